"""`Symmetric`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal
from veneer.types.structured.triangular import Symmetric, Triangular

symmetric = lambda draw: Symmetric(draw(draw.n * (draw.n + 1) // 2))


def definite(draw):
    x = draw(draw.n, draw.n)
    gram = x @ x.mT + jnp.eye(draw.n, dtype=draw.dtype)
    return Symmetric.from_dense(gram, positive_definite=True)


diagonal = lambda draw: Diagonal(draw.positive(draw.n))
vectors = lambda draw: draw(draw.n, 3)
SOLVED = {"dtypes": ("float64",), "sizes": (1, 5), "tolerance": 1024}

test_under, test_over = claims(
    {
        "w @ x": Claim(lambda a, x: a @ x, (symmetric, vectors)),
        "x @ w": Claim(lambda x, a: x @ a, (lambda d: d(3, d.n), symmetric)),
        "2 w - v.T": Claim(lambda a, b: 2 * a - b.T, (symmetric, symmetric), kept=Symmetric),
        "d + w": Claim(lambda a, d: d + a / 3, (symmetric, diagonal), kept=Symmetric),
        "trace": Claim(lambda a: (jnp.trace(a), jnp.diagonal(a)), (symmetric,)),
        "f(w)": Claim(lambda a: jnp.sin(a) ** 3, (symmetric,), kept=Symmetric),
        "solve": Claim(lambda a, b: jnp.linalg.solve(a + a, b), (definite, vectors), **SOLVED),
        "solve, any": Claim(
            lambda a, b: jnp.linalg.solve(a * 2, b),
            (definite, vectors),
            made_dense=True,
            **SOLVED,
        ),
        "inv": Claim(jnp.linalg.inv, (definite,), kept=Symmetric, **SOLVED),
        "slogdet": Claim(lambda a: tuple(jnp.linalg.slogdet(a)), (definite,), **SOLVED),
        "cholesky": Claim(jnp.linalg.cholesky, (definite,), kept=Triangular, **SOLVED),
    }
)


@pytest.mark.parametrize("lower", [True, False])
def test_from_dense_packs_one_triangle(lower):
    x = jnp.arange(18.0).reshape(2, 3, 3)
    kept = jnp.tril(x) if lower else jnp.triu(x)
    strictly = jnp.tril(x, -1) if lower else jnp.triu(x, 1)
    found = Symmetric.from_dense(jnp.where(kept == x, x, jnp.nan), lower=lower)
    assert (vn.materialise(found) == kept + strictly.mT).all()


def test_positive_definite_is_kept_by_sums_and_inverses():
    a = Symmetric.from_dense(jnp.eye(3), positive_definite=True)
    assert (a + a).positive_definite
    assert vn.implicit(jnp.linalg.inv)(a).positive_definite
    other = Symmetric.from_dense(jnp.eye(3))
    for unknown in (-a, a * 2, a - a, a + Diagonal(jnp.ones(3)), a + other):
        assert not unknown.positive_definite


def test_solve_of_an_indefinite_matrix_is_nan():
    a = Symmetric.from_dense(-jnp.eye(3), positive_definite=True)
    assert jnp.isnan(vn.implicit(jnp.linalg.solve)(a, jnp.ones(3))).all()
    assert jnp.isnan(vn.implicit(jnp.linalg.det)(a))


def test_half_of_the_dense_bytes_are_stored():
    assert Symmetric.from_dense(jnp.ones((64, 64))).nbytes == 4 * 64 * 65 // 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Symmetric(jnp.ones(5)), ValueError, r"5 lies between 3 \(n = 2\) and 6"),
        (lambda: Symmetric(jnp.ones(3, "complex64")), TypeError, "real entries, not complex64"),
        (
            lambda: Symmetric.from_dense(jnp.ones((2, 3))),
            ValueError,
            r"square matrix, got \(2, 3\)",
        ),
    ],
)
def test_invalid_symmetric_matrices_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_functions_with_complex_results_materialize():
    w = Symmetric(jnp.arange(1.0, 7))
    for program in (jax.lax.conj, lambda w: w * 2j, lambda w: w.astype("complex64")):
        np.testing.assert_array_equal(vn.implicit(program)(w), program(w.materialise()))
