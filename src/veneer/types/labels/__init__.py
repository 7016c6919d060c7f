"""Arrays with static metadata: axis names, a unit, or a random number generator.

label           `Label`, the base class of `Named` and `Quantity`
axis_names      the axis names of the results of primitives
named           `Named`, an array with axis names
units           the algebra of units, by astropy or pint
unit_laws       the units of the operands and results of primitives
quantity        `Quantity`, an array with a unit
prng            `PRNGKey`, random keys stored as integers
"""

from .named import Named
from .prng import PRNGKey
from .quantity import Quantity

__all__ = ["Named", "PRNGKey", "Quantity"]
