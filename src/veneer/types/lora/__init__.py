"""LoRA adapters for weights, and low-rank matrices.

contractions    contractions of arrays with labeled axes, and norms
array           `LoraArray`
rules           the rules of JAX's primitives for `LoraArray`, with DoRA and dropout
adapters        functions of trees with adapters: split, join, merge, dropout
"""

from ..structured import LowRank
from . import rules as rules
from .adapters import join, merge, split, with_dropout, without_dropout
from .array import LoraArray

__all__ = [
    "LoraArray",
    "LowRank",
    "join",
    "merge",
    "split",
    "with_dropout",
    "without_dropout",
]
