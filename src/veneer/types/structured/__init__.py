"""Structured matrices, which store fewer numbers than the dense matrix and cost fewer operations.

    matrix              `Matrix`, the base class, and decorators that register rules of its types
    rules               rules for all structured matrices: products, sums, solves, determinants

Each type has a module, which imports only modules above it in this list:

    product             `Product`, `LowRank`
    diagonal            `Diagonal`, `Identity`, `Permutation`
    banded              `Banded`, `Tridiagonal`
    partwise            `BlockDiagonal`, `Kronecker`
    triangular          `Triangular`, `Symmetric`
    toeplitz            `Toeplitz`, `Circulant`
"""

from . import rules as rules
from .banded import Banded as Banded
from .banded import Tridiagonal as Tridiagonal
from .diagonal import Diagonal as Diagonal
from .diagonal import Identity as Identity
from .diagonal import Permutation as Permutation
from .partwise import BlockDiagonal as BlockDiagonal
from .partwise import Kronecker as Kronecker
from .product import LowRank as LowRank
from .product import Product as Product
from .toeplitz import Circulant as Circulant
from .toeplitz import Toeplitz as Toeplitz
from .triangular import Symmetric as Symmetric
from .triangular import Triangular as Triangular
