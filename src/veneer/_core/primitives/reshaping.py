"""Reshape the leaves of a value when its dense array is reshaped."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..leaf_axes import Movement, Shape
from ..value import Value
from .leaf_movement import Leaf, layout_of, move


def reshape(x: Value, new: Shape) -> Any:
    """Return a value of another shape, or NotImplemented if a block would be cut."""
    x = x._movable()
    old, layout = x.aval().shape, layout_of(x)
    # Axes after the last one that a leaf axis corresponds to must not change.
    outer = 1 + max(layout.dense_axes(), default=-1)
    new_outer = len(new) - (len(old) - outer)
    if new_outer < 0 or old[outer:] != new[new_outer:] or (layout.is_declared and 0 in old):
        return NotImplemented
    sizes = old[:outer], new[:new_outer]
    axes: list[int | None] = [None] * outer
    for leaf in layout.leaves:
        for i, axis in enumerate(leaf.axes):
            if axis is not None and axis.packed_in:
                at, count = axis.axis, leaf.shape[i] // axis.packed_in
                blocks = (*old[:at], count, *old[at + 1 : outer])
                axes[at] = _new_packed_axis(blocks, *sizes, at, int(axis.block))
                if axes[at] is None:
                    return NotImplemented

    def step(leaf: Leaf) -> Any:
        outer_axes: Any = leaf.axes[:outer]
        if [axis and axis.axis for axis in outer_axes] != [*range(outer)]:
            return NotImplemented
        if any(axis.block == "whole" for axis in outer_axes):
            return NotImplemented
        widths = [axis.packed_in or 1 for axis in outer_axes]
        blocks = tuple(n // width for n, width in zip(leaf.shape, widths, strict=False))
        entries = reshaped(blocks, *sizes)
        if entries is None:
            return NotImplemented
        new_sizes = [*entries, *leaf.shape[outer:]]
        for i, width in zip(axes, widths, strict=True):
            if width > 1 and i is not None:
                new_sizes[i] *= width
        return (), {"new_sizes": tuple(new_sizes), "dimensions": None, "sharding": None}

    movement = Movement(new, (*axes, *range(new_outer, len(new))), reorders=True)
    return move(x, "reshape", movement, step)


def reshaped(leaf: Shape, old: Shape, new: Shape) -> Shape | None:
    """Return the new shape of a leaf when the dense array is reshaped. None if it has none.

    The groups of `reshape_groups` are split and merged separately. In each group, every entry of
    the leaf must be for a contiguous run of dense elements, before and after.

    **Arguments:**

    - `leaf`: the number of leaf entries along each dense axis.
    - `old`, `new`: the dense shapes.
    """
    if leaf == old:
        return new
    if 0 in old:
        return None
    shape = [1] * len(new)
    for old_axes, new_axes in reshape_groups(old, new):
        counts = [leaf[axis] for axis in old_axes]
        if len(old_axes) > 1 or len(new_axes) > 1:
            entries = math.prod(counts)
            if _counts_of_runs(entries, [old[axis] for axis in old_axes]) != counts:
                return None
            new_counts = _counts_of_runs(entries, [new[axis] for axis in new_axes])
            if new_counts is None:
                return None
            counts = new_counts
        for axis, count in zip(new_axes, counts, strict=True):
            shape[axis] = count
    return tuple(shape)


def _new_packed_axis(blocks: Shape, old: Shape, new: Shape, axis: int, block: int) -> int | None:
    """Return the new axis along which blocks are packed. None if they would lie along several.

    **Arguments:**

    - `blocks`: the number of blocks along each dense axis.
    - `axis`, `block`: the old axis along which they are packed, and the elements per block.
    """
    counts = reshaped(blocks, old, new)
    for old_axes, new_axes in reshape_groups(old, new):
        if counts is None or axis not in old_axes:
            continue
        if len(old_axes) == len(new_axes) == 1:
            return new_axes[0]
        packed = [i for i in new_axes if counts[i] < new[i]]
        # The last block of an axis may be partly empty. Merged with another axis, this gap would
        # be in the middle.
        if len(packed) == 1 and old[axis] % block == 0:
            return packed[0]
    return None


def reshape_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of consecutive axes with equal sizes, omitting axes of size 1.

    Axes whose symbolic sizes cannot be compared are in one group with all axes after them.
    """
    left = [axis for axis, size in enumerate(old) if size != 1]
    right = [axis for axis, size in enumerate(new) if size != 1]
    while left:
        group = [left.pop(0)], [right.pop(0)]
        while (a := math.prod(old[i] for i in group[0])) != (
            b := math.prod(new[i] for i in group[1])
        ):
            try:
                is_less = a < b
            except jax.errors.InconclusiveDimensionOperation:
                group = [*group[0], *left], [*group[1], *right]
                left = right = []
                break
            if is_less:
                group[0].append(left.pop(0))
            else:
                group[1].append(right.pop(0))
        yield group


def _counts_of_runs(entries: int, sizes: Sequence[int]) -> list[int] | None:
    """Return the shape of this many entries if each is for a run of elements of shape `sizes`.

    >>> _counts_of_runs(6, [2, 12]), _counts_of_runs(2, [2, 12]), _counts_of_runs(4, [6, 2])
    ([2, 3], [2, 1], None)
    """
    counts = []
    for size in sizes:
        if entries % size == 0:  # also for symbolic sizes
            count = size
        elif size % entries == 0:
            count = entries
        else:
            return None
        counts.append(count)
        entries //= count
    return counts
