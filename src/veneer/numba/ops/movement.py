"""Primitives that move, repeat or select entries, such as reshape, pad and select_n."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Index
from ..codegen.builder import Builder
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, funcify, fused, perform
from ..maths.instructions import select


@fused("broadcast_in_dim")
def _(
    b: Builder, x: ArrayExpr, *sizes: ArrayExpr, shape: Any, broadcast_dimensions: Any, **_: Any
) -> ArrayExpr:
    if sizes:
        raise Unsupported("shape", "it is not static.")
    long_axes = [axis for axis, n in zip(broadcast_dimensions, x.shape, strict=True) if n > 1]
    x = b.hoist(x, long_axes)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        axes = zip(broadcast_dimensions, x.shape, strict=True)
        return k.read(x, [Index() if n == 1 else index[axis] for axis, n in axes])

    return b.lazy(entry, x)


@perform.register("broadcast_in_dim")
def _(x: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    expanded = [1] * len(shape)
    for axis, n in zip(broadcast_dimensions, np.shape(x), strict=True):
        expanded[axis] = n
    return np.broadcast_to(np.reshape(x, expanded), shape)


@fused("reshape")
def _(b: Builder, x: ArrayExpr, *sizes: ArrayExpr, dimensions: Any = None, **_: Any) -> ArrayExpr:
    if sizes:
        raise Unsupported("shape", "it is not static.")
    return b.reshape(x if dimensions is None else _transpose(b, x, dimensions), b.out.shape)


@perform.register("reshape")
def _(x: Any, *, new_sizes: Any, dimensions: Any = None, **_: Any) -> Any:
    return np.reshape(x if dimensions is None else np.transpose(x, dimensions), new_sizes)


@fused("squeeze", "expand_dims")
def _(b: Builder, x: ArrayExpr, **_: Any) -> ArrayExpr:
    return b.reshape(x, b.out.shape)


perform.register("squeeze")(lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)))


@fused("transpose")
def _(b: Builder, x: ArrayExpr, *, permutation: Sequence[int]) -> ArrayExpr:
    return _transpose(b, x, permutation)


def _transpose(b: Builder, x: ArrayExpr, permutation: Sequence[int]) -> ArrayExpr:
    inverse, shape = np.argsort(permutation), [x.shape[axis] for axis in permutation]
    entry = lambda k, index: k.read(x, [index[axis] for axis in inverse])
    return b.lazy(entry, x, shape=shape, dtype=x.dtype)


perform.register("transpose")(lambda x, *, permutation: np.transpose(x, permutation))


@fused("rev")
def _(b: Builder, x: ArrayExpr, *, dimensions: Sequence[int]) -> ArrayExpr:
    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        axes = enumerate(zip(index, x.shape, strict=True))
        return k.read(x, [n - 1 - i if axis in dimensions else i for axis, (i, n) in axes])

    return b.lazy(entry, x)


perform.register("rev")(lambda x, *, dimensions: np.flip(x, dimensions))


@fused("slice")
def _(b: Builder, x: ArrayExpr, *, start_indices: Any, strides: Any, **_: Any) -> ArrayExpr:
    steps = strides or (1,) * x.ndim

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        axes = zip(index, start_indices, steps, strict=True)
        return k.read(x, [i * step + start for i, start, step in axes])

    return b.lazy(entry, x)


@perform.register("slice")
def _(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * np.ndim(x)
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


@fused("split")
def _(b: Builder, x: ArrayExpr, *, sizes: Any, axis: int) -> list[ArrayExpr]:
    x, starts = b.force_costly(x), np.cumsum([0, *sizes])[:-1].tolist()

    def part(start: int, aval: Any) -> ArrayExpr:
        def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
            return k.read(x, [i + start if d == axis else i for d, i in enumerate(index)])

        return b.lazy(entry, x, shape=aval.shape, dtype=aval.dtype)

    return [part(start, aval) for start, aval in zip(starts, b.outs, strict=True)]


perform.register("split")(lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis))


@fused("iota")
def _(b: Builder, *sizes: ArrayExpr, dtype: Any, dimension: int, **_: Any) -> ArrayExpr:
    if sizes:
        raise Unsupported("shape", "it is not static.")
    if dtype.kind == "b":
        raise Unsupported("dtype", "a range of bool is not supported.")
    name = storage.type_name(np.dtype(dtype))
    return b.lazy(lambda k, index: k.let(f"{name}({index[dimension]})"), cost=1)


@perform.register("iota")
def _(*, dtype: Any, shape: Any, dimension: int, **_: Any) -> Any:
    expanded = [n if axis == dimension else 1 for axis, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(expanded), shape)


@funcify.register("concatenate")
def _(b: Builder, *operands: ArrayExpr, dimension: int) -> ArrayExpr:
    out, start = b.buffer(), 0
    with b.kernel() as k:
        for x in operands:
            with k.loops(x.shape) as index:
                text = k.read(x, index)
                target = [i + start if axis == dimension else i for axis, i in enumerate(index)]
                k.store(out, target, text)
            start += x.shape[dimension]
    return out


perform.register("concatenate")(lambda *operands, dimension: np.concatenate(operands, dimension))


@funcify.register("pad")
def _(b: Builder, x: ArrayExpr, filling: ArrayExpr, *, padding_config: Any) -> ArrayExpr:
    out = b.buffer()
    with b.kernel() as k:
        fill = k.read(filling, ())
        with k.loops(out.shape) as index:
            k.store(out, index, fill)
        kept = [_kept_range(n, *config) for n, config in zip(x.shape, padding_config, strict=True)]
        starts = [start for start, _ in kept]
        with k.loops([max(0, end - start) for start, end in kept]) as index:
            source = [i + start for i, start in zip(index, starts, strict=True)]
            target = [
                i * (step + 1) + low
                for i, (low, _, step) in zip(source, padding_config, strict=True)
            ]
            k.store(out, target, k.read(x, source))
    return out


def _kept_range(n: int, low: int, high: int, interior: int) -> tuple[int, int]:
    """Return the range of indices along an axis that negative padding keeps, as start and end.

    `n` is the size of the axis, and `low`, `high` and `interior` are its padding, as in `lax.pad`.
    """
    step = interior + 1
    start = -(low // step) if low < 0 else 0
    end = n - (-(high // step) if high < 0 else 0)
    return start, max(start, end)


@perform.register("pad")
def _(x: Any, filling: Any, *, padding_config: Any) -> Any:
    x = np.asarray(x)
    for axis, (low, high, interior) in enumerate(padding_config):
        n = x.shape[axis]
        long = max(0, n + interior * max(0, n - 1))
        resized = lambda n, x=x, axis=axis: (*x.shape[:axis], n, *x.shape[axis + 1 :])
        spread = np.full(resized(long), filling, x.dtype)
        spread[(slice(None),) * axis + (slice(None, None, interior + 1),)] = x
        out = np.full(resized(long + low + high), filling, x.dtype)
        first, last = max(0, -low), long - max(0, -high)
        inner = spread[(slice(None),) * axis + (slice(first, max(first, last)),)]
        start = max(0, low)
        out[(slice(None),) * axis + (slice(start, start + inner.shape[axis]),)] = inner
        x = out
    return x


@fused("select_n")
def _(b: Builder, which: ArrayExpr, *cases: ArrayExpr) -> ArrayExpr:
    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        chosen = k.read(which, index if which.ndim else ())
        texts = [k.read(case, index) for case in cases]
        if which.dtype.kind == "b":
            return k.let(k.call(select, chosen, *texts[::-1])) if len(texts) == 2 else texts[0]
        result = texts[-1]
        for number, text in reversed([*enumerate(texts[:-1])]):
            result = k.let(k.call(select, f"{chosen} <= {number}", text, result))
        return result

    return b.lazy(entry, which, *cases, cost=len(cases) - 1)


@perform.register("select_n")
def _(which: Any, *cases: Any) -> Any:
    number = np.clip(np.asarray(which).astype(int), 0, len(cases) - 1)
    return np.select([number == n for n in range(len(cases))], cases).astype(cases[0].dtype)


@funcify.register("stack")
def _(b: Builder, *operands: ArrayExpr, axis: int) -> ArrayExpr:
    out = b.buffer()
    with b.kernel() as k:
        for n, x in enumerate(operands):
            with k.loops(x.shape) as index:
                k.store(out, (*index[:axis], Index((), n), *index[axis:]), k.read(x, index))
    return out


perform.register("stack")(lambda *operands, axis: np.stack(operands, axis))


@fused("unstack")
def _(b: Builder, x: ArrayExpr, *, axis: int) -> list[ArrayExpr]:
    x = b.force_costly(x)

    def part(n: int, aval: Any) -> ArrayExpr:
        def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
            return k.read(x, (*index[:axis], Index((), n), *index[axis:]))

        return b.lazy(entry, x, shape=aval.shape, dtype=aval.dtype)

    return [part(n, aval) for n, aval in enumerate(b.outs)]


perform.register("unstack")(lambda x, *, axis: [*np.moveaxis(x, axis, 0)])


@funcify.register("tile")
def _(b: Builder, x: ArrayExpr, *, reps: Sequence[int]) -> ArrayExpr:
    x, out = b.force_costly(x), b.buffer()
    with b.kernel() as k, k.loops(reps) as which, k.loops(x.shape) as index:
        target = [i + copy * n for i, copy, n in zip(index, which, x.shape, strict=True)]
        k.store(out, target, k.read(x, index))
    return out


perform.register("tile")(lambda x, *, reps: np.tile(x, reps))


@fused("empty", "empty2")
def _(b: Builder, **_: Any) -> ArrayExpr:
    zero = storage.literal(0, np.dtype(b.out.dtype))
    return b.lazy(lambda k, index: zero)


perform.register("empty", "empty2")(lambda *, dtype, shape=(), **_: np.zeros(shape, dtype))
