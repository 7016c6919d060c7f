"""Scatter and its variants: entries at computed places are replaced, added to and so on."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..codegen.arrays import ArrayExpr, Buffer, number
from ..codegen.builder import Builder, require_fused
from ..codegen.index import Index
from ..codegen.loop_nest import LoopNest
from ..maths import instructions
from ..reference import evaluate_jaxpr
from ..registry import Unsupported, fused, perform
from .combine import Combine, extreme, operator
from .indexing import batching_axes, clamped, window_starts, within

_COMBINE: dict[str, Combine] = {
    "scatter-add": operator("+", "|"),
    "scatter-sub": operator("-"),
    "scatter-mul": operator("*", "&"),
    "scatter-min": extreme(instructions.minimum, "&"),
    "scatter-max": extreme(instructions.maximum, "|"),
}


@fused("scatter", *_COMBINE)
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
    combine = _COMBINE.get(name)
    if name == "scatter" and update_jaxpr is not None:
        if update_consts:
            raise Unsupported("update_consts", "the function applied may not hold arrays.")
        require_fused(update_jaxpr)
        combine = _applying(b, update_jaxpr)

    def write(out: Buffer, indices: ArrayExpr, updates: ArrayExpr) -> None:
        with b.kernel(name) as k:
            _scatter(k, out, indices, updates, dimension_numbers, mode.name == "CLIP", combine)

    return b.updated(x, write, indices, updates)


def _applying(b: Builder, jaxpr: Any) -> Combine:
    """The function of `x.at[...].apply`, which takes the entry that there is."""

    def combine(k: LoopNest, dtype: np.dtype, old: str, new: str) -> str:
        (result,) = b.inline_in(k, jaxpr, number(old, dtype), number(new, dtype))
        return result

    return combine


def _scatter(
    k: LoopNest,
    out: Buffer,
    indices: ArrayExpr,
    updates: ArrayExpr,
    d: Any,
    clip: bool,
    combine: Combine | None,
) -> None:
    windows = [int(axis) for axis in d.update_window_dims]
    dropped = {*d.inserted_window_dims, *d.operand_batching_dims}
    kept = [axis for axis in range(out.ndim) if axis not in dropped]
    sizes = [1] * out.ndim
    for axis, window in zip(kept, windows, strict=True):
        sizes[axis] = updates.shape[window]
    if any(n < size for n, size in zip(out.shape, sizes, strict=True)):
        return  # an axis is empty: there is no place inside
    k.written.add(out.memory)  # what is loaded is loaded again after each store
    with k.loops(indices.shape[:-1]) as batch:
        place = [Index()] * out.ndim
        for axis, batch_axis in batching_axes(d):
            place[axis] = batch[batch_axis]
        inside = []
        for number, axis in enumerate(d.scatter_dims_to_operand_dims):
            text, last = k.read(indices, (*batch, Index((), number))), out.shape[axis] - sizes[axis]
            if not clip:
                inside.append(within(k, text, indices.dtype, last))
            place[axis] = place[axis] + clamped(k, text, indices.dtype, max(last, 0))
        with k.under(f"if {' and '.join(inside) or 'True'}:"):
            _window(k, out, place, updates, batch, (kept, windows), combine)


def _window(
    k: LoopNest,
    out: Buffer,
    place: list[Index],
    updates: ArrayExpr,
    batch: tuple[Index, ...],
    axes: tuple[list[int], list[int]],
    combine: Combine | None,
) -> None:
    kept, windows = axes
    with k.loops([updates.shape[window] for window in windows]) as offsets:
        rest = iter(batch)
        inner = dict(zip(windows, offsets, strict=True))
        index = [inner[axis] if axis in inner else next(rest) for axis in range(updates.ndim)]
        to = [*place]
        for axis, i in zip(kept, offsets, strict=True):
            to[axis] = to[axis] + i
        new = k.read(updates, index)
        if combine is not None:
            new = combine(k, out.dtype, k.load(out, to), new)
        k.store(out, to, new)


def _perform(function: Callable[..., Any] | None) -> Callable[..., Any]:
    def rule(
        x: Any, indices: Any, updates: Any, *, dimension_numbers: Any, mode: Any,
        update_jaxpr: Any, **_: Any,
    ) -> Any:  # fmt: skip
        d, out = dimension_numbers, np.array(x)
        batches = [axis for axis in range(updates.ndim) if axis not in d.update_window_dims]
        moved = np.transpose(updates, (*batches, *map(int, d.update_window_dims)))
        dropped = tuple(int(n) for n in (*d.inserted_window_dims, *d.operand_batching_dims))
        for batch in np.ndindex(indices.shape[:-1]):
            window = np.expand_dims(moved[batch], dropped)
            starts, inside = window_starts(
                x.shape,
                indices[batch],
                batch,
                d.scatter_dims_to_operand_dims,
                window.shape,
                batching_axes(d),
            )
            if mode.name == "CLIP":
                limits = zip(starts, x.shape, window.shape, strict=True)
                starts = [min(max(0, s), n - size) for s, n, size in limits]
            if mode.name == "CLIP" or inside:
                at = tuple(slice(s, s + n) for s, n in zip(starts, window.shape, strict=True))
                out[at] = _new(function, update_jaxpr, out[at], window)
        return out

    return rule


def _new(function: Any, jaxpr: Any, old: Any, window: Any) -> Any:
    if function is not None:
        return function(old, window)
    if jaxpr is None:
        return window
    entries = [evaluate_jaxpr(jaxpr, o, w)[0] for o, w in zip(old.flat, window.flat, strict=True)]
    return np.reshape(entries, old.shape)


perform.register("scatter")(_perform(None))
_UFUNCS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum
}  # fmt: skip
for _name, _ufunc in _UFUNCS.items():
    perform.register(f"scatter-{_name}")(_perform(_ufunc))
