"""`BlockCache`: a cache whose tokens share scales in blocks; the newest is kept in full."""

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
        dense = _joined(self.blocks.dequantize(), self.ndim + self.axis)
        return _put(dense, self.newest, self.place * self.newest.shape[self.axis], self.axis)

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


def _joined(blocks: jax.Array, axis: int) -> jax.Array:
    """The blocks, which are a first axis, one after the other along an axis of each."""
    apart = jnp.moveaxis(blocks, 0, axis)
    *before, count, size = apart.shape[: axis + 2]
    return apart.reshape(*before, count * size, *apart.shape[axis + 2 :])


def _put(x: jax.Array, part: jax.Array, start: Any, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)


@register("dynamic_update_slice")
def _dynamic_update_slice(cache: BlockCache, update: ArrayLike, *starts: ArrayLike) -> Any:
    """Rounds the blocks that are written into, with what is there; the last is the newest then."""
    if any(isinstance(x, Value) for x in (update, *starts)):
        return NotImplemented
    update, axis = jnp.asarray(update), cache.ndim + cache.axis
    size, length = cache.newest.shape[axis], update.shape[axis]
    if update.size == 0:
        return cache
    inner = [*map(start_in_bounds, starts, cache.shape, update.shape)]
    start = inner[axis]
    # So many blocks have what is written, wherever it begins.
    count = min((length - 2) // size + 2, cache.shape[axis] // size)
    begin = jnp.minimum(start // size, cache.shape[axis] // size - count)
    some = redispatch(lambda x, at: lax.dynamic_slice_in_dim(x, at, count), cache.blocks, begin)
    window = _joined(some.dequantize(), axis)
    among = cache.place - begin
    full = _put(window, cache.newest, jnp.clip(among, 0, count - 1) * size, axis)
    window = jnp.where((among >= 0) & (among < count), full, window)
    inner[axis] = start - begin * size
    window = lax.dynamic_update_slice(window, update, inner)

    place = (start + length - 1) // size
    newest = lax.dynamic_slice_in_dim(window, (place - begin) * size, size, axis)
    apart = window.reshape(*window.shape[:axis], count, size, *window.shape[axis + 1 :])
    axes = range(apart.ndim)
    new = stored_as(cache.blocks, jnp.moveaxis(apart, axis, 0), axes, lambda: some)
    # Others of the window stay as they are: what is rounded twice may be another number.
    number = begin + jnp.arange(count)
    is_new = (number >= start // size) & (number <= place)
    choose = lambda new, old: jnp.where(jnp.expand_dims(is_new, [*range(1, new.ndim)]), new, old)
    write = lambda blocks, part, at: lax.dynamic_update_slice_in_dim(blocks, part, at, 0)
    blocks = redispatch(write, cache.blocks, jax.tree.map(choose, new, some), begin)
    return BlockCache(blocks, newest, place.astype(jnp.int32), cache.axis)


def _product(cache: BlockCache, x: ArrayLike, side: int, params: dict[str, Any]) -> Any:
    """A product with each block, of which the scales are multiplied into x; and with the newest."""
    numbers = DotDimensionNumbers.of(params["dimension_numbers"])
    axis, free = cache.ndim + cache.axis, numbers.free(side, cache.ndim)
    if isinstance(x, Value) or axis not in free or params["out_sharding"] is not None:
        return NotImplemented
    others = len(numbers.free(1 - side, jnp.ndim(x))) if side else 0
    at = len(numbers.batch[0]) + others + free.index(axis)  # of the tokens, in the result
    multiply = lambda *pair: find_primitive("dot_general").bind(*pair, **params)
    ordered = lambda of_cache, of_x: (of_x, of_cache) if side else (of_cache, of_x)
    # Blocks are an axis of a batch, along which x is the same until the scales are in it.
    repeated = jnp.broadcast_to(x, (len(cache.blocks), *jnp.shape(x)))
    out = _joined(redispatch(jax.vmap(multiply), *ordered(cache.blocks, repeated)), at)
    newest = multiply(*ordered(cache.newest, x))
    return _put(out, newest, cache.place * cache.newest.shape[axis], at)


@register("dot_general")
def _first(cache: BlockCache, x: ArrayLike, **params: Any) -> Any:
    return _product(cache, x, 0, params)


@register("dot_general")
def _second(x: ArrayLike, cache: BlockCache, **params: Any) -> Any:
    return _product(cache, x, 1, params)
