"""`Masked`, and what JAX's primitives do on it.

array           `Masked`
movement        what moves entries about
elementwise     functions of entries
reductions      reductions, cumulative functions, products and sorts
sums            sums that know their number of entries
"""

from . import elementwise as elementwise
from . import movement as movement
from . import reductions as reductions
from . import sums as sums
from .array import Masked

__all__ = ["Masked"]
