"""Reductions: sums, extremes, products and logic over axes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, number
from ..codegen.builder import Builder, require_fused
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..maths import instructions
from ..reference import evaluate_jaxpr
from ..registry import Unsupported, funcify, perform
from .combine import Combine, extreme, least, most, operator


def _register(name: str, first: Callable[[np.dtype], Any], step: Combine) -> None:
    @funcify.register(name)
    def _(b: Builder, x: ArrayExpr, *, axes: Sequence[int], **_: Any) -> ArrayExpr:
        if not axes:  # which some functions of jax.numpy reduce over
            return x
        start = storage.literal(first(x.dtype), x.dtype)
        out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # in which sums are kept
        with b.kernel(name) as k:
            reduce = _by_rows if _ends(x, axes) else _into_memory
            reduce(k, x, tuple(axes), out, start, step)
        return b.converted(out, x.dtype)


def _ends(x: ArrayExpr, axes: Sequence[int]) -> bool:
    """Whether the last axis that matters is reduced."""
    long = [axis for axis in range(x.ndim) if x.shape[axis] > 1]
    return not long or long[-1] in axes


def _by_rows(
    k: LoopNest, x: ArrayExpr, axes: tuple[int, ...], out: Buffer, start: str, step: Combine
) -> None:
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    with k.loops([x.shape[axis] for axis in kept]) as outer:
        total = k.here(start, "total")
        with k.loops([x.shape[axis] for axis in axes]) as inner:
            text = k.read(x, _index(kept, outer, axes, inner))
            k.line(f"{total} = {step(k, x.dtype, total, text)}")
        k.store(out, outer, total)


def _into_memory(
    k: LoopNest, x: ArrayExpr, axes: tuple[int, ...], out: Buffer, start: str, step: Combine
) -> None:
    """Adds up whole rows, where entries that are reduced are not neighbours."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    with k.loops(out.shape) as place:
        k.store(out, place, start)
    first = [axis for axis in kept if axis < min(axes)]
    last = [axis for axis in kept if axis > min(axes)]
    with (
        k.loops([x.shape[axis] for axis in first]) as outer,
        k.loops([x.shape[axis] for axis in axes]) as reduced,
        k.loops([x.shape[axis] for axis in last]) as inner,
    ):
        index = _index([*first, *last], (*outer, *inner), axes, reduced)
        total = k.load(out, (*outer, *inner))
        k.store(out, (*outer, *inner), step(k, x.dtype, total, k.read(x, index)))


def _index(
    kept: Sequence[int], outer: Sequence[Index], axes: Sequence[int], inner: Sequence[Index]
) -> list[Index]:
    places = dict(zip([*kept, *axes], [*outer, *inner], strict=True))
    return [places[axis] for axis in range(len(places))]


def _any_order(function: Callable[..., Any], symbol: str) -> Combine:
    def step(k: LoopNest, dtype: np.dtype, total: str, text: str) -> str:
        if dtype.kind in "fV":
            return k.call(function, total, text)
        if dtype.kind == "c":
            return f"{total} {symbol} {text}"
        return f"{storage.type_name(dtype)}({total} {symbol} {text})"

    return step


def _all_bits(dtype: np.dtype) -> Any:
    return True if dtype.kind == "b" else np.invert(dtype.type(0))


_register("reduce_sum", lambda dtype: 0, _any_order(instructions.add_in_any_order, "+"))
_register("reduce_prod", lambda dtype: 1, _any_order(instructions.multiply_in_any_order, "*"))
_register("reduce_max", least, extreme(instructions.maximum, "|"))
_register("reduce_min", most, extreme(instructions.minimum, "&"))
_register("reduce_and", _all_bits, operator("&"))
_register("reduce_or", lambda dtype: 0, operator("|"))
_register("reduce_xor", lambda dtype: 0, operator("^"))


def _named(reduce: Callable[..., Any], axes: Any, groups: Any) -> Callable[..., Any]:
    """A sum or so over axes that had a name under `jax.vmap`, and now have a number each."""
    if groups is not None:
        raise Unsupported("axis_index_groups", "only None is supported.")
    if not all(isinstance(axis, int) for axis in axes):
        raise Unsupported("axes", f"{axes} are axes of a mesh: a program runs on one device.")
    return lambda *operands: [reduce(x, axes) for x in operands]


