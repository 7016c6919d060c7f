"""`BlockCache`, a cache in which blocks of tokens share scales."""

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
        blocks, *shape = stored.shape
        shape[self.axis] *= blocks
        return stored.update(shape=tuple(shape))

    def materialise(self) -> jax.Array:
        """Return the dense array of all tokens, with the newest block in full precision."""
        dense = _join_blocks(self.blocks.dequantize(), self.ndim + self.axis)
        start = self.place * self.newest.shape[self.axis]
        return lax.dynamic_update_slice_in_dim(dense, self.newest, start, self.axis)

    def leaf_axes(self) -> Any:
        """Return one list per stored array, with an entry for each of its axes.

        An entry is a `vn.LeafAxis`. The first axis of `blocks`, which counts the blocks, has None
        instead. The token axis cannot be sliced.
        """
        whole = LeafAxis(self.axis, "whole")
        newest = [LeafAxis(i) if i != self.axis else whole for i in range(-self.ndim, 0)]
        return [[None, *newest], newest, []]

    def _moved(self, movement: Movement) -> "BlockCache":
        axis = movement.axes[self.axis]
        assert axis is not None
        new = object.__new__(BlockCache)
        new.__dict__.update(self.__dict__ | {"axis": axis - len(movement.shape)})
        return new


def _join_blocks(blocks: jax.Array, axis: int) -> jax.Array:
    """Concatenate `[blocks, ...]` along another axis of each block."""
    moved = jnp.moveaxis(blocks, 0, axis)
    *before, count, size = moved.shape[: axis + 2]
    return moved.reshape(*before, count * size, *moved.shape[axis + 2 :])


@register("dynamic_update_slice")
def _dynamic_update_slice(cache: BlockCache, update: ArrayLike, *starts: ArrayLike) -> Any:
    """Quantize the blocks that are written into again. The last of them becomes the newest."""
    if any(isinstance(x, Value) for x in (update, *starts)):
        return NotImplemented
    update, axis = jnp.asarray(update), cache.ndim + cache.axis
    size, length = cache.newest.shape[axis], update.shape[axis]
    if update.size == 0:
        return cache
    inner = [*map(start_in_bounds, starts, cache.shape, update.shape)]
    start = inner[axis]
    # Read a window of as many blocks as the update can touch, wherever it begins.
    count = min((length - 2) // size + 2, cache.shape[axis] // size)
    first = jnp.minimum(start // size, cache.shape[axis] // size - count)
    old = redispatch(lambda x, at: lax.dynamic_slice_in_dim(x, at, count), cache.blocks, first)
    window = _join_blocks(old.dequantize(), axis)
    # If the newest block is in the window, use its values in full precision.
    newest_in_window = cache.place - first
    full = lax.dynamic_update_slice_in_dim(
        window, cache.newest, jnp.clip(newest_in_window, 0, count - 1) * size, axis
    )
    window = jnp.where((newest_in_window >= 0) & (newest_in_window < count), full, window)
    inner[axis] = start - first * size
    window = lax.dynamic_update_slice(window, update, inner)

    place = (start + length - 1) // size
    newest = lax.dynamic_slice_in_dim(window, (place - first) * size, size, axis)
    split = window.reshape(*window.shape[:axis], count, size, *window.shape[axis + 1 :])
    new = stored_as(cache.blocks, jnp.moveaxis(split, axis, 0), range(split.ndim), lambda: old)
    # Other blocks of the window are not replaced, because a second rounding can change values.
    index = first + jnp.arange(count)
    is_new = (index >= start // size) & (index <= place)
    choose = lambda new, old: jnp.where(jnp.expand_dims(is_new, [*range(1, new.ndim)]), new, old)
    write = lambda blocks, part, at: lax.dynamic_update_slice_in_dim(blocks, part, at, 0)
    blocks = redispatch(write, cache.blocks, jax.tree.map(choose, new, old), first)
    return BlockCache(blocks, newest, place.astype(jnp.int32), cache.axis)


@register("dot_general")
def _dot_general_of_cache(cache: BlockCache, x: ArrayLike, **params: Any) -> Any:
    return _multiply(cache, x, 0, params)


@register("dot_general")
def _dot_general_with_cache(x: ArrayLike, cache: BlockCache, **params: Any) -> Any:
    return _multiply(cache, x, 1, params)


def _multiply(cache: BlockCache, x: ArrayLike, side: int, params: dict[str, Any]) -> Any:
    """Return the product of a cache, which is operand 0 or 1 (`side`), and a dense array.

    The product with all blocks multiplies the scales of each block into `x`. The product with the
    newest block in full precision then replaces a part of the result.
    """
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    axis, free = cache.ndim + cache.axis, numbers.free(side, cache.ndim)
    if isinstance(x, Value) or axis not in free or params["out_sharding"] is not None:
        return NotImplemented
    before = len(numbers.free(1 - side, jnp.ndim(x))) if side else 0
    token_axis = len(numbers.batch[0]) + before + free.index(axis)  # in the result
    multiply = lambda *pair: find_primitive("dot_general").bind(*pair, **params)
    in_order = lambda cached, x: (x, cached) if side else (cached, x)
    # vmap makes blocks a batch axis. `x` is repeated because each block scales it differently.
    repeated = jnp.broadcast_to(x, (len(cache.blocks), *jnp.shape(x)))
    out = redispatch(jax.vmap(multiply), *in_order(cache.blocks, repeated))
    start = cache.place * cache.newest.shape[axis]
    return lax.dynamic_update_slice_in_dim(
        _join_blocks(out, token_axis), multiply(*in_order(cache.newest, x)), start, token_axis
    )
