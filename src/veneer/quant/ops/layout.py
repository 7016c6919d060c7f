"""Rules for primitives that move values about: a QArray in, a QArray out, no code unpacked.

Each does to the entries of every leaf what the primitive does to the values (`grids`). Where that
would cut a block in two, the rule returns NotImplemented, and the operand is materialised.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..formats.tiles import Shape
from ..qarray import QUANTIZABLE, QArray
from .grids import (
    Grid,
    Step,
    grids,
    move,
    move_codes,
    rebuild,
    without_needless_packing,
)


def _step(function: Callable, rule: Callable, *operands: Any, **params: Any) -> Step:
    """Returns what does a primitive to a leaf: the function, or the rule if a scale is a QArray."""
    return lambda x: (rule if isinstance(x, QArray) else function)(x, *operands, **params)


@register("convert_element_type")
def _convert_element_type(q: QArray, *, new_dtype, weak_type, sharding) -> Any:
    # To fewer bits, it is meant to round.
    if weak_type or sharding is not None or new_dtype not in QUANTIZABLE:
        return NotImplemented
    return q.replace(dense_dtype=new_dtype)


@register("transpose")
def _transpose(q: QArray, *, permutation) -> Any:
    step = _step(lax.transpose, _transpose, permutation=permutation)
    shape = tuple(q.shape[axis] for axis in permutation)
    return move(q, lambda grid: step, shape, [*permutation].index)


@register("squeeze")
def _squeeze(q: QArray, *, dimensions) -> Any:
    step = _step(lax.squeeze, _squeeze, dimensions=dimensions)
    kept = [axis for axis in range(q.ndim) if axis not in dimensions]
    return move(q, lambda grid: step, tuple(q.shape[axis] for axis in kept), kept.index)


@register("broadcast_in_dim")
def _broadcast_in_dim(q: QArray, *, shape, broadcast_dimensions, sharding=None) -> Any:
    if sharding is not None:
        return NotImplemented

    def plan(grid: Grid) -> Step:
        # Every leaf has the new axes in full, so that vmap and scan may take them off again. Along
        # an axis that grows from 1, the values go on sharing a scale.
        new = list(shape)
        for i, axis in enumerate(broadcast_dimensions):
            if grid.leaf != "packed" or q.shape[i] == shape[axis]:
                new[axis] = grid.shape[i]
        dimensions = {"broadcast_dimensions": broadcast_dimensions}
        return _step(lax.broadcast_in_dim, _broadcast_in_dim, shape=tuple(new), **dimensions)

    return move(q, plan, shape, lambda axis: broadcast_dimensions[axis])


@register("slice")
def _slice(q: QArray, *, start_indices, limit_indices, strides) -> Any:
    strides = strides or (1,) * q.ndim

    def plan(grid: Grid) -> Any:
        cuts = []
        for axis, block in enumerate(grid.block):
            size, start, limit = q.shape[axis], start_indices[axis], limit_indices[axis]
            if (start, limit, strides[axis]) == (0, size, 1) or grid.is_shared(axis):
                cuts.append((0, grid.shape[axis], 1))
            elif block == 1:
                cuts.append((start, limit, strides[axis]))
            elif (
                strides[axis] == 1
                and start % block == 0
                and limit in (size, limit // block * block)
            ):
                cuts.append((start // block, -(-limit // block), 1))
            else:
                return NotImplemented
        starts, limits, steps = zip(*cuts, strict=True) if cuts else ((), (), ())
        params = {"start_indices": starts, "limit_indices": limits, "strides": steps}
        return _step(lax.slice, _slice, **params)

    spans = zip(start_indices, limit_indices, strides, strict=True)
    return move(q, plan, tuple(len(range(*span)) for span in spans))


@register("dynamic_slice")
def _dynamic_slice(q: QArray, *start_indices: ArrayLike, slice_sizes) -> Any:
    def plan(grid: Grid) -> Any:
        sizes = list(slice_sizes)
        for axis, block in enumerate(grid.block):
            if slice_sizes[axis] == q.shape[axis] or grid.is_shared(axis):
                sizes[axis] = grid.shape[axis]  # all of it: any start is clamped to 0
            elif block > 1:
                return NotImplemented
        return lambda x: (
            _dynamic_slice(x, *start_indices, slice_sizes=tuple(sizes))
            if isinstance(x, QArray)
            else lax.dynamic_slice(x, start_indices, sizes)
        )

    return move(q, plan, tuple(slice_sizes))


@register("gather")
def _gather(
    q: QArray,
    indices: ArrayLike,
    *,
    dimension_numbers,
    slice_sizes,
    unique_indices,
    indices_are_sorted,
    mode,
    fill_value,
) -> Any:
    modes = lax.GatherScatterMode
    if mode == modes.ONE_HOT or q.size == 0:
        return NotImplemented
    if mode == modes.FILL_OR_DROP and fill_value is not None and not np.isnan(fill_value):
        return NotImplemented
    indices = jnp.asarray(indices)

    def plan(grid: Grid) -> Any:
        sizes = list(slice_sizes)
        divisors = [1] * q.ndim
        for axis, block in enumerate(grid.block):
            if slice_sizes[axis] == q.shape[axis]:
                sizes[axis] = grid.shape[axis]
            elif block > 1:
                batched = axis in dimension_numbers.operand_batching_dims
                if grid.leaf == "packed" or slice_sizes[axis] != 1 or batched:
                    return NotImplemented
                divisors[axis] = block
        return _step(
            lax.gather,
            _gather,
            _entries(indices, [divisors[i] for i in dimension_numbers.start_index_map]),
            dimension_numbers=dimension_numbers,
            slice_sizes=tuple(sizes),
            unique_indices=unique_indices and max(divisors, default=1) == 1,
            indices_are_sorted=indices_are_sorted,
            mode=mode,
            # The default for a float is NaN. What a scale of NaN multiplies does not matter.
            fill_value=None if grid.leaf == "scale" else 0,
        )

    gone = {*dimension_numbers.collapsed_slice_dims, *dimension_numbers.operand_batching_dims}
    kept = [axis for axis in range(q.ndim) if axis not in gone]
    offsets = dict(zip(kept, dimension_numbers.offset_dims, strict=True))
    sizes = {offsets[axis]: slice_sizes[axis] for axis in kept}
    batch = iter(indices.shape[:-1])
    ndim = len(kept) + indices.ndim - 1
    shape = tuple(sizes[i] if i in sizes else next(batch) for i in range(ndim))
    return move(q, plan, shape, offsets.__getitem__)


def _entries(indices: jax.Array, divisors: list[int]) -> jax.Array:
    """Finds the entry that covers each index. Floor division keeps out of bounds what is."""
    if set(divisors) <= {1}:
        return indices
    if jnp.iinfo(indices.dtype).bits < 32:  # too few for the divisors, perhaps
        indices = indices.astype(jnp.int32)
    return indices // jnp.array(divisors, indices.dtype)


@register("concatenate")
def _concatenate(*operands: QArray, dimension) -> Any:
    if any(q.size == 0 for q in operands):
        return NotImplemented
    qs = [without_needless_packing(q) for q in operands]
    covers = [grids(q) for q in qs]
    if len({(q.qtype, q.dense_dtype, *cover) for q, cover in zip(qs, covers, strict=True)}) > 1:
        return NotImplemented
    leaves: dict[str, Any] = {}
    for name, first in covers[0].items():
        # Entries go in one row if all have blocks of one size, and none but the last a partial one.
        short = any(q.shape[dimension] % first.block[dimension] for q in qs[:-1])
        if short or any(cover[name].block != first.block for cover in covers):
            return NotImplemented
        if name == "packed":
            join = lambda xs: lax.concatenate(xs, dimension)
            leaves[name] = move_codes(qs, join, lambda axis: axis)
        else:
            leaves[name] = _joined([getattr(q, name) for q in qs], dimension)
        if leaves[name] is NotImplemented:
            return NotImplemented
    shape = list(qs[0].shape)
    shape[dimension] = sum(q.shape[dimension] for q in qs)
    return rebuild(qs[0], leaves, tuple(shape), lambda axis: axis)


def _joined(scales: Sequence[Any], dimension: int) -> Any:
    if all(isinstance(scale, QArray) for scale in scales):
        joined = _concatenate(*scales, dimension=dimension)
        if joined is not NotImplemented:
            return joined
    scales = [scale.dequantize() if isinstance(scale, QArray) else scale for scale in scales]
    if len({scale.dtype for scale in scales}) > 1:
        return NotImplemented
    return lax.concatenate(scales, dimension)


@register("stack")
def _stack(*operands: QArray, axis) -> Any:
    return _concatenate(*(_expand(q, axis) for q in operands), dimension=axis)


def _expand(q: QArray, axis: int) -> QArray:
    step = _step(lambda x: lax.expand_dims(x, [axis]), lambda q: _expand(q, axis))
    shape = (*q.shape[:axis], 1, *q.shape[axis:])
    return move(q, lambda grid: step, shape, lambda packed: packed + (packed >= axis))


@register("split")
def _split(q: QArray, *, sizes, axis) -> Any:
    pieces = []
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        starts, limits = [0] * q.ndim, list(q.shape)
        starts[axis], limits[axis] = end - size, end
        pieces.append(_slice(q, start_indices=starts, limit_indices=limits, strides=None))
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


@register("reshape")
def _reshape(q: QArray, *, new_sizes, dimensions=None, sharding=None) -> Any:
    if dimensions is not None or sharding is not None:
        return NotImplemented
    return reshape(q, tuple(new_sizes))


def reshape(q: QArray, new_sizes: Shape) -> Any:
    """Returns a QArray of another shape, or NotImplemented where a tile or a byte would be cut."""
    if q.size == 0:
        return NotImplemented
    q = without_needless_packing(q)
    packed_axis = -1 if q.packing is None else _reshaped_packed_axis(q, new_sizes)
    if packed_axis is None:
        return NotImplemented

    def plan(grid: Grid) -> Any:
        shape = _reshaped(grid.shape, q.shape, new_sizes)
        if shape is None:
            return NotImplemented
        return _step(lax.reshape, _reshape, new_sizes=shape)

    return move(q, plan, new_sizes, lambda _: packed_axis)


def _reshaped_packed_axis(q: QArray, new: Shape) -> int | None:
    """Returns the axis that units lie along once the values have shape `new`; None for several."""
    assert q.packing is not None
    axis = q.ndim + q.packing.axis
    units = grids(q)["packed"]
    counts = _reshaped(units.shape, q.shape, new)
    for old_axes, new_axes in _reshape_groups(q.shape, new):
        if counts is None or axis not in old_axes:
            continue
        if len(old_axes) == len(new_axes) == 1:
            return new_axes[0]
        along = [i for i in new_axes if counts[i] < new[i]]
        # A unit that is partly empty ends a row, and would be amid the values of a longer one.
        if len(along) == 1 and q.shape[axis] % units.block[axis] == 0:
            return along[0]
    return None


def _reshaped(leaf: Shape, old: Shape, new: Shape) -> Shape | None:
    """Returns a leaf's shape once the values go from shape `old` to `new`, or None.

    Axes are split and merged in groups of equal size. In a group, the leaf's entries must cover
    runs of values that follow each other in memory, before and after.
    """
    shape = [1] * len(new)
    for old_axes, new_axes in _reshape_groups(old, new):
        counts = [leaf[axis] for axis in old_axes]
        if len(old_axes) > 1 or len(new_axes) > 1:
            entries = math.prod(counts)
            if _runs(entries, [old[axis] for axis in old_axes]) != counts:
                return None
            runs = _runs(entries, [new[axis] for axis in new_axes])
            if runs is None:
                return None
            counts = runs
        for axis, count in zip(new_axes, counts, strict=True):
            shape[axis] = count
    return tuple(shape)


def _reshape_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yields consecutive axes of both shapes with as many values, few at a time; none of size 1."""
    left = [axis for axis, size in enumerate(old) if size != 1]
    right = [axis for axis, size in enumerate(new) if size != 1]
    while left:
        group = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(old[i] for i in group[0])) != (
            b := math.prod(new[i] for i in group[1])
        ):
            if a < b:
                group[0].append(left.pop(0))
            else:
                group[1].append(right.pop(0))
        yield group


def _runs(entries: int, sizes: Sequence[int]) -> list[int] | None:
    """Returns a leaf's shape if its entries cover equal runs in memory of values of shape `sizes`.

    >>> _runs(6, [2, 12]), _runs(2, [2, 12]), _runs(4, [6, 2])
    ([2, 3], [2, 1], None)
    """
    counts = []
    for size in sizes:
        count = math.gcd(entries, size)
        if count not in (entries, size):
            return None
        counts.append(count)
        entries //= count
    return counts
