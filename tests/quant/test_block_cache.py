"""Reading and writing a `BlockCache`, whose newest block is in full precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.stored_values import stored_in_cache

import veneer as vn

H, S, D, SIZE = 2, 24, 8, 4  # heads, tokens, width, tokens of a block


def empty(qtype="int4", room=S, width=D, size=SIZE, axis=1, **how):
    return vn.quant.zeros(
        (H, room, width),
        qtype,
        channelwise_axes=(0, 2),
        tiled_axes={axis: size},
        block_axis=axis,
        **how,
    )


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def written(tokens, count, size=SIZE, qtype="int4", **how):
    """Return the expected values of a cache: all blocks are quantized except the last."""
    dense = jnp.where(jnp.arange(tokens.shape[1])[:, None] < count, tokens, 0)
    whole = stored_in_cache(dense, qtype, (0, 2), {1: size}, **how).dequantize()
    is_last = jnp.arange(tokens.shape[1]) // size == (count - 1) // size
    return jnp.where(is_last[:, None], dense, whole)


write = jax.jit(
    vn.implicit(lambda c, u, at: lax.dynamic_update_slice(c, u, (0, at, 0)), on_materialise="error")
)


@pytest.mark.parametrize("how", [{}, {"calibration_method": "minmax"}, {"scale_dtype": "float16"}])
@pytest.mark.parametrize("parts", [[1] * S, [5, 1, 1, 4, 7, 6], [S], [4] * 6, [2, 9, 3, 10]])
def test_all_blocks_except_the_newest_are_quantized(parts, how):
    qtype = "uint4" if "calibration_method" in how else "int4"
    cache, tokens, at = empty(qtype, **how), draw(H, S, D), 0
    for length in parts:
        cache = write(cache, tokens[:, at : at + length], at)
        at += length
        assert isinstance(cache, vn.quant.BlockCache)
        expected = written(tokens, at, qtype=qtype, **how)
        np.testing.assert_allclose(cache.materialise(), expected, atol=1e-6)


def test_writing_an_older_block_quantizes_it_again():
    tokens = draw(H, S, D)
    cache = write(write(empty(), tokens, 0), 2 * tokens[:, :1], 5)
    changed = written(tokens, S).at[:, 5].set(2 * tokens[:, 0])
    got = cache.materialise()
    np.testing.assert_array_equal(got[:, 4:8], changed[:, 4:8])  # now in full precision
    np.testing.assert_array_equal(got[:, :4], changed[:, :4])
    after = write(cache, tokens[:, :1], 20).materialise()
    whole = stored_in_cache(changed[:, 4:8], "int4", (0, 2)).dequantize()
    np.testing.assert_allclose(after[:, 4:8], whole, atol=1e-6)
    np.testing.assert_array_equal(after[:, 8:20], got[:, 8:20])  # not rounded again


@pytest.mark.parametrize("start", [-3, 0, 21, 23, 40])
def test_starts_are_clamped_as_in_jax(start):
    tokens = draw(H, 3, D)
    expected = lax.dynamic_update_slice(jnp.zeros((H, S, D)), tokens, (0, start, 0))
    got = write(empty(), tokens, start).materialise()
    np.testing.assert_allclose(got, expected, atol=0.6)
    np.testing.assert_array_equal(got == 0, expected == 0)


OTHERS = {
    "a head": ((1, 1, D), (1, 2, 0)),
    "a part of the width": ((H, 1, 3), (0, 2, 4)),
    "nothing": ((H, 0, D), (0, 2, 0)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_axes_can_be_written_in_part(name):
    shape, at = OTHERS[name]
    run = lambda c, u: lax.dynamic_update_slice(c, u, at)
    cache, update = write(empty(), draw(H, 2, D, seed=1), 0), draw(*shape)
    out = vn.implicit(run, on_materialise="error")(cache, update)
    np.testing.assert_array_equal(out.materialise(), run(cache.materialise(), update))


def test_loops_and_donation_keep_the_type():
    tokens = draw(H, S, D)
    body = lambda i, c: lax.dynamic_update_slice(
        c, lax.dynamic_slice_in_dim(tokens, i, 1, 1), (0, i, 0)
    )
    run = vn.implicit(lambda c: lax.fori_loop(0, S, body, c), on_materialise="error")
    step = jax.jit(run, donate_argnums=0)
    cache = empty()
    compiled = step.lower(cache).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.blocks.nbytes
    np.testing.assert_allclose(step(cache).materialise(), written(tokens, S), atol=1e-6)


PRODUCTS = {
    "einsum": lambda x, c: jnp.einsum("hqd,hsd->hqs", x, c),
    "einsum, tokens first": lambda x, c: jnp.einsum("hsd,hqd->hsq", c, x),
    "of its transpose": lambda x, c: x @ c.swapaxes(1, 2),
    "on the left": lambda x, c: c @ x.swapaxes(1, 2),
    "without a batch": lambda x, c: jnp.einsum("qd,hsd->qhs", x[0], c),
    "of all but tokens": lambda x, c: jnp.einsum("hqd,hsd->qs", x, c),
    "a slice of heads": lambda x, c: x[1:] @ c[1:].swapaxes(1, 2),
}


@pytest.mark.parametrize("qtype", ["int4", "uint4", "int8"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_equal_products_of_the_dense_array(name, qtype):
    how = {"calibration_method": "minmax"} if qtype == "uint4" else {}
    cache = write(empty(qtype, **how), draw(H, 13, D), 0)
    x, run = draw(H, 3, D, seed=1), PRODUCTS[name]
    found = jax.jit(vn.implicit(run))(x, cache)
    np.testing.assert_allclose(found, run(x, cache.materialise()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("qtype", ["int4", "uint4"])
def test_kernels_read_packed_blocks(qtype):
    how = {"calibration_method": "minmax"} if qtype == "uint4" else {}
    cache = write(empty(qtype, room=2048, width=64, size=32, **how), draw(H, 1500, 64), 0)
    x, run = draw(H, 3, 64, seed=1), PRODUCTS["einsum"]
    report = vn.explain(run)(x, cache)
    assert "CPU kernel" in report.events[0].how
    assert not report.materialised
    found = jax.jit(vn.implicit(run, on_materialise="error"))(x, cache)
    np.testing.assert_allclose(found, run(x, cache.materialise()), rtol=1e-4, atol=1e-4)
    assert cache.nbytes < 0.25 * 4 * cache.size


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_writing_and_reading_copies_no_block(qtype):
    cache = empty(qtype, room=2048, width=64, size=32)

    def step(cache, token, x, at):
        cache = lax.dynamic_update_slice(cache, token, (0, at, 0))
        return cache, PRODUCTS["einsum"](x, cache)

    compiled = jax.jit(vn.implicit(step, on_materialise="error"), donate_argnums=0)
    token, x = draw(H, 1, 64), draw(H, 3, 64, seed=1)
    lines = compiled.lower(cache, token, x, 5).compile().as_text().splitlines()
    stored = ",".join(map(str, cache.blocks.packed.shape))
    made = [line for line in lines if f"8[{stored}]" in line.partition(" = ")[2].partition("(")[0]]
    assert not [line for line in made if " copy(" in line]
    assert sum("dynamic-update-slice" in line and " fusion(" in line for line in made) == 1
    expected = write(cache, token, 5).materialise()  # before the buffer is donated
    cache, found = compiled(cache, token, x, 5)
    np.testing.assert_array_equal(cache.materialise(), expected)
    np.testing.assert_allclose(found, PRODUCTS["einsum"](x, expected), rtol=1e-4, atol=1e-4)


def test_contracting_tokens_is_reported():
    cache = write(empty(), draw(H, 13, D), 0)
    run = lambda x, c: jnp.einsum("hqs,hsd->hqd", x, c)
    x = draw(H, 3, S, seed=1)
    np.testing.assert_allclose(vn.implicit(run)(x, cache), run(x, cache.materialise()), rtol=1e-5)
    with pytest.raises(vn.MaterialiseError, match="dot_general"):
        vn.implicit(run, on_materialise="error")(x, cache)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_newest_block_keeps_narrow_dtypes(dtype):
    cache = vn.quant.zeros(
        (H, S, D), "int4", dtype=dtype, channelwise_axes=(0, -1), tiled_axes={-2: 4}, block_axis=-2
    )
    tokens = draw(H, 7, D).astype(dtype)
    cache = write(cache, tokens, 0)
    assert cache.dtype == dtype
    np.testing.assert_array_equal(cache.materialise()[:, 4:7], tokens[:, 4:])


@pytest.mark.parametrize(
    ("axis", "tiles", "message"),
    [
        (1, {2: 4}, "must be one of tiled_axes"),
        (1, None, "must be one of"),
        (1, {1: 5}, "does not divide"),
    ],
)
def test_invalid_block_axes_raise(axis, tiles, message):
    with pytest.raises(ValueError, match=message):
        vn.quant.zeros((H, S, D), "int4", channelwise_axes=(0,), tiled_axes=tiles, block_axis=axis)


def test_high_types_keep_the_type():
    tokens, x = draw(H, 7, D), draw(H, 3, D, seed=1)
    with vn.hijax.enabled():
        step = jax.jit(lambda c, u: lax.dynamic_update_slice(c, u, (0, 2, 0)))
        cache = step(empty(), tokens)
        scores = jax.jit(PRODUCTS["einsum"])(x, cache)
    expected = write(empty(), tokens, 2)
    np.testing.assert_allclose(cache.materialise(), expected.materialise(), atol=1e-6)
    np.testing.assert_allclose(
        scores, PRODUCTS["einsum"](x, expected.materialise()), rtol=1e-4, atol=1e-5
    )


def test_vmap_outside_of_implicit_maps_caches():
    caches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), empty())
    tokens, at = draw(2, H, 3, D), jnp.array([2, 11])
    out = jax.vmap(write)(caches, tokens, at)
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], out)
        expected = write(empty(), tokens[i], at[i])
        np.testing.assert_allclose(one.materialise(), expected.materialise(), atol=1e-6)
