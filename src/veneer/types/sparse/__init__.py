"""Arrays that store only some of their entries. The others are zero.

array           `SparseArray`: nonzero entries and their indices
nm_sparse       `NMSparse`: n of every m neighboring entries
rules           the rules of JAX's primitives for both
"""

from . import rules as rules
from .array import SparseArray
from .nm_sparse import NMSparse

__all__ = ["NMSparse", "SparseArray"]
