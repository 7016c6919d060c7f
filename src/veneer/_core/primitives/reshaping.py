"""What becomes of a leaf in blocks when the dense array is reshaped."""

import math
from collections.abc import Iterator, Sequence

import jax

from ..leaf_axes import Shape


def reshaped(leaf: Shape, old: Shape, new: Shape) -> Shape | None:
    """A leaf's shape once the values go from shape `old` to `new`, or None.

    Axes are split and merged in groups of equal size. In a group, the leaf's entries must cover
    runs of values that follow each other in memory, before and after.
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
            if _runs(entries, [old[axis] for axis in old_axes]) != counts:
                return None
            runs = _runs(entries, [new[axis] for axis in new_axes])
            if runs is None:
                return None
            counts = runs
        for axis, count in zip(new_axes, counts, strict=True):
            shape[axis] = count
    return tuple(shape)


def axis_of_units(units: Shape, old: Shape, new: Shape, axis: int, block: int) -> int | None:
    """The new axis along which units lie, whose last may be partly empty; None for several."""
    counts = reshaped(units, old, new)
    for old_axes, new_axes in reshape_groups(old, new):
        if counts is None or axis not in old_axes:
            continue
        if len(old_axes) == len(new_axes) == 1:
            return new_axes[0]
        along = [i for i in new_axes if counts[i] < new[i]]
        # A unit that is partly empty ends a row, and would be amid the values of a longer one.
        if len(along) == 1 and old[axis] % block == 0:
            return along[0]
    return None


def reshape_groups(old: Shape, new: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Yields consecutive axes of both shapes with as many values, few at a time; none of size 1.

    Axes whose symbolic sizes cannot be compared are in one group with all that follow.
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


def _runs(entries: int, sizes: Sequence[int]) -> list[int] | None:
    """A leaf's shape if its entries cover equal runs in memory of values of shape `sizes`.

    >>> _runs(6, [2, 12]), _runs(2, [2, 12]), _runs(4, [6, 2])
    ([2, 3], [2, 1], None)
    """
    counts = []
    for size in sizes:
        if entries % size == 0:  # also of symbolic sizes
            count = size
        elif size % entries == 0:
            count = entries
        else:
            return None
        counts.append(count)
        entries //= count
    return counts
