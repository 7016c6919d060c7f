"""Rules for primitives that move values about: a QArray in, a QArray out, no code unpacked.

Each does to the leaves what the primitive does to the values. A leaf is coarser than the values: an
entry of the scale covers a tile, a byte on the packed axis covers two codes. Both are called a
*block* here. Where the primitive would cut a block in two, the rule returns NotImplemented, and the
operand is materialised.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..packing import Packing
from ..qarray import QArray
from ..tiles import Leaf, Shape


def _rebuild(q: QArray, leaves: Sequence[jax.Array], shape: Shape) -> QArray:
    """Returns `q` with other leaves, which stand for values of `shape`."""
    new = jax.tree.unflatten(jax.tree.structure(q), leaves)
    # The packed axis is the one with fewer bytes than codes. Of size 1 it needs no unpacking.
    axes = [i for i, size in enumerate(shape) if new.packed.shape[i] != size]
    packing = Packing(axes[0] - len(shape), shape[axes[0]]) if axes else None
    return new.replace(packing=packing)


def _blocks(leaf: Leaf, shape: Shape) -> list[int]:
    """Counts the values that an entry of `leaf` covers along each axis. The last may have fewer."""
    return [max(1, -(-size // max(1, n))) for size, n in zip(shape, leaf.shape, strict=True)]


@register("convert_element_type")
def _convert_element_type(q: QArray, *, new_dtype, weak_type, sharding) -> Any:
    if weak_type or sharding is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q.replace(dense_dtype=new_dtype)


@register("transpose")
def _transpose(q: QArray, *, permutation) -> Any:
    leaves = [lax.transpose(leaf, permutation) for leaf in jax.tree.leaves(q)]
    return _rebuild(q, leaves, tuple(q.shape[axis] for axis in permutation))


@register("squeeze")
def _squeeze(q: QArray, *, dimensions) -> Any:
    leaves = [lax.squeeze(leaf, dimensions) for leaf in jax.tree.leaves(q)]
    return _rebuild(q, leaves, tuple(n for i, n in enumerate(q.shape) if i not in dimensions))


@register("broadcast_in_dim")
def _broadcast_in_dim(q: QArray, *, shape, broadcast_dimensions, sharding) -> Any:
    if sharding is not None:
        return NotImplemented
    leaves = []
    for leaf in jax.tree.leaves(q):
        # Every leaf has the new axes in full, so that vmap and scan may take them off again. Along
        # an axis that grows from 1, the values go on sharing a scale.
        new_shape = list(shape)
        for i, axis in enumerate(broadcast_dimensions):
            if leaf is not q.packed or q.shape[i] == shape[axis]:
                new_shape[axis] = leaf.shape[i]
        leaves.append(lax.broadcast_in_dim(leaf, new_shape, broadcast_dimensions))
    return _rebuild(q, leaves, shape)


@register("slice")
def _slice(q: QArray, *, start_indices, limit_indices, strides) -> Any:
    strides = strides or (1,) * q.ndim
    leaves = []
    for leaf in jax.tree.leaves(q):
        cuts = []
        for axis, block in enumerate(_blocks(leaf, q.shape)):
            size, start, limit = q.shape[axis], start_indices[axis], limit_indices[axis]
            if (start, limit, strides[axis]) == (0, size, 1) or _is_shared(leaf, axis, q):
                cuts.append((0, leaf.shape[axis], 1))
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
        leaves.append(lax.slice(leaf, *zip(*cuts, strict=True)) if cuts else leaf)
    spans = zip(start_indices, limit_indices, strides, strict=True)
    return _rebuild(q, leaves, tuple(len(range(*span)) for span in spans))


@register("dynamic_slice")
def _dynamic_slice(q: QArray, *start_indices: ArrayLike, slice_sizes) -> Any:
    leaves = []
    for leaf in jax.tree.leaves(q):
        sizes = list(slice_sizes)
        for axis, block in enumerate(_blocks(leaf, q.shape)):
            if slice_sizes[axis] == q.shape[axis] or _is_shared(leaf, axis, q):
                sizes[axis] = leaf.shape[axis]  # all of it: any start is clamped to 0
            elif block > 1:
                return NotImplemented
        leaves.append(lax.dynamic_slice(leaf, start_indices, sizes))
    return _rebuild(q, leaves, slice_sizes)


def _is_shared(leaf: Leaf, axis: int, q: QArray) -> bool:
    """Whether any values along the axis go with the leaf's one entry: codes never share."""
    return leaf is not q.packed and leaf.shape[axis] == 1


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
    leaves = []
    for leaf in jax.tree.leaves(q):
        sizes = list(slice_sizes)
        divisors = [1] * q.ndim
        for axis, block in enumerate(_blocks(leaf, q.shape)):
            if slice_sizes[axis] == q.shape[axis]:
                sizes[axis] = leaf.shape[axis]
            elif block > 1:
                batched = axis in dimension_numbers.operand_batching_dims
                if leaf is q.packed or slice_sizes[axis] != 1 or batched:
                    return NotImplemented
                divisors[axis] = block
        leaves.append(
            lax.gather(
                leaf,
                _entries(indices, [divisors[i] for i in dimension_numbers.start_index_map]),
                dimension_numbers,
                sizes,
                unique_indices=unique_indices and max(divisors, default=1) == 1,
                indices_are_sorted=indices_are_sorted,
                mode=mode,
                # The default for a float is NaN. What a scale of NaN multiplies does not matter.
                fill_value=None if leaf is q.scale else 0,
            )
        )
    return _rebuild(q, leaves, _gathered_shape(indices.shape, slice_sizes, dimension_numbers))


