"""Leaf axes: how the axes of the stored leaves correspond to the axes of the dense array."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

Shape = tuple[int, ...]


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
        """Map a dense slice to `(start, limit, stride)` in the leaf. None if it splits a block."""
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
    """A change of the axes of the dense array."""

    shape: Shape  # the new dense shape
    axes: tuple[int | None, ...]  # the new index of each old axis; None if removed or merged
    reorders: bool = False  # whether axes are permuted, merged or split


Axes = Sequence[LeafAxis | None]  # an entry for each axis of a leaf; None: no dense axis


def aligned_axes(ndim: int) -> tuple[LeafAxis, ...]:
    """Return the leaf axes of a leaf with the shape of the dense array."""
    return tuple(map(LeafAxis, range(-ndim, 0)))


def are_valid_axes(axes: Any, ndims: list[int]) -> bool:
    """Return whether the result of `leaf_axes` has an entry for each axis of each leaf."""
    if not isinstance(axes, list | tuple) or not all(isinstance(a, list | tuple) for a in axes):
        return False
    if [len(of_leaf) for of_leaf in axes] != ndims:
        return False
    return all(axis is None or isinstance(axis, LeafAxis) for of_leaf in axes for axis in of_leaf)


def partition_leaves(
    axes: Sequence[Axes], spec: PartitionSpec, old: Shape, new: Shape
) -> list[PartitionSpec] | None:
    """Return the `PartitionSpec` of each leaf for a `PartitionSpec` of the dense array.

    Return None if a block would be cut. `old` and `new` are the dense shapes before and after the
    array is cut or joined. Each part of an array gets a copy of an entry that all elements share.
    """

    def entry(axis: LeafAxis | None) -> Any:
        if axis is None or (axis.block == "shared" and new[axis.axis] < old[axis.axis]):
            return None
        return None if axis.block == "whole" else spec[axis.axis]

    for axis in (axis for of_leaf in axes for axis in of_leaf if axis is not None):
        # Each part must end with a whole block. The number of bytes can be divisible although the
        # number of codes is not: two blocks of 6 codes, stored in units of 8.
        small, large = sorted((old[axis.axis], new[axis.axis]))
        cut = axis.block == "whole" or (isinstance(axis.block, int) and small % axis.block)
        if small != large and cut:
            return None
    return [PartitionSpec(*map(entry, of_leaf)) for of_leaf in axes]
