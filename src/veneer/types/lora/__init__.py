"""LoRA adapters for weights, and low-rank matrices.

contractions    contractions of arrays with labeled axes, column norms (DoRA), dropout
array           `LoraArray`
rules           the rules of JAX's primitives for `LoraArray`
low_rank        `LowRank`, whose sum with another structured matrix is a `LoraArray`
adapters        functions of trees with adapters: split, join, merge, dropout
"""

from . import rules as rules
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
