"""Structured matrices, which store fewer numbers than the dense matrix and cost fewer operations.

    matrix              `Matrix`, the base class, and decorators that register rules of its types
    rules               rules of JAX primitives for all structured matrices
    linear_algebra      rules of the functions of `jnp.linalg` for all structured matrices

Each type has a module, which imports only modules above it in this list:

    diagonal            `Diagonal`
    banded              `Banded`, `Tridiagonal`
    block_diagonal      `BlockDiagonal`
    identity            `Identity`
    kronecker           `Kronecker`
    product             `Product`, the product of two structured matrices
    permutation         `Permutation`
    triangular          `Triangular`
    symmetric           `Symmetric`
    toeplitz            `Toeplitz`, `Circulant`
"""

from . import linear_algebra as linear_algebra
from . import rules as rules
from .banded import Banded, Tridiagonal
from .block_diagonal import BlockDiagonal
from .diagonal import Diagonal
from .identity import Identity
from .kronecker import Kronecker
from .permutation import Permutation
from .product import Product
from .symmetric import Symmetric
from .toeplitz import Circulant, Toeplitz
from .triangular import Triangular

__all__ = [
    "Banded",
    "BlockDiagonal",
    "Circulant",
    "Diagonal",
    "Identity",
    "Kronecker",
    "Permutation",
    "Product",
    "Symmetric",
    "Toeplitz",
    "Triangular",
    "Tridiagonal",
]
