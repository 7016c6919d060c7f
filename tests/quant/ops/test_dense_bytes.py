"""Products of a QArray and dense integers: bytes are multiplied as codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays

import veneer as vn
from veneer.quant import quantize

NHWC = ("NHWC", "HWIO", "NHWC")
CONV = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
SIZES = arrays.array([2, 0, 3])
MATMUL = (([1], [0]), ([], []))

# The function, the dense function, the shapes, and the channelwise axes of each operand.
PRODUCTS = {
    "dot_general": (
        lambda x, y: vn.quant.dot_general(x, y, MATMUL),
        lambda x, y: lax.dot_general(x, y, MATMUL),
        [(5, 32), (32, 4)],
        [[0], [1]],
    ),
    "dot_general under implicit": (
        vn.implicit(jnp.matmul),
        jnp.matmul,
        [(5, 32), (32, 4)],
        [[0], [1]],
    ),
    "ragged_dot": (
        lambda x, y: vn.quant.ragged_dot(x, y, SIZES),
        lambda x, y: lax.ragged_dot(x, y, SIZES),
        [(5, 32), (3, 32, 4)],
        [[0], [0, 2]],
    ),
    "conv_general_dilated": (
        lambda x, y: vn.quant.conv_general_dilated(x, y, **CONV),
        lambda x, y: lax.conv_general_dilated(x, y, **CONV),
        [(2, 6, 6, 8), (3, 3, 8, 4)],
        [[0], [3]],
    ),
}


def operands(name, side, dtype, qtype="int8", dense_dtype=jnp.float32):
    """Return two operands: dense bytes, at a side, and a QArray."""
    _, _, shapes, channels = PRODUCTS[name]
    rng = np.random.default_rng(0)
    info = jnp.iinfo(dtype)
    low, high = max(info.min, -(2**10)), min(info.max, 2**10)
    pair = [jnp.asarray(rng.normal(size=shape), dense_dtype) for shape in shapes]
    pair[1 - side] = quantize(pair[1 - side], qtype, channelwise_axes=channels[1 - side])
    pair[side] = jnp.asarray(rng.integers(low, high + 1, shapes[side]), dtype)
    return pair


def stands_for(pair):
    q = next(x for x in pair if isinstance(x, vn.quant.QArray))
    return [vn.materialise(x).astype(q.dtype) for x in pair]


def assert_close(out, expected, tolerance=1e-5):
    assert out.dtype == expected.dtype
    out, expected = (np.asarray(x, np.float64) for x in (out, expected))
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance * abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_dense_bytes_have_their_values(name, side, dtype):
    run, dense, *_ = PRODUCTS[name]
    for qtype, dense_dtype in (
        ("int8", jnp.float32),
        ("uint4", jnp.float32),
        ("int8", jnp.bfloat16),
    ):
        pair = operands(name, side, dtype, qtype, dense_dtype)
        wide = [x.astype(jnp.float32) for x in stands_for(pair)]
        expected = dense(*wide).astype(dense_dtype)
        assert_close(run(*pair), expected, 1e-5 if dense_dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", PRODUCTS)
def test_dense_bytes_agree_under_every_transformation(name, side):
    run, dense, *_ = PRODUCTS[name]
    pair = operands(name, side, jnp.int8)
    expected = dense(*stands_for(pair))
    assert_close(jax.jit(run)(*pair), expected)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), pair)
    assert_close(lax.scan(lambda c, pair: (c, run(*pair)), 0, stacked)[1][1], expected)
    if name != "ragged_dot":  # JAX batches it only along the first axis of dense operands
        assert_close(jax.vmap(run)(*stacked)[1], expected)
    q = pair[1 - side]

    def loss(run, read, scale):
        bytes_, other = read(pair[side]), read(q.replace(scale=scale))
        return (run(*([other, bytes_] if side else [bytes_, other])) ** 2).sum()

    floats = lambda x: vn.materialise(x).astype(q.dtype)
    by_codes = jax.jit(jax.grad(lambda scale: loss(run, lambda x: x, scale)))(q.scale)
    assert_close(by_codes, jax.grad(lambda scale: loss(dense, floats, scale))(q.scale), 1e-4)


@pytest.mark.parametrize("side", [0, 1])
def test_bytes_are_multiplied_as_codes(side):
    pair = operands("dot_general under implicit", side, jnp.int8)
    (event,) = vn.explain(jnp.matmul)(*pair).events
    assert event.how == "multiply integer codes, scale the output"
    assert not event.made_dense


def test_dense_bytes_are_convolved_as_integers():
    pair = operands("conv_general_dilated", 0, jnp.int8)
    program = jax.make_jaxpr(lambda *pair: vn.quant.conv_general_dilated(*pair, **CONV))(*pair)
    assert "preferred_element_type=int32" in str(program)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("dtype", "qtype"), [(jnp.int32, "int8"), (jnp.int8, "nf4")])
def test_other_integers_and_formats_are_multiplied_as_floats(name, dtype, qtype):
    run, dense, *_ = PRODUCTS[name]
    if name == "ragged_dot":
        pytest.skip("JAX's has no operands of two dtypes")
    pair = operands(name, 0, dtype, qtype)
    assert_close(run(*pair), dense(*stands_for(pair)))


def test_a_product_with_integer_result_agrees_with_jax():
    x, q = operands("dot_general", 0, jnp.int8)
    out = vn.quant.dot_general(x, q, MATMUL, preferred_element_type=jnp.float16)
    assert out.dtype == jnp.float16
    pair = operands("conv_general_dilated", 0, jnp.int8)
    with pytest.raises(TypeError, match="preferred_element_type"):
        vn.quant.conv_general_dilated(*pair, preferred_element_type=jnp.int32, **CONV)
