"""`QCache`, a quantized array that programs write into, such as a cache of keys and values."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.primitives.writing import stored_as
from ..._core.value import Value, make_dense
from ..._jax.primitives import find_primitive
from ..arrays.qarray import QArray
from ..conversion.quantize import quantize_as
from ..formats.packing import pack, unpack
from ..formats.rounding import round_to_dtype
from ..formats.tiles import Shape, over_tiles, split_tiles


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
        """Return a cache with the fields of a QArray."""
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
    """Return the format, packing and dtypes of `q`. If equal, arrays can exchange their codes."""
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
    if new.packing is not None:
        codes, _ = pack(new.format.to_fields(codes), new.format.bits, new.packing.axis)
    scales = {
        name: jnp.where(is_equal, getattr(old, name), getattr(new, name))
        for name in ("scale", "zero_point")
        if getattr(new, name) is not None
    }
    return new.changed(packed=codes, **scales)


def repack(q: QArray, axis: int) -> QArray:
    """Return an array with its codes packed along another axis, counted from the end.

    Codes that are stored one per byte stay unpacked.
    """
    if q.packing is None or q.packing.axis == axis:
        return q
    bits = q.format.bits
    packed, packing = pack(unpack(q.packed, q.packing, bits), bits, axis)
    return q.changed(packed=packed, packing=packing)
