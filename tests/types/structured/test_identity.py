"""`Identity`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import pytest
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal, Identity
from veneer.types.structured.partwise import Kronecker

identity = lambda draw: Identity(draw.n, draw.dtype, leading=draw.batch)
diagonal = lambda draw: Diagonal(draw.positive(draw.n))
vectors = lambda draw: draw(draw.n, 3)
square = lambda draw: draw(draw.n, draw.n)
FACTORED = {"dtypes": ("float64",), "sizes": (1, 5)}


def kronecker(draw):
    return Kronecker(draw(draw.n, draw.n), draw(1, 1))


def determinant_and_trace(a):
    return *jnp.linalg.slogdet(a), jnp.linalg.det(a), jnp.trace(a), jnp.diagonal(a)


test_under, test_over = claims(
    {
        "i @ x": Claim(lambda a, x: a @ x, (identity, vectors)),
        "x.T @ i": Claim(lambda a, x: x.mT @ a, (identity, vectors)),
        "i @ d @ i": Claim(lambda a, d: a @ d @ a, (identity, diagonal), kept=Diagonal),
        "k @ i.T": Claim(lambda a, k: k @ a.T, (identity, kronecker), kept=Kronecker),
        "i @ i": Claim(lambda a: a @ a.T, (identity,), kept=Identity),
        "2 i - i + d": Claim(lambda a, d: 2 * a - a + d, (identity, diagonal), kept=Diagonal),
        "i * x": Claim(lambda a, x: a * x, (identity, square), kept=Diagonal),
        "i * i * d": Claim(lambda a, d: a * a * d, (identity, diagonal), kept=Diagonal),
        "sin": Claim(lambda a: jnp.sin(a) ** 2, (identity,), kept=Diagonal),
        "solve": Claim(jnp.linalg.solve, (identity, vectors), **FACTORED),
        "inv, cholesky": Claim(
            lambda a: (jnp.linalg.inv(a), jnp.linalg.cholesky(a)),
            (identity,),
            kept=Identity,
            **FACTORED,
        ),
        "determinant and trace": Claim(determinant_and_trace, (identity,), **FACTORED),
    }
)


def test_identity_takes_no_memory():
    assert Identity(10**6).nbytes == 0
    assert Identity(10**6, leading=(3,)).shape == (3, 10**6, 10**6)


def test_default_dtype_is_the_default_float():
    assert Identity(3).dtype == jnp.float32
    with jax.enable_x64(True):
        assert Identity(3).dtype == jnp.float64
    assert Identity(3, "bfloat16").astype("float16").dtype == jnp.float16


def test_product_promotes_dtypes():
    half = Diagonal(jnp.ones(2, "bfloat16"))
    assert (Identity(2) @ half).diagonal.dtype == jnp.float32
    assert (half @ Identity(2, "bfloat16")).diagonal.dtype == jnp.bfloat16


def test_stack_of_identities_is_an_identity():
    stack = vn.implicit(jnp.stack, on_materialise="error")([Identity(4), Identity(4)])
    assert (repr(stack), repr(stack[0])) == ("Identity(f32[2,4,4])", "Identity(f32[4,4])")


def test_product_keeps_infinity_and_nan():
    x = jnp.array([jnp.inf, jnp.nan, 1.0])
    assert jnp.array_equal(Identity(3) @ x, x, equal_nan=True)


def test_triangular_solve_returns_the_right_hand_side():
    solve = lambda a: jax.scipy.linalg.solve_triangular(a, jnp.arange(3.0))
    assert (vn.implicit(solve, on_materialise="error")(Identity(3)) == jnp.arange(3.0)).all()


@pytest.mark.parametrize(("n", "error"), [(-1, ValueError), (2.5, TypeError)])
def test_invalid_sizes_raise(n, error):
    with pytest.raises(error):
        Identity(n)


@pytest.mark.parametrize("equation", ["ij,ij->", "bij,bij->bi", "bij,cjk->bcik", "bij,bjk->ik"])
def test_contractions_that_are_not_matmuls_are_correct(equation):
    eye = Identity(3, leading=(2,) if "b" in equation else ())
    run = lambda x: jnp.einsum(equation, x, x)
    assert jnp.allclose(vn.implicit(run)(eye), run(vn.materialise(eye)))
