"""`Product`: its operations give the same results as a dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Diagonal, Identity, Permutation
from veneer.types.structured.partwise import Kronecker
from veneer.types.structured.product import Product


def kronecker(draw):
    n1, n2 = (2, draw.n // 2) if draw.n % 2 == 0 else (1, draw.n)
    regular = lambda n: draw(n, n) / 4 + jnp.eye(n, dtype=draw.dtype)
    return Kronecker(regular(n1), regular(n2))


diagonal = lambda draw: Diagonal(draw.positive(draw.n))
permutation = lambda draw: Permutation(jnp.argsort(draw(draw.n), -1), draw.dtype)
vectors = lambda draw: draw(draw.n, 3)
# With sizes 0 and 1, two matrices take more than twice the memory of their dense product.
SIZES = {"sizes": (5,)}
FACTORED = {"dtypes": ("float64",), "sizes": (5,)}


def determinant_and_trace(d, k):
    a = d @ k
    return *jnp.linalg.slogdet(a), jnp.linalg.det(a), jnp.trace(a), jnp.diagonal(k @ d)


test_under, test_over = claims(
    {
        "d @ k": Claim(lambda d, k: d @ k, (diagonal, kronecker), kept=Product, **SIZES),
        "d @ k @ x": Claim(lambda d, k, x: d @ k @ x, (diagonal, kronecker, vectors), **SIZES),
        "x.T @ (p @ d)": Claim(
            lambda p, d, x: x.mT @ (p @ d), (permutation, diagonal, vectors), **SIZES
        ),
        "-2 (k @ p).T": Claim(
            lambda k, p: -2 * (k @ p).mT, (kronecker, permutation), kept=Product, **SIZES
        ),
        "solve": Claim(
            lambda d, k, x: jnp.linalg.solve(d @ k, x), (diagonal, kronecker, vectors), **FACTORED
        ),
        "inv": Claim(
            lambda p, k: jnp.linalg.inv(p @ k), (permutation, kronecker), kept=Product, **FACTORED
        ),
        "determinant and trace": Claim(determinant_and_trace, (diagonal, kronecker), **FACTORED),
    }
)

D = Diagonal(arrays.arange(1.0, 7.0))
P = Permutation(arrays.array([3, 1, 0, 5, 4, 2]))
K = Kronecker(arrays.array([[2.0, 1.0], [0.0, 1.0]]), arrays.array(np.eye(3) + 1))


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: D @ (D @ K), "Diagonal @ Kronecker"),
        (lambda: (K @ D) @ D, "Kronecker @ Diagonal"),
        (lambda: (D @ P) @ (P.T @ D), "Diagonal @ Permutation @ Diagonal"),
        (lambda: P.T @ (P @ K) @ K, "Permutation @ Kronecker"),
        (lambda: (D @ K) @ P, "Diagonal @ Kronecker @ Permutation"),
        (lambda: Identity(6) @ (D @ K) @ Identity(6), "Diagonal @ Kronecker"),
    ],
)
def test_adjacent_factors_are_multiplied_if_a_type_fits(make, shown):
    def names(x):
        return names(x.left) + names(x.right) if isinstance(x, Product) else [type(x).__name__]

    assert " @ ".join(n for n in names(make()) if n != "Identity") == shown


def test_large_factors_of_a_small_product_materialize():
    thin = Kronecker(jnp.ones((1, 2)), jnp.ones((2, 50)))
    out = vn.implicit(jnp.matmul)(thin, thin.T)
    assert isinstance(out, Kronecker)  # a rule multiplies them
    out = vn.implicit(lambda a, d, b: a @ d @ b)(thin, Diagonal(jnp.ones(100)), thin.T)
    assert not isinstance(out, vn.Value)
    assert (out == 100).all()


def test_product_in_a_loop_agrees_with_dense():
    def power(d, k):
        return jax.lax.fori_loop(0, 3, lambda _, a: a @ k, d)

    expected = power(vn.materialise(D), vn.materialise(K))
    assert jnp.allclose(vn.implicit(power)(D, K), expected)


def test_solve_materializes_if_a_factor_has_no_solve():
    a, b = Kronecker(jnp.ones((2, 3)), jnp.ones((2, 2))), Kronecker(jnp.ones((3, 2)), jnp.eye(2))
    square = Product(a, b)
    assert vn.implicit(jnp.linalg.det)(square) == jnp.linalg.det(vn.materialise(square))
    with pytest.raises(vn.MaterialiseError):
        vn.implicit(jnp.linalg.det, on_materialise="error")(square)


def test_only_factors_are_stored():
    assert (D @ K).nbytes == D.nbytes + K.nbytes


@pytest.mark.parametrize(
    ("left", "right", "error", "message"),
    [
        (D, Diagonal(arrays.ones(3)), ValueError, "axis k of right is 3"),
        (D, arrays.ones((6, 6)), TypeError, "right is an array of shape"),
    ],
)
def test_invalid_factors_raise(left, right, error, message):
    with pytest.raises(error, match=message):
        Product(left, right)
