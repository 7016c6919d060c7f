"""`BlockCache`, a cache in which blocks of tokens share scales."""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.leaf_axes import LeafAxis, Movement
from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..._core.primitives.writing import stored_as
from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._core.tree import static
from ..._core.value import Value
from ..._jax.primitives import find_primitive, start_in_bounds
from .qcache import QCache


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
        """Update `axis` after a primitive, such as `transpose`, was applied to the leaves."""
        axis = movement.axes[self.axis]
        assert axis is not None  # leaf_axes does not allow the removal of the token axis
        new = object.__new__(BlockCache)  # without checks: the leaves can be of any type here
        new.__dict__.update(self.__dict__ | {"axis": axis - len(movement.shape)})
        return new


def _join_blocks(blocks: jax.Array, axis: int) -> jax.Array:
    """Concatenate `blocks[0], blocks[1], ...` along the axis `axis` of each block."""
    moved = jnp.moveaxis(blocks, 0, axis)
    *before, count, size = moved.shape[: axis + 2]
    return moved.reshape(*before, count * size, *moved.shape[axis + 2 :])


@register("dynamic_update_slice")
def _dynamic_update_slice(cache: BlockCache, update: ArrayLike, *starts: ArrayLike) -> Any:
    """Return the cache after a dense update, with only the changed blocks quantized again.

    The last changed block becomes the newest block. Return NotImplemented, which materializes the
    cache, if the update or a start is an implicit array.
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
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
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
