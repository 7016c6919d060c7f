"""Indexing: slices at places that are computed, and gather."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, parts
from ..codegen.builder import Builder
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..maths import instructions
from ..registry import Unsupported, fused, perform

Place = tuple[Index, ...]


def clamped(k: LoopNest, text: str, dtype: np.dtype, last: int) -> Index:
    """An index at a computed number, moved to 0 or to `last` where it is not between them."""
    most = storage.literal(min(last, np.iinfo(dtype).max), dtype)
    below = k.call(instructions.minimum, text, most)
    inside = k.call(instructions.maximum, below, storage.literal(0, dtype))
    return k.variable(f"np.int64({inside})", last + 1)


def _starts(
    k: LoopNest, starts: Sequence[ArrayExpr], x: ArrayExpr, sizes: Sequence[int]
) -> list[Index]:
    axes = zip(starts, x.shape, sizes, strict=True)
    return [clamped(k, k.read(s, ()), s.dtype, n - size) for s, n, size in axes]


@fused("dynamic_slice")
def _(b: Builder, x: ArrayExpr, *starts: ArrayExpr, slice_sizes: Sequence[int]) -> ArrayExpr:
    if len(starts) > x.ndim:
        raise Unsupported("shape", "it is not static.")

    def entry(k: LoopNest, index: Place) -> str:
        first = _starts(k, starts, x, slice_sizes)
        return k.read(x, [i + start for i, start in zip(index, first, strict=True)])

    value = b.lazy(entry, x)  # loops find the place once: it adds nothing to the cost of an entry
    value.reads |= parts(*starts)
    return value


@perform.register("dynamic_slice")
def _(x: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    return x[_window(starts, np.shape(x), slice_sizes)]


def _window(starts: Any, shape: Any, sizes: Any) -> tuple[slice, ...]:
    axes = zip(map(int, starts), shape, sizes, strict=True)
    firsts = [(min(max(start, 0), n - size), size) for start, n, size in axes]
    return tuple(slice(first, first + size) for first, size in firsts)


@fused("dynamic_update_slice")
def _(b: Builder, x: ArrayExpr, update: ArrayExpr, *starts: ArrayExpr) -> ArrayExpr:
    def write(out: Buffer, update: ArrayExpr, *starts: ArrayExpr) -> None:
        with b.kernel("dynamic_update_slice") as k:
            first = _starts(k, starts, out, update.shape)
            with k.loops(update.shape) as index:
                place = [i + start for i, start in zip(index, first, strict=True)]
                k.store(out, place, k.read(update, index))

    return b.updated(x, write, update, *starts)


@perform.register("dynamic_update_slice")
def _(x: Any, update: Any, *starts: Any) -> Any:
    out = np.array(x)
    out[_window(starts, np.shape(x), np.shape(update))] = update
    return out


@fused("gather")
def _(
    b: Builder,
    x: ArrayExpr,
    indices: ArrayExpr,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> ArrayExpr:
    offsets = [int(axis) for axis in dimension_numbers.offset_dims]
    dropped = {*dimension_numbers.collapsed_slice_dims, *dimension_numbers.operand_batching_dims}
    kept = [axis for axis in range(x.ndim) if axis not in dropped]
    fill = mode.name == "FILL_OR_DROP"
    if mode.name not in ("FILL_OR_DROP", "CLIP", "PROMISE_IN_BOUNDS"):
        raise Unsupported("mode", f"{mode} is not supported.")
    if np.prod(b.out.shape) > x.size:
        x = b.cheap(x)

    def entry(k: LoopNest, index: Place) -> str:
        batch = [i for axis, i in enumerate(index) if axis not in offsets]
        place = [Index()] * x.ndim
        for axis, offset in zip(kept, offsets, strict=True):
            place[axis] = index[offset]
        for axis, batch_axis in batching_axes(dimension_numbers):
            place[axis] = batch[batch_axis]
        inside = []
        for number, axis in enumerate(dimension_numbers.start_index_map):
            text, last = k.read(indices, (*batch, Index((), number))), x.shape[axis]
            last -= slice_sizes[axis]
            place[axis] = place[axis] + clamped(k, text, indices.dtype, last)
            inside.append(within(k, text, indices.dtype, last))
        text = k.read(x, place)
        if fill and inside:
            filling = storage.literal(fill_value, x.dtype)
            text = k.let(k.call(instructions.select, k.let(" and ".join(inside)), text, filling))
        return text

    empty = any(n < size for n, size in zip(x.shape, slice_sizes, strict=True))
    if empty or x.size == 0:  # there is nothing to read: JAX refuses any but an empty result
        return b.lazy(lambda k, index: storage.literal(fill_value or 0, x.dtype))
    return b.lazy(entry, x, indices, cost=3)


def batching_axes(dimension_numbers: Any) -> list[tuple[int, int]]:
    """The axes of an operand that go with axes of the indices, and those."""
    d = dimension_numbers
    indices_axes = getattr(d, "start_indices_batching_dims", None)
    indices_axes = d.scatter_indices_batching_dims if indices_axes is None else indices_axes
    return [(int(x), int(y)) for x, y in zip(d.operand_batching_dims, indices_axes, strict=True)]


def within(k: LoopNest, text: str, dtype: np.dtype, last: int) -> str:
    """A condition: that an index is one of 0 to `last`."""
    most = np.iinfo(dtype).max
    above = [] if dtype.kind == "u" else [f"{text} >= {storage.literal(0, dtype)}"]
    below = [] if last >= most else [f"{text} <= {storage.literal(last, dtype)}"]
    return k.let(" and ".join(above + below) or "True")


@perform.register("gather")
def _(
    x: Any,
    indices: Any,
    *,
    dimension_numbers: Any,
    slice_sizes: Sequence[int],
    mode: Any,
    fill_value: Any,
    **_: Any,
) -> Any:
    d = dimension_numbers
    dropped = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    windows = []
    for batch in np.ndindex(indices.shape[:-1]):
        starts, inside = window_starts(
            x.shape, indices[batch], batch, d.start_index_map, slice_sizes, batching_axes(d)
        )
        window = x[_window(starts, x.shape, slice_sizes)].squeeze(tuple(map(int, dropped)))
        outside = mode.name == "FILL_OR_DROP" and not inside
        windows.append(np.full_like(window, fill_value) if outside else window)
    if not windows:
        kept = [n for axis, n in enumerate(slice_sizes) if axis not in dropped]
        result = np.zeros((*indices.shape[:-1], *kept), x.dtype)
    else:
        result = np.reshape(windows, (*indices.shape[:-1], *windows[0].shape)).astype(x.dtype)
    return np.moveaxis(result, range(indices.ndim - 1, result.ndim), d.offset_dims)


def window_starts(
    shape: Any, row: Any, batch: Any, axes: Any, sizes: Any, batching: Any
) -> tuple[list[int], bool]:
    """Where in an operand a window starts, and whether all of it is inside."""
    starts, inside = [0] * len(shape), True
    for number, axis in enumerate(axes):
        starts[axis] = int(row[number])
        inside &= 0 <= starts[axis] <= shape[axis] - sizes[axis]
    for axis, batch_axis in batching:
        starts[axis] = batch[batch_axis]
    return starts, inside
