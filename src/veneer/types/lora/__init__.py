"""A weight and a low-rank update of it, and matrices of low rank themselves.

`LoraArray`, what JAX's primitives do on it, and functions of trees that hold some; `LowRank`, which
beside another structure is a `LoraArray`.
"""

from . import convolution as convolution
from . import dot_general as dot_general
from . import gather as gather
from . import layout as layout
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
