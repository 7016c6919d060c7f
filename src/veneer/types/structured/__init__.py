"""Matrices with structure: what each does to vectors, and what follows from that for all.

`matrix` is the base, with the rules that all have; `linear_algebra` those for `jnp.linalg`.
"""

from . import linear_algebra as linear_algebra
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
