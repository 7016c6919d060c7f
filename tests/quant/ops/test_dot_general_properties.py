"""Products of any two operands, compared with products in float64 by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import veneer as vn
from veneer.quant import FORMATS, QArray, quantize

# Shapes of both operands, and the dimension numbers. Sums have 64 terms, or 4 times 16.
CONTRACTIONS = (
    ((3, 64), (64, 5), (([1], [0]), ([], []))),
    ((64, 3), (5, 64), (([0], [1]), ([], []))),
    ((2, 1, 64), (2, 64, 5), (([2], [1]), ([0], [0]))),
    ((16, 3, 4), (2, 4, 16), (([0, 2], [2, 1]), ([], []))),
    ((17, 64), (64, 18), (([1], [0]), ([], []))),
    ((64,), (64,), (([0], [0]), ([], []))),
)
# Each example compiles a program.
FEW = settings(max_examples=min(10, settings().max_examples))
UNTILED = [name for name, format in FORMATS.items() if format.tile_size is None]


@st.composite
def operands(draw, shape, contracting):
    """Draw a function that creates a dense array, or a QArray of any format and granularity."""
    seed, power = draw(st.integers(0, 99)), draw(st.integers(-1, 1))
    if draw(st.integers(0, 4)) == 0:
        return seed, power, None
    channelwise, tiled = [], {}
    for axis, size in enumerate(shape):
        tiles = [n for n in (1, 2, 4, 16, 32, 64) if size % n == 0 and n < size]
        kind = draw(
            st.sampled_from(["shared", "tiled", "shared" if axis in contracting else "own"])
        )
        if kind == "own":
            channelwise.append(axis)
        elif kind == "tiled" and tiles:
            tiled[axis] = draw(st.sampled_from(tiles))
    qtype = draw(st.sampled_from(UNTILED))
    affine = FORMATS[qtype].is_integer and FORMATS[qtype].bits >= 2
    method = draw(st.sampled_from([None, "minmax"])) if affine else None
    return seed, power, (qtype, channelwise, tiled, method)


def make(how, shape, dtype):
    seed, power, quantized = how
    x = jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 10.0**power, dtype)
    if quantized is None:
        return x
    qtype, channelwise, tiled, method = quantized
    return quantize(
        x, qtype, channelwise_axes=channelwise, tiled_axes=tiled, calibration_method=method
    )


def in_float64(x):
    """Return the dense array of an operand, computed from its codes by NumPy."""
    if not isinstance(x, QArray):
        return np.asarray(x, np.float64)
    values = np.asarray(x.format.decode(x.codes(), jnp.float32), np.float64)
    for leaf, op in ((x.zero_point, np.subtract), (x.scales(), np.multiply)):
        if leaf is not None:
            leaf = np.asarray(leaf, np.float64)
            for axis, size in enumerate(x.shape):
                leaf = np.repeat(leaf, size // leaf.shape[axis], axis)
            values = op(values, leaf)
    return values


def contracted(lhs, rhs, dimension_numbers):
    (lc, rc), (lb, rb) = dimension_numbers
    batch, summed = "ABC"[: len(lb)], "KLM"[: len(lc)]

    def names(ndim, contracting, batched, free):
        known = dict(zip([*contracting, *batched], summed + batch, strict=True))
        return "".join(known.get(axis, free[axis]) for axis in range(ndim))

    left, right = names(lhs.ndim, lc, lb, "abcd"), names(rhs.ndim, rc, rb, "wxyz")
    out = batch + "".join(c for c in left + right if c.islower())
    return np.einsum(f"{left},{right}->{out}", lhs, rhs)


def check_any(data, dtype):
    lhs_shape, rhs_shape, dimension_numbers = data.draw(st.sampled_from(CONTRACTIONS))
    lhs = make(data.draw(operands(lhs_shape, dimension_numbers[0][0])), lhs_shape, dtype)
    rhs = make(data.draw(operands(rhs_shape, dimension_numbers[0][1])), rhs_shape, dtype)
    check(lhs, rhs, dimension_numbers)


def check(lhs, rhs, dimension_numbers):
    dtype = lhs.dtype
    actual = jax.jit(
        lambda lhs, rhs: vn.implicit(lax.dot_general)(lhs, rhs, dimension_numbers, "highest")
    )(lhs, rhs)
    assert actual.dtype == dtype
    exact = in_float64(lhs), in_float64(rhs)
    expected = contracted(*exact, dimension_numbers)
    size = contracted(*map(np.abs, exact), dimension_numbers)
    # Relative to the largest possible sum: a rounding for each of 64 terms and a few for scales, in
    # the dtype of sums; two roundings of dequantized operands; and one of the result.
    eps = float(jnp.finfo(dtype).eps)
    summed_in = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)
    bound = size * (72 * summed_in + 2 * eps) + np.abs(expected) * eps
    error = np.abs(np.asarray(actual, np.float64) - expected)
    assert (error <= bound + float(jnp.finfo(dtype).tiny)).all(), (error / bound).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@FEW
@given(data=st.data())
def test_any_operands_agree(data, dtype):
    check_any(data, jnp.dtype(dtype))


@FEW
@given(data=st.data())
def test_any_operands_in_float64_agree(data):
    with jax.enable_x64(True):
        check_any(data, jnp.dtype(jnp.float64))


# One scale, and tiles along the contracted axis with equal and different sizes.
GRANULARITIES = ({}, {2: 2}, {0: 1, 2: 32})


@pytest.mark.parametrize("tiled", GRANULARITIES, ids=str)
@pytest.mark.parametrize("qtype", UNTILED)
def test_each_format_in_float64_agrees(qtype, tiled):
    lhs_shape, rhs_shape, dimension_numbers = CONTRACTIONS[2]
    with jax.enable_x64(True):
        lhs = make((0, 0, (qtype, [], tiled, None)), lhs_shape, jnp.float64)
        check(lhs, make((1, 0, None), rhs_shape, jnp.float64), dimension_numbers)
