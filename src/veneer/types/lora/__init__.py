"""LoRA adapters for weights, and low-rank matrices.

    array           `LoraArray`
    low_rank        `LowRank`; its sum with another structure is a `LoraArray`
    adapters        functions of trees with adapters: split, join, merge, dropout

and the rules of JAX's primitives for `LoraArray`:

    axis_groups     transposes and reshapes of the input and output axes
    dot_general     products with a dense array
    convolution     convolutions by a kernel
    gather          row lookups
    dropout         dropout of the operand of an adapter
    magnitude       column norms (DoRA)
    woodbury        solves, inverses and determinants
    labels          contractions of arrays with labeled axes
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
