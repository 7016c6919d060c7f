"""`Diagonal`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal

diagonal = lambda draw: Diagonal(draw(draw.n))
positive = lambda draw: Diagonal(draw.positive(draw.n))
square = lambda draw: draw(draw.n, draw.n)
FACTORED = {"dtypes": ("float64",), "sizes": (1, 5)}

# test_linear_algebra.py tests products, sums and solves of all structured matrices.
test_under, test_over = claims(
    {
        "d + d": Claim(lambda a, b: a + b, (diagonal, positive), kept=Diagonal),
        "d * x": Claim(lambda a, x: a * x, (diagonal, square), kept=Diagonal),
        "x * d": Claim(lambda a, x: x * a, (diagonal, square), kept=Diagonal),
        "d * d": Claim(lambda a, b: a * b, (diagonal, positive), kept=Diagonal),
        "zero-preserving": Claim(
            lambda a: jnp.tanh(jnp.abs(jnp.sin(a))) ** 3, (diagonal,), kept=Diagonal
        ),
        "cholesky": Claim(jnp.linalg.cholesky, (positive,), kept=Diagonal, **FACTORED),
        "solve_triangular": Claim(
            lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True, trans=1),
            (positive, square),
            **FACTORED,
        ),
        "cho_solve": Claim(
            lambda a, b: jax.scipy.linalg.cho_solve((a, True), b), (positive, square), **FACTORED
        ),
    }
)


def test_triangular_solve_from_the_right_divides_columns():
    d, b = Diagonal(jnp.array([1.0, 2.0, 4.0])), jnp.ones((2, 3))
    solve = lambda a: jax.lax.linalg.triangular_solve(a, b, left_side=False)
    assert (vn.implicit(solve, on_materialise="error")(d) == solve(vn.materialise(d))).all()


def test_triangular_solve_ignores_a_unit_diagonal():
    solve = lambda a: jax.scipy.linalg.solve_triangular(a, jnp.ones(3), unit_diagonal=True)
    assert (vn.implicit(solve)(Diagonal(jnp.zeros(3))) == 1).all()


@pytest.mark.parametrize("function", [jnp.cos, jnp.exp, lambda x: x + 1, lambda x: x**-1])
def test_functions_that_do_not_keep_zeros_materialize(function):
    d = Diagonal(jnp.array([1.0, 2.0]))
    assert (vn.implicit(function)(d) == function(vn.materialise(d))).all()


def test_entries_outside_of_an_infinite_diagonal_are_zero():
    d = Diagonal(jnp.array([jnp.inf, jnp.nan]))
    assert vn.materialise(d)[0, 1] == vn.materialise(d)[1, 0] == 0
    y = d @ jnp.array([1.0, 1.0])
    assert y[0] == jnp.inf
    assert vn.materialise(Diagonal(jnp.ones(2)) * jnp.full((2, 2), jnp.inf))[0, 1] == 0


def test_sqrt_has_finite_derivatives_outside_of_the_diagonal():
    d = Diagonal(jnp.array([4.0, 9.0]))
    roots = lambda d: jnp.sqrt(d).sum()
    assert jnp.allclose(jax.grad(vn.implicit(roots))(d).diagonal, jnp.array([1 / 4, 1 / 6]))


def test_determinant_with_a_zero_entry_is_zero():
    sign, logabsdet = vn.implicit(jnp.linalg.slogdet)(Diagonal(jnp.array([1.0, 0.0])))
    assert (sign, logabsdet) == (0.0, -jnp.inf)


def test_grad_inside_implicit_is_dense_and_outside_is_diagonal():
    f = lambda d: (d @ jnp.ones(2)).sum()
    d = Diagonal(jnp.array([1.0, 2.0]))
    assert (vn.implicit(jax.grad(f))(d) == jnp.ones((2, 2))).all()
    assert (jax.grad(vn.implicit(f))(d).diagonal == jnp.ones(2)).all()


def test_only_the_diagonal_is_stored():
    assert Diagonal(jnp.ones(8, "bfloat16")).nbytes == 16


@pytest.mark.parametrize(
    ("diagonal", "error", "message"),
    [
        (arrays.ones(()), ValueError, "too few axes"),
        ([1.0, 2.0], TypeError, "an array for diagonal"),
    ],
)
def test_invalid_diagonals_raise(diagonal, error, message):
    with pytest.raises(error, match=message):
        Diagonal(diagonal)


def test_quantized_diagonal_raises():
    with pytest.raises(TypeError, match=r"takes a dense array for diagonal, .* veneer.materialise"):
        Diagonal(vn.quant.quantize(jnp.ones(3), "int8"))


def test_complex_cholesky_factorizes_the_hermitian_part():
    d = Diagonal(jnp.array([1 + 1j, 2]))
    factor = vn.implicit(jnp.linalg.cholesky)(d)
    assert jnp.allclose(vn.materialise(factor), jnp.linalg.cholesky(vn.materialise(d)))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x // 2,
        lambda x: x / 2,
        lambda x: jax.lax.div(x, 3),
        jnp.linalg.inv,
        jnp.linalg.det,
        lambda x: tuple(jnp.linalg.slogdet(x)),
        jnp.linalg.cholesky,
    ],
)
def test_integer_division_agrees_with_the_dense_matrix(run):
    d = Diagonal(jnp.array([2, 3, 4]))
    out, expected = vn.materialise(vn.implicit(run)(d)), run(vn.materialise(d))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), out, expected)
