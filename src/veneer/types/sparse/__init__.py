"""Arrays that store only some of their entries. The others are zero.

    array           `SparseArray`: nonzero entries and their indices
    nm_sparse       `NMSparse`: n of every m neighboring entries

and the rules of JAX's primitives for both:

    axes            transposes, sums, reshapes, slices and products
    elementwise     elementwise functions
"""

from . import axes as axes
from . import elementwise as elementwise
from .array import SparseArray
from .nm_sparse import NMSparse

__all__ = ["NMSparse", "SparseArray"]
