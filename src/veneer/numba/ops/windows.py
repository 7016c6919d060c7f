"""Windows: reductions of the entries under one that moves over an array, and what pooling's
derivatives are made of."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, number
from ..codegen.builder import Builder, require_fused
from ..codegen.index import Index, flat
from ..codegen.loop_nest import LoopNest
from ..codegen.storage import wrapped
from ..maths import instructions
from ..reference import evaluate_jaxpr
from ..registry import Unsupported, funcify, perform
from .combine import Combine, extreme, least, most, operator
from .movement import padded

Sizes = Sequence[int]


def _padded(
    b: Builder, x: ArrayExpr, filling: ArrayExpr, padding: Any, dilation: Sizes
) -> ArrayExpr:
    """The array with a number around it, and in between."""
    pairs = zip(padding, dilation, strict=True)
    return padded(b, x, filling, [(int(low), int(high), step - 1) for (low, high), step in pairs])


def _under(
    window: Sequence[Index], inner: Sequence[Index], strides: Sizes, dilation: Sizes
) -> list[Index]:
    axes = zip(window, inner, strides, dilation, strict=True)
    return [i * stride + j * step for i, j, stride, step in axes]


def _reduced(
    b: Builder, x: ArrayExpr, start: ArrayExpr, step: Combine, *,
    window_dimensions: Sizes, window_strides: Sizes, padding: Any, base_dilation: Sizes,
    window_dilation: Sizes, masked: bool = False,
) -> ArrayExpr:  # fmt: skip
    """Of each window, `total = step(k, dtype, total, entry)` of all its entries from `start` on.

    With `masked`, of those of the array alone; else `start` is to be what changes no total.
    """
    if 0 in b.out.shape:
        return b.buffer()
    within = (padding, base_dilation)
    mask = _padded(b, _full(b, True, x.shape), _full(b, False), *within) if masked else None
    x = _padded(b, x, start, padding, base_dilation)
    out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # in which totals are kept
    with b.kernel() as k, k.loops(out.shape) as window:
        total = k.here(k.read(start, ()), "total")
        with k.loops(window_dimensions) as inner:
            place = _under(window, inner, window_strides, window_dilation)
            condition = "True" if mask is None else k.read(mask, place)
            with nullcontext() if condition == "True" else k.under(f"if {condition}:"):
                k.line(f"{total} = {step(k, x.dtype, total, k.read(x, place))}")
        k.store(out, window, total)
    return b.converted(out, x.dtype)


def _full(b: Builder, value: bool, shape: Sizes = ()) -> ArrayExpr:
    text = str(value)
    return b.lazy(lambda k, index: text, shape=shape, dtype=bool)


_KINDS: dict[str, tuple[Any, Any, Any]] = {
    "reduce_window_sum": (lambda dtype: 0, operator("+"), np.add),
    "reduce_window_max": (least, extreme(instructions.maximum, "|"), np.maximum),
    "reduce_window_min": (most, extreme(instructions.minimum, "&"), np.minimum),
}


def _register(name: str, first: Any, step: Any, ufunc: Any) -> None:
    @funcify.register(name)
    def _(b: Builder, x: ArrayExpr, **params: Any) -> ArrayExpr:
        return _reduced(b, x, b.constant(first(x.dtype), x.dtype), step, **params)

    @perform.register(name)
    def _(x: Any, **params: Any) -> Any:
        return _performed(x, first(x.dtype), ufunc, **params)


for _name, _parts in _KINDS.items():
    _register(_name, *_parts)


@funcify.register("reduce_window")
def _(b: Builder, *operands: ArrayExpr, jaxpr: Any, consts: Any, **params: Any) -> ArrayExpr:
    if len(operands) != 2 or consts:
        raise Unsupported("operands", "more than one array is not supported.")
    require_fused(jaxpr)

    def step(k: LoopNest, dtype: np.dtype, total: str, entry: str) -> str:
        now = k.here(total)  # of which nothing moves out of the loop
        (result,) = b.inline_in(k, jaxpr, number(now, dtype), number(entry, dtype))
        return result

    return _reduced(b, operands[0], operands[1], step, masked=True, **params)


@perform.register("reduce_window")
def _(x: Any, start: Any, *, jaxpr: Any, consts: Any, **params: Any) -> Any:
    dtype = x.dtype

    def step(total: Any, x: Any) -> Any:
        pairs = zip(*(each.reshape(-1).astype(dtype) for each in (total, x)), strict=True)
        results = [evaluate_jaxpr(jaxpr, *map(np.asarray, pair))[0] for pair in pairs]
        return np.asarray(results, total.dtype).reshape(total.shape)

    return _performed(x, start, step, **params)


def _performed(
    x: Any, start: Any, step: Any, *, window_dimensions: Any, window_strides: Any, padding: Any,
    base_dilation: Any, window_dilation: Any,
) -> Any:  # fmt: skip
    total = None
    start = np.asarray(start).astype(x.dtype)
    args = window_dimensions, window_strides, padding, base_dilation, window_dilation
    inside = _windows(np.ones(x.shape, bool), np.False_, *args)
    for part, counts in zip(_windows(x, start, *args), inside, strict=True):
        wide = part.astype(storage.computed_dtype(x.dtype))
        total = np.full(part.shape, start, wide.dtype) if total is None else total
        total = np.where(counts, step(total, wide), total)
    return np.asarray(total).astype(x.dtype)


def _windows(
    x: Any, filling: Any, sizes: Any, strides: Any, padding: Any, base: Any, dilation: Any
) -> Any:
    """By place in the window, the entries there of all windows."""
    config = [(low, high, step - 1) for (low, high), step in zip(padding, base, strict=True)]
    x = perform["pad"](x, filling, padding_config=config)
    extents = [(size - 1) * step + 1 for size, step in zip(sizes, dilation, strict=True)]
    counts = [
        max(0, (n - extent) // stride + 1)
        for n, extent, stride in zip(x.shape, extents, strides, strict=True)
    ]
    for place in np.ndindex(*sizes):
        places = [
            np.arange(count) * stride + i * step
            for count, stride, i, step in zip(counts, strides, place, dilation, strict=True)
        ]
        yield x[np.ix_(*places)]


# Pooling's derivatives.


def _keeps(select_prim: Any) -> str:
    """The symbol by which the entry that was selected is kept."""
    symbols = {"ge": ">=", "le": "<="}
    if select_prim.name not in symbols:
        raise Unsupported("select_prim", f"{select_prim} is not supported.")
    return symbols[select_prim.name]


@funcify.register("select_and_scatter_add")
def _(
    b: Builder, source: ArrayExpr, x: ArrayExpr, *, select_prim: Any, window_dimensions: Sizes,
    window_strides: Sizes, padding: Any,
) -> ArrayExpr:  # fmt: skip
    symbol, x, source = _keeps(select_prim), b.cheap(x), b.cheap(source)
    out = b.buffer(dtype=storage.computed_dtype(x.dtype))  # in which sums are kept
    entries = out.reshaped((out.size,))
    with b.kernel() as k:
        with k.loops([out.size]) as (i,):
            k.store(entries, (i,), storage.literal(0, out.dtype))
        with k.loops(source.shape) as window:
            best = k.here(storage.literal(0, x.dtype), "best")
            where = k.here("-1", "where")
            with k.loops(window_dimensions) as inner:
                moved = _under(window, inner, window_strides, [1] * x.ndim)
                place = [i - int(low) for i, (low, _) in zip(moved, padding, strict=True)]
                with k.under(f"if {_inside(place, x.shape)}:"):
                    entry = k.read(x, place)
                    with k.under(f"if {where} < 0 or not {best} {symbol} {entry}:"):
                        k.line(f"{best} = {entry}")
                        k.line(f"{where} = {flat(place, x.shape)}")
            with k.under(f"if {where} >= 0:"):
                at = (k.variable(k.here(where), out.size),)
                total = k.load(entries, at)
                k.store(entries, at, wrapped(f"{total} + {k.read(source, window)}", x.dtype))
    return b.converted(out, x.dtype)


def _inside(place: Sequence[Index], shape: Sizes) -> str:
    """The condition that a place is one of an array."""
    tests = []
    for i, n in zip(place, shape, strict=True):
        tests += [f"{i} >= 0"] if i.smallest < 0 else []
        tests += [f"{i} < {n}"] if i.largest >= n else []
    return " and ".join(tests) or "True"


@perform.register("select_and_scatter_add")
def _(
    source: Any, x: Any, *, select_prim: Any, window_dimensions: Any, window_strides: Any,
    padding: Any,
) -> Any:  # fmt: skip
    keeps = {"ge": np.greater_equal, "le": np.less_equal}[select_prim.name]
    out = np.zeros(x.shape, storage.computed_dtype(x.dtype))
    for window in np.ndindex(*source.shape):
        best = None
        for inner in np.ndindex(*window_dimensions):
            axes = zip(window, inner, window_strides, padding, strict=True)
            place = tuple(i * stride + j - low for i, j, stride, (low, _) in axes)
            if all(0 <= i < n for i, n in zip(place, x.shape, strict=True)):
                best = place if best is None or not keeps(x[best], x[place]) else best
        if best is not None:
            out[best] += source[window]
    return out.astype(x.dtype)


@funcify.register("select_and_gather_add")
def _(
    b: Builder, source: ArrayExpr, x: ArrayExpr, *, select_prim: Any, window_dimensions: Sizes,
    window_strides: Sizes, padding: Any, base_dilation: Sizes, window_dilation: Sizes,
) -> ArrayExpr:  # fmt: skip
    # Of equal entries the first counts, as in the transpose; to XLA it may be another of them.
    symbol, dtype = _keeps(select_prim), x.dtype
    if dtype.kind == "c":
        raise Unsupported("dtype", f"{dtype} has no order.")
    first = b.constant(least(dtype) if symbol == ">=" else most(dtype), dtype)
    zero = b.constant(0, dtype)
    x = _padded(b, x, first, padding, base_dilation)
    source = _padded(b, source, zero, padding, base_dilation)
    out = b.buffer()
    with b.kernel() as k, k.loops(out.shape) as window:
        best, gathered = k.here(k.read(first, ()), "best"), k.here(k.read(zero, ()), "gathered")
        with k.loops(window_dimensions) as inner:
            place = _under(window, inner, window_strides, window_dilation)
            entry, other = k.read(x, place), k.read(source, place)
            with k.under(f"if not {best} {symbol} {entry}:"):
                k.line(f"{best} = {entry}")
                k.line(f"{gathered} = {other}")
        k.store(out, window, gathered)
    return out


@perform.register("select_and_gather_add")
def _(source: Any, x: Any, *, select_prim: Any, **params: Any) -> Any:
    greatest = select_prim.name == "ge"
    start = np.asarray(least(x.dtype) if greatest else most(x.dtype)).astype(x.dtype)
    names = "dimensions strides".split()
    sizes = [params[f"window_{name}"] for name in names]
    rest = [params[name] for name in ("padding", "base_dilation", "window_dilation")]
    pairs = zip(
        _windows(x, start, *sizes, *rest),
        _windows(source, 0, *sizes, *rest),
        strict=True,
    )
    best = gathered = None
    for part, other in pairs:
        best = np.full(part.shape, start) if best is None else best
        gathered = np.zeros(part.shape, x.dtype) if gathered is None else gathered
        keep = best >= part if greatest else best <= part
        best, gathered = np.where(keep, best, part), np.where(keep, gathered, other)
    return gathered
