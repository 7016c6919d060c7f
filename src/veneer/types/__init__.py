"""The array types: one file each, and each a model of how to write one."""

from . import linear_algebra as linear_algebra
from .diagonal import Diagonal
from .frozen import Frozen
from .lazy import Lazy
from .named import Named
from .nm_sparse import NMSparse
from .prng import PRNGKey
from .quantity import Quantity
from .sparse import SparseArray

__all__ = ["Diagonal", "Frozen", "Lazy", "NMSparse", "Named", "PRNGKey", "Quantity", "SparseArray"]
