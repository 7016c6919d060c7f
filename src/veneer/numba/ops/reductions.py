"""Reductions over axes, cumulative reductions along an axis, and argmax and argmin."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, Index, scalar_expr
from ..codegen.builder import Builder, require_fused
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, evaluate_jaxpr, funcify, perform
from ..maths import elementary, instructions

# Steps: how a total and an entry become the next total.

#: A function of a loop nest, a dtype, the total so far and an entry, which are expressions. It
#: returns the expression of the next total.
Step = Callable[[LoopNest, np.dtype, str, str], str]


def operator_step(symbol: str, bool_symbol: str = "") -> Step:
    """Return a function that writes the next total of a reduction with a Python operator.

    The operator is `symbol`, or `bool_symbol` for bools if it is given.
    """

    def step(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        operator = bool_symbol if dtype.kind == "b" and bool_symbol else symbol
        return storage.wrap(f"{total} {operator} {entry}", dtype)

    return step


def extreme_step(function: Callable[..., Any], bool_symbol: str) -> Step:
    """Return a function that writes the next total of a maximum or minimum.

    It calls `function`, the instruction `maximum` or `minimum`, or uses the operator `bool_symbol`
    for bools.
    """

    def step(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        if dtype.kind == "c":
            raise Unsupported("dtype", f"{dtype} has no order.")
        if dtype.kind == "b":
            return f"{total} {bool_symbol} {entry}"
        return k.call(function, total, entry)

    return step


def _any_order_step(function: Callable[..., Any], symbol: str) -> Step:
    """Return a function that writes the next total of a sum or a product.

    For floats, it calls `function`, which lets the compiler change the order and use vector
    instructions. For other dtypes, it uses the operator `symbol`.
    """
    in_order = operator_step(symbol)

    def step(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        if dtype.kind in "fV":
            return k.call(function, total, entry)
        if dtype.kind == "b":
            return f"{storage.type_name(dtype)}({total} {symbol} {entry})"
        return in_order(k, dtype, total, entry)

    return step


def lowest_value(dtype: np.dtype) -> Any:
    """Return the smallest value of a dtype, which is the maximum of no entries."""
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def highest_value(dtype: np.dtype) -> Any:
    """Return the largest value of a dtype, which is the minimum of no entries."""
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


# Reductions of an array by a known function.


def _register(name: str, first: Callable[[np.dtype], Any], step: Step, ufunc: Any) -> None:
    """Register the reduction primitive `name`, for native code and for NumPy.

    `first` returns the result for no entries, given a dtype. `step` writes the next total, given a
    total and an entry. `ufunc` is the reduction in NumPy.
    """

    @funcify.register(name)
    def _(b: Builder, x: ArrayExpr, *, axes: Sequence[int], **_: Any) -> ArrayExpr:
        if not axes:  # some functions of jax.numpy reduce over no axes
            return x
        start = storage.literal(first(x.dtype), x.dtype)
        out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # holds totals
        long_axes = [axis for axis in range(x.ndim) if x.shape[axis] > 1]
        with b.kernel(name) as k:
            reduces_last = not long_axes or long_axes[-1] in axes
            reduce = _reduce_in_register if reduces_last else _reduce_in_memory
            reduce(k, x, tuple(axes), out, start, step)
        return b.convert(out, x.dtype)

    @perform.register(name)
    def _(x: Any, *, axes: Any, **_: Any) -> Any:
        initial = {"initial": first(x.dtype)} if ufunc in (np.maximum, np.minimum) else {}
        return ufunc.reduce(x, axis=tuple(axes), dtype=x.dtype, **initial)


def _reduce_in_register(
    k: LoopNest, x: ArrayExpr, axes: tuple[int, ...], out: Buffer, start: str, step: Step
) -> None:
    """Write loops that reduce axes of `x`, if the last axis is one of them.

    Each entry of the result is a local variable in these loops. It begins with `start`, and `step`
    writes its next value.
    """
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    with k.loops([x.shape[axis] for axis in kept]) as outer:
        total = k.assign(start, "total")
        with k.loops([x.shape[axis] for axis in axes]) as inner:
            entry = k.read(x, _join_index(kept, outer, axes, inner))
            k.line(f"{total} = {step(k, x.dtype, total, entry)}")
        k.store(out, outer, total)


def _reduce_in_memory(
    k: LoopNest, x: ArrayExpr, axes: tuple[int, ...], out: Buffer, start: str, step: Step
) -> None:
    """Write loops that reduce axes of `x`, if the last axis is not one of them.

    All entries of `out` begin with `start`. Each row of `x` is combined with a row of `out` by
    `step`.
    """
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    with k.loops(out.shape) as index:
        k.store(out, index, start)
    first = [axis for axis in kept if axis < min(axes)]
    last = [axis for axis in kept if axis > min(axes)]
    with (
        k.loops([x.shape[axis] for axis in first]) as outer,
        k.loops([x.shape[axis] for axis in axes]) as reduced,
        k.loops([x.shape[axis] for axis in last]) as inner,
    ):
        index = _join_index([*first, *last], (*outer, *inner), axes, reduced)
        total = k.load(out, (*outer, *inner))
        k.store(out, (*outer, *inner), step(k, x.dtype, total, k.read(x, index)))


def _join_index(
    kept: Sequence[int], outer: Sequence[Index], axes: Sequence[int], inner: Sequence[Index]
) -> tuple[Index, ...]:
    """Return an index of the operand of a reduction from two parts.

    `outer` is the index along the axes `kept`, and `inner` is the index along the reduced axes
    `axes`.
    """
    parts = dict(zip([*kept, *axes], [*outer, *inner], strict=True))
    return tuple(parts[axis] for axis in range(len(parts)))


_add = _any_order_step(instructions.add_in_any_order, "+")
_multiply = _any_order_step(instructions.multiply_in_any_order, "*")
maximum_step = extreme_step(instructions.maximum, "|")
minimum_step = extreme_step(instructions.minimum, "&")
_register("reduce_sum", lambda dtype: 0, _add, np.add)
_register("reduce_prod", lambda dtype: 1, _multiply, np.multiply)
_register("reduce_max", lowest_value, maximum_step, np.maximum)
_register("reduce_min", highest_value, minimum_step, np.minimum)
_register("reduce_and", lambda dtype: ~dtype.type(0), operator_step("&"), np.bitwise_and)
_register("reduce_or", lambda dtype: 0, operator_step("|"), np.bitwise_or)
_register("reduce_xor", lambda dtype: 0, operator_step("^"), np.bitwise_xor)


# Collectives over an axis that `jax.vmap` has named: they reduce over axes by number.


def _register_collective(name: str, reduce: Callable[..., Any]) -> None:
    def to_jaxpr(operands: Any, axes: Any, groups: Any) -> Any:
        if groups is not None:
            raise Unsupported("axis_index_groups", "only None is supported.")
        if not all(isinstance(axis, int) for axis in axes):
            raise Unsupported("axes", f"{axes} are axes of a mesh: a program runs on one device.")
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return jax.make_jaxpr(lambda *xs: [reduce(x, axes) for x in xs])(*avals)

    @funcify.register(name)
    def _(b: Builder, *operands: ArrayExpr, axes: Any, axis_index_groups: Any) -> list[ArrayExpr]:
        return b.inline(to_jaxpr(operands, axes, axis_index_groups), *operands)

    @perform.register(name)
    def _(*operands: Any, axes: Any, axis_index_groups: Any) -> Any:
        return evaluate_jaxpr(to_jaxpr(operands, axes, axis_index_groups), *operands)


_register_collective("psum", lax.reduce_sum)
_register_collective("pmax", lax.reduce_max)
_register_collective("pmin", lax.reduce_min)


# Reductions of several arrays at once by a jaxpr of scalars.


@funcify.register("reduce")
def _(
    b: Builder, *operands: ArrayExpr, jaxpr: Any, dimensions: Sequence[int], **_: Any
) -> list[ArrayExpr]:
    if not dimensions:
        return [*operands[: len(operands) // 2]]
    require_fused(jaxpr)
    arrays, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    shape, dtypes = arrays[0].shape, [x.dtype for x in arrays]
    kept = [axis for axis in range(len(shape)) if axis not in dimensions]
    outs = [b.buffer(dtype=storage.computed_dtype(dtype)) for dtype in dtypes]
    with b.kernel() as k, k.loops([shape[axis] for axis in kept]) as outer:
        totals = [k.assign(k.read(start, ()), "total") for start in starts]
        with k.loops([shape[axis] for axis in dimensions]) as inner:
            index = _join_index(kept, outer, dimensions, inner)
            now = [k.assign(total) for total in totals]  # so that nothing moves out of the loop
            texts = [*now, *(k.read(x, index) for x in arrays)]
            results = b.inline_into_kernel(k, jaxpr, *map(scalar_expr, texts, dtypes * 2))
            for total, text in zip(totals, results, strict=True):
                k.line(f"{total} = {text}")
        for out, total in zip(outs, totals, strict=True):
            k.store(out, outer, total)
    return [b.convert(out, dtype) for out, dtype in zip(outs, dtypes, strict=True)]


@perform.register("reduce")
def _(*operands: Any, jaxpr: Any, dimensions: Sequence[int], **_: Any) -> list[Any]:
    arrays, starts = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    if not dimensions:
        return [*arrays]
    shape = arrays[0].shape
    kept = [n for axis, n in enumerate(shape) if axis not in dimensions]
    n, ends = math.prod(shape[axis] for axis in dimensions), range(-len(dimensions), 0)
    rows = [np.moveaxis(x, dimensions, ends).reshape(math.prod(kept), n) for x in arrays]
    outs = [np.empty(math.prod(kept), x.dtype) for x in arrays]
    for i in range(math.prod(kept)):
        totals = [np.asarray(start) for start in starts]
        for entries in zip(*(row[i] for row in rows), strict=True):
            totals = evaluate_jaxpr(jaxpr, *totals, *map(np.asarray, entries))
        for out, total in zip(outs, totals, strict=True):
            out[i] = total
    return [out.reshape(kept) for out in outs]


# The indices of extremes.


@funcify.register("argmax", "argmin")
def _(b: Builder, x: ArrayExpr, *, axes: Any, index_dtype: Any) -> ArrayExpr:
    """Return the index of the first extreme entry. NaN counts as the maximum and as the minimum."""
    if len(axes) != 1:
        raise Unsupported("axes", f"{axes} are not one axis.")
    if x.dtype.kind == "c":
        raise Unsupported("dtype", f"{x.dtype} has no order.")
    (axis,), dtype = axes, np.dtype(index_dtype)
    symbol = ">" if b.primitive == "argmax" else "<"
    x, out = b.force_costly(x), b.buffer()
    with b.kernel() as k, k.loops(out.shape) as outer:
        index_at = lambda i: (*outer[:axis], i, *outer[axis:])
        best = k.assign(k.read(x, index_at(Index())), "best")
        where = k.assign(storage.literal(0, dtype), "where")
        with k.loops([x.shape[axis]]) as (i,):
            new = k.read(x, index_at(i))
            better = f"{new} {symbol} {best}"
            if x.dtype.kind in "fV":
                better = f"({better} or {new} != {new}) and {best} == {best}"
            with k.block(f"if {better}:"):
                k.line(f"{best} = {new}")
                k.line(f"{where} = {storage.type_name(dtype)}({i})")
        k.store(out, outer, where)
    return out


@perform.register("argmax")
def _(x: Any, *, axes: Any, index_dtype: Any) -> Any:
    return np.argmax(x, axes[0]).astype(index_dtype)


@perform.register("argmin")
def _(x: Any, *, axes: Any, index_dtype: Any) -> Any:
    return np.argmin(x, axes[0]).astype(index_dtype)


# Cumulative reductions.


def _register_cumulative(name: str, step: Step, ufunc: Any) -> None:
    @funcify.register(name)
    def _(b: Builder, x: ArrayExpr, *, axis: int, reverse: bool) -> ArrayExpr:
        if x.size == 0:
            return x
        x = b.force_costly(x)
        out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # holds totals
        is_last = all(n == 1 for n in x.shape[axis + 1 :])
        with b.kernel() as k:
            accumulate = _accumulate_in_register if is_last else _accumulate_rows
            accumulate(k, x, out, axis, reverse, step)
        return b.convert(out, x.dtype)

    @perform.register(name)
    def _(x: Any, *, axis: int, reverse: bool) -> Any:
        wide = x.astype(storage.computed_dtype(x.dtype))
        wide = np.flip(wide, axis) if reverse else wide
        out = ufunc.accumulate(wide, axis=axis, dtype=wide.dtype)
        return (np.flip(out, axis) if reverse else out).astype(x.dtype)


def _position(i: Index, n: int, reverse: bool) -> Index:
    return n - 1 - i if reverse else i


def _accumulate_in_register(
    k: LoopNest, x: ArrayExpr, out: Buffer, axis: int, reverse: bool, step: Step
) -> None:
    """Write loops that accumulate `x` along its last axis. `step` writes the next total."""
    n, zeros = x.shape[axis], [Index()] * (x.ndim - axis - 1)
    with k.loops(x.shape[:axis]) as outer:
        index_at = lambda i: (*outer, _position(i, n, reverse), *zeros)
        total = k.assign(k.read(x, index_at(Index())), "total")
        k.store(out, index_at(Index()), total)
        with k.loops([n - 1]) as (i,):
            k.line(f"{total} = {step(k, x.dtype, total, k.read(x, index_at(i + 1)))}")
            k.store(out, index_at(i + 1), total)


def _accumulate_rows(
    k: LoopNest, x: ArrayExpr, out: Buffer, axis: int, reverse: bool, step: Step
) -> None:
    """Write loops that accumulate `x` along an axis that is not the last, row by row.

    `step` writes the next total.
    """
    n, rest = x.shape[axis], x.shape[axis + 1 :]
    with k.loops(x.shape[:axis]) as outer:
        with k.loops(rest) as inner:
            first = (*outer, _position(Index(), n, reverse), *inner)
            k.store(out, first, k.read(x, first))
        with k.loops([n - 1]) as (i,), k.loops(rest) as inner:
            before, here = ((*outer, _position(j, n, reverse), *inner) for j in (i, i + 1))
            total = k.load(out, before)
            k.store(out, here, step(k, x.dtype, total, k.read(x, here)))


def _logsumexp_step(k: LoopNest, dtype: np.dtype, total: str, x: str) -> str:
    """Return an expression for `log(exp(total) + exp(x))`, computed from maximum and difference."""
    if dtype.kind not in "fV":
        raise Unsupported("dtype", f"{dtype} is not supported.")
    computed = storage.computed_dtype(dtype)
    exp, log1p = (elementary.functions_of(name)[computed] for name in ("exp", "log1p"))
    total, x = k.assign(total), k.let(x)
    maximum, gap = k.assign(k.call(instructions.maximum, total, x)), k.assign(f"{total} - {x}")
    below = k.assign(k.call(exp, f"-{k.call(instructions.fabs, gap)}"))
    # The difference of equal infinities is NaN, but their sum is the result.
    equal = k.assign(f"{total} + {x}")
    result = f"{maximum} + {k.call(log1p, below)}"
    return k.call(instructions.select, f"{gap} == {gap}", result, equal)


_register_cumulative("cumsum", operator_step("+"), np.add)
_register_cumulative("cumprod", operator_step("*"), np.multiply)
_register_cumulative("cummax", maximum_step, np.maximum)
_register_cumulative("cummin", minimum_step, np.minimum)
_register_cumulative("cumlogsumexp", _logsumexp_step, np.logaddexp)
