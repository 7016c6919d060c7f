"""Two entries as one: steps of reductions, running totals, windows and scatters."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen.loop_nest import LoopNest
from ..codegen.storage import wrapped
from ..registry import Unsupported

#: Given a loop nest, a dtype, the total so far and an entry, the expression of the next total.
Combine = Callable[[LoopNest, np.dtype, str, str], str]


def operator(symbol: str, of_bools: str = "") -> Combine:
    """An operator of Python's, and perhaps another for bools."""

    def combine(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        return wrapped(f"{total} {(dtype.kind == 'b' and of_bools) or symbol} {entry}", dtype)

    return combine


def extreme(function: Callable[..., Any], of_bools: str) -> Combine:
    """The greater or the smaller one, by a function of numbers or an operator of bools."""

    def combine(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        if dtype.kind == "c":
            raise Unsupported("dtype", f"{dtype} has no order.")
        if dtype.kind == "b":
            return f"{total} {of_bools} {entry}"
        return k.call(function, total, entry)

    return combine


def least(dtype: np.dtype) -> Any:
    """What the greatest of no entries is."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def most(dtype: np.dtype) -> Any:
    """What the smallest of no entries is."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf
