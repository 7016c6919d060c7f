"""Values that a program reads from a cache or a collective and writes back do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import arrays
from support.stored_values import stored_in_cache

import veneer as vn

H, S, D = 4, 12, 32  # texts or heads, tokens, width
FORMATS = [f for f in vn.quant.FORMATS.values() if f.scale_tile is None]
NAMES = [f.name for f in FORMATS]
#: Formats with optional zero points in caches.
AFFINE = [f.name for f in FORMATS if f.is_integer and f.bits >= 2]
METHODS = [(name, None) for name in NAMES] + [
    (name, "minmax") for name in AFFINE if name.startswith("int")
]


def rows(*shape, dtype="float32"):
    """Return rows with different ranges and means, some of them positive, and zeros."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * np.exp(3 * rng.normal(size=(*shape[:-1], 1)))
    x += rng.normal(size=(*shape[:-1], 1)) * abs(x).max(-1, keepdims=True)
    flat = x.reshape(-1, shape[-1])
    flat[0], flat[1], flat[2] = 0, -abs(flat[1]), abs(flat[2])
    flat[3] = np.round(2 * rng.normal(size=shape[-1])) / 2  # ends halfway between codes
    return arrays.array(x.astype(np.float32)).astype(dtype)


def assert_same_bits(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        *(np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (found, expected))
    )


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_dequantized_values_quantize_to_themselves(name, method):
    store = jax.jit(lambda x: stored_in_cache(x, name, [0], None, method).dequantize())
    once = store(rows(512, 32))
    assert_same_bits(store(once), once)


