"""`Masked`, and what JAX's primitives do on it."""

from . import elementwise as elementwise
from . import layout as layout
from . import reductions as reductions
from . import sums as sums
from .array import Masked

__all__ = ["Masked"]
