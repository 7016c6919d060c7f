"""`Toeplitz` and `Circulant`: their operations give the same results as dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured import toeplitz as module
from veneer.types.structured.toeplitz import Circulant, Toeplitz


@pytest.fixture(autouse=True)
def by_fft(monkeypatch):
    """Use the FFT for small matrices too, so that claims with small sizes test it."""
    monkeypatch.setattr(module, "DIRECT_UP_TO", 2)


def toeplitz(rows=None, columns=None):
    return lambda draw: Toeplitz(draw(rows or draw.n), draw(columns or draw.n))


def dominant(draw):
    diagonal = jnp.zeros(draw.n, draw.dtype).at[:1].set(4)
    return Toeplitz(draw(draw.n) / 2 + diagonal, draw(draw.n) / 2)


def circulant(draw):  # the eigenvalues are not near zero
    return Circulant(draw(draw.n) / 4 + jnp.zeros(draw.n, draw.dtype).at[:1].set(2))


vectors = lambda draw: draw(draw.n, 3)
SOLVED = {"dtypes": ("float64",), "sizes": (1, 2, 5), "tolerance": 2048}

test_under, test_over = claims(
    {
        "t @ x": Claim(lambda a, x: a @ x, (toeplitz(rows=3), vectors)),
        "x @ t": Claim(lambda x, a: x @ a, (lambda d: d(3, d.n), toeplitz(columns=3))),
        "2 t.T - t": Claim(lambda a: 2 * a.T - a, (toeplitz(),), kept=Toeplitz),
        "t + c": Claim(lambda a, c: c + a + c, (toeplitz(), circulant), kept=Toeplitz),
        "solve t": Claim(jnp.linalg.solve, (dominant, vectors), **SOLVED),
        "trace t": Claim(lambda a: (jnp.trace(a), jnp.diagonal(a)), (toeplitz(),)),
        "t.sum()": Claim(lambda a: (a.sum(), a.sum(0), a.sum(1)), (toeplitz(rows=3),)),
        "f(t)": Claim(lambda a: jnp.sin(a) ** 3, (toeplitz(rows=3),), kept=Toeplitz),
        "f(c)": Claim(lambda a: jnp.sin(a) ** 3, (circulant,), kept=Circulant),
        "c @ x": Claim(lambda a, x: a @ x, (circulant, vectors)),
        "x @ c": Claim(lambda x, a: x @ a, (lambda d: d(3, d.n), circulant)),
        "c @ c.T / 3 - c": Claim(lambda a: a @ a.T / 3 - a, (circulant,), kept=Circulant),
        "solve c": Claim(jnp.linalg.solve, (circulant, vectors), **SOLVED),
        "inv c": Claim(jnp.linalg.inv, (circulant,), kept=Circulant, **SOLVED),
        "slogdet c": Claim(lambda a: tuple(jnp.linalg.slogdet(-a)), (circulant,), **SOLVED),
        "trace c": Claim(lambda a: (jnp.trace(a), jnp.diagonal(a)), (circulant,)),
    }
)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (1, 6), (7, 2)])
def test_dense_matrix_agrees_with_scipy(rows, columns):
    column, row = np.arange(rows) + 1.0, -np.arange(columns) - 1.0
    a = Toeplitz(jnp.asarray(column), jnp.asarray(row))
    dense = scipy.linalg.toeplitz(column, row)
    np.testing.assert_array_equal(vn.materialise(a), dense)
    np.testing.assert_array_equal(vn.materialise(a.T), dense.T)
    np.testing.assert_allclose(a @ jnp.ones(columns), dense.sum(1), rtol=1e-6)


def test_default_row_gives_a_hermitian_matrix():
    column = np.array([1.0, 2.0 + 1.0j, 3.0j])
    np.testing.assert_array_equal(
        vn.materialise(Toeplitz(column)), scipy.linalg.toeplitz(column).astype("complex64")
    )


@pytest.mark.parametrize("type_", [Toeplitz, Circulant])
def test_complex_matrices_agree_with_dense_ones(type_):
    column, x = jax.random.normal(jax.random.key(0), (2, 7), "complex64")
    a = type_(column + 4 * (jnp.arange(7) == 0))
    dense = vn.materialise(a)
    np.testing.assert_allclose(a @ x, dense @ x, rtol=1e-4)
    np.testing.assert_allclose(
        vn.implicit(jnp.linalg.solve)(a, x), jnp.linalg.solve(dense, x), rtol=1e-4
    )
    for found, expected in zip(
        vn.implicit(jnp.linalg.slogdet)(a), jnp.linalg.slogdet(dense), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_fft_error_is_proportional_to_the_norm():
    column, row, x = jax.random.normal(jax.random.key(0), (3, 3, 500))
    a = Toeplitz(column, row)
    exact = np.einsum("lij,lj->li", np.asarray(vn.materialise(a), "f8"), np.asarray(x, "f8"))
    found = vn.implicit(jnp.linalg.matmul)(a, x[..., None])[..., 0]
    norms = np.linalg.norm(vn.materialise(a), ord=2, axis=(1, 2)) * np.linalg.norm(x, axis=1)
    error = np.linalg.norm(found - exact, axis=1)
    assert (error <= 10 * jnp.finfo("float32").eps * norms).all()


def solve_with_scipy(column, row, b):
    return scipy.linalg.solve_toeplitz(tuple(np.asarray(v, "f8") for v in (column, row)), b)


def test_solve_agrees_with_scipy():
    column, row, b = jax.random.normal(jax.random.key(1), (3, 200))
    column = column.at[0].set(40.0)
    x = jax.jit(vn.implicit(jnp.linalg.solve))(Toeplitz(column, row), b)
    np.testing.assert_allclose(x, solve_with_scipy(column, row, b), rtol=0, atol=1e-6)


def test_solve_with_a_singular_leading_block_uses_lu():
    """With a zero diagonal, the recursion cannot begin, but LU with pivoting can."""
    column, row, b = jax.random.normal(jax.random.key(2), (3, 2, 6))
    a = Toeplitz(column.at[0, 0].set(0.0), row)  # one matrix of the batch
    solve = lambda a, b: jnp.linalg.solve(a, b[..., None])[..., 0]
    expected = solve(vn.materialise(a), b)
    assert jnp.isfinite(expected).all()
    for run in (vn.implicit(solve), jax.vmap(vn.implicit(solve)), jax.jit(vn.implicit(solve))):
        np.testing.assert_allclose(run(a, b), expected, rtol=1e-3)


def test_small_products_and_solves_use_the_dense_matrix(monkeypatch):
    monkeypatch.setattr(module, "DIRECT_UP_TO", 6)
    column, row, x = jax.random.normal(jax.random.key(3), (3, 6))
    for a in (Toeplitz(column, row), Circulant(column)):
        assert "fft" not in str(jax.make_jaxpr(vn.implicit(jnp.matmul))(a, x))
        np.testing.assert_allclose(a @ x, vn.materialise(a) @ x, rtol=1e-5)


@pytest.mark.parametrize("size", [150, 151])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_determinant_of_a_large_circulant(size, sign):
    column = jax.random.normal(jax.random.key(size), (size,)) * sign
    a = Circulant(column)
    expected = np.linalg.slogdet(np.asarray(vn.materialise(a), "f8"))
    found = vn.implicit(jnp.linalg.slogdet)(a)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_singular_circulant_has_zero_determinant():
    a = Circulant(jnp.ones(4))
    assert vn.implicit(jnp.linalg.det)(a) == 0
    assert not jnp.isfinite(vn.implicit(jnp.linalg.solve)(a, jnp.arange(4.0))).any()


def test_nan_in_a_vector_stays_in_its_product():
    column, row = jax.random.normal(jax.random.key(4), (2, 5))
    x = jnp.ones((5, 2)).at[3, 0].set(jnp.nan)
    for a in (Toeplitz(column, row), Circulant(column)):
        assert (jnp.isnan(a @ x) == jnp.array([True, False])).all()


def test_integer_products_materialize_and_are_exact():
    column = jnp.arange(6)
    for a in (Toeplitz(column), Circulant(column)):
        x = jnp.arange(6) + 2**24
        assert ((a @ x) == vn.materialise(a) @ x).all()
        assert vn.explain(jnp.matmul)(a, x).materialised


def test_only_column_and_row_are_stored():
    assert Toeplitz(jnp.ones(8), jnp.ones(4)).nbytes == 4 * 12
    assert Circulant(jnp.ones(8, "bfloat16")).nbytes == 2 * 8


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Toeplitz(jnp.ones((2, 3)), jnp.ones(3)), ValueError, "leading axes differ"),
        (lambda: Toeplitz(jnp.ones(()), jnp.ones(3)), ValueError, "too few axes"),
        (lambda: Circulant(jnp.float32(1)), ValueError, "too few axes"),
        (lambda: Circulant([1.0, 2.0]), TypeError, "an array for column"),
    ],
)
def test_invalid_fields_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_ignored_corner_has_zero_gradient():
    row = jnp.array([0.0, 4.0])  # sqrt has an infinite derivative at 0
    entries = lambda row: vn.implicit(lambda a: jnp.sqrt(a).sum())(Toeplitz(jnp.ones(2), row))
    assert jax.grad(entries)(row).tolist() == [0.0, 0.25]
