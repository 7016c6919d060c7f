"""`Constant`: its operations give the same results as a dense array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.claims import Claim, claims

import veneer as vn
from veneer.types.constant import Constant


def constant(draw):
    return Constant(draw.positive() / 2, (draw.n, 3))


def dense(draw):
    return draw(draw.n, 3)


def integer_constant(draw):
    return Constant(jnp.full(draw.batch, 5), (draw.n, 3))


def row_constants(draw):
    """Return a constant per row: the fill has an axis."""
    return Constant(draw(draw.n), (3,))


SMOOTH = (
    *(lax.abs, lax.cbrt, lax.exp, lax.exp2, lax.expm1, lax.lgamma, lax.log, lax.log1p),
    *(lax.logistic, lax.neg, lax.rsqrt, lax.sqrt, lax.square, lax.erf, lax.erfc, lax.sin, lax.cos),
    *(lax.tan, lax.asin, lax.acos, lax.atan, lax.sinh, lax.cosh, lax.tanh, lax.asinh, lax.atanh),
    lambda x: x**3,
    lambda x: lax.acosh(1 + x),
    lambda x: lax.reduce_precision(x, 5, 3),
)
STEPS = (lax.ceil, lax.floor, lax.round, lax.sign, lax.is_finite, lambda x: x.astype("int32"))
OF_TWO = (
    *(lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.pow, lax.max, lax.min, lax.atan2),
    *(lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge),
)
OF_INTEGERS = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, lax.shift_left, lax.div, lax.rem)


CLAIMS = {
    "smooth functions": Claim(lambda x: [f(x) for f in SMOOTH], [constant], Constant),
    "steps": Claim(lambda x: [f(x) for f in STEPS], [constant], Constant),
    "of two": Claim(lambda x, y: [f(x, y) for f in OF_TWO], [constant, constant], Constant),
    "of integers": Claim(
        lambda x, y: [f(x, y) for f in OF_INTEGERS],
        [integer_constant, integer_constant],
        Constant,
        without=("grad of implicit", "implicit of grad"),
    ),
    "with numbers": Claim(
        lambda x: (2 * x + 1, 1 / x, x > 0.5, x.clip(0, 0.5)), [constant], Constant
    ),
    "with an array": Claim(
        lambda x, y: (x + y, y * x, x - y, jnp.maximum(y, x), x < y), [constant, dense]
    ),
    "with a row": Claim(lambda x, y: (x + y, y * x), [constant, lambda d: d(3)]),
    "of a row and an array": Claim(lambda x, y: x * y, [lambda d: Constant(d(), (3,)), dense]),
    "of a row and a constant": Claim(
        lambda x, y: x * y, [lambda d: Constant(d(), (3,)), constant], Constant
    ),
    "of fills with other axes": Claim(lambda x, y: x * y, [row_constants, constant], Constant),
    "a choice by constants": Claim(
        lambda x, y: jnp.where(x > 0, x, y), [constant, constant], Constant
    ),
    "a choice by an array": Claim(
        lambda x, y: jnp.where(y > 0, x, y), [constant, dense], sizes=(1, 5)
    ),
    "a choice between constants": Claim(
        lambda x, y: jnp.where(y > 0, x, 2 * x),
        [constant, dense],
        sizes=(1, 5),  # for size 0, jnp.where returns an operand
    ),
    "reductions": Claim(
        lambda x: (
            x.sum(),
            x.sum(-1),
            x.prod(-1),
            x.max(-1),
            x.min((-1,)),
            x.mean(-1),
            x.argmax(-1),
        ),
        [constant],
        Constant,
        tolerance=1024,  # a bfloat16 product in another order
    ),
    "reductions of fills": Claim(
        lambda x: (x.sum(-2), x.max(-1), x.argmin(-1), x.sum()), [row_constants], Constant
    ),
    "truth": Claim(lambda x: ((x > 0).all(-1), (x > 0).any(-1)), [constant], Constant),
    "layout": Claim(
        lambda x: (x.mT, x[..., None], x[..., None, :], x.reshape(*x.shape[:-2], -1), x[::-1]),
        [constant],
        Constant,
        sizes=(1, 5),  # -1 cannot be inferred for size 0
    ),
    "layout of fills": Claim(
        lambda x: (x[..., None], x[..., ::-1, 1:], jnp.squeeze(x[..., :1], -1)),
        [row_constants],
        Constant,
    ),
    "slices": Claim(
        lambda x: (x[1:, ::2], x[..., 0], x[-1:]),
        [constant],
        Constant,
    ),
    "dynamic slices": Claim(
        lambda x: lax.dynamic_slice(x, (0, 1), (1, 2)),
        [constant],
        Constant,
        sizes=(1, 5),  # size 0 has no rows
        without=("implicit of vmap",),  # vmap makes a gather of it
    ),
    "broadcast": Claim(lambda x: jnp.broadcast_to(x, (2, *x.shape)), [constant], Constant),
    "a product with an array": Claim(lambda x, y: (x.T @ y, y.T @ x), [constant, dense]),
    "a product with a vector": Claim(lambda x, y: (x @ y, y @ x.T), [constant, lambda d: d(3)]),
    "a product of two": Claim(lambda x, y: (x.T @ y, x @ y.T), [constant, constant], Constant),
    "a product of fills": Claim(lambda x, y: jnp.einsum("ij,ik->jk", x, y), [row_constants, dense]),
    "a product of fills and a constant": Claim(
        lambda x, y: x @ y.T, [row_constants, constant], Constant
    ),
    "a product of batches": Claim(
        lambda x, y: jnp.einsum("bij,bjk->bik", x, y),
        [lambda d: Constant(d(), (2, d.n, 3)), lambda d: d(2, 3, d.n)],
    ),
    "a contraction of two axes": Claim(lambda x, y: jnp.einsum("ij,ij->", x, y), [constant, dense]),
}

test_under, test_over_sizes_and_dtypes = claims(CLAIMS)


def test_preferred_element_type_sets_the_dtype():
    x, y = Constant(jnp.int8(100), (5, 4)), jnp.full((4, 2), 100, "int8")
    dot = lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.int32)
    assert jnp.array_equal(vn.implicit(dot)(x, y), jnp.full((5, 2), 40_000))


@pytest.mark.parametrize("fill", [0.0, jnp.inf, -jnp.inf, jnp.nan])
def test_infinities_and_nan_reach_the_result(fill):
    x, y = Constant(fill, (3,)), jnp.array([1.0, jnp.inf, jnp.nan])
    program = lambda x, y: (x * y, x + y, x.sum(), x.max(), x.prod(), jnp.maximum(x, y), x @ y)
    for out, expected in zip(
        jax.tree.leaves(vn.materialise(vn.implicit(program)(x, y))),
        program(jnp.full(3, fill), y),
        strict=True,
    ):
        assert jnp.array_equal(out, expected, equal_nan=True)


@pytest.mark.parametrize("fill", [jnp.inf, jnp.nan])
def test_sum_of_no_infinities_is_zero(fill):
    x = Constant(fill, (2, 0))
    assert jnp.array_equal(vn.materialise(x.sum(-1)), jnp.zeros(2))
    assert jnp.array_equal(x @ jnp.ones((0, 2)), jnp.zeros((2, 2)))


def test_count_may_exceed_the_range_of_float16():
    x = Constant(jnp.float16(0.001), (100_000,))
    assert jnp.allclose(vn.materialise(x.sum()), 100, rtol=1e-2)


def test_index_out_of_bounds_is_filled():
    x = Constant(2.0, (3,))
    assert vn.implicit(lambda x: x.at[jnp.array([1, 5])].get(mode="fill"))(x)[1] != 2


def test_one_number_is_stored():
    assert Constant.zeros((1000, 1000)).nbytes == 4
    assert repr(Constant.ones((2,), bool)) == "Constant(fill=bool[], trailing=(2,))"
    assert np.array_equal(np.asarray(Constant.ones((2,), bool)), np.ones(2, bool))


@pytest.mark.parametrize("arguments", [("x", (2,)), (0.0, [2]), (0.0, 2), (0.0, (-1,))])
def test_invalid_arguments_raise(arguments):
    with pytest.raises(TypeError, match="Constant takes a"):
        Constant(*arguments)


def test_count_may_exceed_int32():
    ones = Constant.ones((50_000, 50_000))
    assert vn.implicit(jnp.sum)(ones) == 2.5e9
    assert vn.implicit(jnp.mean)(ones) == 1
    assert vn.implicit(jnp.sum)(Constant.ones((50_000, 50_000), "int32")) == 2_500_000_000 - 2**32
