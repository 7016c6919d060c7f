"""Dynamic slices, gather and scatter: entries at computed indices are read or written."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen import storage
from ..codegen.arrays import ArrayExpr, Buffer, Index, lazy_arrays_in, scalar_expr
from ..codegen.builder import Builder, require_fused
from ..codegen.loop_nest import LoopNest
from ..codegen.registry import Unsupported, evaluate_jaxpr, fused, perform
from ..maths import instructions
from .reductions import Step, maximum_step, minimum_step, operator_step


def clamped_index(k: LoopNest, text: str, dtype: np.dtype, last: int) -> Index:
    """Return the value of the integer expression `text`, clamped to the range from 0 to `last`."""
    most = storage.literal(min(last, np.iinfo(dtype).max), dtype)
    below = k.call(instructions.minimum, text, most)
    inside = k.call(instructions.maximum, below, storage.literal(0, dtype))
    return k.variable(f"np.int64({inside})", last + 1)


def _start_index(
    k: LoopNest, starts: Sequence[ArrayExpr], x: ArrayExpr, sizes: Sequence[int]
) -> list[Index]:
    axes = zip(starts, x.shape, sizes, strict=True)
    return [clamped_index(k, k.read(s, ()), s.dtype, n - size) for s, n, size in axes]


@fused("dynamic_slice")
def _(b: Builder, x: ArrayExpr, *starts: ArrayExpr, slice_sizes: Sequence[int]) -> ArrayExpr:
    if len(starts) > x.ndim:
        raise Unsupported("shape", "it is not static.")

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        first = _start_index(k, starts, x, slice_sizes)
        return k.read(x, [i + start for i, start in zip(index, first, strict=True)])

    value = b.lazy(entry, x)  # at no cost, because loops compute the start once
    value.reads |= lazy_arrays_in(*starts)
    return value


@perform.register("dynamic_slice")
def _(x: Any, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    return x[_window_slices(starts, np.shape(x), slice_sizes)]


def _window_slices(starts: Any, shape: Any, sizes: Any) -> tuple[slice, ...]:
    axes = zip(map(int, starts), shape, sizes, strict=True)
    firsts = [(min(max(start, 0), n - size), size) for start, n, size in axes]
    return tuple(slice(first, first + size) for first, size in firsts)


@fused("dynamic_update_slice")
def _(b: Builder, x: ArrayExpr, update: ArrayExpr, *starts: ArrayExpr) -> ArrayExpr:
    def write(out: Buffer, update: ArrayExpr, *starts: ArrayExpr) -> None:
        with b.kernel("dynamic_update_slice") as k:
            first = _start_index(k, starts, out, update.shape)
            with k.loops(update.shape) as index:
                place = [i + start for i, start in zip(index, first, strict=True)]
                k.store(out, place, k.read(update, index))

    return b.update(x, write, update, *starts)


@perform.register("dynamic_update_slice")
def _(x: Any, update: Any, *starts: Any) -> Any:
    out = np.array(x)
    out[_window_slices(starts, np.shape(x), np.shape(update))] = update
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
        x = b.force_costly(x)

    def entry(k: LoopNest, index: tuple[Index, ...]) -> str:
        batch = [i for axis, i in enumerate(index) if axis not in offsets]
        source = [Index()] * x.ndim
        for axis, offset in zip(kept, offsets, strict=True):
            source[axis] = index[offset]
        for axis, batch_axis in _batching_axes(dimension_numbers):
            source[axis] = batch[batch_axis]
        inside = []
        for number, axis in enumerate(dimension_numbers.start_index_map):
            text, last = k.read(indices, (*batch, Index((), number))), x.shape[axis]
            last -= slice_sizes[axis]
            source[axis] = source[axis] + clamped_index(k, text, indices.dtype, last)
            inside.append(is_within(k, text, indices.dtype, last))
        text = k.read(x, source)
        if fill and inside:
            filling = storage.literal(fill_value, x.dtype)
            text = k.let(k.call(instructions.select, k.let(" and ".join(inside)), text, filling))
        return text

    empty = any(n < size for n, size in zip(x.shape, slice_sizes, strict=True))
    if empty or x.size == 0:  # nothing to read, so the result is empty or filled
        return b.lazy(lambda k, index: storage.literal(fill_value or 0, x.dtype))
    return b.lazy(entry, x, indices, cost=3)


def _batching_axes(dimension_numbers: Any) -> list[tuple[int, int]]:
    """Return the pairs of batching axes of a gather or scatter.

    Each pair has an axis of the operand and an axis of the indices.
    """
    d = dimension_numbers
    indices_axes = getattr(d, "start_indices_batching_dims", None)
    indices_axes = d.scatter_indices_batching_dims if indices_axes is None else indices_axes
    return [(int(x), int(y)) for x, y in zip(d.operand_batching_dims, indices_axes, strict=True)]


def is_within(k: LoopNest, text: str, dtype: np.dtype, last: int) -> str:
    """Return an expression for whether the integer expression `text` is from 0 to `last`."""
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
        starts, inside = _window_start(
            x.shape, indices[batch], batch, d.start_index_map, slice_sizes, _batching_axes(d)
        )
        window = x[_window_slices(starts, x.shape, slice_sizes)].squeeze(tuple(map(int, dropped)))
        outside = mode.name == "FILL_OR_DROP" and not inside
        windows.append(np.full_like(window, fill_value) if outside else window)
    if not windows:
        kept = [n for axis, n in enumerate(slice_sizes) if axis not in dropped]
        result = np.zeros((*indices.shape[:-1], *kept), x.dtype)
    else:
        result = np.reshape(windows, (*indices.shape[:-1], *windows[0].shape)).astype(x.dtype)
    return np.moveaxis(result, range(indices.ndim - 1, result.ndim), d.offset_dims)


def _window_start(
    shape: Any, row: Any, batch: Any, axes: Any, sizes: Any, batching: Any
) -> tuple[list[int], bool]:
    """Return the start of a window of gather or scatter, and whether the whole window is inside.

    **Arguments:**

    - `shape`: the shape of the operand.
    - `row`: the start indices of the window, one for each of `axes` of the operand.
    - `batch`: the position of `row` in the array of indices.
    - `sizes`: the shape of the window.
    - `batching`: pairs of an axis of the operand and an axis of `batch`.
    """
    starts, inside = [0] * len(shape), True
    for number, axis in enumerate(axes):
        starts[axis] = int(row[number])
        inside &= 0 <= starts[axis] <= shape[axis] - sizes[axis]
    for axis, batch_axis in batching:
        starts[axis] = batch[batch_axis]
    return starts, inside


_STEPS: dict[str, tuple[Step, Any]] = {
    "scatter-add": (operator_step("+", "|"), np.add),
    "scatter-sub": (operator_step("-"), np.subtract),
    "scatter-mul": (operator_step("*", "&"), np.multiply),
    "scatter-min": (minimum_step, np.minimum),
    "scatter-max": (maximum_step, np.maximum),
}


@fused("scatter", *_STEPS)
def _(
    b: Builder,
    x: ArrayExpr,
    indices: ArrayExpr,
    updates: ArrayExpr,
    *,
    dimension_numbers: Any,
    update_jaxpr: Any,
    update_consts: Any,
    mode: Any,
    **_: Any,
) -> ArrayExpr:
    name = b.primitive
    step = _STEPS[name][0] if name in _STEPS else None
    if name == "scatter" and update_jaxpr is not None:  # `x.at[...].apply`
        if update_consts:
            raise Unsupported("update_consts", "the function applied may not hold arrays.")
        require_fused(update_jaxpr)

        def step(k: LoopNest, dtype: np.dtype, old: str, new: str) -> str:
            (result,) = b.inline_into_kernel(
                k, update_jaxpr, *(scalar_expr(x, dtype) for x in (old, new))
            )
            return result

    def write(out: Buffer, indices: ArrayExpr, updates: ArrayExpr) -> None:
        with b.kernel(name) as k:
            _scatter(k, out, indices, updates, dimension_numbers, mode.name == "CLIP", step)

    return b.update(x, write, indices, updates)


def _scatter(
    k: LoopNest,
    out: Buffer,
    indices: ArrayExpr,
    updates: ArrayExpr,
    d: Any,
    clip: bool,
    step: Step | None,
) -> None:
    """Write windows of `updates` into `out`, at the positions in `indices`.

    **Arguments:**

    - `d`: the dimension numbers of the primitive.
    - `clip`: whether to move windows into `out` that are partly outside. If not, they are dropped.
    - `step`: combines the old and the new entry. If it is None, the new entry replaces the old one.
    """
    window_axes = [int(axis) for axis in d.update_window_dims]
    dropped = {*d.inserted_window_dims, *d.operand_batching_dims}
    kept = [axis for axis in range(out.ndim) if axis not in dropped]
    sizes = [1] * out.ndim
    for axis, window_axis in zip(kept, window_axes, strict=True):
        sizes[axis] = updates.shape[window_axis]
    if any(n < size for n, size in zip(out.shape, sizes, strict=True)):
        return  # no window fits
    k.written.add(out.memory)  # so that entries are loaded again after each store
    with k.loops(indices.shape[:-1]) as batch:
        start = [Index()] * out.ndim
        for axis, batch_axis in _batching_axes(d):
            start[axis] = batch[batch_axis]
        inside = []
        for number, axis in enumerate(d.scatter_dims_to_operand_dims):
            text, last = k.read(indices, (*batch, Index((), number))), out.shape[axis] - sizes[axis]
            if not clip:
                inside.append(is_within(k, text, indices.dtype, last))
            start[axis] = start[axis] + clamped_index(k, text, indices.dtype, max(last, 0))
        with (
            k.block(f"if {' and '.join(inside) or 'True'}:"),
            k.loops([updates.shape[axis] for axis in window_axes]) as offsets,
        ):
            rest = iter(batch)
            inner = dict(zip(window_axes, offsets, strict=True))
            index = [inner[axis] if axis in inner else next(rest) for axis in range(updates.ndim)]
            target = [*start]
            for axis, i in zip(kept, offsets, strict=True):
                target[axis] = target[axis] + i
            new = k.read(updates, index)
            if step is not None:
                new = step(k, out.dtype, k.load(out, target), new)
            k.store(out, target, new)


def _register_reference(name: str, ufunc: Any) -> None:
    @perform.register(name)
    def _(
        x: Any, indices: Any, updates: Any, *, dimension_numbers: Any, mode: Any,
        update_jaxpr: Any, **_: Any,
    ) -> Any:  # fmt: skip
        d, out = dimension_numbers, np.array(x)
        batches = [axis for axis in range(updates.ndim) if axis not in d.update_window_dims]
        moved = np.transpose(updates, (*batches, *map(int, d.update_window_dims)))
        dropped = tuple(int(n) for n in (*d.inserted_window_dims, *d.operand_batching_dims))
        axes, batching = d.scatter_dims_to_operand_dims, _batching_axes(d)
        for batch in np.ndindex(indices.shape[:-1]):
            new = np.expand_dims(moved[batch], dropped)
            starts, inside = _window_start(
                x.shape, indices[batch], batch, axes, new.shape, batching
            )
            if mode.name == "CLIP":
                limits = zip(starts, x.shape, new.shape, strict=True)
                starts = [min(max(0, s), n - size) for s, n, size in limits]
            elif not inside:
                continue
            window = tuple(slice(s, s + n) for s, n in zip(starts, new.shape, strict=True))
            old = out[window]
            if ufunc is not None:
                new = ufunc(old, new)
            elif update_jaxpr is not None:
                pairs = zip(old.flat, new.flat, strict=True)
                entries = [evaluate_jaxpr(update_jaxpr, *pair)[0] for pair in pairs]
                new = np.reshape(entries, old.shape)
            out[window] = new
        return out


_register_reference("scatter", None)
for _name, (_, _ufunc) in _STEPS.items():
    _register_reference(_name, _ufunc)
