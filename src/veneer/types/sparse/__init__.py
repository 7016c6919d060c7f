"""Arrays most of whose entries are zero: `SparseArray` and `NMSparse`."""

from . import axes as axes
from . import dot_general as dot_general
from . import elementwise as elementwise
from .array import SparseArray
from .nm_sparse import NMSparse

__all__ = ["NMSparse", "SparseArray"]
