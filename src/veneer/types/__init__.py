"""The array types, each a model of how to write one.

    lora            a weight and a low-rank update
    structured      matrices: diagonal, banded, triangular, ...
    sparse          arrays most of whose entries are zero
    masked          arrays some of whose entries are left out
    labels          arrays of which something is said: names of axes, a unit, that they are keys
    basis           arrays that are stored in another basis: permuted, rotated, scaled
    constant        `Constant`
    frozen          `Frozen`
    lazy            `Lazy`

and what they share:

    axes            the check of the axes of a type's leaves
    elementwise     which primitives are elementwise
    zero_preserving  which of them give 0 for 0
"""

from . import lora
from .basis import Permuted, Rotated, Scaled
from .constant import Constant
from .frozen import Frozen
from .labels import Named, PRNGKey, Quantity
from .lazy import Lazy
from .lora import LoraArray, LowRank
from .masked import Masked
from .sparse import NMSparse, SparseArray
from .structured import (
    Banded,
    BlockDiagonal,
    Circulant,
    Diagonal,
    Identity,
    Kronecker,
    Permutation,
    Product,
    Symmetric,
    Toeplitz,
    Triangular,
    Tridiagonal,
)

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
    "LoraArray",
    "LowRank",
    "Masked",
    "NMSparse",
    "Named",
    "PRNGKey",
    "Permutation",
    "Permuted",
    "Product",
    "Quantity",
    "Rotated",
    "Scaled",
    "SparseArray",
    "Symmetric",
    "Toeplitz",
    "Triangular",
    "Tridiagonal",
    "lora",
]
