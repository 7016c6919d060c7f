"""`QCache`: a quantised array that programs write into, such as a cache of keys and values."""

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

    __init__ = QArray.__init__

    def __post_init__(self) -> None:
        super().__post_init__()

    def _counts(self, shape: Shape, axes: Sequence[int | None]) -> Shape | None:
        """Returns the shape of the scale of an update; None where that is a part of a group."""
        counts = []
        for size, axis in zip(shape, axes, strict=True):
            tile, count = (
                (1, 1) if axis is None else (self.tile_shape[axis], self.scale.shape[axis])
            )
            if tile == count == 0:
                tile = 1  # The axis has no entries yet. Each new one gets a scale.
            if size % tile if tile else size:
                return None
            counts.append(size // tile if tile else 1)
        return tuple(counts)

    def _is_like(self, q: QArray, counts: Shape) -> bool:
        def kind(x: QArray) -> Any:
            dtypes = [leaf.dtype for leaf in jax.tree.leaves(x)]
            return x.qtype, x.packing and x.packing.axis, x.dense_dtype, dtypes

        leaves = [leaf for leaf in (q.scale, q.zero_point) if leaf is not None]
        return kind(q) == kind(self) and all(leaf.shape == counts for leaf in leaves)

    @classmethod
    def _of(cls, q: QArray) -> "QCache":
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
    counts = cache._counts(jnp.shape(update), axes)
    if counts is None or isinstance(cache.scale, QArray) or cache.minimum is not None:
        return NotImplemented
    if isinstance(update, QArray) and cache._is_like(update, counts):
        return QCache._of(update)
    if isinstance(update, Value):
        (update,) = make_dense(find_primitive("dynamic_update_slice"), [update])
    q = quantize_as(update, cache, counts)
    if cache.packing is not None:
        q = packed_along(q, cache.packing.axis)
    if read is not None and not finds_scales_again(cache.dtype, cache.scale.dtype):
        q = _unless_same(q, update, read())
    return QCache._of(q)


def finds_scales_again(dtype: Any, scale_dtype: Any) -> bool:
    """Return whether dequantized values are always quantized by the scales that they come from.

    Products of a code and a scale must be exact in `dtype`, and the scale must not be subnormal.
    """
    return dtype in (jnp.float32, jnp.float64) and dtype == scale_dtype


def _unless_same(new: QArray, update: jax.Array, old: QArray) -> QArray:
    """Return an array in which each group has the codes and scale of `old` if its values are."""
    shapes = lambda x: [leaf.shape for leaf in jax.tree.leaves(x)]
    if shapes(new) != shapes(old):
        return new
    # A program may have kept more bits of values that it read than their dtype has.
    as_read = lambda x: round_to_dtype(x, new.dtype)
    is_same = split_tiles(as_read(update) == as_read(old.dequantize()), new.scale.shape)
    is_same = is_same.all(range(1, is_same.ndim, 2))
    of_each = over_tiles(jnp.logical_or, jnp.zeros(new.shape, bool), is_same)
    codes = jnp.where(of_each, old.codes(), new.codes())
    if new.packing is not None:
        codes, _ = pack(new.format.to_fields(codes), new.format.bits, new.packing.axis)
    others = {
        name: jnp.where(is_same, getattr(old, name), getattr(new, name))
        for name in ("scale", "zero_point")
        if getattr(new, name) is not None
    }
    return new.changed(packed=codes, **others)


def packed_along(q: QArray, axis: int) -> QArray:
    """Returns an array whose codes are packed along an axis, counted from the end."""
    if q.packing is None or q.packing.axis == axis:
        return q
    bits = q.format.bits
    packed, packing = pack(unpack(q.packed, q.packing, bits), bits, axis)
    return q.changed(packed=packed, packing=packing)
