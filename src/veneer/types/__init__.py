"""Array types that represent a dense array and store something cheaper.

    lora            a weight with a LoRA adapter, and low-rank matrices
    structured      matrices: diagonal, banded, triangular, ...
    sparse          arrays with few nonzero entries
    masked          arrays with invalid entries
    labels          arrays with axis names or a unit, and random keys
    basis           arrays stored in another basis: permuted, rotated, scaled
    constant        `Constant`
    frozen          `Frozen`
    lazy            `Lazy`

Modules that several types use:

    axes            checks that the leaves of a type are arrays with matching shapes
    elementwise     lists of elementwise primitives, and rules for primitives that map 0 to 0
"""

from . import lora as lora
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
]


def __dir__() -> list[str]:
    return __all__
