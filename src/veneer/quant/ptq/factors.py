"""Factors of channels, by which a weight is multiplied and its activations are divided.

A product is the same, and what is rounded is not: `(x / s) @ (s * w)`.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from .moments import Moments

#: The powers of activations that are tried (AWQ, section 3.2: a grid of 20 over [0, 1]).
_POWERS = np.linspace(0, 1, 21)
#: Of so many outputs the losses are compared: a matrix has more alike.
_COLUMNS = 512


def awq_factors(
    matrices: np.ndarray,
    moments: Sequence[Moments],
    magnitudes: np.ndarray,
    rounded: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Returns AWQ's factors: a power of the magnitudes of activations, of the least loss.

    Lin et al., arXiv 2306.00978, equation 5.

    **Arguments:**

    - `matrices`: the weight, `[S, K, N]`, finite.
    - `moments`: of the activations that each meets.
    - `magnitudes`: the mean magnitude of each channel of them, `[S, K]`.
    - `rounded`: matrices, quantised and back.

    **Returns:** factors of the weight, `[S, K]`, of f32.
    """
    columns = slice(None, None, math.ceil(max(1, matrices.shape[2]) / _COLUMNS))
    least = np.full(len(matrices), np.inf)
    best = np.ones(magnitudes.shape, np.float32)
    for power in _POWERS:
        factors = np.where(magnitudes > 0, magnitudes, 1) ** power
        factors /= np.sqrt(factors.max(1, keepdims=True) * factors.min(1, keepdims=True))
        factors = factors.astype(np.float32)
        values = rounded(matrices * factors[:, :, None]) / factors[:, :, None]
        for i, moment in enumerate(moments):
            lost = moment.loss(matrices[i, :, columns], values[i, :, columns]).sum()
            if lost < least[i]:
                least[i], best[i] = lost, factors[i]
    return best


def smoothquant_factors(
    matrices: np.ndarray, largest: np.ndarray, strength: float = 0.5
) -> np.ndarray:
    """Returns SmoothQuant's factors, by which a weight takes over what activations have in range.

    Xiao et al., arXiv 2211.10438, equation 4.

    **Arguments:**

    - `matrices`: the weight, `[S, K, N]`, finite.
    - `largest`: the largest magnitude of each channel of activations, `[S, K]`.
    - `strength`: how much of it: of 0, channels of the weight are made alike; of 1, activations.

    **Returns:** factors of the weight, `[S, K]`, of f32; 1 for what is zeros.

    >>> import numpy as np
    >>> from veneer.quant.ptq.factors import smoothquant_factors
    >>> smoothquant_factors(np.ones((1, 2, 3)), np.array([[4.0, 100.0]])).tolist()
    [[2.0, 10.0]]
    """
    of_weight = np.abs(matrices).max(2, initial=0)
    alive = (of_weight > 0) & (largest > 0)
    factors = np.where(alive, largest, 1) ** strength
    return (factors / np.where(alive, of_weight, 1) ** (1 - strength)).astype(np.float32)
