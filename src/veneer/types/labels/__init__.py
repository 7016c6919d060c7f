"""Arrays of which something is said: names of axes, a unit, that they are keys.

label           `Label`, the base, and the laws by which primitives carry on what is said
named           `Named`: names of axes
axis_names      their laws
quantity        `Quantity`: a unit
unit_laws       the laws of units
units           their algebra: that of astropy, or of pint
prng            `PRNGKey`
"""

from .named import Named
from .prng import PRNGKey
from .quantity import Quantity

__all__ = ["Named", "PRNGKey", "Quantity"]
