"""The array types: one file each, and each a model of how to write one."""

from . import linear_algebra as linear_algebra
from .diagonal import Diagonal
from .frozen import Frozen
from .lazy import Lazy

__all__ = ["Diagonal", "Frozen", "Lazy"]
