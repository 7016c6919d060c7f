"""Functions of integers, of any width: Numba computes in 64 bits, and callers cut to the width."""

import numpy as np

from .bits import select
from .scalar import scalar


@scalar
def absolute(x):
    """The absolute value; the least number is its own."""
    return select(x < 0, -np.int64(x), np.int64(x))


@scalar
def sign(x):
    """-1, 0 or 1."""
    return np.int64(x > 0) - np.int64(x < 0)
