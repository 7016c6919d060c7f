"""A weight and a low-rank update of it, and matrices of low rank themselves.

    array           `LoraArray`
    low_rank        `LowRank`, which beside another structure is a `LoraArray`
    adapters        trees that hold some: merged, taken apart, and with dropout

and what JAX's primitives do on the first, beyond what follows from its leaf axes:

    axis_groups     which axes come in and which go out, after a transpose or a reshape
    dot_general     products with a dense array
    convolution     convolutions by a kernel
    gather          rows looked up
    dropout         dropout of the operand of an update
    magnitude       the norms of the columns
    woodbury        solves, inverses and determinants
    labels          contractions of arrays whose axes are labelled
"""

from . import axis_groups as axis_groups
from . import convolution as convolution
from . import dot_general as dot_general
from . import gather as gather
from .adapters import join, merge, split, with_dropout, without_dropout
from .array import LoraArray
from .low_rank import LowRank

__all__ = [
    "LoraArray",
    "LowRank",
    "join",
    "merge",
    "split",
    "with_dropout",
    "without_dropout",
]
