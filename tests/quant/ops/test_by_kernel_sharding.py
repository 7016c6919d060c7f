"""Products by kernels on 8 devices. Each device computes a part of the result."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import arrays
from support.arrays import normal

import veneer as vn
from veneer.quant import quantize

if jax.device_count() < 8:
    pytest.skip("needs 8 devices", allow_module_level=True)

MESH = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

# Each shard has enough entries for a kernel.
K, N = 512, 256


def put(value, spec, mesh=MESH):
    """Place an array, or a weight leaf by leaf, on a mesh."""
    return vn.implicit(lambda x: jax.device_put(x, NamedSharding(mesh, spec)))(value)


def collectives(program):
    text = program.as_text()
    return {name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", text)}


def assert_close(actual, x, w):
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(actual, exact, rtol=1e-5, atol=2e-5 * np.abs(exact).max())


WEIGHTS = {
    "int8": ("int8", {}),
    "int4, tiled": ("int4", {0: 32}),
    "uint4, tiled": ("uint4", {0: 32}),
    "uint8": ("uint8", {}),
    "int3, tiled": ("int3", {0: 32}),
}
of_each_weight = pytest.mark.parametrize(("qtype", "tiled"), WEIGHTS.values(), ids=WEIGHTS)

# Shardings of activations, weight and result, and the collectives.
CUTS = {
    "columns": (P(), P(None, "y"), P(None, "y"), set()),
    "rows of activations and columns": (P("x"), P(None, "y"), P("x", "y"), set()),
    "rows of activations": (P(("x", "y")), P(), P(("x", "y")), set()),
    "the sum": (P(None, "y"), P("y"), P(), {"all-reduce"}),
    "the sum, of the weight alone": (P(), P("y"), P(), {"all-reduce"}),
    "the sum and columns": (P(None, "x"), P("x", "y"), P(None, "y"), {"all-reduce"}),
    "nothing": (P(), P(), P(), set()),
}


@of_each_weight
@pytest.mark.parametrize(("of_x", "of_w", "of_out", "sent"), CUTS.values(), ids=CUTS)
def test_each_device_multiplies_its_part(qtype, tiled, of_x, of_w, of_out, sent):
    x, w = normal(8, K, seed=1), normal(K, N, seed=2)
    q = quantize(w, qtype, channelwise_axes=[1], tiled_axes=tiled)
    operands = put(x, of_x), put(q, of_w)
    compiled = jax.jit(vn.implicit(jnp.matmul)).lower(*operands).compile()
    out = compiled(*operands)
    assert_close(out, x, q.dequantize())
    assert out.sharding.is_equivalent_to(NamedSharding(MESH, of_out), 2)
    assert collectives(compiled) == sent
    assert "veneer_rows" in compiled.as_text()


@of_each_weight
def test_a_weight_contracted_along_columns_agrees(qtype, tiled):
    x, w = normal(8, K, seed=1), normal(N, K, seed=2)
    transposed = {1 - axis: size for axis, size in tiled.items()}
    q = quantize(w, qtype, channelwise_axes=[0], tiled_axes=transposed)
    product = jax.jit(vn.implicit(lambda x, w: jnp.einsum("mk,nk->mn", x, w)))
    for of_x, of_w, sent in ((P(), P("y"), set()), (P(None, "y"), P(None, "y"), {"all-reduce"})):
        operands = put(x, of_x), put(q, of_w)
        compiled = product.lower(*operands).compile()
        assert_close(compiled(*operands), x, q.dequantize().T)
        assert collectives(compiled) == sent
        assert "veneer_columns" in compiled.as_text()


@pytest.mark.parametrize("of_w", [P("y"), P(None, "y"), P("x", "y")], ids=str)
def test_minima_are_sharded_like_scales(of_w):
    """Along the contracted axis, each device adds the minima of its tiles."""
    x, w = normal(8, K, seed=1), normal(N, K, seed=2)
    q = quantize(w, "uint4", channelwise_axes=[0], tiled_axes={1: 32})
    q = q.replace(zero_point=None, minimum=normal(*q.scale.shape).astype("float16"))
    product = lambda x, w: x @ w.T
    operands = put(x, P(None, of_w[1] if len(of_w) > 1 else None)), put(q, of_w)
    compiled = jax.jit(vn.implicit(product)).lower(*operands).compile()
    assert_close(compiled(*operands), x, q.dequantize().T)
    assert "veneer_columns" in compiled.as_text()
    assert collectives(compiled) == ({"all-reduce"} if len(of_w) > 1 else set())
    if of_w == P(None, "y"):
        added = lambda x, w: jax.lax.psum(product(x, w), "y")
        run = jax.shard_map(added, mesh=MESH, in_specs=(P(None, "y"), of_w), out_specs=P())
        assert_close(jax.jit(vn.implicit(run))(x, q), x, q.dequantize().T)


# Weights, and an axis along which a shard would cut a tile or a byte.
TOGETHER = arrays.OnDemand(
    {
        "a byte": lambda: (
            quantize(normal(K, 4 * 33, seed=2), "int4", channelwise_axes=[1]),
            P(None, "y"),
        ),
        "tiles along the sum": lambda: (
            quantize(normal(K, N, seed=2), "int4", channelwise_axes=[1], tiled_axes={0: 256}),
            P("y"),
        ),
        "tiles of columns": lambda: (
            quantize(normal(K, N, seed=2), "int4", tiled_axes={0: 32, 1: 128}),
            P(None, "y"),
        ),
        "bit planes of the same codes": lambda: (
            quantize(normal(K, 132, seed=2), "int3", channelwise_axes=[1]),
            P(None, "y"),
        ),
        "digits of base 3": lambda: (
            quantize(normal(K, 140, seed=2), "ternary", channelwise_axes=[1]),
            P(None, "y"),
        ),
        "an odd last byte": lambda: (
            quantize(normal(K, 131, seed=2), "int4", channelwise_axes=[1]),
            P("y"),
        ),
    }
)


@pytest.mark.parametrize("name", TOGETHER)
def test_tiles_and_bytes_are_never_cut(name):
    q, spec = TOGETHER[name]
    x = normal(8, K, seed=1)
    operands = put(x, P("x")), put(q, spec)
    wanted = NamedSharding(MESH, P("x", None if q.shape[1] % 4 else "y"))
    for out_sharding in (None, wanted):
        product = jax.jit(vn.implicit(jnp.matmul), out_shardings=out_sharding)
        assert_close(product(*operands), x, q.dequantize())


def test_a_batch_is_sharded_by_matrix():
    x, w = normal(8, 3, K, seed=1), normal(8, K, N, seed=2)
    q = quantize(w, "int4", channelwise_axes=[0, 2], tiled_axes={1: 32})
    for of_x, of_w in ((P(("x", "y")), P(("x", "y"))), (P("x"), P("x", None, "y"))):
        operands = put(x, of_x), put(q, of_w)
        compiled = jax.jit(vn.implicit(jnp.matmul)).lower(*operands).compile()
        assert_close(compiled(*operands), x, q.dequantize())
        assert "all-gather" not in collectives(compiled)


@pytest.mark.parametrize("tiles", [{}, {1: 32}])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_integer_activations_are_sharded_with_their_scales(side, tiles):
    x, w = normal(8, K, seed=1), normal(K, N, seed=2)
    q = quantize(w, "int4", channelwise_axes=[1], tiled_axes={0: 32})
    x = quantize(x, "int8", channelwise_axes=[0], tiled_axes=tiles)
    program = jnp.matmul
    if side == "columns":
        q = quantize(w.T, "int4", channelwise_axes=[0], tiled_axes={1: 32})
        program = lambda x, w: x @ w.T
    for of_x, of_w in (
        (P("x"), (None, "y")),
        (P(None, "y"), ("y", None)),
        (P("x", "y"), (None,) * 2),
    ):
        operands = put(x, of_x), put(q, P(*(of_w if side == "rows" else of_w[::-1])))
        compiled = jax.jit(vn.implicit(program)).lower(*operands).compile()
        dense = q.dequantize()
        assert_close(compiled(*operands), x.dequantize(), dense if side == "rows" else dense.T)
        assert f"veneer_integer_{side}" in compiled.as_text()


def test_gradients_have_the_sharding_of_their_values():
    x, w = normal(8, K, seed=1), normal(K, N, seed=2)
    q = quantize(w, "int4", channelwise_axes=[1], tiled_axes={0: 32})
    loss = lambda x, w: jnp.sum(jnp.sin(x @ w))
    operands = put(x, P("x")), put(q, P(None, "y"))
    compiled = jax.jit(jax.grad(vn.implicit(loss))).lower(*operands).compile()
    expected = jax.grad(loss)(x, q.dequantize())
    np.testing.assert_allclose(compiled(*operands), expected, rtol=1e-3, atol=1e-2)
    assert collectives(compiled) == {"all-reduce"}  # for the gradient, over columns


@of_each_weight
def test_shard_map_runs_a_kernel_on_each_device(qtype, tiled):
    x, w = normal(8, K, seed=1), normal(K, N, seed=2)
    q = quantize(w, qtype, channelwise_axes=[1], tiled_axes=tiled)
    specs = {
        "columns": ((P("x"), P(None, "y")), P("x", "y"), lambda x, w: x @ w),
        "the sum": ((P(None, "y"), P("y")), P(), lambda x, w: jax.lax.psum(x @ w, "y")),
    }
    for in_specs, out_specs, f in specs.values():
        run = jax.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs)
        loss = lambda x, w, run=run: jnp.sum(jnp.sin(run(x, w)))
        compiled = jax.jit(vn.implicit(run)).lower(x, q).compile()
        assert_close(compiled(x, q), x, q.dequantize())
        assert "veneer_rows" in compiled.as_text()
        actual = jax.jit(jax.grad(vn.implicit(loss)))(x, q)
        expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ q.dequantize())))(x)
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-2)


def test_a_shard_map_of_one_axis_leaves_the_other_to_xla():
    x, q = normal(8, K, seed=1), quantize(normal(K, N, seed=2), "int8", channelwise_axes=[1])
    run = jax.shard_map(
        lambda x, w: x @ w,
        mesh=MESH,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        axis_names={"x"},
    )
    assert_close(jax.jit(vn.implicit(run))(put(x, P("x")), put(q, P(None, "y"))), x, q.dequantize())


def test_operands_with_explicit_sharding_are_left_to_xla():
    x, q = normal(8, K, seed=1), quantize(normal(K, N, seed=2), "int8", channelwise_axes=[1])
    with jax.set_mesh(EXPLICIT):
        operands = put(x, P("x"), EXPLICIT), put(q, P(None, "y"), EXPLICIT)
        out = jax.jit(vn.implicit(jnp.matmul))(*operands)
    assert jax.typeof(out).sharding.spec == P("x", "y")
    assert_close(out, x, q.dequantize())
