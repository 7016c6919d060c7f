"""Leaf axes: which axis of the dense array each axis of each leaf follows, in blocks of what size.

A type says so (`Value.leaf_axes`), or batch axes are all that is known (`batch_axes`). How leaves
are sliced, moved and sharded follows.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

Shape = tuple[int, ...]


class LeafAxis(NamedTuple):
    """How an axis of a leaf follows one of the dense array; in order, as those of the array lie.

    **Arguments:**

    - `axis`: of the dense array, counted from the end.
    - `block`: how many neighbours along it go with one entry of the leaf. `"shared"`: however many
      there are, and any part of them goes with the same entry. `"whole"`: all of them together, of
      which no part may be taken.
    - `packed_in`: how many entries hold a block, where it is packed and not shared. The last block
      may be partly empty.
    """

    axis: int
    block: int | Literal["shared", "whole"] = 1
    packed_in: int | None = None

    def span(self, start: int, limit: int, stride: int, size: int) -> Any:
        """The entries of a leaf for those of an axis of `size`, or None if a block would be cut."""
        block = self.block
        if block == 1:
            return start, limit, stride
        if isinstance(block, str) or stride != 1 or start % block:
            return None
        if limit != size and limit % block:
            return None
        width = self.packed_in or 1
        return start // block * width, -(-limit // block) * width, 1


class Movement(NamedTuple):
    """What becomes of the axes of the dense array.

    **Arguments:**

    - `shape`: the new one.
    - `axes`: for each old axis, the new one that it is; None for one that is gone or merged. Both
      are counted from the front.
    - `reorders`: whether axes change places, or are merged or split.
    """

    shape: Shape
    axes: tuple[int | None, ...]
    reorders: bool = False


Axes = Sequence[LeafAxis | None]  # of a leaf: of each of its axes; None follows no dense axis


def aligned(ndim: int) -> tuple[LeafAxis, ...]:
    """The axes of a leaf that has those of the dense array."""
    return tuple(map(LeafAxis, range(-ndim, 0)))


def are_axes(stated: Any, ndims: list[int]) -> bool:
    """Whether a type states an entry for each axis of each leaf; nothing else is iterated over."""
    lists = isinstance(stated, list | tuple) and all(isinstance(a, list | tuple) for a in stated)
    if not lists or [len(axes) for axes in stated] != ndims:
        return False
    return all(axis is None or isinstance(axis, LeafAxis) for axes in stated for axis in axes)


def partition(
    axes: Sequence[Axes], spec: PartitionSpec, old: Shape, new: Shape
) -> list[PartitionSpec] | None:
    """How leaves are cut when the dense array is: along the axes that they follow.

    An entry that all blocks share goes to each of them; blocks that are put together keep the
    entries that each has.

    **Arguments:**

    - `axes`: of each leaf.
    - `spec`: an entry for each axis of the dense array.
    - `old`, `new`: its shape, and that of a block, or of the whole of which it is one.

    **Returns:** None where a block of entries would be cut.
    """

    def entry(axis: LeafAxis | None) -> Any:
        if axis is None or (axis.block == "shared" and new[axis.axis] < old[axis.axis]):
            return None
        return None if axis.block == "whole" else spec[axis.axis]

    for axis in (axis for of_leaf in axes for axis in of_leaf if axis is not None):
        # All are of the smaller size, and must end with a unit of codes: sizes in bytes may fit
        # where these do not, as those of two blocks of 6 codes, in units of 8.
        small, large = sorted((old[axis.axis], new[axis.axis]))
        cut = axis.block == "whole" or (isinstance(axis.block, int) and small % axis.block)
        if small != large and cut:
            return None
    return [PartitionSpec(*map(entry, of_leaf)) for of_leaf in axes]
