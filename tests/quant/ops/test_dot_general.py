import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_types import Lora
from jax import lax

import veneer as vn
from veneer.quant import FORMATS, QArray, quantize

module = importlib.import_module("veneer.quant.ops.dot_general")  # the function has its name

# Shapes of lhs and rhs, and the dimension numbers.
CONTRACTIONS = {
    "matmul": ((3, 8), (8, 5), (([1], [0]), ([], []))),
    "transposed": ((8, 3), (5, 8), (([0], [1]), ([], []))),
    "batch": ((2, 3, 8), (2, 8, 5), (([2], [1]), ([0], [0]))),
    "batch axes out of order": ((3, 2, 8, 4), (8, 4, 5, 2), (([2], [0]), ([3, 1], [1, 3]))),
    "two contracting axes": ((3, 8, 2), (2, 5, 8), (([1, 2], [2, 0]), ([], []))),
    "several free axes": ((3, 8, 2), (5, 8, 4, 3), (([1], [1]), ([], []))),
    "vectors": ((8,), (8,), (([0], [0]), ([], []))),
    "matrix times vector": ((3, 8), (8,), (([1], [0]), ([], []))),
    "outer product": ((3,), (5,), (([], []), ([], []))),
    "empty sum": ((3, 0), (0, 5), (([1], [0]), ([], []))),
    "empty free axis": ((0, 8), (8, 5), (([1], [0]), ([], []))),
}


def normal(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def tiled(x, qtype, contracting, tiling):
    """`x` quantised with the scale varying as `tiling` says."""
    free = [axis for axis in range(x.ndim) if axis not in contracting]
    if tiling == "channelwise":
        return quantize(x, qtype, channelwise_axes=free)
    if tiling == "tiled free axes":
        return quantize(x, qtype, tiled_axes={i: 2 for i in free if x.shape[i] % 2 == 0})
    return quantize(x, qtype, channelwise_axes=free, tiled_axes=dict.fromkeys(contracting, 2))


def assert_agrees(actual, expected, operand_dtype=np.float32):
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    # Sums of tens of products of order 1, in another order; rounded once to the dtype. Dense
    # operands were rounded to theirs before that.
    eps = float(max(jnp.finfo(expected.dtype).eps, jnp.finfo(operand_dtype).eps))
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=4 * eps, atol=40 * eps)


@pytest.mark.parametrize("tiling", ["channelwise", "tiled free axes", "tiled sum"])
@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_agrees_with_the_dense_arrays_on_either_side_and_both(contraction, tiling):
    lhs_shape, rhs_shape, dimension_numbers = CONTRACTIONS[contraction]
    lhs, rhs = normal(*lhs_shape, seed=1), normal(*rhs_shape, seed=2)
    lhs_quantised = tiled(lhs, "int8", dimension_numbers[0][0], tiling)
    rhs_quantised = tiled(rhs, "int4", dimension_numbers[0][1], tiling)
    operands = [(lhs_quantised, rhs), (lhs, rhs_quantised), (lhs_quantised, rhs_quantised)]

    @jax.jit
    def run(operands):
        actual = [vn.quant.dot_general(*pair, dimension_numbers) for pair in operands]
        expected = [lax.dot_general(*pair, dimension_numbers) for pair in vn.materialise(operands)]
        return actual, expected

    for actual, expected in zip(*run(operands), strict=True):
        assert_agrees(actual, expected)


@pytest.mark.parametrize("rhs_format", FORMATS)
@pytest.mark.parametrize("lhs_format", FORMATS)
def test_any_two_formats_multiply(lhs_format, rhs_format):
    lhs = quantize(normal(3, 8), lhs_format, channelwise_axes=[0])
    rhs = quantize(normal(8, 5), rhs_format, channelwise_axes=[1])
    dimension_numbers = (([1], [0]), ([], []))
    expected = lax.dot_general(lhs.dequantize(), rhs.dequantize(), dimension_numbers)
    assert_agrees(vn.quant.dot_general(lhs, rhs, dimension_numbers), expected)


@pytest.mark.parametrize("lhs_zero", [None, 3])
def test_a_zero_point_counts(lhs_zero):
    zero = None if lhs_zero is None else jnp.full((3, 1), lhs_zero, jnp.int8)
    lhs = QArray(jnp.arange(-12, 12, dtype=jnp.int8).reshape(3, 8), jnp.full((3, 1), 0.5), zero)
    rhs = QArray(jnp.ones((8, 2), jnp.int8), jnp.ones((1, 2)), jnp.full((1, 2), -2, jnp.int8))
    dimension_numbers = (([1], [0]), ([], []))
    expected = lax.dot_general(lhs.dequantize(), rhs.dequantize(), dimension_numbers)
    assert_agrees(vn.quant.dot_general(lhs, rhs, dimension_numbers), expected)


