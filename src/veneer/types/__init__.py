"""The array types: one file each, and each a model of how to write one."""

from . import linear_algebra as linear_algebra
from .diagonal import Diagonal
from .frozen import Frozen
from .lazy import Lazy
from .named import Named
from .prng import PRNGKey
from .quantity import Quantity

__all__ = ["Diagonal", "Frozen", "Lazy", "Named", "PRNGKey", "Quantity"]