def _register_named(name: str, reduce: Callable[..., Any]) -> None:
    def steps(operands: Any, axes: Any, groups: Any) -> Any:
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return jax.make_jaxpr(_named(reduce, axes, groups))(*avals)

    @funcify.register(name)
    def _(b: Builder, *operands: ArrayExpr, axes: Any, axis_index_groups: Any) -> list[ArrayExpr]:
        return b.inline(steps(operands, axes, axis_index_groups), *operands)

    @perform.register(name)
    def _(*operands: Any, axes: Any, axis_index_groups: Any) -> Any:
        return evaluate_jaxpr(steps(operands, axes, axis_index_groups), *operands)


_register_named("psum", lax.reduce_sum)
_register_named("pmax", lax.reduce_max)
_register_named("pmin", lax.reduce_min)


def _perform(function: Any) -> Callable[..., Any]:
    def rule(x: Any, *, axes: Any, **_: Any) -> Any:
        first = {"initial": _first[function](x.dtype)} if function in _first else {}
        return function.reduce(x, axis=tuple(axes), dtype=x.dtype, **first)

    return rule


_first: dict[Any, Any] = {np.maximum: least, np.minimum: most}
_UFUNCS = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
for _name, _ufunc in _UFUNCS.items():
    perform.register(f"reduce_{_name}")(_perform(_ufunc))


# By any function of numbers, of one array or of several at once.


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
    # Totals are kept in what they are computed in.
    outs = [b.buffer(dtype=storage.computed_dtype(dtype)) for dtype in dtypes]
    with b.kernel() as k, k.loops([shape[axis] for axis in kept]) as outer:
        totals = [k.here(k.read(start, ()), "total") for start in starts]
        with k.loops([shape[axis] for axis in dimensions]) as inner:
            places = dict(zip([*kept, *dimensions], [*outer, *inner], strict=True))
            index = [places[axis] for axis in range(len(shape))]
            now = [k.here(total) for total in totals]  # of which nothing moves out of the loop
            texts = [*now, *(k.read(x, index) for x in arrays)]
            results = b.inline_in(k, jaxpr, *map(number, texts, dtypes * 2))
            for total, text in zip(totals, results, strict=True):
                k.line(f"{total} = {text}")
        for out, total in zip(outs, totals, strict=True):
            k.store(out, outer, total)
    return [b.converted(out, dtype) for out, dtype in zip(outs, dtypes, strict=True)]


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
    for place in range(math.prod(kept)):
        totals = [np.asarray(start) for start in starts]
        for entries in zip(*(row[place] for row in rows), strict=True):
            totals = evaluate_jaxpr(jaxpr, *totals, *map(np.asarray, entries))
        for out, total in zip(outs, totals, strict=True):
            out[place] = total
    return [out.reshape(kept) for out in outs]


# Where the greatest and the smallest entries along an axis are.


@funcify.register("argmax", "argmin")
def _(b: Builder, x: ArrayExpr, *, axes: Any, index_dtype: Any) -> ArrayExpr:
    """The first of them; a NaN is taken for the greatest, and for the smallest."""
    if len(axes) != 1:
        raise Unsupported("axes", f"{axes} are not one axis.")
    if x.dtype.kind == "c":
        raise Unsupported("dtype", f"{x.dtype} has no order.")
    (axis,), dtype = axes, np.dtype(index_dtype)
    symbol = ">" if b.primitive == "argmax" else "<"
    x, out = b.cheap(x), b.buffer()
    with b.kernel() as k, k.loops(out.shape) as outer:
        place = lambda i: (*outer[:axis], i, *outer[axis:])
        best = k.here(k.read(x, place(Index())), "best")
        where = k.here(storage.literal(0, dtype), "where")
        with k.loops([x.shape[axis]]) as (i,):
            new = k.read(x, place(i))
            better = f"{new} {symbol} {best}"
            if x.dtype.kind in "fV":
                better = f"({better} or {new} != {new}) and {best} == {best}"
            with k.under(f"if {better}:"):
                k.line(f"{best} = {new}")
                k.line(f"{where} = {storage.type_name(dtype)}({i})")
        k.store(out, outer, where)
    return out


def _perform_place(function: Any) -> Any:
    return lambda x, *, axes, index_dtype: function(x, axes[0]).astype(index_dtype)


perform.register("argmax")(_perform_place(np.argmax))
perform.register("argmin")(_perform_place(np.argmin))
