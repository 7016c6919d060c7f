"""Arrays most of whose entries are zero.

array           `SparseArray`: the entries that are not zero, and where they are
entries         of each its value and its index along every axis
axes            what moves, drops, adds and cuts axes of a `SparseArray`
elementwise     functions of its entries
dot_general     products with it
nm_sparse       `NMSparse`: n of every m neighbours are kept
"""

from . import axes as axes
from . import dot_general as dot_general
from . import elementwise as elementwise
from .array import SparseArray
from .nm_sparse import NMSparse

__all__ = ["NMSparse", "SparseArray"]