def _entries(indices: jax.Array, divisors: list[int]) -> jax.Array:
    """Finds the entry that covers each index. Floor division keeps out of bounds what is."""
    if set(divisors) <= {1}:
        return indices
    if jnp.iinfo(indices.dtype).bits < 32:  # too few for the divisors, perhaps
        indices = indices.astype(jnp.int32)
    return indices // jnp.array(divisors, indices.dtype)


def _gathered_shape(indices: Shape, slice_sizes: Shape, dimension_numbers: Any) -> Shape:
    gone = {*dimension_numbers.collapsed_slice_dims, *dimension_numbers.operand_batching_dims}
    offsets = iter([size for axis, size in enumerate(slice_sizes) if axis not in gone])
    batch = iter(indices[:-1])
    ndim = len(slice_sizes) - len(gone) + len(indices) - 1
    return tuple(
        next(offsets if axis in dimension_numbers.offset_dims else batch) for axis in range(ndim)
    )


@register("concatenate")
def _concatenate(*operands: QArray, dimension) -> Any:
    kinds = {(q.qtype, q.dense_dtype, len(jax.tree.leaves(q))) for q in operands}
    if len(kinds) > 1 or any(q.size == 0 for q in operands):
        return NotImplemented
    leaves = []
    for column in zip(*map(jax.tree.leaves, operands), strict=True):
        blocks, *others = (_blocks(leaf, q.shape) for leaf, q in zip(column, operands, strict=True))
        short = any(q.shape[dimension] % blocks[dimension] for q in operands[:-1])
        if short or any(other != blocks for other in others):
            return NotImplemented
        leaves.append(lax.concatenate(column, dimension))
    shape = list(operands[0].shape)
    shape[dimension] = sum(q.shape[dimension] for q in operands)
    return _rebuild(operands[0], leaves, tuple(shape))


@register("stack")
def _stack(*operands: QArray, axis) -> Any:
    return _concatenate(*(_expand(q, axis) for q in operands), dimension=axis)


def _expand(q: QArray, axis: int) -> QArray:
    leaves = [lax.expand_dims(leaf, [axis]) for leaf in jax.tree.leaves(q)]
    return _rebuild(q, leaves, (*q.shape[:axis], 1, *q.shape[axis:]))


@register("split")
def _split(q: QArray, *, sizes, axis) -> Any:
    pieces = []
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        starts, limits = [0] * q.ndim, list(q.shape)
        starts[axis], limits[axis] = end - size, end
        pieces.append(_slice(q, start_indices=starts, limit_indices=limits, strides=None))
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


@register("reshape")
def _reshape(q: QArray, *, new_sizes, dimensions, sharding) -> Any:
    if dimensions is not None or sharding is not None or q.size == 0:
        return NotImplemented
    leaves = []
    for leaf in jax.tree.leaves(q):
        shape = _reshaped(leaf.shape, q.shape, new_sizes)
        if shape is None:
            return NotImplemented
        leaves.append(lax.reshape(leaf, shape))
    return _rebuild(q, leaves, new_sizes)


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
