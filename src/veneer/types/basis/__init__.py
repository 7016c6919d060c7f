"""Arrays stored in another basis along some axes.

in_basis        `InBasis`, the base class, and its rules
permuted        `Permuted`, with another order along an axis
rotated         `Rotated`, multiplied by orthogonal matrices, which spread outliers
scaled          `Scaled`, divided by factors
"""

from .in_basis import InBasis
from .permuted import Permuted
from .rotated import Rotated
from .scaled import Scaled

__all__ = ["InBasis", "Permuted", "Rotated", "Scaled"]
