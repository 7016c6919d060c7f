"""Leaf axes: how the axes of the stored leaves correspond to the axes of the dense array."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

Shape = tuple[int, ...]
# The entry for each axis of one leaf. None if the axis of the leaf corresponds to no dense axis.
Axes = Sequence["LeafAxis | None"]


class LeafAxis(NamedTuple):
    """A mapping from an axis of a leaf to an axis of the dense array that keeps the element order.

    `ImplicitArray.leaf_axes` returns, for each leaf, a list with a `LeafAxis` per axis. With it,
    Veneer slices, transposes and shards the leaves instead of the dense array.

    **Arguments:**

    - `axis`: the axis of the dense array, counted from the end.
    - `block`: the number of consecutive elements of the dense axis that form one block. Or
      `"shared"` if the leaf has size 1 along this axis, and all slices of the dense array share its
      entry. Or `"whole"` if the leaf cannot be sliced along this axis.
    - `packed_in`: the number of leaf entries that store one block. None means 1. For example,
      `block=8, packed_in=3` is for 8 codes of 3 bits in 3 bytes. The last block may be partly
      empty.

    In this type, each entry of `x` stores two columns. A slice that takes whole pairs of columns is
    a `Pairs` again:

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> class Pairs(vn.ImplicitArray):
    ...     x: jax.Array  # [..., m, n // 2]
    ...     def materialise(self):
    ...         return jnp.repeat(self.x, 2, axis=-1)
    ...     def leaf_axes(self):
    ...         return [[vn.LeafAxis(-2), vn.LeafAxis(-1, block=2)]]
    >>> Pairs(jnp.ones((3, 4)))[:, 2:6]
    Pairs(x=f32[3,2])
    """

    axis: int
    block: int | Literal["shared", "whole"] = 1
    packed_in: int | None = None

    def span(self, start: int, limit: int, stride: int, size: int) -> Any:
        """Convert a slice of the dense axis to `(start, limit, stride)` in the leaf.

        `size` is the length of the dense axis. Return None if the slice does not consist of whole
        blocks, or if `block` is not a number.
        """
        block = self.block
        if block == 1:
            return start, limit, stride
        if isinstance(block, str) or stride != 1 or start % block:
            return None
        if limit != size and limit % block:
            return None
        entries_per_block = self.packed_in or 1
        block_limit = -(-limit // block)  # rounded up, because the last block may be partly empty
        return start // block * entries_per_block, block_limit * entries_per_block, 1


class Movement(NamedTuple):
    """The effect of a primitive such as `transpose` on the axes of its operand.

    `shape` is the shape of the result. `axes[i]` is the index in the result of the operand's axis
    `i`, or None if the result does not have it. `reorders` is True if axes are permuted, merged or
    split.
    """

    shape: Shape  # the shape of the result
    axes: tuple[int | None, ...]  # for each axis of the operand, its index in the result; or None
    reorders: bool = False  # whether axes are permuted, merged or split


def aligned_axes(ndim: int) -> tuple[LeafAxis, ...]:
    """Return the `LeafAxis` of each axis of a leaf that has the shape of the dense array."""
    return tuple(map(LeafAxis, range(-ndim, 0)))


def are_valid_axes(axes: Any, ndims: list[int]) -> bool:
    """Return whether `axes[i]` has a `LeafAxis` or None for each of `ndims[i]` axes of leaf `i`."""
    if not isinstance(axes, list | tuple) or not all(isinstance(a, list | tuple) for a in axes):
        return False
    has_valid_entries = all(isinstance(x, LeafAxis | None) for entries in axes for x in entries)
    return has_valid_entries and list(map(len, axes)) == ndims


def partition_leaves(
    axes: Sequence[Axes], spec: PartitionSpec, old: Shape, new: Shape
) -> list[PartitionSpec] | None:
    """Return the `PartitionSpec` of each leaf for `spec`, a `PartitionSpec` of the dense array.

    `axes` is the result of `leaf_axes`. `old` is the shape of the dense array. `new` is the shape
    of one shard, if the array is split over devices, or of the whole array, if shards are joined.
    Return None if the border of a shard would cut through a block. A leaf has one entry along an
    axis with `block="shared"`. It is replicated, so its entry in the `PartitionSpec` is None.
    """

    def spec_entry(axis: LeafAxis | None) -> Any:
        if axis is None or (axis.block == "shared" and new[axis.axis] < old[axis.axis]):
            return None
        return None if axis.block == "whole" else spec[axis.axis]

    for axis in (axis for leaf_axes in axes for axis in leaf_axes if axis is not None):
        # Count dense elements, because the number of leaf entries can be divisible although a part
        # ends inside a block.
        part_size, full_size = sorted((old[axis.axis], new[axis.axis]))
        block = axis.block
        cuts_block = block == "whole" or (isinstance(block, int) and part_size % block)
        if part_size != full_size and cuts_block:
            return None
    return [PartitionSpec(*map(spec_entry, leaf_axes)) for leaf_axes in axes]
