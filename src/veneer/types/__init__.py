"""The array types: one file each, and each a model of how to write one."""

from . import linear_algebra as linear_algebra
from .banded import Banded, Tridiagonal
from .block_diagonal import BlockDiagonal
from .constant import Constant
from .diagonal import Diagonal
from .frozen import Frozen
from .identity import Identity
from .kronecker import Kronecker
from .lazy import Lazy
from .masked import Masked
from .named import Named
from .nm_sparse import NMSparse
from .permutation import Permutation
from .prng import PRNGKey
from .product import Product
from .quantity import Quantity
from .sparse import SparseArray
from .symmetric import Symmetric
from .toeplitz import Circulant, Toeplitz
from .triangular import Triangular

__all__ = [
    "Banded",
    "BlockDiagonal",
    "Circulant",
    "Constant",
    "Diagonal",
    "Frozen",
    "Identity",
    "Kronecker",
    "Lazy",
    "Masked",
    "NMSparse",
    "Named",
    "PRNGKey",
    "Permutation",
    "Product",
    "Quantity",
    "SparseArray",
    "Symmetric",
    "Toeplitz",
    "Triangular",
    "Tridiagonal",
]
