"""Rules of all types agree with the dense computation in each floating dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.every_type import EVERY_TYPE, T, plain, value

import veneer as vn
from veneer._core.rules import rules_of
from veneer.testing import check_rules
from veneer.types.structured.matrix import Matrix

DTYPES = ("bfloat16", "float16", "float32", "float64")

#: These types have no dense array. They raise for operations that they do not support.
REFUSING = (T.Masked, T.Named, T.Quantity)

#: Primitives that the generated programs do not contain, with the reason.
ELSEWHERE = {
    "conv_general_dilated": "for convolution kernels",
    "ragged_dot_general": "for groups of matrices",
    "real imag": "for complex numbers",
    "reduce_and reduce_or reduce_xor": "for bools and integers",
    "copy stop_gradient": "compute nothing",
    "cholesky": "for positive definite matrices",
}
BY_TYPE = {
    "Constant": "reshape transpose",  # only for a fill with more axes
    "Lazy": "transpose",  # only within a solve
    "LoraArray": "add reshape",  # only with a LowRank, or with more than two axes
    "QArray": "ppermute",  # needs a mesh
    "Symmetric": "conj",  # its entries are real
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in EVERY_TYPE if name != "PRNGKey"])
def test_every_rule_agrees_with_the_dense_array(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        w = value(name, (), dtype)
        programs, elsewhere = {}, [*ELSEWHERE, BY_TYPE.get(type(w).__name__, "")]
        if isinstance(w, T.Masked):
            w = T.Masked(w.value, jnp.ones_like(w.mask))  # sums skip invalid entries
            # Entries outside of the array are invalid, not NaN.
            programs = {f"filled along {axis}": lambda w, d: w for axis in (0, 1)}
        untested = " ".join(elsewhere).split()
        if dtype != "float32":  # float32 tests all rules
            untested = [target.name for target, _ in rules_of(type(w))]
        check_rules(
            type(w),
            w,
            programs=programs,
            untested=untested,
            dense=plain,
            may_refuse=isinstance(w, REFUSING),
            transformations=False,  # test_matrix.py tests them
        )


def _check(program, dtype, out, expected):
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype), program
    x, y = np.asarray(out, "float64"), np.asarray(expected, "float64")
    # Intermediate results in 16 bits are rounded, too.
    tolerance = 4 * float(jnp.finfo(dtype).eps) * np.max(np.abs(y), initial=1)
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance, err_msg=program)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["LowRank", "LoraArray", "Product", "Kronecker"])
def test_sums_of_16_bit_floats(name, dtype):
    w = value(name, (2,), dtype)
    for axes in (0, 1, 2, (1, 2), (0, 2), None):
        out, expected = vn.implicit(lambda w, i=axes: w.sum(i))(w), plain(w).sum(axes)
        _check(f"sum over {axes}", dtype, out, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", EVERY_TYPE)
def test_float32_product_is_not_rounded_to_16_bits(name, dtype):
    w = value(name)
    if not isinstance(w, Matrix) or isinstance(w, T.LoraArray) or w.dtype != jnp.float32:
        pytest.skip("not a structured matrix of floats")
    cast = lambda to: lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x
    halves = jax.tree.map(cast(dtype), w)
    wide = plain(jax.tree.map(cast("float32"), halves))
    other = vn.types.Diagonal(jnp.array([1.1, 0.7, 1.3, 0.9], dtype))  # has rules for two types
    by = plain(jax.tree.map(cast("float32"), other))
    products = lambda w, d: [
        jnp.matmul(*p, preferred_element_type="float32")
        for p in ((w, w), (w.T, w), (w, d), (d, w.T))
    ]
    for out, expected in zip(vn.implicit(products)(halves, other), products(wide, by), strict=True):
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(plain(out), expected, rtol=1e-5, atol=1e-5)
