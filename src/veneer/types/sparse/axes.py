"""Rules for primitives that move, drop, add and cut axes of sparse arrays."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._jax.primitives import start_in_bounds
from .array import SparseArray
from .entries import Axes


def arranged(x: SparseArray, batch: Axes, sparse: Axes) -> Any:
    """x with its axes in this order, the first as batch axes; summed over the axes that are left.

    A batch axis may become a sparse one: the entries of all its batches are put together. Dense if
    no sparse axis is to be left.
    """
    entries = x.entries()
    folded = [axis for axis in range(x.n_batch) if axis not in batch]
    shape = [entries.sizes[axis] for axis in batch]
    shape.append(math.prod(entries.sizes[axis] for axis in folded) * x.nse)
    put = lambda leaf: lax.transpose(leaf, (*batch, *folded, x.n_batch)).reshape(shape)
    data = put(entries.data)
    if not sparse:
        return data.sum(-1, dtype=data.dtype)
    indices = jnp.stack([put(entries.columns[axis]) for axis in sparse], -1)
    summed = any(n != 1 for i, n in enumerate(entries.sizes) if i not in (*batch, *sparse))
    sizes = tuple(entries.sizes[axis] for axis in sparse)
    return SparseArray(data, indices, sizes, x.unique_indices and not summed)


def _in_order(x: SparseArray, axes: Axes) -> Any:
    """x with these axes in this order; batch axes stay such as long as no sparse one precedes."""
    count = next((i for i, axis in enumerate(axes) if axis >= x.n_batch), len(axes))
    return arranged(x, axes[:count], axes[count:])


@register("transpose")
def _transpose(x: SparseArray, *, permutation: Any) -> Any:
    return _in_order(x, permutation)


@register("reduce_sum")
def _reduce_sum(x: SparseArray, *, axes: Any, out_sharding: Any) -> Any:
    if out_sharding is not None:
        return NotImplemented
    return _in_order(x, [axis for axis in range(x.ndim) if axis not in axes])


@register("squeeze")
def _squeeze(x: SparseArray, *, dimensions: Any) -> Any:
    return _in_order(x, [axis for axis in range(x.ndim) if axis not in dimensions])


def broadcast(x: SparseArray, shape: tuple[int, ...]) -> SparseArray | jax.Array:
    """Return x in this shape, by NumPy's rules. It is dense if no sparse axis keeps its size."""
    if x.shape == shape:
        return x
    own = range(len(shape) - x.ndim, len(shape))
    return _broadcast_in_dim(x, shape=shape, broadcast_dimensions=own, sharding=None)


@register("broadcast_in_dim")
def _broadcast_in_dim(
    x: SparseArray, *, shape: Any, broadcast_dimensions: Any, sharding: Any
) -> Any:
    if sharding is not None:
        return NotImplemented
    source = {to: axis for axis, to in enumerate(broadcast_dimensions)}
    new = [to for to, n in enumerate(shape) if to not in source or x.shape[source[to]] != n]
    # First as batch axes, after those of x; then each is put in its place.
    own, b = x.data.shape[:-1], x.n_batch
    more = [shape[to] for to in new]
    repeat = lambda leaf: jnp.broadcast_to(
        lax.expand_dims(leaf, range(b, b + len(new))), (*own, *more, *leaf.shape[b:])
    )
    repeated = SparseArray(
        repeat(jnp.asarray(x.data)), repeat(jnp.asarray(x.indices)), *x.pattern[1:]
    )
    moved = lambda axis: axis if axis < b else axis + len(new)
    place = {to: moved(axis) for to, axis in source.items()}
    place |= {to: b + i for i, to in enumerate(new)}
    return _in_order(repeated, [place[to] for to in range(len(shape))])


@register("reshape")
def _reshape(x: SparseArray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    if dimensions is not None or sharding is not None:
        return NotImplemented
    new, sparse = tuple(new_sizes), len(x.sparse_shape)
    batch = x.data.shape[:-1]
    if new[-sparse:] == x.sparse_shape and math.prod(new[:-sparse]) == math.prod(batch):
        data = jnp.reshape(x.data, (*new[:-sparse], x.nse))
        return SparseArray(data, jnp.reshape(x.indices, (*data.shape, sparse)), *x.pattern[1:])
    kept = 0  # the first batch axes, which stay as they are
    while kept < min(len(batch), len(new)) and batch[kept] == new[kept]:
        kept += 1
    x = arranged(x, range(kept), range(kept, x.ndim))
    if math.prod(x.sparse_shape) > jnp.iinfo(jnp.int32).max:
        return NotImplemented  # an entry's place would overflow
    entries = x.entries()
    place: Any = 0
    for column, size in zip(entries.columns[kept:], x.sparse_shape, strict=True):
        place = place * size + column.astype(jnp.int32)
    columns = []
    for size in reversed(new[kept:]):
        columns.append(jnp.where(entries.is_entry, place % max(size, 1), size))
        place = place // max(size, 1)
    if not columns:
        return entries.data.sum(-1, dtype=x.dtype)
    return SparseArray(entries.data, jnp.stack(columns[::-1], -1), new[kept:], x.unique_indices)


@register("slice")
def _slice(x: SparseArray, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    from jax.experimental import sparse

    cut = {"start_indices": start_indices, "limit_indices": limit_indices, "strides": strides}
    return _part_of(x, sparse.bcoo_slice(x.to_bcoo(), **cut))


@register("dynamic_slice")
def _dynamic_slice(x: SparseArray, *start_indices: ArrayLike, slice_sizes: Any) -> Any:
    from jax.experimental import sparse

    # bcoo_dynamic_slice counts negative starts from the end, which the primitive clamps.
    starts = [
        start_in_bounds(start, size, cut)
        for start, size, cut in zip(start_indices, x.shape, slice_sizes, strict=True)
    ]
    return _part_of(x, sparse.bcoo_dynamic_slice(x.to_bcoo(), starts, slice_sizes))


def _part_of(x: SparseArray, bcoo: Any) -> SparseArray:
    part = SparseArray.from_bcoo(bcoo)
    # The slice had its entries summed by index if there were more of them than places.
    unique = x.unique_indices or part.nse < x.nse
    return SparseArray(part.data, part.indices, part.sparse_shape, unique)
