"""The array types: one file each, and each a model of how to write one."""

from . import linear_algebra as linear_algebra
from .constant import Constant
from .diagonal import Diagonal
from .frozen import Frozen
from .lazy import Lazy
from .masked import Masked
from .named import Named
from .nm_sparse import NMSparse
from .prng import PRNGKey
from .quantity import Quantity
from .sparse import SparseArray

__all__ = [
    "Constant",
    "Diagonal",
    "Frozen",
    "Lazy",
    "Masked",
    "NMSparse",
    "Named",
    "PRNGKey",
    "Quantity",
    "SparseArray",
]
