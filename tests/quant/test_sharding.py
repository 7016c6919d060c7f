"""Sharding of QArrays: no tile and no byte is split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.array_types import assert_close

import veneer as vn
from veneer.quant import QArray, quantize

if jax.device_count() < 4:
    pytest.skip("needs 4 devices", allow_module_level=True)

MESH = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
KEY = arrays.key(0)


def shard(f, in_specs, out_specs):
    return jax.jit(vn.implicit(jax.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs)))


def through(q, spec):
    """Return the result of an identity shard_map with the same spec for input and output."""
    out = shard(lambda q: q, spec, spec)(q)
    assert_close(out, q.dequantize())
    return out


ROWS, COLUMNS = P("x"), P(None, "x")

# The format, shape, channelwise axes, tiled axes, spec, and the shape of the scale after joining 4
# blocks, or None if the array cannot be sharded.
CUTS = {
    "channels": ("int8", (8, 8), [1], {}, COLUMNS, (1, 8)),
    "across the channels": ("int8", (8, 8), [1], {}, ROWS, (4, 8)),
    "one scale for all": ("int8", (8, 8), [], {}, ROWS, (4, 1)),
    "between tiles": ("int4", (16, 2), [1], {0: 4}, ROWS, (4, 2)),
    "through tiles": ("int4", (16, 2), [1], {0: 8}, ROWS, None),
    "between bytes": ("nf4", (2, 16), [0], {}, COLUMNS, (2, 4)),
    "through bytes": ("nf4", (2, 4), [0], {}, COLUMNS, None),
    "bytes and tiles": ("int4", (2, 16), [0], {1: 2}, COLUMNS, (2, 8)),
    "a batch axis": ("int8", (4, 6, 2), [0, 2], {}, ROWS, (4, 1, 2)),
    "a batch axis, of 4 bits": ("int4", (4, 6, 3), [0, 2], {}, ROWS, (4, 1, 3)),
    "a vector": ("int4", (16,), [], {0: 4}, ROWS, (4,)),
    "between bit planes": ("int3", (2, 64), [0], {}, COLUMNS, (2, 4)),
    # 28 codes take 4 units of 8, but a block of 7 codes takes a unit, too. Only the bytes divide.
    "through bit planes": ("int3", (2, 28), [0], {}, COLUMNS, None),
    "between digits": ("ternary", (2, 20), [0], {}, COLUMNS, (2, 4)),
    "powers of two": ("mxfp8", (2, 128), [0], None, COLUMNS, (2, 4)),
    "scales with a scale for all": ("nvfp4", (4, 64), [0], None, COLUMNS, (4, 4)),
    "rows of such": ("nvfp4", (8, 32), [0], None, ROWS, (8, 2)),
    "scales with scales": ("nf4_dq", (8, 32), [0], {1: 8}, ROWS, (8, 4)),
}


@pytest.mark.parametrize(
    ("qtype", "shape", "channelwise", "tiled", "spec", "scale"), CUTS.values(), ids=CUTS
)
def test_sharding_splits_no_tile_and_no_byte(qtype, shape, channelwise, tiled, spec, scale):
    w = jax.random.normal(KEY, shape)
    out = through(quantize(w, qtype, channelwise_axes=channelwise, tiled_axes=tiled), spec)
    if scale is None:
        assert isinstance(out, jax.Array)
    else:
        assert isinstance(out, QArray)
        assert out.scale.shape == scale


def test_a_sharding_constraint_places_each_leaf():
    q = quantize(jax.random.normal(KEY, (8, 64)), "nvfp4")
    sharding = NamedSharding(MESH, ROWS)
    placed = jax.jit(vn.implicit(lambda q: jax.lax.with_sharding_constraint(q, sharding)))(q)
    assert placed.packed.sharding.spec == placed.scale.packed.sharding.spec == ROWS
    assert placed.scale.scale.sharding.is_fully_replicated
    assert_close(placed, q.dequantize())


def test_zero_points_are_sharded_like_scales():
    codes = jax.random.randint(KEY, (8, 4), -8, 8, jnp.int8)
    scale = jnp.linspace(0.5, 1.0, 4).reshape(4, 1)
    for zero_point in (jnp.arange(4, dtype=jnp.int8).reshape(4, 1), jnp.full((1, 1), 3, jnp.int8)):
        out = through(QArray(codes, scale, zero_point), ROWS)
        assert out.zero_point.shape == (4, 1)


@pytest.mark.parametrize(
    ("qtype", "shape", "whole"),
    [
        ("int4", (2, 4), vn.quant.Packing(-1, 16)),
        ("int4", (2, 3), None),
        ("int3", (2, 8), vn.quant.Packing(-1, 32)),
        ("int3", (2, 7), None),
    ],
    ids=["end with a byte", "end within a byte", "end with bit planes", "end within bit planes"],
)
def test_whole_blocks_are_joined(qtype, shape, whole):
    q = quantize(jax.random.normal(KEY, shape), qtype, channelwise_axes=[-1])
    out = shard(lambda q: q, P(), COLUMNS)(q)
    assert_close(out, jnp.tile(q.dequantize(), (1, 4)))
    assert getattr(out, "packing", None) == whole


@pytest.mark.parametrize("spec", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("qtype", "tiled"), [("int8", {}), ("int4", {0: 16}), ("uint4", {0: 16}), ("mxfp8", None)]
)
def test_sharded_arrays_are_quantized_along_any_axis(qtype, tiled, spec):
    w = jax.random.normal(KEY, (64, 8)).at[3, 5].set(jnp.nan)
    make = lambda w: quantize(w, qtype, channelwise_axes=[1], tiled_axes=tiled or {0: 32})
    found = jax.jit(make)(jax.device_put(w, NamedSharding(MESH, spec)))
    assert_close(found.dequantize(), make(w).dequantize())


# Explicit meshes, the default of `jax.make_mesh` from JAX 0.12 on.

EXPLICIT = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
UP, DOWN = arrays.normal(64, 32), arrays.normal(32, 16, seed=1)
MIXED = arrays.array(
    np.asarray(arrays.normal(4, 24, 64, seed=2)) @ np.asarray(arrays.normal(64, 64, seed=3))
)


def cut(x, *spec):
    return jax.device_put(x, NamedSharding(EXPLICIT, P(*spec)))


@pytest.fixture
def explicit():
    with jax.set_mesh(EXPLICIT):
        yield


def mlp(params, x):
    hidden = jax.nn.relu(jnp.dot(x, params["up"], out_sharding=P(None, "x", "y")))
    return jnp.dot(hidden, params["down"], out_sharding=P(None, "x", None))


def dense_mlp(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


# The specs of `up` and of the activations.
LAYOUTS = {
    "by rows of activations": ((None, "y"), (None, "x", None)),
    "along the contracted axis": (("y", None), (None, "x", "y")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_explicit_mesh_does_not_change_statistics(name, explicit):
    rules = [vn.quant.Rule(".*", "int4", tile_size=16)]
    of_up, of_x = LAYOUTS[name]
    params = {"up": cut(UP, *of_up), "down": cut(DOWN, "y", None)}
    found = vn.quant.observe(mlp, rules, params=params, gram=True)([cut(MIXED, *of_x)])
    expected = vn.quant.observe(dense_mlp, rules, params={"up": UP, "down": DOWN}, gram=True)(
        [MIXED]
    )
    for path in params:
        assert_close(jnp.asarray(found[path].gram), jnp.asarray(expected[path].gram), 1e-4)
        assert_close(jnp.asarray(found[path].maximum), jnp.asarray(expected[path].maximum), 1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("how", [{}, {"sequential": True, "propagation": 0.5}], ids=str)
def test_a_model_over_an_explicit_mesh_is_calibrated(how, name, explicit):
    rules = [vn.quant.Rule(".*", "int4", tile_size=16)]
    of_up, of_x = LAYOUTS[name]
    params, x = {"up": cut(UP, *of_up), "down": cut(DOWN, "y", None)}, cut(MIXED, *of_x)
    small = vn.quant.calibrate(jax.jit(mlp), rules, params=params, **how)([x])
    alone = vn.quant.calibrate(dense_mlp, rules, params={"up": UP, "down": DOWN}, **how)([MIXED])
    for path in params:
        same = small[path].codes() == alone[path].codes()
        assert jnp.mean(same) > 0.95  # sums are in another order


def test_programs_are_traced_with_argument_shardings(explicit):
    def model(params, x):
        specs = {"in_specs": (P("x", None), P(None, "y")), "out_specs": P("x", "y")}
        return jax.shard_map(lambda x, w: x @ w, mesh=EXPLICIT, **specs)(x, params["w"])

    params, x = {"w": cut(UP, None, "y")}, cut(MIXED[0], "x")
    rules = [vn.quant.Rule(".*", "int4", tile_size=16)]
    small = vn.quant.quantize_tree(params, rules, model=model, args=(x,))
    assert small["w"].scale.shape == (4, 32)


def test_bits_are_allocated_over_an_explicit_mesh(explicit):
    choices = [vn.quant.Rule(".*", qtype, tile_size=16) for qtype in ("int4", "int8")]
    params, x = {"up": cut(UP, None, "y"), "down": cut(DOWN, "y", None)}, cut(MIXED, None, "x")
    found = vn.quant.allocate_bits(mlp, choices, 8.0, params=params)([x])
    dense = {"up": UP, "down": DOWN}
    assert found == vn.quant.allocate_bits(dense_mlp, choices, 8.0, params=dense)([MIXED])


@pytest.mark.parametrize("spec", [("y", None), (None, "y"), (("x", "y"), None)], ids=str)
@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4"])
def test_tiles_that_span_devices_of_an_explicit_mesh_agree(qtype, spec, explicit):
    # A device holds 16 of 64 rows with tiles of 32, or 96 of 192 rows with tiles of 64.
    w = arrays.normal(64, 8)
    make = lambda w: quantize(w, qtype, channelwise_axes=[1], tiled_axes={0: 32})
    tall = jnp.concatenate([w, w, w])
    large = lambda w: quantize(w, qtype, channelwise_axes=[1], tiled_axes={0: 64})
    for x, of in ((w, make), (tall, large)):
        q, expected = of(cut(x, *spec)), of(x)
        assert_close(q.dequantize(), expected.dequantize())
        product = lambda y, q: jnp.dot(y, q, out_sharding=P(None, None))
        out = jax.jit(vn.implicit(product))(jnp.ones((3, len(x))), q)
        assert_close(out, jnp.ones((3, len(x))) @ expected.dequantize(), 1e-4)