@pytest.mark.parametrize("preferred", [None, jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("both", [False, True])
def test_the_dtype_is_that_of_the_dense_arrays(dtype, preferred, both):
    lhs, rhs = normal(3, 8, dtype=dtype), quantize(normal(8, 5, dtype=dtype), "int8")
    if both:
        lhs = quantize(lhs, "int8", channelwise_axes=[0])
    args = (([1], [0]), ([], [])), None, preferred
    expected = lax.dot_general(*vn.materialise((lhs, rhs)), *args)
    assert_agrees(vn.quant.dot_general(lhs, rhs, *args), expected, dtype)


@pytest.mark.parametrize(
    ("lhs_dtype", "dense_dtype"), [(jnp.float32, jnp.bfloat16), (jnp.int32, jnp.float32)]
)
def test_operands_of_different_dtypes_give_what_lax_gives(lhs_dtype, dense_dtype):
    lhs = jnp.arange(24).reshape(3, 8).astype(lhs_dtype)
    rhs = quantize(normal(8, 5, dtype=dense_dtype), "int8")
    dimension_numbers = (([1], [0]), ([], []))
    expected = lax.dot_general(lhs, rhs.dequantize(), dimension_numbers)
    assert_agrees(vn.quant.dot_general(lhs, rhs, dimension_numbers), expected)


def test_f16_sums_of_codes_do_not_overflow():
    x = jnp.full((1, 64), 100, jnp.float16)
    w = quantize(jnp.ones((64, 1), jnp.float16), "int8")
    y = vn.quant.dot_general(x, w, (([1], [0]), ([], [])))
    np.testing.assert_allclose(np.asarray(y, np.float32), 6400, rtol=1e-2)


@pytest.mark.parametrize("qtype", FORMATS)
def test_a_nan_scale_is_seen_in_its_own_channel(qtype):
    w = normal(8, 3).at[2, 1].set(jnp.nan)
    y = vn.quant.dot_general(
        jnp.ones((2, 8)), quantize(w, qtype, channelwise_axes=[1]), (([1], [0]), ([], []))
    )
    assert np.isnan(y).all(axis=0).tolist() == [False, True, False]
    assert np.isfinite(y[:, ::2]).all()


@pytest.mark.parametrize("side", [0, 1])
def test_other_implicit_operands_are_materialised(side):
    low_rank = Lora(normal(8, 8), normal(8, 2), normal(2, 8))
    operands = [quantize(normal(8, 8), "int8", channelwise_axes=[1 - side])] * 2
    operands[side] = low_rank
    dimension_numbers = (([1], [0]), ([], []))
    run = lambda *operands: vn.quant.dot_general(*operands, dimension_numbers)
    expected = lax.dot_general(*vn.materialise(operands), dimension_numbers)
    assert_agrees(run(*operands), expected)
    assert_agrees(jax.jit(run)(*operands), expected)


# What is computed: the claims about the jaxpr.


def dots(function, *args):
    """Operand and output dtypes of the dot_general equations that a function traces to."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return [
        tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))
        for eqn in eqns
        if eqn.primitive.name == "dot_general"
    ]


def matmul(lhs, rhs):
    return vn.quant.dot_general(lhs, rhs, (([1], [0]), ([], [])))


def test_a_channelwise_weight_is_never_dequantised():
    w = quantize(normal(8, 5, dtype=jnp.bfloat16), "int4", channelwise_axes=[1])
    jaxpr = jax.make_jaxpr(matmul)(normal(3, 8, dtype=jnp.bfloat16), w)
    scaled = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "mul"]
    assert scaled == [(3, 5)]  # the output, not the weight
    assert dots(matmul, normal(3, 8, dtype=jnp.bfloat16), w) == [
        ("bfloat16", "bfloat16", "float32")
    ]


def test_integer_codes_are_multiplied_as_integers():
    x = quantize(normal(3, 8), "int8", channelwise_axes=[0])
    w = quantize(normal(8, 5), "int4", channelwise_axes=[1])
    assert dots(matmul, x, w) == [("int8", "int8", "int32")]


def test_a_sum_that_int32_may_not_hold_is_left_to_floats(monkeypatch):
    x = quantize(normal(3, 8), "int8", channelwise_axes=[0])
    w = quantize(normal(8, 5), "int8", channelwise_axes=[1])
    exact = matmul(x, w)
    monkeypatch.setattr(module, "_MAX_INT32_TERMS", 7)
    assert dots(matmul, x, w) == [("float32", "float32", "float32")]
    assert_agrees(matmul(x, w), exact)


def test_the_longest_sum_of_the_largest_codes_fits_int32():
    terms = module._MAX_INT32_TERMS
    lowest = QArray(jnp.full(terms, -128, jnp.int8), jnp.ones(1))
    y = vn.quant.dot_general(lowest, lowest, (([0], [0]), ([], [])))
    assert y == np.float32(terms * 128.0**2)


@pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, "highest"])
@pytest.mark.parametrize("both", [False, True])
def test_precision_is_passed_on(precision, both):
    x = quantize(normal(3, 8), "int8") if both else normal(3, 8)
    w = quantize(normal(8, 5), "int8")
    run = lambda x, w: vn.quant.dot_general(x, w, (([1], [0]), ([], [])), precision)
    [eqn] = [e for e in jax.make_jaxpr(run)(x, w).eqns if e.primitive.name == "dot_general"]
    assert eqn.params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def test_an_algorithm_fixes_the_types_so_the_operands_are_dequantised():
    w = quantize(normal(8, 5), "int8")
    run = lambda x, w: vn.quant.dot_general(
        x, w, (([1], [0]), ([], [])), lax.DotAlgorithmPreset.BF16_BF16_F32, jnp.float32
    )
    eqns = jax.make_jaxpr(run)(normal(3, 8), w).eqns
    assert [e.outvars[0].aval.shape for e in eqns if e.primitive.name == "mul"] == [(8, 5)]


def test_shapes_that_do_not_fit_raise_what_lax_raises():
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        vn.quant.dot_general(
            jnp.ones((3, 7)), quantize(jnp.ones((8, 5)), "int8"), (([1], [0]), ([], []))
        )


# As a rule.

PROGRAMS = {
    "matmul": lambda x, w: x @ w,
    "on the left": lambda x, w: w.T @ x.T,
    "einsum": lambda x, w: jnp.einsum("bk,kn->nb", x, w),
    "with itself": lambda x, w: x @ (w @ w.T),
    "jit": jax.jit(lambda x, w: x @ w),
    "vmap": lambda x, w: jax.vmap(lambda x: x @ w)(x),
    "vmap over columns": lambda x, w: jax.vmap(lambda column: x @ column, in_axes=1, out_axes=1)(w),
    "scan": lambda x, w: lax.scan(lambda c, x: (c, x @ w), 0.0, x)[1],
    "scan over rows": lambda x, w: lax.scan(lambda c, row: (c + row, None), jnp.zeros(6), w)[0],
    "checkpoint": jax.checkpoint(lambda x, w: jnp.sin(x @ w)),
    "grad of x": jax.grad(lambda x, w: jnp.sum((x @ w) ** 2)),
    "grad of w": jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=1),
}


@pytest.mark.parametrize(
    "w",
    [
        quantize(normal(8, 6), "int4", channelwise_axes=[1]),
        quantize(normal(8, 6), "nf4", tiled_axes={0: 4, 1: 2}),
    ],
    ids=["int4 channelwise", "nf4 tiled"],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_under_implicit_agree_with_the_dense_weight(program, w):
    x, run = normal(3, 8), PROGRAMS[program]
    np.testing.assert_allclose(
        vn.materialise(vn.implicit(run)(x, w)), run(x, w.dequantize()), rtol=1e-5, atol=1e-5
    )


def test_the_rules_are_differentiated_with_respect_to_the_scale():
    x, w = normal(3, 8), quantize(normal(8, 5), "int8", channelwise_axes=[1])
    loss = lambda x, w: jnp.sum((x @ w) ** 2)
    grad = jax.grad(vn.implicit(loss), argnums=1, allow_int=True)(x, w)
    by_hand = lambda scale: loss(x, w.codes() * scale)
    np.testing.assert_allclose(grad.scale, jax.grad(by_hand)(w.scale), rtol=1e-5)


def test_stacked_weights_are_scanned_packed():
    x, w = normal(3, 8), quantize(normal(4, 8, 8), "int4", channelwise_axes=[0, 2])
    run = lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    actual = vn.implicit(run, on_materialise="error")(x, w)
    np.testing.assert_allclose(actual, run(x, w.dequantize()), rtol=1e-5, atol=1e-5)
