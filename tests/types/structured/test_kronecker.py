"""`Kronecker`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal, Permutation
from veneer.types.structured.partwise import Kronecker


def factors(n):
    """Return the sizes of two square factors of an n x n matrix."""
    return (2, n // 2) if n % 2 == 0 else (1, n)


def kronecker(draw):
    n1, n2 = factors(draw.n)
    return Kronecker(draw(n1, n1), draw(n2, n2))


def of_diagonal(draw):
    n1, n2 = factors(draw.n)
    return Kronecker(Diagonal(draw.positive(n1)), _regular(draw, n2))


def rectangular(draw):
    n1, n2 = factors(draw.n)
    return Kronecker(draw(2, n1), draw(3, n2))


def regular(draw):
    n1, n2 = factors(draw.n)
    return Kronecker(_regular(draw, n1), _regular(draw, n2))


def definite(draw):
    k = regular(draw)
    return Kronecker(*((w + w.mT) / 2 for w in (k.a, k.b)))


def _regular(draw, n):
    return draw(n, n) / 4 + jnp.eye(n, dtype=draw.dtype)


vectors = lambda draw: draw(draw.n, 3)
FACTORED = {"dtypes": ("float64",), "sizes": (1, 5)}


def determinant_and_trace(a):
    return *jnp.linalg.slogdet(a), jnp.linalg.det(a), jnp.trace(a), jnp.diagonal(a)


test_under, test_over = claims(
    {
        "k @ x": Claim(lambda a, x: a @ x, (rectangular, vectors)),
        "x.T @ k": Claim(lambda a, x: x.mT @ a, (of_diagonal, vectors)),
        "3 k.T @ k": Claim(lambda a, b: 3 * a.T @ b / 2, (kronecker,) * 2, kept=Kronecker),
        "k * k": Claim(lambda a, b: a * b, (kronecker,) * 2, kept=Kronecker),
        "abs": Claim(lambda a: jnp.abs(a) ** 3, (kronecker,), kept=Kronecker),
        "sum": Claim(lambda a: (a.sum(), a.sum(0), a.sum(1)), (rectangular,)),
        "solve": Claim(jnp.linalg.solve, (of_diagonal, vectors), **FACTORED),
        "inv": Claim(jnp.linalg.inv, (regular,), kept=Kronecker, **FACTORED),
        "cholesky": Claim(jnp.linalg.cholesky, (definite,), kept=Kronecker, **FACTORED),
        "determinant and trace": Claim(determinant_and_trace, (regular,), **FACTORED),
    }
)


def test_dense_matrix_agrees_with_numpy():
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(vn.materialise(Kronecker(a, b)), np.kron(a, b))


def test_factor_can_be_a_kronecker_product():
    a, b, c = (2 * jnp.eye(n) + jnp.arange(n) for n in (2, 3, 4))
    k = Kronecker(a, Kronecker(b, c))
    use = lambda k: (k @ jnp.arange(24.0), jnp.linalg.solve(k, jnp.ones(24)), jnp.linalg.det(k))
    found = vn.implicit(use, on_materialise="error")(k)
    expected = use(np.kron(a, np.kron(b, c)))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_structured_factors_keep_their_type():
    k = Kronecker(Permutation(jnp.array([1, 2, 0])), jnp.eye(2))
    inverse = vn.implicit(jnp.linalg.inv, on_materialise="error")(2 * k)
    assert isinstance(inverse.a, Permutation)
    assert jnp.allclose(vn.materialise(inverse) @ vn.materialise(2 * k), jnp.eye(6))


def test_quantized_factor_is_multiplied():
    q = vn.quant.quantize(jax.random.normal(jax.random.key(0), (4, 4)), "int8")
    k, x = Kronecker(jnp.eye(2), q), jnp.arange(8.0)
    assert jnp.allclose(k @ x, vn.materialise(k) @ x, rtol=1e-5)


def test_product_with_mismatched_factors_agrees_with_dense():
    a, b = Kronecker(jnp.ones((2, 2)), jnp.eye(3)), Kronecker(jnp.ones((3, 3)), jnp.eye(2))
    out = vn.implicit(jnp.matmul)(a, b)
    assert jnp.allclose(vn.materialise(out), vn.materialise(a) @ vn.materialise(b))


def test_determinant_materializes_if_factors_are_not_square():
    k = Kronecker(jnp.arange(6.0).reshape(2, 3), jnp.arange(6.0).reshape(3, 2))
    assert vn.implicit(jnp.trace)(k) == jnp.trace(vn.materialise(k))
    with pytest.raises(vn.MaterialiseError):
        vn.implicit(jnp.linalg.det, on_materialise="error")(k)


def test_bfloat16_product_is_rounded_once():
    a, b, x = jax.random.normal(jax.random.key(0), (3, 32, 32)).astype("bfloat16")
    x = x.reshape(-1)
    exact = np.kron(*(np.asarray(w, "float64") for w in (a, b))) @ np.asarray(x, "float64")
    error = np.abs(np.asarray(Kronecker(a, b) @ x, "float64") - exact)
    assert error.max() <= 2**-8 * np.abs(exact).max()


def test_only_factors_are_stored():
    assert Kronecker(jnp.ones((8, 8)), jnp.ones((4, 4))).nbytes == 4 * (64 + 16)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (arrays.ones((5, 2, 2)), arrays.ones((4, 2, 2)), ValueError),
        (arrays.ones(2), arrays.ones((2, 2)), ValueError),
        (arrays.ones((2, 2)), [[1.0]], TypeError),
    ],
)
def test_invalid_factors_raise(a, b, error):
    with pytest.raises(error, match="Kronecker takes"):
        Kronecker(a, b)
