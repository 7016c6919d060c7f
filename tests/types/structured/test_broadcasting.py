"""Elementwise operations broadcast axes of size 1 of structured matrices."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.types import (
    Banded,
    BlockDiagonal,
    Circulant,
    Diagonal,
    Identity,
    Kronecker,
    LoraArray,
    LowRank,
    Permutation,
    SparseArray,
    Symmetric,
    Toeplitz,
    Triangular,
    Tridiagonal,
)

normal = arrays.normal


OF_ANY_SIZE = {
    "LowRank": lambda m, n: LowRank(normal(m, 2), normal(2, n)),
    "LoraArray": lambda m, n: LoraArray(normal(m, n, seed=1), normal(m, 2), normal(2, n)),
    "SparseArray": lambda m, n: SparseArray(
        normal(2), arrays.array(np.array([[0, n - 1], [m - 1, 0]])), (m, n)
    ),
    "Kronecker": lambda m, n: Kronecker(normal(1, n), normal(m, 1)),
}
SQUARE = {
    "Diagonal": lambda n: Diagonal(normal(n)),
    "Identity": lambda n: Identity(n),
    "Circulant": lambda n: Circulant(normal(n)),
    "Toeplitz": lambda n: Toeplitz(normal(n), normal(n)),
    "Symmetric": lambda n: Symmetric.from_dense(normal(n, n)),
    "Triangular": lambda n: Triangular(normal(n, n)),
    "Permutation": lambda n: Permutation(arrays.array(np.arange(n)[::-1].copy())),
    "BlockDiagonal": lambda n: BlockDiagonal(normal(1, n, n)),
    "Banded": lambda n: Banded(normal(2, n), 1, 0),
}
NARROW = [(name, (1, 1)) for name in SQUARE]
NARROW += [(name, shape) for name in OF_ANY_SIZE for shape in [(1, 1), (1, 3), (3, 1)]]


def matrix(name, shape):
    return SQUARE[name](shape[0]) if name in SQUARE else OF_ANY_SIZE[name](*shape)


@pytest.mark.parametrize("narrow", NARROW, ids=lambda narrow: f"{narrow[0]}{narrow[1]}")
@pytest.mark.parametrize("name", [*OF_ANY_SIZE, *SQUARE])
def test_matrix_axes_of_size_1_are_broadcast(name, narrow):
    def results(x, y):
        return [x + y, x - y, y - x, x * y]

    x, y = matrix(name, (3, 3)), matrix(*narrow)
    found = vn.implicit(results)(x, y)
    expected = results(vn.materialise(x), vn.materialise(y))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(vn.materialise(one), other, rtol=1e-5, atol=1e-5)


BANDED = {
    "Diagonal": lambda *lead: Diagonal(normal(*lead, 3)),
    "Tridiagonal": lambda *lead: Tridiagonal(
        normal(*lead, 2), normal(*lead, 3), normal(*lead, 2, seed=1)
    ),
    "Banded": lambda *lead: Banded(normal(*lead, 2, 3), 1, 0),
    "Symmetric": lambda *lead: Symmetric(normal(*lead, 6)),
    "Toeplitz": lambda *lead: Toeplitz(normal(*lead, 3), normal(*lead, 3, seed=1)),
}


@pytest.mark.parametrize("leads", [((1,), (4,)), ((4,), (1,)), ((), (4,)), ((2, 1), (1, 3))])
@pytest.mark.parametrize("first", BANDED)
@pytest.mark.parametrize("second", BANDED)
def test_leading_axes_are_broadcast(first, second, leads):
    x, y = (BANDED[name](*lead) for name, lead in zip((first, second), leads, strict=True))
    for operation in (jnp.add, jnp.subtract):
        found = vn.materialise(vn.implicit(operation)(x, y))
        expected = operation(vn.materialise(x), vn.materialise(y))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
