"""`Tridiagonal` and `Banded`: their operations give the same results as dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.banded import Banded, Tridiagonal
from veneer.types.structured.diagonal import Diagonal


def tridiagonal(draw):
    beside = max(draw.n - 1, 0)
    return Tridiagonal(draw(beside), draw(draw.n), draw(beside))


def definite(draw):  # not symmetric: JAX factorizes the symmetric part
    beside = max(draw.n - 1, 0)
    return Tridiagonal(draw(beside) / 4, draw.positive(draw.n) + 1, draw(beside) / 4)


def banded(lower, upper):
    return lambda draw: Banded(draw(lower + upper + 1, draw.n), lower, upper)


diagonal = lambda draw: Diagonal(draw.positive(draw.n))
vectors = lambda draw: draw(draw.n, 3)
FACTORED = {"dtypes": ("float64",), "sizes": (1, 2, 5)}
# A solve amplifies rounding errors by the condition number, which is a few hundred here.
SOLVED = {**FACTORED, "tolerance": 1e4}

test_under, test_over = claims(
    {
        "t @ x": Claim(lambda a, x: a @ x, (tridiagonal, vectors)),
        "x @ t": Claim(lambda x, a: x @ a, (lambda d: d(3, d.n), tridiagonal)),
        "2 t.T - t": Claim(lambda a: 2 * a.T - a, (tridiagonal,), kept=Tridiagonal),
        "t + d": Claim(lambda a, d: d + a + d, (tridiagonal, diagonal), kept=Tridiagonal),
        "d @ t @ d": Claim(lambda a, d: d @ a @ (d * 2), (tridiagonal, diagonal), kept=Tridiagonal),
        "t.T @ t": Claim(lambda a: a.T @ a, (tridiagonal,), kept=Banded),
        "f(t)": Claim(lambda a: jnp.sin(a) ** 3, (tridiagonal,), kept=Tridiagonal),
        "f(b)": Claim(lambda a: jnp.sin(a) ** 3, (banded(1, 2),), kept=Banded),
        "solve t": Claim(jnp.linalg.solve, (tridiagonal, vectors), **SOLVED),
        "slogdet t": Claim(lambda a: tuple(jnp.linalg.slogdet(a)), (tridiagonal,), **SOLVED),
        "trace t": Claim(lambda a: (jnp.trace(a), jnp.diagonal(a)), (tridiagonal,), **FACTORED),
        "cholesky t": Claim(jnp.linalg.cholesky, (definite,), kept=Tridiagonal, **FACTORED),
        "b @ x": Claim(lambda a, x: a @ x, (banded(2, 1), vectors)),
        "x @ b": Claim(lambda x, a: x @ a, (lambda d: d(3, d.n), banded(2, 1))),
        "b.T / 3": Claim(lambda a: a.T / 3, (banded(0, 2),), kept=Banded),
        "b + t - d": Claim(
            lambda b, t, d: b + t - d, (banded(2, 0), tridiagonal, diagonal), kept=Banded
        ),
        "b @ t @ d": Claim(
            lambda b, t, d: d @ (b @ t), (banded(2, 1), tridiagonal, diagonal), kept=Banded
        ),
        "solve b": Claim(jnp.linalg.solve, (banded(2, 1), vectors), **SOLVED),
        "slogdet b": Claim(lambda a: tuple(jnp.linalg.slogdet(a)), (banded(1, 2),), **SOLVED),
        "trace b": Claim(lambda a: (jnp.trace(a), jnp.diagonal(a)), (banded(1, 2),), **FACTORED),
    }
)


@pytest.mark.parametrize(("lower", "upper"), [(0, 0), (2, 0), (0, 3), (3, 1), (6, 6)])
def test_storage_and_solves_agree_with_scipy(lower, upper):
    rng = np.random.default_rng(0)
    bands = rng.normal(size=(lower + upper + 1, 6)).astype("float32")
    b = rng.normal(size=6).astype("float32")
    x = vn.implicit(jnp.linalg.solve)(Banded(jnp.asarray(bands), lower, upper), b)
    expected = scipy.linalg.solve_banded((lower, upper), bands.astype("float64"), b)
    np.testing.assert_allclose(x, expected, rtol=2e-3)


def test_entries_outside_of_the_matrix_are_not_read():
    nan = jnp.nan
    bands = jnp.array([[nan, nan, 1.0], [nan, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, nan]])
    a = Banded(bands, lower=1, upper=2)
    use = lambda a: (a @ jnp.ones(3), a @ a, a + a.T, jnp.linalg.slogdet(a), a.sum(0))
    found = vn.implicit(use, on_materialise="error")(a)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(vn.materialise(found)))


@pytest.mark.parametrize("size", [64, 65])
def test_zero_leading_minors_are_pivoted(size):
    """Use a zero diagonal between ones, for which every other leading minor is zero."""
    beside = jnp.ones(size - 1)
    a = Tridiagonal(beside, jnp.zeros(size), beside)
    sign, logabsdet = vn.implicit(jnp.linalg.slogdet)(a)
    assert (sign, logabsdet) == ((1.0, 0.0) if size == 64 else (0.0, -jnp.inf))
    if size == 64:
        x = vn.implicit(jnp.linalg.solve)(a, beside[:1].repeat(64))
        assert jnp.allclose(vn.materialise(a) @ x, 1)


def test_determinant_does_not_overflow_or_underflow():
    a = Tridiagonal(jnp.zeros(199), jnp.full(200, 1e30).at[::2].set(-1e-36), jnp.zeros(199))
    sign, logabsdet = vn.implicit(jnp.linalg.slogdet)(a)
    assert sign == 1.0
    assert jnp.allclose(logabsdet, 100 * jnp.log(1e-6), rtol=1e-5)


@pytest.mark.parametrize("make", [tridiagonal, banded(1, 1)])
def test_singular_solve_is_not_finite(make):
    a = jax.tree.map(jnp.zeros_like, Tridiagonal(jnp.ones(2), jnp.ones(3), jnp.ones(2)))
    a = a if make is tridiagonal else Banded(jnp.zeros((3, 3)), 1, 1)
    assert not jnp.isfinite(vn.implicit(jnp.linalg.solve)(a, jnp.ones(3))).any()


def test_cholesky_of_an_indefinite_matrix_is_nan():
    a = Tridiagonal(jnp.array([2.0, 0.0]), jnp.ones(3), jnp.array([2.0, 0.0]))
    factor = vn.implicit(jnp.linalg.cholesky)(a)
    assert jnp.isnan(factor.diagonal).all()
    assert jnp.isnan(factor.lower).all()


def test_long_product_has_no_bands_outside_of_the_matrix():
    a = Tridiagonal(jnp.ones(3), jnp.ones(4), jnp.ones(3))
    power = a @ a @ a @ a
    assert (power.lower, power.upper, power.bands.shape) == (3, 3, (7, 4))


def test_only_bands_are_stored():
    assert Tridiagonal(jnp.ones(7), jnp.ones(8), jnp.ones(7)).nbytes == 4 * 22
    assert Banded(jnp.ones((3, 8), "bfloat16"), 1, 1).nbytes == 2 * 24


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tridiagonal(jnp.ones(3), jnp.ones(3), jnp.ones(3)), "one entry fewer"),
        (lambda: Tridiagonal(jnp.ones(2), jnp.ones(3), jnp.ones(1)), "axis n-1 of upper is 1"),
        (lambda: Banded(jnp.ones((3, 4)), lower=1, upper=0), r"bands \[\.\.\., 2, n\]"),
        (lambda: Banded(jnp.ones((1, 4)), lower=-1, upper=1), "negative"),
    ],
)
def test_mismatched_sizes_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_entries_outside_of_the_matrix_have_zero_gradient():
    bands = jnp.array([[0.0, 4.0], [1.0, 1.0]])  # sqrt has an infinite derivative at 0
    entries = lambda x: vn.implicit(lambda a: jnp.sqrt(a).sum())(Banded(x, lower=0, upper=1))
    assert jax.grad(entries)(bands).tolist() == [[0.0, 0.25], [0.5, 0.5]]


def test_determinant_with_a_zero_column_is_zero():
    b = Banded(jnp.array([[0.0, 1, 1], [0, 1, 2], [0, 1, 0]]), 1, 1)
    assert vn.implicit(jnp.linalg.det)(b) == 0
    assert vn.implicit(jnp.linalg.slogdet)(b)[1] == -jnp.inf
