"""The array types, each a model of how to write one.

`lora`, `sparse` and `structured` are weights and matrices, `labels` arrays with something said of
them; the rest are a file each.
"""

from . import lora
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
    "Product",
    "Quantity",
    "SparseArray",
    "Symmetric",
    "Toeplitz",
    "Triangular",
    "Tridiagonal",
    "lora",
]
