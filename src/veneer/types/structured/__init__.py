"""Matrices with structure: what each does to vectors, and what follows from that for all.

    matrix              `Matrix`, the base, and the rules that all have
    by_vectors          a dot_general as products of a matrix with vectors
    linear_algebra      the rules for `jnp.linalg`

A file for each type:

    diagonal            `Diagonal`
    banded              `Banded`, `Tridiagonal`
    block_diagonal      `BlockDiagonal`
    identity            `Identity`
    kronecker           `Kronecker`
    permutation         `Permutation`
    product             `Product`: two matrices, one after the other
    symmetric           `Symmetric`
    toeplitz            `Toeplitz`, `Circulant`
    triangular          `Triangular`

and what several of them use:

    band_elimination    Gaussian elimination of a banded matrix
    factors             what parts do to vectors, dense or not
    half_precision      floats of 16 bits, computed with in f32
    levinson            solves with a Toeplitz matrix
    stored_entries      elementwise functions of types that store each entry once
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