#: Formats in which 16-bit values can get another scale: their codes have more bits than bf16, their
#: ends differ, or their scales in f16 are subnormal. A cache compares new values with old ones.
UNSURE = ["int16", "uint8", "iq4_nl", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "method"), [m for m in METHODS if m[0] not in UNSURE])
def test_values_of_16_bits_quantize_to_themselves(name, method, dtype):
    """They are rounded to their dtype after they are dequantized."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 32)) * np.exp(rng.normal(size=(4096, 1)))
    x[::3] += 3 * rng.normal(size=(len(x[::3]), 1))
    for i, few in enumerate((1, 2, 3, 8)):
        x[i::5, few:] = 0
    store = jax.jit(lambda x: stored_in_cache(x, name, [0], None, method).dequantize())
    once = store(arrays.array(x.astype(np.float32)).astype(dtype))
    assert_same_bits(store(once), once)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "int4", "uint4", "ternary", "fp8"])
def test_values_with_narrow_scales_quantize_to_themselves(name, scale_dtype):
    store = lambda x: stored_in_cache(x, name, [0], scale_dtype=scale_dtype).dequantize()
    once = store(rows(512, 32))
    assert_same_bits(store(once), once)


@pytest.mark.parametrize("name", ["int8", "uint4", "nf4"])
def test_f64_values_quantize_to_themselves(name):
    with jax.enable_x64(True):
        store = jax.jit(lambda x: stored_in_cache(x, name, [0]).dequantize())
        once = store(rows(64, 32).astype("float64"))
        assert once.dtype == jnp.float64
        assert_same_bits(store(once), once)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("int")][:-1])
def test_the_largest_magnitude_has_the_last_code(name):
    x = rows(64, 32)
    q = stored_in_cache(x, name, [0])
    scale = abs(np.asarray(x)).max(1) / q.format.code_range[1]
    np.testing.assert_allclose(q.scale[:, 0], np.where(scale == 0, 1, scale), rtol=2**-16)


def read(cache, *starts):
    """Return a dense slice of a cache."""
    return vn.materialise(lax.dynamic_slice(cache, starts, (H, 1, D)))


#: Programs that write new tokens to some texts, and to the others the values that they read.
WRITES = {
    "a slice": lambda c, new, on, at: lax.dynamic_update_slice(
        c, jnp.where(on[:, None, None], new, read(c, 0, at, 0)), (0, at, 0)
    ),
    "at an index": lambda c, new, on, at: c.at[:, at].set(
        jnp.where(on[:, None], new[:, 0], vn.materialise(c[:, at]))
    ),
    "at indices": lambda c, new, on, at: c.at[jnp.arange(H), at + jnp.arange(H)].set(
        jnp.where(on[:, None], new[:, 0], vn.materialise(c[jnp.arange(H), at + jnp.arange(H)]))
    ),
    "without reading by hand": lambda c, new, on, at: c.at[:, at].set(
        jnp.where(on[:, None], new[:, 0], c[:, at])
    ),
    "mapped": lambda c, new, on, at: jax.vmap(
        lambda c, new, on: lax.dynamic_update_slice(
            c,
            jnp.where(on, new, vn.materialise(lax.dynamic_slice(c, (at, 0), (1, D)))),
            (at, 0),
        )
    )(c, new, on),
    "all of it": lambda c, new, on, at: lax.dynamic_update_slice(c, vn.materialise(c), (0, 0, 0)),
    "joined": lambda c, new, on, at: jnp.concatenate([c[:, :2], vn.materialise(c[:, 2:])], 1),
}


def filled(qtype, dtype="float32", **how):
    empty = vn.quant.zeros((H, S, D), qtype, dtype=dtype, channelwise_axes=(0, 1), **how)
    write = vn.implicit(lambda c, x: lax.dynamic_update_slice(c, x, (0, 0, 0)))
    return write(empty, rows(H, S, D, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_a_masked_write_keeps_the_other_texts(name, method, dtype):
    cache = filled(name, dtype, calibration_method=method)
    before = cache.dequantize()
    step = jax.jit(vn.implicit(WRITES["a slice"]))
    on, new = jnp.arange(H) == 1, rows(H, 1, D, dtype=dtype)[::-1]
    for _ in range(3):
        cache = step(cache, new, on, 2)
    after = cache.dequantize()
    assert_same_bits(after.at[1, 2].set(0), before.at[1, 2].set(0))
    once = step(filled(name, dtype, calibration_method=method), new, on, 2)
    assert_same_bits(after, once.dequantize())


CACHES = {
    "int8": {},
    "int4 in tiles": {"tiled_axes": {2: 16}},
    "int4 in odd tiles": {"tiled_axes": {2: 1}},
    "uint4, scales of 16 bits": {"scale_dtype": "float16", "tiled_axes": {2: 16}},
    "int3, in halves": {"dtype": "bfloat16", "calibration_method": "minmax"},
    "nf4, powers of two": {"scale_dtype": "float8_e8m0fnu"},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", WRITES)
def test_every_write_keeps_unchanged_values(name, cache):
    full = filled(cache.split()[0].rstrip(","), **CACHES[cache])
    if name == "joined" and "powers" in cache:
        return  # Concatenation has no old values to compare with.
    before = full.dequantize()
    step = jax.jit(vn.implicit(WRITES[name]))
    after = step(full, jnp.ones((H, 1, D), before.dtype), jnp.zeros(H, bool), 2)
    assert isinstance(after, vn.quant.QCache)
    assert_same_bits(after.dequantize(), before)


def test_a_small_scale_of_16_bits_is_kept():
    """Subnormal scales have few bits, so a second rounding can change them."""
    tiny = rows(H, 1, D) * 1e-6
    cache = vn.quant.zeros((H, S, D), "int8", channelwise_axes=(0, 1), scale_dtype="float16")
    write = vn.implicit(lambda c, x: lax.dynamic_update_slice(c, x, (0, 3, 0)))
    once = write(cache, tiny)
    again = write(once, once.dequantize()[:, 3:4])
    assert_same_bits(again.dequantize(), once.dequantize())


BLOCKS = {"int8": {}, "int4": {}, "uint4": {"calibration_method": "minmax"}, "nf4": {}, "fp8": {}}


def blocks(qtype, dtype="float32", **how):
    return vn.quant.zeros(
        (H, 24, D),
        qtype,
        dtype=dtype,
        channelwise_axes=(0, 2),
        tiled_axes={1: 4},
        block_axis=1,
        **how,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_other_texts_do_not_change(name, dtype):
    """Texts of unequal lengths are written in turns, each at its own position."""
    cache, tokens = blocks(name, dtype, **BLOCKS[name]), rows(H, 24, D, dtype=dtype)

    @jax.jit
    @vn.implicit
    def write(cache, text, at):
        token = lax.dynamic_slice(tokens, (text, at, 0), (1, 1, D))
        return lax.dynamic_update_slice(cache, token, (text, at, 0))

    cache = vn.implicit(lambda c: lax.dynamic_update_slice(c, tokens[:, :16], (0, 0, 0)))(cache)
    for step in range(8):
        text, at = step % 2, (16, 5)[step % 2] + step // 2
        before = cache.materialise()
        cache = write(cache, text, at)
        after = cache.materialise()
        # The previous newest block is rounded now. All other blocks of other texts keep their bits.
        others = [i for i in range(6) if i != (5, 16)[step % 2] // 4 and i != at // 4]
        split = lambda x: x.reshape(H, 6, 4, D)[:, others]  # noqa: B023
        if step:
            assert_same_bits(split(after), split(before))
            rest = [i for i in range(H) if i > 1]
            if step > 2:
                assert_same_bits(after[jnp.array(rest)], before[jnp.array(rest)])


def test_texts_of_unequal_lengths_are_rounded_once():
    tokens = jax.random.normal(jax.random.key(0), (2, 64, D))
    lengths = jnp.array([40, 8])

    def step(i, cache):
        for text in range(2):
            at = jnp.minimum(i, lengths[text] - 1) + jnp.array([0, 24])[text]
            token = lax.dynamic_slice(tokens, (text, at, 0), (1, 1, D))
            cache = lax.dynamic_update_slice(cache, token, (text, at, 0))
        return cache

    how = {"channelwise_axes": (0, 2), "tiled_axes": {1: 8}}
    empty = vn.quant.zeros((2, 64, D), "int4", block_axis=1, **how)
    run = jax.jit(vn.implicit(lambda c: lax.fori_loop(0, 128, step, c)))
    at = jnp.arange(64)
    written = jnp.stack([at < 40, (at >= 24) & (at < 32)])[..., None]
    dense = jnp.where(written, tokens, 0)
    error = lambda x: jnp.linalg.norm(jnp.where(written, x, 0) - dense) / jnp.linalg.norm(dense)
    once = vn.quant.quantize(dense, "int4", **how).dequantize()
    assert error(run(empty).materialise()) < 1.5 * error(once)


# Collectives.


def mean_of(collective, qtype, devices):
    """Return a function that averages replicas by a collective."""
    mesh = jax.make_mesh(
        (devices,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )
    of_each, specs = {
        "psum": (lambda x: vn.distributed.psum(x, "i", qtype) / devices, P()),
        "psum_scatter": (
            lambda x: vn.distributed.psum_scatter(x, "i", qtype, tiled=True) / devices,
            P("i"),
        ),
        "all_gather": (lambda x: vn.distributed.all_gather(x, "i", qtype)[-1], P()),
    }[collective]
    return jax.jit(
        jax.shard_map(of_each, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("collective", ["psum", "psum_scatter", "all_gather"])
def test_a_collective_of_equal_replicas_changes_nothing(collective, name):
    run = mean_of(collective, name, 8)
    once = run(rows(48, 64))
    assert_same_bits(run(once), once)


@pytest.mark.parametrize("devices", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("name", ["int8", "int4", "uint8", "ternary", "nf4", "fp8"])
def test_a_mean_over_any_number_of_devices_changes_nothing(name, devices):
    run = mean_of("psum", name, devices)
    once = run(rows(48, 64))
    np.testing.assert_allclose(run(run(once)), once, rtol=2**-15, atol=0)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("uint8", "iq4_nl")])
def test_a_sum_of_replicas_in_16_bits_changes_nothing(name):
    run = mean_of("psum", name, 8)
    x = np.random.default_rng(0).normal(size=(512, 128)) * np.exp2(np.linspace(-4, 4, 512))[:, None]
    x[::2] += x[::2].max()
    once = run(jnp.concatenate([rows(48, 128), x.astype(np.float32)]).astype("bfloat16"))
    for _ in range(3):
        assert_same_bits(run(once), once)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_makes_no_number_infinite(name, dtype):
    tile = vn.quant.FORMATS[name].tile_size
    tiles = {} if tile is None else {"tiled_axes": {1: tile}}
    cache = vn.quant.zeros((2, 64), name, channelwise_axes=(0,), dtype=dtype, **tiles)
    largest = float(jnp.finfo(dtype).max)
    values = np.append(np.linspace(0, largest, 64), np.linspace(-largest, 0, 64)).reshape(2, 64)
    out = vn.implicit(lax.dynamic_update_slice)(cache, jnp.asarray(values, dtype), (0, 0))
    assert not jnp.isinf(out.dequantize()).any()
