"""Reshape the leaves of a value when its dense array is reshaped."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ..leaf_axes import Movement, Shape
from ..value import Value
from .leaves import Leaf, layout_of, move


def reshape(x: Value, new_shape: Shape) -> Any:
    """Reshape the leaves of a value, so that they represent the reshaped dense array.

    Return NotImplemented if a block (dense elements that share a leaf entry) would be cut.
    """
    x = x._movable()
    old_shape, layout = x.aval().shape, layout_of(x)
    # Outer axes end with the last axis that a leaf axis corresponds to. Later axes must not change.
    outer = 1 + max(layout.dense_axes(), default=-1)
    new_outer = len(new_shape) - (len(old_shape) - outer)
    if new_outer < 0 or old_shape[outer:] != new_shape[new_outer:]:
        return NotImplemented
    if layout.is_declared and 0 in old_shape:
        return NotImplemented
    outer_shapes = old_shape[:outer], new_shape[:new_outer]
    # Find the new axis of each outer axis along which blocks are packed. Other axes may be split
    # or merged, so they have no single new axis.
    new_axes: list[int | None] = [None] * outer
    for leaf in layout.leaves:
        for i, axis in enumerate(leaf.axes):
            if axis is not None and axis.packed_in:
                dense_axis, count = axis.axis, leaf.shape[i] // axis.packed_in
                block_counts = (*old_shape[:dense_axis], count, *old_shape[dense_axis + 1 : outer])
                new_axis = _new_packed_axis(
                    block_counts, *outer_shapes, dense_axis, int(axis.block)
                )
                if new_axis is None:
                    return NotImplemented
                new_axes[dense_axis] = new_axis

    def get_step(leaf: Leaf) -> Any:
        outer_axes: Any = leaf.axes[:outer]
        if [axis and axis.axis for axis in outer_axes] != [*range(outer)]:
            return NotImplemented
        if any(axis.block == "whole" for axis in outer_axes):
            return NotImplemented
        # Reshape the blocks. A packed block is `width` entries of the leaf.
        widths = [axis.packed_in or 1 for axis in outer_axes]
        block_counts = tuple(n // width for n, width in zip(leaf.shape, widths, strict=False))
        new_block_counts = reshaped(block_counts, *outer_shapes)
        if new_block_counts is None:
            return NotImplemented
        new_sizes = [*new_block_counts, *leaf.shape[outer:]]
        for new_axis, width in zip(new_axes, widths, strict=True):
            if width > 1 and new_axis is not None:
                new_sizes[new_axis] *= width
        return (), {"new_sizes": tuple(new_sizes), "dimensions": None, "sharding": None}

    movement = Movement(new_shape, (*new_axes, *range(new_outer, len(new_shape))), reorders=True)
    return move(x, "reshape", movement, get_step)


def reshaped(leaf_shape: Shape, old: Shape, new: Shape) -> Shape | None:
    """Return the shape of a leaf after its dense array is reshaped from `old` to `new`.

    Each leaf entry is for a block of dense elements. Return None if a block is not
    contiguous, before or after, within the axes that are merged or split together.
    `leaf_shape` is the number of leaf entries along each dense axis.
    """
    if leaf_shape == old:
        return new
    if 0 in old:
        return None
    new_leaf_shape = [1] * len(new)
    for old_axes, new_axes in reshape_groups(old, new):
        sizes = [leaf_shape[axis] for axis in old_axes]
        if len(old_axes) > 1 or len(new_axes) > 1:
            entries = math.prod(sizes)
            if _shape_of_runs(entries, [old[axis] for axis in old_axes]) != sizes:
                return None
            new_sizes = _shape_of_runs(entries, [new[axis] for axis in new_axes])
            if new_sizes is None:
                return None
            sizes = new_sizes
        for axis, size in zip(new_axes, sizes, strict=True):
            new_leaf_shape[axis] = size
    return tuple(new_leaf_shape)


def _new_packed_axis(
    block_counts: Shape, old: Shape, new: Shape, axis: int | np.integer, block: int
) -> int | None:
    """Return the axis of packed blocks after a reshape, or None if they do not lie along one axis.

    **Arguments:**

    - `block_counts`: the number of blocks along each dense axis.
    - `old`, `new`: the dense shapes.
    - `axis`: the old axis along which blocks are packed.
    - `block`: the number of dense elements per block.
    """
    new_counts = reshaped(block_counts, old, new)
    if new_counts is None:
        return None
    for old_axes, new_axes in reshape_groups(old, new):
        if axis not in old_axes:
            continue
        if len(old_axes) == len(new_axes) == 1:
            return new_axes[0]
        packed_axes = [i for i in new_axes if new_counts[i] < new[i]]
        # If the last block of the axis is partly empty, merging the axis would leave a gap.
        if len(packed_axes) == 1 and old[axis] % block == 0:
            return packed_axes[0]
    return None


def reshape_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of old axes and new axes that have the same number of elements.

    A reshape splits and merges the axes of each pair separately. The axes are consecutive, apart
    from axes of size 1, which are omitted. If symbolic sizes cannot be compared, the pair has all
    remaining axes.

    >>> list(reshape_groups((2, 3, 8), (6, 4, 2)))
    [([0, 1], [0]), ([2], [1, 2])]
    """
    old_rest = [axis for axis, size in enumerate(old) if size != 1]
    new_rest = [axis for axis, size in enumerate(new) if size != 1]
    while old_rest:
        old_axes, new_axes = [old_rest.pop(0)], [new_rest.pop(0)]
        # Add an axis to the side with fewer elements until both sides have the same number.
        while True:
            old_count = math.prod(old[axis] for axis in old_axes)
            new_count = math.prod(new[axis] for axis in new_axes)
            if old_count == new_count:
                break
            try:
                old_is_smaller = old_count < new_count
            except jax.errors.InconclusiveDimensionOperation:
                old_axes, new_axes = [*old_axes, *old_rest], [*new_axes, *new_rest]
                old_rest = new_rest = []
                break
            if old_is_smaller:
                old_axes.append(old_rest.pop(0))
            else:
                new_axes.append(new_rest.pop(0))
        yield old_axes, new_axes


def _shape_of_runs(entries: int, sizes: Sequence[int]) -> list[int] | None:
    """Return the shape of a leaf with `entries` entries, each for a contiguous run of elements.

    The dense array has the shape `sizes`, and all runs have the same length. Return None if these
    runs do not form a grid.

    >>> _shape_of_runs(6, [2, 12]), _shape_of_runs(2, [2, 12]), _shape_of_runs(4, [6, 2])
    ([2, 3], [2, 1], None)
    """
    shape = []
    for size in sizes:
        if entries % size == 0:  # also for symbolic sizes
            leaf_size = size
        elif size % entries == 0:
            leaf_size = entries
        else:
            return None
        shape.append(leaf_size)
        entries //= leaf_size
    return shape
