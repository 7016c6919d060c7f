"""Structured matrices, which store fewer numbers than the dense matrix and cost fewer operations.

    matrix              `Matrix`, the base class, and decorators that register rules of its types
    rules               rules of JAX primitives for all structured matrices
    linear_algebra      rules of the functions of `jnp.linalg` for all structured matrices

Each type has a module, which imports only modules above it in this list:

    diagonal            `Diagonal`, `Identity`
    banded              `Banded`, `Tridiagonal`
    partwise            `BlockDiagonal`, `Kronecker`
    product             `Product`, the product of two structured matrices
    permutation         `Permutation`
    triangular          `Triangular`, `Symmetric`
    toeplitz            `Toeplitz`, `Circulant`
"""

from . import linear_algebra as linear_algebra
from . import rules as rules
from .banded import Banded as Banded
from .banded import Tridiagonal as Tridiagonal
from .diagonal import Diagonal as Diagonal
from .diagonal import Identity as Identity
from .partwise import BlockDiagonal as BlockDiagonal
from .partwise import Kronecker as Kronecker
from .permutation import Permutation as Permutation
from .product import Product as Product
from .toeplitz import Circulant as Circulant
from .toeplitz import Toeplitz as Toeplitz
from .triangular import Symmetric as Symmetric
from .triangular import Triangular as Triangular
