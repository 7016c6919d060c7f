"""Writing into a `QCache`: new values are quantized, and other values do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.stored_values import stored_in_cache

import veneer as vn

H, S, D = 2, 5, 6  # heads, tokens, width


def cache(qtype="int8", dtype=jnp.float32, **how):
    return vn.quant.zeros((H, S, D), qtype, dtype=dtype, channelwise_axes=(0, 1), **how)


def rounded(x, qtype="int8", channelwise_axes=(0, 1), **how):
    return stored_in_cache(x, qtype, channelwise_axes, **how)


def draw(shape, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


token = arrays.normal(H, 1, D)
each = arrays.array(np.arange(H)[:, None])

WRITES = {
    "a slice": lambda c, u, i: lax.dynamic_update_slice(c, u, (0, i, 0)),
    "at an index": lambda c, u, i: c.at[:, i].set(u[:, 0]),
    "at two indices": lambda c, u, i: c.at[each, jnp.broadcast_to(i, (H, 1))].set(u),
    "a row": lambda c, u, i: c.at[1, i].set(u[0, 0]),
    "out of bounds": lambda c, u, i: c.at[:, i + S].set(u[:, 0], mode="drop"),
    "nothing": lambda c, u, i: c.at[:, i : i + 0].set(u[:, :0]) if isinstance(i, int) else c,
    "in a scan": lambda c, u, i: lax.scan(
        lambda c, j: (lax.dynamic_update_slice(c, u * j, (0, j, 0)), None), c, jnp.arange(3)
    )[0],
    "in a while loop": lambda c, u, i: lax.fori_loop(0, i, lambda j, c: c.at[:, j].set(u[:, 0]), c),
    "in a branch": lambda c, u, i: lax.cond(i > 2, lambda: c.at[:, i].set(u[:, 0]), lambda: c),
    "mapped": lambda c, u, i: jax.vmap(lambda c, u, i: lax.dynamic_update_slice(c, u, (i, 0)))(
        c, u, (jnp.arange(H) + i) % S
    ),
    "joined": lambda c, u, i: jnp.concatenate([c, u], 1),
}

FORMATS = {
    "int8": {},
    "int4": {},
    "int3": {},
    "nf4": {},
    "fp8": {},
    "uint4": {"calibration_method": "minmax"},
    "int8 in tiles": {"tiled_axes": {2: 3}},
    "int8, scales of 16 bits": {"scale_dtype": "bfloat16"},
}


@pytest.mark.parametrize("write", WRITES)
def test_written_values_are_rounded_and_others_stay(write):
    c, run = cache(), WRITES[write]
    c = vn.implicit(WRITES["a slice"])(c, 3 * draw((H, S, D), seed=1), 0)
    expected = run(c.dequantize(), rounded(token).dequantize(), 3)
    eager = vn.implicit(run, on_materialise="error")
    with vn.hijax.enabled():
        high = jax.jit(run)(c, token, 3)
    for out in (eager(c, token, 3), jax.jit(eager)(c, token, 3), high):
        assert isinstance(out, vn.quant.QArray)
        np.testing.assert_array_equal(out.dequantize(), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_format_is_written_at_every_position(name, dtype):
    qtype, how = name.split()[0].rstrip(","), FORMATS[name]
    c = cache(qtype, dtype, **how)
    np.testing.assert_array_equal(c.dequantize(), 0)
    dense = c.dequantize()
    write = jax.jit(vn.implicit(WRITES["a slice"], on_materialise="error"))
    for i in range(S):
        u = draw((H, 1, D), dtype, seed=i)
        c, dense = write(c, u, i), dense.at[:, i : i + 1].set(rounded(u, qtype, **how).dequantize())
        np.testing.assert_array_equal(c.dequantize(), dense)
    assert c.nbytes == cache(qtype, dtype, **how).nbytes


def test_codes_are_packed_along_the_axis_that_shares_a_scale():
    keys = vn.quant.zeros((H, D, S), "int4", channelwise_axes=(0, 2))
    assert keys.packing.axis == -2
    write = vn.implicit(
        lambda c, u, i: lax.dynamic_update_slice(c, u, (0, 0, i)), on_materialise="error"
    )
    out = write(keys, draw((H, D, 1)), 3)
    expected = rounded(draw((H, D, 1)), "int4", (0, 2)).dequantize()
    np.testing.assert_array_equal(out.dequantize()[..., 3:4], expected)
    np.testing.assert_array_equal(out.dequantize()[..., :3], 0)


NOTHING = {
    "a slice": lambda c, u: lax.dynamic_update_slice(c, u[:, :0], (0, 3, 0)),
    "at indices": lambda c, u: c.at[:, 2:2].set(u[:, :0]),
    "of no head": lambda c, u: c.at[:0].set(u[:0]),
    "joined": lambda c, u: jnp.concatenate([c, u[:, :0]], 1),
}


@pytest.mark.parametrize("write", NOTHING)
def test_an_empty_update_writes_nothing(write):
    c = vn.implicit(WRITES["a slice"])(cache(), token, 2)
    out = vn.implicit(NOTHING[write], on_materialise="error")(c, token)
    assert isinstance(out, vn.quant.QCache)
    np.testing.assert_array_equal(out.dequantize(), c.dequantize())


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_outside_of_implicit_writes(axes):
    caches, updates = jax.tree.map(lambda x: jnp.stack([x, x]), cache()), draw((2, H, 1, D))
    args = tuple(
        x if axis == 0 else jax.tree.map(lambda leaf: leaf[0], x)
        for x, axis in zip((caches, updates), axes, strict=True)
    )
    run = vn.implicit(lambda c, u: WRITES["a slice"](c, u, 3), on_materialise="error")
    out = jax.vmap(run, in_axes=axes)(*args)
    assert out.shape == (2, H, S, D)
    for i in range(2):
        u = updates[i] if axes[1] == 0 else updates[0]
        np.testing.assert_array_equal(out.dequantize()[i], run(cache(), u).dequantize())


@pytest.mark.parametrize("name", ["a slice", "at an index", "joined"])
def test_writing_has_no_derivative(name):
    """The derivative by the update is zero. Other derivatives in the program are right."""
    run = vn.implicit(lambda u, w: (WRITES[name](cache(), u, 3) * w).sum())
    by_update, by_weight = jax.grad(run, (0, 1))(token, 2.0)
    np.testing.assert_array_equal(by_update, 0)
    np.testing.assert_allclose(by_weight, rounded(token).dequantize().sum(), rtol=1e-5)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_nan_and_infinity_stay_in_their_group(value):
    out = vn.implicit(WRITES["at an index"])(cache(), token.at[0, 0, 0].set(value), 2)
    is_nan = jnp.isnan(out.dequantize()).all(-1)
    assert [*zip(*jnp.nonzero(is_nan), strict=True)] == [(0, 2)]


def test_writing_part_of_a_group_is_reported():
    c = vn.quant.zeros((H, S, D), "int8", channelwise_axes=(0,))
    run = WRITES["a slice"]
    out = vn.implicit(run)(c, token, 1)
    np.testing.assert_array_equal(out, run(c.dequantize(), token, 1))
    with pytest.raises(vn.MaterialiseError, match="dynamic_update_slice"):
        vn.implicit(run, on_materialise="error")(c, token, 1)


def test_writing_into_a_weight_materializes_it():
    """Rows that a program writes into an embedding are not quantized."""
    rows = rounded(draw((H, S, D)))
    for name in ("a slice", "at an index", "joined"):
        run = WRITES[name]
        out = vn.implicit(run)(rows, token, 1)
        np.testing.assert_array_equal(out, run(rows.dequantize(), token, 1))


def test_quantized_updates_keep_their_codes():
    u = rounded(token)
    out = vn.implicit(WRITES["a slice"], on_materialise="error")(cache(), u, 2)
    np.testing.assert_array_equal(out.packed[:, 2:3], u.packed)


def test_each_type_uses_its_own_rule_for_writing():
    d = lambda *shape: vn.types.Diagonal(draw(shape))
    for run in (
        lambda x, y: lax.dynamic_update_slice(x, y, (1, 0, 0)),
        lambda x, y: x.at[1].set(y[0]),
    ):
        x, y = d(3, 4), d(1, 4)
        expected = run(vn.materialise(x), vn.materialise(y))
        np.testing.assert_array_equal(vn.materialise(vn.implicit(run)(x, y)), expected)


@pytest.mark.parametrize("qtype", ["int8", "fp8"])
def test_only_new_values_are_written(qtype):
    c = vn.quant.zeros((4, 1024, 64), qtype, channelwise_axes=(0, 1))
    write = jax.jit(vn.implicit(WRITES["a slice"]), donate_argnums=0)
    compiled = write.lower(c, jnp.ones((4, 1, 64)), 3).compile()
    for wider in ("f32", "f16", "bf16"):  # XLA converts 8-bit floats to these
        assert f"{wider}[4,1024,64]" not in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == c.nbytes
    assert memory.temp_size_in_bytes < c.nbytes // 8


def test_a_sharded_cache_stays_sharded():
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    c = vn.device_put(cache(), NamedSharding(mesh, P("heads")))
    out = jax.jit(vn.implicit(WRITES["a slice"]))(c, token, 1)
    np.testing.assert_array_equal(out.dequantize()[:, 1:2], rounded(token).dequantize())
    assert out.packed.sharding.spec[:1] == ("heads",)
    on_blocks = jax.shard_map(
        lambda c, u: WRITES["a slice"](c, u, 1),
        mesh=mesh,
        in_specs=P("heads"),
        out_specs=P("heads"),
    )
    mapped = vn.implicit(on_blocks, on_materialise="error")(cache(), token)
    np.testing.assert_array_equal(mapped.dequantize(), out.dequantize())


@pytest.mark.parametrize(
    ("qtype", "how", "message"),
    [
        ("nvfp4", {}, "has quantized scales"),
        ("int8", {"calibration_method": "mse"}, "calibration_method"),
        ("int8", {"tiled_axes": {2: 4}}, "does not divide"),
        ("int8", {"channelwise_axes": (3,)}, "axis 3 is out of range"),
        ("int8", {"tiled_axes": {2: 3}, "block_axis": 5}, "axis 5 is out of range"),
        ("int8", {"tiled_axes": {2: 3}, "block_axis": -4}, "axis -4 is out of range"),
        ("int8", {"tiled_axes": {2: 3}, "block_axis": 1}, "must be one of tiled_axes"),
    ],
)
def test_invalid_arguments_of_zeros_raise(qtype, how, message):
    with pytest.raises(ValueError, match=message):
        vn.quant.zeros((H, S, D), qtype, **how)


@pytest.mark.parametrize("shape", [(-1,), (H, -S, D), (-H, -S, D)])
def test_negative_sizes_raise(shape):
    with pytest.raises(ValueError, match="must not have negative sizes"):
        vn.quant.zeros(shape, "int8")


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_a_cache_can_have_tiles_along_two_axes(qtype):
    how = {"channelwise_axes": (0,), "tiled_axes": {1: 4, 2: 3}}
    empty = vn.quant.zeros((H, 8, D), qtype, **how)
    assert empty.scale.shape == (H, 2, 2)
    np.testing.assert_array_equal(empty.dequantize(), np.zeros((H, 8, D)))


TILES = {
    "by token": {"channelwise_axes": (0, 1)},
    "one scale": {},
    "tiles of tokens": {"channelwise_axes": (0,), "tiled_axes": {1: 4}},
    "blocks": {"channelwise_axes": (0,), "tiled_axes": {1: 4}, "block_axis": 1},
}


@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("shape", [(H, 0, D), (H, 8, 0), (0, 8, D), (H, 0, 0)], ids=str)
def test_an_empty_cache_is_read_and_written(shape, name, qtype):
    empty = vn.quant.zeros(shape, qtype, **TILES[name])
    assert empty.shape == vn.materialise(empty).shape == shape
    dense = jnp.zeros(shape)
    program = lambda c: (
        lax.dynamic_update_slice(c, dense, (0, 0, 0)),
        jnp.concatenate([c, jnp.ones((shape[0], 4, shape[2]))], 1),
        jnp.einsum("hd,hsd->hs", jnp.ones((shape[0], shape[2])), c),
        jnp.einsum("hs,hsd->hd", jnp.ones(shape[:2]), c),
        jnp.swapaxes(c, 1, 2),
    )
    outs = vn.materialise(vn.implicit(program)(empty))
    for out, expected in zip(outs, program(dense), strict=True):
        np.testing.assert_allclose(out, expected, atol=0.2)


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_an_empty_cache_grows_by_tokens(qtype):
    empty = vn.quant.zeros((H, 0, D), qtype, channelwise_axes=(0, 1))
    out = vn.implicit(lambda c: jnp.concatenate([c, token], 1), on_materialise="error")(empty)
    assert type(out) is type(empty)
    np.testing.assert_array_equal(out.dequantize(), rounded(token, qtype).dequantize())


def attend(c, q):
    return jax.nn.softmax(q @ c.swapaxes(1, 2)) @ c


def test_reports_do_not_call_a_cache_a_weight():
    report = vn.explain(attend)(cache(), jnp.ones((H, 1, D)))
    assert {event.cache_nbytes for event in report.materialised} == {4 * H * S * D}
    assert "(caches only)" in report.summary
    w = vn.quant.quantize(jnp.ones((D, 3)), "int8", channelwise_axes=[1])
    report = vn.explain(lambda c, q, w: attend(c, q) @ w)(cache(), jnp.ones((H, 1, D)), w)
    assert "(480 bytes of caches, 72 bytes of weights)" in report.summary


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_reports_say_that_a_cache_is_too_small(qtype):
    small, large = (
        vn.quant.zeros((H, room, 64), qtype, channelwise_axes=(0, 1)) for room in (16, 256)
    )
    for c in (small, large):
        report = vn.explain(attend)(c, jnp.ones((H, 1, 64)))
        made = report.materialised
        if c is large and made:
            pytest.skip("kernels cannot run here")
        assert all(
            "rhs is too small for a kernel (1,024 values in each of 2" in str(e) for e in made
        )
        assert ("too small for a kernel" in str(report)) == (c is small)
