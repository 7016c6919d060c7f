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

    If a program reads values and writes them back, they do not change. To ensure this, a cache
    computes its scales differently from `vn.quant.quantize`. In int4, for example, the scale of a
    group is its largest magnitude divided by 7 instead of 7.5. If the dtype of the array has 16
    bits, or differs from the dtype of the scales, each write also compares the new values with the
    old ones, and groups with equal values keep their codes.

    **Arguments:** the same as for `QArray`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> cache = vn.quant.zeros((4, 8), "int8", channelwise_axes=[0])
    >>> write = vn.implicit(lambda cache, row: jax.lax.dynamic_update_slice(cache, row, (1, 0)))
    >>> cache = write(cache, jnp.ones((1, 8)))
    >>> type(cache).__name__, cache.dequantize()[:, 0].round(1).tolist()
    ('QCache', [0.0, 1.0, 0.0, 0.0])
    """

    is_cache: ClassVar[bool] = True

    __init__ = QArray.__init__  # otherwise, the dataclass would define one

    @classmethod
    def from_qarray(cls, q: QArray) -> "QCache":
        """Return a cache with the fields of a QArray."""
        new = cls.__new__(cls)
        new.__dict__.update(q.changed().__dict__)
        return new


@stored_as.register
def _(
    cache: QCache,
    update: Any,
    axes: Sequence[int | None],
    read: Callable[[], Any] | None = None,
) -> Any:
    counts = _counts_of_update(cache, jnp.shape(update), axes)
    if counts is None or isinstance(cache.scale, QArray) or cache.minimum is not None:
        return NotImplemented
    if isinstance(update, QArray) and _describe(update) == _describe(cache):
        leaves = (update.scale, update.zero_point)
        if all(leaf.shape == counts for leaf in leaves if leaf is not None):
            return QCache.from_qarray(update)
    if isinstance(update, Value):
        (update,) = make_dense(find_primitive("dynamic_update_slice"), [update])
    q = quantize_as(update, cache, counts)
    if cache.packing is not None:
        q = repack(q, cache.packing.axis)
    # Dequantized values get their old scales again if products of a code and a scale are exact and
    # the scales are not subnormal. Otherwise they are compared with the old values.
    is_exact = cache.dtype in (jnp.float32, jnp.float64) and cache.dtype == cache.scale.dtype
    if read is not None and not is_exact:
        q = _keep_equal_groups(q, update, read())
    return QCache.from_qarray(q)


def _counts_of_update(cache: QCache, shape: Shape, axes: Sequence[int | None]) -> Shape | None:
    """Return the scale shape of an update, or None if the update covers a part of a group.

    `axes` names the axis of the cache for each axis of the update, or None for a new axis.
    """
    counts = []
    for size, axis in zip(shape, axes, strict=True):
        tile, count = (1, 1) if axis is None else (cache.tile_shape[axis], cache.scale.shape[axis])
        if tile == count == 0:
            tile = 1  # The axis has no entries yet. Each new one gets a scale.
        if size % tile if tile else size:
            return None
        counts.append(size // tile if tile else 1)
    return tuple(counts)


def _describe(q: QArray) -> Any:
    """Return the properties that arrays must share for their codes to be copied."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(q)]
    return q.qtype, q.packing and q.packing.axis, q.dense_dtype, dtypes


def _keep_equal_groups(new: QArray, update: jax.Array, old: QArray) -> QArray:
    """Return `new`, but with the codes and scale of `old` in each group whose values are equal."""
    shapes = lambda x: [leaf.shape for leaf in jax.tree.leaves(x)]
    if shapes(new) != shapes(old):
        return new
    # A GPU can keep more bits of the values that it read than their dtype has.
    rounded = lambda x: round_to_dtype(x, new.dtype)
    is_equal = split_tiles(rounded(update) == rounded(old.dequantize()), new.scale.shape)
    is_equal = is_equal.all(range(1, is_equal.ndim, 2))
    is_value_kept = over_tiles(jnp.logical_or, jnp.zeros(new.shape, bool), is_equal)
    codes = jnp.where(is_value_kept, old.codes(), new.codes())
    if new.packing is not None:
        codes, _ = pack(new.format.to_fields(codes), new.format.bits, new.packing.axis)
    others = {
        name: jnp.where(is_equal, getattr(old, name), getattr(new, name))
        for name in ("scale", "zero_point")
        if getattr(new, name) is not None
    }
    return new.changed(packed=codes, **others)


def repack(q: QArray, axis: int) -> QArray:
    """Return an array whose codes are packed along another axis, counted from the end."""
    if q.packing is None or q.packing.axis == axis:
        return q
    bits = q.format.bits
    packed, packing = pack(unpack(q.packed, q.packing, bits), bits, axis)
    return q.changed(packed=packed, packing=packing)
