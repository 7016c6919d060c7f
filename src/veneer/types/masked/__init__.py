"""`Masked`, an array with invalid entries.

array           `Masked`
rules           the rules of JAX's primitives for `Masked`
"""

from . import rules as rules
from .array import Masked

__all__ = ["Masked"]
