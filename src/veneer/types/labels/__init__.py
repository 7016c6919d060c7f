"""Arrays of which something is said: names of axes, a unit, that they are keys."""

from .named import Named
from .prng import PRNGKey
from .quantity import Quantity

__all__ = ["Named", "PRNGKey", "Quantity"]
