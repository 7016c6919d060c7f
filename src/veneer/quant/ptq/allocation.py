"""Bits given out among weights: of each the choice by which the model loses least, within a budget.

A weight has a few choices, each of so many bits and of so much loss; losses of different weights
add up. That is the knapsack of which one thing is taken of each class (Kellerer, Pferschy and
Pisinger 2004, "Knapsack Problems", chapter 11), here by dynamic programming over the sums of which
none of fewer bits has less loss.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

#: Of more sums than this, the best is kept in each of as many ranges of bits.
_SUMS = 8192


class Choice(NamedTuple):
    """What a weight takes and what the model loses, if it is stored in one of several ways.

    **Arguments:**

    - `number`: of the choice.
    - `bits`: of the whole weight.
    - `loss`: of any unit that is the same for all weights.
    """

    number: int
    bits: int
    loss: float


def allocated(choices: Mapping[str, Sequence[Choice]], budget: float | int) -> dict[str, Choice]:
    """Returns the choice of each weight, by its path, of the least loss within a budget.

    Of a few weights it is the least; of many, of which there are more sums than are kept, within
    what one in some thousand bits is worth for each weight.

    **Arguments:**

    - `choices`: of each weight, one at least.
    - `budget`: bits of all weights together.

    **Raises:** `ValueError` for a budget below the least that the weights take.

    >>> from veneer.quant.ptq.allocation import Choice, allocated
    >>> small, large = Choice(0, 40, 1.0), Choice(1, 80, 0.1)
    >>> found = allocated({"a": [small, large], "b": [small, Choice(1, 80, 0.5)]}, 120)
    >>> {path: choice.bits for path, choice in found.items()}
    {'a': 80, 'b': 40}
    """
    left = sum(min(x.bits for x in of) for of in choices.values())  # of weights that follow
    if not left <= budget:
        raise ValueError(f"the weights take at least {left} bits, and the budget is {budget:.0f}")
    bits, losses, taken = np.zeros(1), np.zeros(1), []
    for of in choices.values():
        left -= min(x.bits for x in of)
        of_bits, of_losses = (np.array([x[i] for x in of], float) for i in (1, 2))
        all_bits = (bits[:, None] + of_bits).ravel()
        all_losses = (losses[:, None] + of_losses).ravel()
        kept = _kept(all_bits, all_losses, budget - left)
        bits, losses = all_bits[kept], all_losses[kept]
        taken.append(np.divmod(kept, len(of)))
    at, found = len(losses) - 1, {}
    for (path, of), (before, number) in zip(reversed([*choices.items()]), taken[::-1], strict=True):
        found[path] = of[number[at]]
        at = before[at]
    return {path: found[path] for path in choices}


def _kept(bits: np.ndarray, losses: np.ndarray, budget: float | int) -> np.ndarray:
    """The sums within a budget of which none of fewer bits has less loss, in the order of bits."""
    order = np.lexsort((losses, bits))
    order = order[bits[order] <= budget]
    before = np.minimum.accumulate(losses[order])[:-1]
    order = order[np.append(True, losses[order][1:] < before)]
    if len(order) <= _SUMS:
        return order
    of = bits[order]
    ranges = ((of - of[0]) / (of[-1] - of[0]) * _SUMS).astype(int)
    return order[np.append(ranges[1:] > ranges[:-1], True)]
