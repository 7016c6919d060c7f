"""Arrays whose entries along some axes are stored in another basis.

The modules here:

    in_basis        `InBasis`: what such arrays share, and their rules
    permuted        `Permuted`: entries along an axis in another order
    rotated         `Rotated`: mixed by Hadamard matrices, so that no entry stands out
    scaled          `Scaled`: times a factor of each
    rotation        the rotation of a dense array
"""

from .in_basis import InBasis
from .permuted import Permuted
from .rotated import Rotated
from .scaled import Scaled

__all__ = ["InBasis", "Permuted", "Rotated", "Scaled"]
