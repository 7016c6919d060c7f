"""`SparseArray`, and what JAX's primitives do on it."""

from . import axes as axes
from . import dot_general as dot_general
from . import elementwise as elementwise
from .array import SparseArray as SparseArray
