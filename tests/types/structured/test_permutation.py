"""`Permutation`: its operations give the same results as a dense matrix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.claims import Claim, claims

import veneer as vn
from veneer.types.structured.diagonal import Permutation
from veneer.types.structured.product import Product


def permutation(draw):
    return Permutation(jnp.argsort(draw(draw.n), -1), draw.dtype)


vectors = lambda draw: draw(draw.n, 3)
FACTORED = {"dtypes": ("float64",), "sizes": (1, 5)}
NO_GRADIENT = {"without": ("grad of implicit",)}  # the indices are integers


def determinant_and_trace(a):
    return *jnp.linalg.slogdet(a), jnp.linalg.det(a), jnp.trace(a), jnp.diagonal(a)


test_under, test_over = claims(
    {
        "p @ x": Claim(lambda a, x: a @ x, (permutation, vectors)),
        "x.T @ p": Claim(lambda a, x: x.mT @ a, (permutation, vectors)),
        "p @ q.T": Claim(
            lambda a, b: a @ b.T, (permutation, permutation), kept=Permutation, **NO_GRADIENT
        ),
        "-2 p": Claim(lambda a: -2 * a, (permutation,), kept=Product, **NO_GRADIENT),
        "sum": Claim(lambda a: (a.sum(), a.sum(0)), (permutation,), **NO_GRADIENT),
        "solve": Claim(jnp.linalg.solve, (permutation, vectors), **FACTORED),
        "inv": Claim(jnp.linalg.inv, (permutation,), kept=Permutation, **FACTORED, **NO_GRADIENT),
        "determinant and trace": Claim(
            determinant_and_trace, (permutation,), **FACTORED, **NO_GRADIENT
        ),
    }
)


def test_product_reorders_entries():
    indices, x = jnp.array([2, 0, 1]), jnp.array([jnp.inf, jnp.nan, 1.0])
    assert jnp.array_equal(Permutation(indices) @ x, x[indices], equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_determinant_is_the_parity(n):
    indices = np.array(list(itertools.permutations(range(n))), int)
    inversions = (indices[:, :, None] > indices[:, None, :]) & np.triu(np.ones((n, n), bool))
    sign, logabsdet = vn.implicit(jnp.linalg.slogdet)(Permutation(indices))
    assert (sign == (-1.0) ** inversions.sum((1, 2))).all()
    assert (logabsdet == 0).all()


def test_determinant_of_a_long_cycle():
    for n in (8, 9, 1000):
        cycle = Permutation(jnp.roll(jnp.arange(n), 1))
        assert vn.implicit(jnp.linalg.det)(cycle) == (-1) ** (n - 1)


def test_traced_index_out_of_range_gives_nan():
    run = jax.jit(lambda indices: Permutation(indices) @ jnp.ones(2))
    assert jnp.isnan(run(jnp.array([0, 2]))).tolist() == [False, True]


def test_only_indices_are_stored():
    assert Permutation(jnp.arange(8, dtype="int16")).nbytes == 16


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (arrays.array([0, 2]), ValueError, r"each of 0, \.\.\., 1 once, got \[0 2\]"),
        (arrays.array([[0, 1], [1, 1]]), ValueError, "each of 0, .* once"),
        (arrays.array(0), ValueError, "too few axes"),
        (arrays.array([0.0, 1.0]), TypeError, "integers for indices, not float32"),
        ([0, 1], TypeError, "an array for indices"),
    ],
)
def test_invalid_indices_raise(indices, error, message):
    with pytest.raises(error, match=message):
        Permutation(indices)
