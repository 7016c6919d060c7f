"""The axes of reshapes and of products: which old axis becomes which new axis."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..leaf_axes import Shape

# Reshapes.


def reshape_leaf_shape(leaf_shape: Shape, old: Shape, new: Shape) -> Shape | None:
    """Return the shape of a leaf after its dense array is reshaped from `old` to `new`.

    A leaf is a stored array with one entry per block of dense elements, such as one scale per tile.
    `leaf_shape` is the number of blocks along each dense axis. Return None if a block is not
    contiguous, before or after, within the axes that are merged or split together.
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


def find_packed_axis(
    block_counts: Shape, old: Shape, new: Shape, axis: int | np.integer, block: int
) -> int | None:
    """Return the axis along which packed blocks lie after a reshape, or None if there are several.

    A packed block is a group of dense elements that are stored together, such as 8 codes in 3
    bytes.

    **Arguments:**

    - `block_counts`: the number of blocks along each dense axis.
    - `old`, `new`: the dense shapes.
    - `axis`: the old axis along which blocks are packed.
    - `block`: the number of dense elements per block.
    """
    new_counts = reshape_leaf_shape(block_counts, old, new)
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
    """Yield, for a reshape from `old` to `new`, pairs of old axes and the new axes they become.

    The old axes and the new axes of a pair have the same number of elements. The axes are
    consecutive, apart from axes of size 1, which are omitted. If symbolic sizes cannot be compared,
    the pair has all remaining axes.

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
    """Return how many runs there are along each axis, if an array is divided into equal runs.

    A run is a number of consecutive elements of the array, which has the shape `sizes`. `entries`
    is the number of runs. Return None if the runs do not form a grid.

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


# Products.

Axes = tuple[int, ...]

#: `dimension_numbers` as `jax.lax.dot_general` takes them.
NestedAxes = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class DotDimensionNumbers(NamedTuple):
    """The `dimension_numbers` of `jax.lax.dot_general`, in hashable form.

    **Arguments:**

    - `contracting`: the contracted axes of the left and of the right operand.
    - `batch`: the batch axes of the left and of the right operand. The output has them first.

    >>> from veneer._core.primitives.axes import DotDimensionNumbers
    >>> numbers = DotDimensionNumbers.from_lax((([2], [1]), ([0], [0])))
    >>> numbers.free(0, 3), numbers.swapped.contracting
    ((1,), ((1,), (2,)))
    """

    contracting: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]

    @classmethod
    def from_lax(
        cls, dimension_numbers: Sequence[Sequence[Sequence[Any]]]
    ) -> "DotDimensionNumbers":
        """Convert `dimension_numbers` of `lax.dot_general`: nested sequences of any integers."""
        contracting, batch = (
            (tuple(map(int, lhs)), tuple(map(int, rhs))) for lhs, rhs in dimension_numbers
        )
        return cls(contracting, batch)

    @property
    def swapped(self) -> "DotDimensionNumbers":
        """The dimension numbers of the product with its operands exchanged."""
        return DotDimensionNumbers(self.contracting[::-1], self.batch[::-1])

    def free(self, side: int, ndim: int) -> Axes:
        """Return the axes of an operand that are neither contracted nor batch axes.

        `side` is 0 for the left operand and 1 for the right operand, which has `ndim` axes.
        """
        shared = (*self.contracting[side], *self.batch[side])
        return tuple(axis for axis in range(ndim) if axis not in shared)

    def without(self, lhs_axis: int | None, rhs_axis: int | None) -> "DotDimensionNumbers":
        """Return the dimension numbers for operands without the axes `lhs_axis` and `rhs_axis`.

        None removes no axis.
        """
        contracting, batch = ((without(lhs, lhs_axis), without(rhs, rhs_axis)) for lhs, rhs in self)
        return DotDimensionNumbers(contracting, batch)


def without(axes: Axes, removed: int | None) -> Axes:
    """Return `axes` of an array, renumbered for the array without its axis `removed`.

    If `removed` is None, return `axes`.

    >>> from veneer._core.primitives.axes import without
    >>> without((0, 1, 3), 1)
    (0, 2)
    """
    if removed is None:
        return axes
    return tuple(axis - (axis > removed) for axis in axes if axis != removed)
