"""`Triangular`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import pytest
from jax.scipy.linalg import solve_triangular
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.product import Product
from veneer.types.structured.triangular import Triangular


def triangular(*, lower=True, unit_diagonal=False):
    """Return a triangular matrix with NaN in the entries that must not be read."""

    def make(draw):
        x = draw(draw.n, draw.n) + 2 * jnp.eye(draw.n, dtype=draw.dtype)
        kept = jnp.tri(draw.n, k=-1 if unit_diagonal else 0, dtype=bool)
        return Triangular(jnp.where(kept if lower else kept.T, x, jnp.nan), lower, unit_diagonal)

    return make


LOWER, UPPER, UNIT = triangular(), triangular(lower=False), triangular(unit_diagonal=True)
vectors = lambda draw: draw(draw.n, 3)
SOLVED = {"dtypes": ("float64",), "sizes": (1, 5), "tolerance": 2048}

test_under, test_over = claims(
    {
        "w @ x": Claim(lambda a, x: a @ x, (LOWER, vectors)),
        "x @ w": Claim(lambda x, a: x @ a, (lambda d: d(3, d.n), UPPER)),
        "2 w + u.T - w": Claim(lambda a, u: 2 * a + u.T - a, (LOWER, UPPER), kept=Triangular),
        "unit + unit": Claim(lambda a: a + a * 3, (UNIT,), kept=Triangular),
        "w @ unit @ unit": Claim(lambda a, u: a @ (u @ u), (LOWER, UNIT), kept=Triangular),
        "f(w)": Claim(lambda a: jnp.sin(a) ** 3, (UNIT,), kept=Triangular),
        "solve": Claim(jnp.linalg.solve, (UPPER, vectors), **SOLVED),
        "solve, unit": Claim(jnp.linalg.solve, (UNIT, vectors), **SOLVED),
        "solve_triangular": Claim(
            lambda a, u, b: (
                solve_triangular(a, b, lower=True),
                solve_triangular(a, b, lower=True, trans=1),
                solve_triangular(a.T, b, unit_diagonal=True),
                solve_triangular(u, b, lower=True),
            ),
            (LOWER, UNIT, vectors),
            **SOLVED,
        ),
        "inv": Claim(jnp.linalg.inv, (UNIT,), kept=Triangular, **SOLVED),
        "slogdet": Claim(lambda a: tuple(jnp.linalg.slogdet(-a)), (UPPER,), **SOLVED),
        "trace": Claim(lambda a, u: (jnp.trace(a), jnp.diagonal(u)), (LOWER, UNIT)),
        "w @ w.T": Claim(lambda a: a @ a.T, (LOWER,), kept=Product),
        "w + w.T": Claim(lambda a: a + a.T, (LOWER,), made_dense=True),
    }
)


@pytest.mark.parametrize("unit_diagonal", [False, True])
def test_solve_with_the_other_triangle_reads_the_diagonal(unit_diagonal):
    a = Triangular(jnp.array([[2.0, 7.0], [1.0, 4.0]]), unit_diagonal=unit_diagonal)
    strict = vn.implicit(solve_triangular, on_materialise="error")
    expected = [8.0, 8.0] if unit_diagonal else [4.0, 2.0]
    assert strict(a, jnp.array([8.0, 8.0]), lower=False).tolist() == expected


def test_lower_and_upper_are_kept():
    lower = Triangular(jnp.ones((3, 3)), unit_diagonal=True)
    assert (lower.T.lower, lower.T.unit_diagonal) == (False, True)
    assert (lower @ lower).unit_diagonal
    assert not (lower + lower).unit_diagonal
    assert not (2 * lower).unit_diagonal


def test_zero_on_the_diagonal_is_singular():
    a = Triangular(jnp.array([[0.0, 7.0], [1.0, 4.0]]))
    sign, logabsdet = vn.implicit(jnp.linalg.slogdet)(a)
    assert (sign, logabsdet) == (0.0, -jnp.inf)
    assert not jnp.isfinite(vn.implicit(jnp.linalg.solve)(a, jnp.ones(2))).any()


def test_quantized_array_is_unpacked():
    x = jax.random.normal(jax.random.key(0), (8, 8))
    q = vn.quant.quantize(x, "int8")
    found = Triangular(q) @ jnp.ones(8)
    assert jnp.allclose(found, jnp.tril(vn.materialise(q)).sum(1), atol=1e-5)


def test_whole_array_is_stored():
    assert Triangular(jnp.ones((8, 8), "bfloat16")).nbytes == 2 * 64


def test_array_that_is_not_square_raises():
    with pytest.raises(ValueError, match=r"x \[\.\.\., n, n\]"):
        Triangular(jnp.ones((3, 4)))


def test_half_of_a_symmetric_matrix_is_not_triangular():
    a = Triangular(jnp.array([[2.0, 0.0], [1.0, 2.0]]))
    run = lambda a: jax.scipy.linalg.solve(a, jnp.array([1.0, 0.0]), assume_a="pos", lower=True)
    assert jnp.allclose(vn.implicit(run)(a), run(vn.materialise(a)))
