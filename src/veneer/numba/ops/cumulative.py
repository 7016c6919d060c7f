"""Sums, products and extremes of all entries up to each, along an axis."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer
from ..codegen.builder import Builder
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..maths import elementary, instructions
from ..registry import Unsupported, funcify, perform
from .combine import Combine, extreme, operator


def _logsumexp(k: LoopNest, dtype: np.dtype, total: str, x: str) -> str:
    """`log(exp(total) + exp(x))`, of the greater one and the difference."""
    if dtype.kind not in "fV":
        raise Unsupported("dtype", f"{dtype} is not supported.")
    computed = storage.computed_dtype(dtype)
    exp, log1p = (elementary.functions_of(name)[computed] for name in ("exp", "log1p"))
    total, x = k.here(total), k.let(x)
    most, gap = k.here(k.call(instructions.maximum, total, x)), k.here(f"{total} - {x}")
    below = k.here(k.call(exp, f"-{k.call(instructions.fabs, gap)}"))
    # The difference of equal infinities is no number; their sum is.
    equal = k.here(f"{total} + {x}")
    return k.call(instructions.select, f"{gap} == {gap}", f"{most} + {k.call(log1p, below)}", equal)


def _register(name: str, step: Combine) -> None:
    @funcify.register(name)
    def _(b: Builder, x: ArrayExpr, *, axis: int, reverse: bool) -> ArrayExpr:
        if x.size == 0:
            return x
        x = b.cheap(x)
        out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # in which totals are kept
        last = all(n == 1 for n in x.shape[axis + 1 :])
        with b.kernel() as k:
            (_along_rows if last else _row_by_row)(k, x, out, axis, reverse, step)
        return b.converted(out, x.dtype)


def _place(i: Index, n: int, reverse: bool) -> Index:
    return n - 1 - i if reverse else i


def _along_rows(
    k: LoopNest, x: ArrayExpr, out: Buffer, axis: int, reverse: bool, step: Combine
) -> None:
    """Neighbours are added up, in a register."""
    n, none = x.shape[axis], [Index()] * (x.ndim - axis - 1)
    with k.loops(x.shape[:axis]) as outer:
        place = lambda i: (*outer, _place(i, n, reverse), *none)
        total = k.here(k.read(x, place(Index())), "total")
        k.store(out, place(Index()), total)
        with k.loops([n - 1]) as (i,):
            k.line(f"{total} = {step(k, x.dtype, total, k.read(x, place(i + 1)))}")
            k.store(out, place(i + 1), total)


def _row_by_row(
    k: LoopNest, x: ArrayExpr, out: Buffer, axis: int, reverse: bool, step: Combine
) -> None:
    """Whole rows are added up, each to what the one before it has become."""
    n, rest = x.shape[axis], x.shape[axis + 1 :]
    with k.loops(x.shape[:axis]) as outer:
        with k.loops(rest) as inner:
            first = (*outer, _place(Index(), n, reverse), *inner)
            k.store(out, first, k.read(x, first))
        with k.loops([n - 1]) as (i,), k.loops(rest) as inner:
            before, here = ((*outer, _place(j, n, reverse), *inner) for j in (i, i + 1))
            total = k.load(out, before)
            k.store(out, here, step(k, x.dtype, total, k.read(x, here)))


_register("cumsum", operator("+"))
_register("cumprod", operator("*"))
_register("cummax", extreme(instructions.maximum, "|"))
_register("cummin", extreme(instructions.minimum, "&"))
_register("cumlogsumexp", _logsumexp)


def _perform(function: Any) -> Callable[..., Any]:
    def rule(x: Any, *, axis: int, reverse: bool) -> Any:
        wide = x.astype(storage.computed_dtype(x.dtype))
        wide = np.flip(wide, axis) if reverse else wide
        out = function.accumulate(wide, axis=axis, dtype=wide.dtype)
        return (np.flip(out, axis) if reverse else out).astype(x.dtype)

    return rule


_UFUNCS = {
    "cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum,
    "cumlogsumexp": np.logaddexp,
}  # fmt: skip
for _name, _ufunc in _UFUNCS.items():
    perform.register(_name)(_perform(_ufunc))
