"""Quantized arrays that programs write into, such as key-value caches.

- `QCache` quantizes new values with new scales.
- In a `BlockCache`, blocks of tokens share scales, and the newest block has full precision.
- `zeros` creates both.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._core.leaf_axes import LeafAxis, Movement
from .._core.primitives.axes import DotDimensionNumbers
from .._core.primitives.writing import stored_as
from .._core.rules import register
from .._core.surface.array import ImplicitArray
from .._core.trace import redispatch
from .._core.tree import static
from .._core.value import Value, make_dense
from .._jax.primitives import find_primitive, start_in_bounds
from .arrays import QUANTIZABLE, QArray
from .conversion.compute import QuantizeParams, quantize_with_params
from .conversion.quantize import Axes, TiledAxes, quantize_as, quantize_params
from .formats import get_format
from .formats.format import round_to_dtype
from .formats.packing import pack, unpack
from .formats.tiles import Shape, normalize_axis, over_tiles, split_tiles, tile_shape


class QCache(QArray):
    """A quantized array that stays quantized when a program writes into it.

    `jax.lax.dynamic_update_slice`, `.at[...].set` and `jnp.concatenate` quantize the new values to
    the format of the cache, with new scales. Writing into a `QArray` that is not a cache
    materializes it. All other operations are the same as for `QArray`. `vn.quant.zeros` creates a
    cache.

    A write must replace whole groups of values that share a scale. Writing a part of a group
    materializes the array, and `vn.explain` reports it.

    Values that a program reads and writes back do not change. For this, a cache computes its scales
    differently from `vn.quant.quantize`. In int4, for example, the scale of a group is its largest
    magnitude divided by 7 instead of 7.5. If this is not exact, as for a bfloat16 cache, each write
    also compares new and old values, and groups with equal values keep their codes.

    **Arguments:** the same as for `QArray`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> cache = vn.quant.zeros((4, 8), "int8", channelwise_axes=[0])
    >>> write = vn.implicit(lambda cache, row: jax.lax.dynamic_update_slice(cache, row, (1, 0)))
    >>> cache = write(cache, jnp.ones((1, 8)))
    >>> type(cache).__name__, cache.dequantize()[:, 0].round(1).tolist()
    ('QCache', [0.0, 1.0, 0.0, 0.0])
    """

    is_cache: ClassVar[bool] = True

    __init__ = QArray.__init__  # Otherwise, the dataclass decorator would generate a constructor.

    @classmethod
    def from_qarray(cls, q: QArray) -> "QCache":
        """Return a QCache with the same stored arrays and format as a QArray."""
        new = cls.__new__(cls)
        new.__dict__.update(q.changed().__dict__)  # `changed` copies only the fields
        return new


@stored_as.register
def _quantize_update(
    cache: QCache,
    update: Any,
    axes: Sequence[int | None],
    read_replaced: Callable[[], Any] | None = None,
) -> Any:
    """Return `update`, which is written into `cache`, as a QCache in the format of the cache.

    `axes` holds the axis of the cache for each axis of the update. It holds None for an axis that
    stacks separate updates, as in `scatter`. `read_replaced` returns the values to be replaced.

    Return NotImplemented, which materializes the cache, if the update covers only a part of a group
    of values that share a scale, or if the cache has quantized scales or minima.
    """
    scale_shape = _update_scale_shape(cache, jnp.shape(update), axes)
    if scale_shape is None or isinstance(cache.scale, QArray) or cache.minimum is not None:
        return NotImplemented
    if isinstance(update, QArray) and _describe_format(update) == _describe_format(cache):
        leaves = (update.scale, update.zero_point)
        if all(leaf.shape == scale_shape for leaf in leaves if leaf is not None):
            return QCache.from_qarray(update)  # keep its codes and scales
    if isinstance(update, Value):
        (update,) = make_dense(find_primitive("dynamic_update_slice"), [update])
    q = quantize_as(update, cache, scale_shape)
    if cache.packing is not None:
        q = repack(q, cache.packing.axis)
    # In these dtypes, quantizing dequantized values gives the old codes and scales, because
    # `code * scale` is exact if the scale is not subnormal. In other dtypes, compare the values.
    is_exact = cache.dtype in (jnp.float32, jnp.float64) and cache.dtype == cache.scale.dtype
    if read_replaced is not None and not is_exact:
        q = _keep_equal_groups(q, update, read_replaced())
    return QCache.from_qarray(q)


def _update_scale_shape(cache: QCache, shape: Shape, axes: Sequence[int | None]) -> Shape | None:
    """Return the shape of the scales of an update, or None if the update covers a part of a group.

    `shape` is the shape of the update, and `axes` has the same meaning as in `_quantize_update`.
    """
    scale_shape = []
    for size, axis in zip(shape, axes, strict=True):
        if axis is None or cache.scale.shape[axis] == cache.shape[axis]:
            scale_shape.append(size)  # Each index has its own scale.
        elif (tile := cache.tile_shape[axis]) and size % tile == 0:
            scale_shape.append(size // tile)
        elif tile == size == 0:
            scale_shape.append(1)  # The values of an empty axis share one scale.
        else:
            return None
    return tuple(scale_shape)


def _describe_format(q: QArray) -> Any:
    """Return the format, packing and dtypes of an array.

    If two QArrays have equal descriptions, codes and scales of one can be copied to the other.
    """
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(q)]
    return q.qtype, q.packing and q.packing.axis, q.dense_dtype, dtypes


def _keep_equal_groups(new: QArray, update: jax.Array, old: QArray) -> QArray:
    """Return `new` with the codes and scales of `old` in groups where `update` equals `old`.

    `new` is the quantized `update`, and `old` holds the values that it replaces. A group is the
    values that share a scale.
    """
    leaf_shapes = lambda q: [leaf.shape for leaf in jax.tree.leaves(q)]
    if leaf_shapes(new) != leaf_shapes(old):
        return new
    # XLA can compute dequantized values on GPU with more bits than their dtype has.
    rounded = lambda x: round_to_dtype(x, new.dtype)
    # `split_tiles` splits each axis in two: the groups, and the values within a group.
    is_equal = split_tiles(rounded(update) == rounded(old.dequantize()), new.scale.shape)
    is_equal = is_equal.all(range(1, is_equal.ndim, 2))
    is_equal_per_value = over_tiles(jnp.logical_or, jnp.zeros(new.shape, bool), is_equal)
    codes = jnp.where(is_equal_per_value, old.codes(), new.codes())
    scales = {
        name: jnp.where(is_equal, getattr(old, name), getattr(new, name))
        for name in ("scale", "zero_point")
        if getattr(new, name) is not None
    }
    return new.with_codes(codes).changed(**scales)


def repack(q: QArray, axis: int) -> QArray:
    """Return a QArray with the same values, whose codes are packed along the axis `axis`.

    `axis` is counted from the end. Codes that are stored one per byte stay unpacked.
    """
    if q.packing is None or q.packing.axis == axis:
        return q
    bits = q.format.bits
    packed, packing = pack(unpack(q.packed, q.packing, bits), bits, axis)
    return q.changed(packed=packed, packing=packing)


class BlockCache(ImplicitArray):
    """A quantized cache in which blocks of tokens share scales.

    Each block has one scale per channel, like the keys in KIVI (Liu et al., 2024, arXiv
    2402.02750). A new token can change the scales of its block. For this reason, the newest block
    is also stored in full precision, and is quantized again with each new token. To create a cache,
    call `vn.quant.zeros` with `block_axis`.

    The cache stays quantized in four operations: `jax.lax.dynamic_update_slice`, products that do
    not contract the token axis, transposes, and slices that keep all tokens. All other operations
    materialize the array.

    **Arguments:**

    - `blocks`: a `QCache` with all blocks, `[blocks, ..., tokens per block, ...]`.
    - `newest`: the newest block, `[..., tokens per block, ...]`, in the dtype of the dense array.
    - `place`: the index of the newest block in `blocks`, an int32 scalar.
    - `axis`: the token axis, counted from the end.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> keys = vn.quant.zeros((8, 4), "int4", tiled_axes={0: 4}, channelwise_axes=[1], block_axis=0)
    >>> write = vn.implicit(lambda keys, key: jax.lax.dynamic_update_slice(keys, key, (2, 0)))
    >>> type(jax.eval_shape(write, keys, jnp.ones((1, 4)))).__name__, keys.newest.shape
    ('BlockCache', (4, 4))
    """

    metadata_is_meaning: ClassVar[bool] = False
    is_cache: ClassVar[bool] = True

    blocks: QCache
    newest: jax.Array
    place: jax.Array
    axis: int = static()

    def aval(self) -> jax.core.ShapedArray:
        """Return the shape and dtype of the dense array."""
        stored = self.blocks.aval()
        num_blocks, *shape = stored.shape
        shape[self.axis] *= num_blocks
        return stored.update(shape=tuple(shape))

    def materialise(self) -> jax.Array:
        """Return the dense array of all tokens, with the newest block in full precision."""
        dense = _join_blocks(self.blocks.dequantize(), self.ndim + self.axis)
        start = self.place * self.newest.shape[self.axis]
        return lax.dynamic_update_slice_in_dim(dense, self.newest, start, self.axis)

    def leaf_axes(self) -> Any:
        """Return a list each for `blocks`, `newest` and `place`: the `vn.LeafAxis` of each axis.

        The entry of the first axis of `blocks` is None, because no dense axis matches this axis.
        """
        token_axis = LeafAxis(self.axis, "whole")  # "whole": it cannot be sliced
        newest = [LeafAxis(i) if i != self.axis else token_axis for i in range(-self.ndim, 0)]
        return [[None, *newest], newest, []]

    def _moved(self, movement: Movement) -> "BlockCache":
        """Return a copy with a new `axis`, the token axis, after a primitive moved the axes.

        `movement` describes the primitive, such as `transpose`, which was applied to the leaves.
        """
        axis = movement.axes[self.axis]
        assert axis is not None  # leaf_axes does not allow the removal of the token axis
        new = object.__new__(BlockCache)  # without checks: the leaves can be of any type here
        new.__dict__.update(self.__dict__ | {"axis": axis - len(movement.shape)})
        return new


def _join_blocks(blocks: jax.Array, axis: int) -> jax.Array:
    """Concatenate blocks, which are stacked along the first axis of `blocks`.

    `axis` is the token axis of a single block, along which the blocks are joined.
    """
    moved = jnp.moveaxis(blocks, 0, axis)
    *before, count, size = moved.shape[: axis + 2]
    return moved.reshape(*before, count * size, *moved.shape[axis + 2 :])


@register("dynamic_update_slice")
def _dynamic_update_slice(cache: BlockCache, update: ArrayLike, *starts: ArrayLike) -> Any:
    """Return the cache after writing `update` at the indices `starts`, one index per axis.

    Only the blocks that change are quantized again. The last changed block becomes the newest
    block. Return NotImplemented, which materializes the cache, if the update or a start is an
    implicit array.
    """
    if any(isinstance(x, Value) for x in (update, *starts)):
        return NotImplemented
    update, axis = jnp.asarray(update), cache.ndim + cache.axis
    if update.size == 0:
        return cache
    block_size, length = cache.newest.shape[axis], update.shape[axis]
    num_blocks = cache.shape[axis] // block_size
    window_starts = [*map(start_in_bounds, starts, cache.shape, update.shape)]
    start = window_starts[axis]
    # Dequantize a window of blocks. `start` can be traced, so the window has the largest number of
    # blocks that any update of this length touches.
    count = min((length - 2) // block_size + 2, num_blocks)
    first_block = jnp.minimum(start // block_size, num_blocks - count)
    read = lambda blocks, index: lax.dynamic_slice_in_dim(blocks, index, count)
    old_blocks = redispatch(read, cache.blocks, first_block)
    window = _join_blocks(old_blocks.dequantize(), axis)
    # If the newest block is in the window, use its values in full precision.
    newest_index = cache.place - first_block
    newest_start = jnp.clip(newest_index, 0, count - 1) * block_size
    with_newest = lax.dynamic_update_slice_in_dim(window, cache.newest, newest_start, axis)
    window = jnp.where((newest_index >= 0) & (newest_index < count), with_newest, window)
    # Write the update into the window, and quantize the window.
    window_starts[axis] = start - first_block * block_size
    window = lax.dynamic_update_slice(window, update, window_starts)
    split = window.reshape(*window.shape[:axis], count, block_size, *window.shape[axis + 1 :])
    split = jnp.moveaxis(split, axis, 0)
    new_blocks = stored_as(cache.blocks, split, range(split.ndim), lambda: old_blocks)
    # Keep the codes of unchanged blocks of the window: a second rounding can change values.
    place = (start + length - 1) // block_size
    indices = first_block + jnp.arange(count)
    is_changed = (indices >= start // block_size) & (indices <= place)

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(is_changed, [*range(1, new.ndim)]), new, old)

    selected = jax.tree.map(select, new_blocks, old_blocks)
    write = lambda blocks, part, index: lax.dynamic_update_slice_in_dim(blocks, part, index, 0)
    blocks = redispatch(write, cache.blocks, selected, first_block)
    newest_start = (place - first_block) * block_size
    newest = lax.dynamic_slice_in_dim(window, newest_start, block_size, axis)
    return BlockCache(blocks, newest, place.astype(jnp.int32), cache.axis)


@register("dot_general")
def _dot_general_of_cache(cache: BlockCache, x: ArrayLike, **params: Any) -> Any:
    return _multiply(cache, x, 0, params)


@register("dot_general")
def _dot_general_with_cache(x: ArrayLike, cache: BlockCache, **params: Any) -> Any:
    return _multiply(cache, x, 1, params)


def _multiply(cache: BlockCache, x: ArrayLike, cache_index: int, params: dict[str, Any]) -> Any:
    """Return the `dot_general` of a cache, which is operand `cache_index` (0 or 1), and `x`.

    Multiply `x` by all quantized blocks. Then overwrite the part of the result that belongs to the
    newest block with the product of `x` and that block in full precision. Return NotImplemented,
    which materializes the cache, if the product contracts the token axis or has it as a batch axis.
    """
    numbers = DotDimensionNumbers.from_lax(params["dimension_numbers"])
    axis, free_axes = cache.ndim + cache.axis, numbers.free(cache_index, cache.ndim)
    if isinstance(x, Value) or axis not in free_axes or params["out_sharding"] is not None:
        return NotImplemented
    # The axes of the result are: batch axes, free axes of operand 0, free axes of operand 1.
    token_axis = len(numbers.batch[0]) + free_axes.index(axis)
    if cache_index == 1:
        token_axis += len(numbers.free(0, jnp.ndim(x)))
    dot_general = partial(find_primitive("dot_general").bind, **params)
    order_operands = lambda cached, x: (cached, x) if cache_index == 0 else (x, cached)
    # vmap makes blocks a batch axis. `x` is repeated because each block scales it differently.
    repeated = jnp.broadcast_to(x, (len(cache.blocks), *jnp.shape(x)))
    products = redispatch(jax.vmap(dot_general), *order_operands(cache.blocks, repeated))
    product = _join_blocks(products, token_axis)
    newest_product = dot_general(*order_operands(cache.newest, x))
    start = cache.place * cache.newest.shape[axis]
    return lax.dynamic_update_slice_in_dim(product, newest_product, start, token_axis)


def zeros(
    shape: Sequence[int],
    qtype: DTypeLike,
    *,
    dtype: DTypeLike = jnp.float32,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    block_axis: int | None = None,
) -> QCache | BlockCache:
    """Return a quantized array of zeros that programs write into, such as a KV cache.

    `jax.lax.dynamic_update_slice`, `.at[...].set` and `jnp.concatenate` quantize only the values
    that they write. If a program writes one token at a time, name the token axis in
    `channelwise_axes`, so that each token has its own scale.

    **Arguments:**

    - `shape`: the shape of the array. To start with an empty cache, give the token axis size 0 and
      name it in `channelwise_axes`. Each token that is concatenated then gets its own scale.
    - `qtype`, `channelwise_axes`, `tiled_axes`, `scale_dtype`: as for `vn.quant.quantize`.
    - `dtype`: the dtype of the dense array.
    - `calibration_method`: None or the name of the default method of the format, or "minmax" for
      scales with a zero point (integer formats only).
    - `block_axis`: the token axis, if blocks of tokens share scales, as in KIVI (arXiv 2402.02750).
      The axis must be one of `tiled_axes`, and its tile size is the block size. The newest block is
      also stored in full precision.

    **Returns:** a `QCache`, or a `BlockCache` if `block_axis` is given. Codes of fewer than 8 bits
    are packed along the last axis on which values share a scale. Each write then changes whole
    bytes.

    **Raises:**

    - `TypeError` if `dtype` is not floating.
    - `ValueError` if `vn.quant.quantize` would reject the arguments, if a size is negative, or if
      `block_axis` is not in `tiled_axes`.
    - `ValueError` if `calibration_method` is another method, or the format has quantized scales
      (nvfp4, nf4_dq).

    >>> import jax.numpy as jnp, veneer as vn
    >>> keys = vn.quant.zeros((8, 128, 64), "int8", channelwise_axes=[0, 1])
    >>> write = vn.implicit(lambda keys, key, at: keys.at[:, at].set(key))
    >>> keys = write(keys, jnp.ones((8, 64)), 3)
    >>> keys, keys.dequantize()[0, 2:5, 0].round(1).tolist()
    (QArray(q8[8,128,64] channelwise, 8.5 bits), [0.0, 1.0, 0.0])
    """
    format, shape = get_format(qtype), tuple(map(operator.index, shape))
    if any(size < 0 for size in shape):
        raise ValueError(f"shape must not have negative sizes, but is {shape}")
    if format.scale_tile is not None:
        raise ValueError(
            f"{format.name} has quantized scales, so a part of an array cannot be quantized alone: "
            "use another format for a cache"
        )
    if calibration_method not in (None, format.calibration, "minmax"):
        raise ValueError(
            f"calibration_method of a cache in {format.name} must be {format.calibration!r} or "
            f"'minmax', not {calibration_method!r}"
        )
    like = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if like.dtype not in QUANTIZABLE:
        raise TypeError(f"dtype must be floating, not {like.dtype.name}")
    params = quantize_params(
        like, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    if block_axis is not None:
        axis = normalize_axis(operator.index(block_axis), shape)
        if axis not in [int(i) % len(shape) for i in tiled_axes or ()]:
            raise ValueError(
                f"block_axis {block_axis} must be one of tiled_axes, which are "
                f"{[*(tiled_axes or ())]}"
            )
        return _zeros_in_blocks(shape, dtype, params, axis)
    # Bytes are packed along one axis. Quantize one row along this axis, and repeat its codes and
    # scales along all other axes.
    tile = tile_shape(shape, params.scale_shape)
    packed_axis = max((i for i, size in enumerate(tile) if size > 1), default=len(shape) - 1)
    row_shape, row_scale_shape = (
        tuple(size if i == packed_axis else 1 for i, size in enumerate(sizes))
        for sizes in (shape, params.scale_shape)
    )
    row_params = dataclasses.replace(params, scale_shape=row_scale_shape)
    row = quantize_with_params(jnp.zeros(row_shape, dtype), row_params)
    row = repack(row, packed_axis - len(shape))
    packed_shape = [row.packed.shape[i] if i == packed_axis else n for i, n in enumerate(shape)]
    repeat = lambda leaf: leaf if leaf is None else jnp.broadcast_to(leaf, params.scale_shape)
    return QCache.from_packed(
        jnp.broadcast_to(row.packed, packed_shape),
        repeat(row.scale),
        repeat(row.zero_point),
        qtype=qtype,
        packing=row.packing,
        dense_dtype=dtype,
    )


def _zeros_in_blocks(
    shape: Shape, dtype: DTypeLike, params: QuantizeParams, axis: int
) -> BlockCache:
    """Return a `BlockCache` of zeros with blocks along the token axis `axis`.

    `params` are the parameters to quantize an array of the whole `shape`.
    """
    num_blocks = params.scale_shape[axis]
    with_size = lambda sizes, size: (*sizes[:axis], size, *sizes[axis + 1 :])  # along `axis`
    newest = jnp.zeros(with_size(shape, shape[axis] // max(num_blocks, 1)), dtype)
    block_params = dataclasses.replace(params, scale_shape=with_size(params.scale_shape, 1))
    block = quantize_with_params(newest, block_params)
    blocks = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_blocks, *leaf.shape)), block)
    return BlockCache(QCache.from_qarray(blocks), newest, jnp.int32(0), axis - len(shape))
