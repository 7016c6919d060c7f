"""`QCache`: a quantised array that programs write into, such as a cache of keys and values."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._core.primitives.writing import stored_as
from .._core.value import Value, make_dense
from .._jax.primitives import find_primitive
from .conversion.quantize import quantize_as
from .formats.packing import pack, unpack
from .formats.tiles import Shape
from .qarray import QArray


class QCache(QArray):
    """A quantized array that stays quantized when a program writes into it.

    `jax.lax.dynamic_update_slice`, `.at[...].set` and `jnp.concatenate` quantize the update to the
    format of the cache, with new scales. Writing into any other `QArray` materializes it.
    `vn.quant.zeros` makes a cache. All other rules are those of `QArray`.

    Values that are written back as they were read do not change. For this, the scales differ from
    those of `vn.quant.quantize`: the largest value has the last code
    (`quant.conversion.calibration.stable_scale`).

    An update must consist of whole groups of values that share a scale. An update of a part of a
    group materializes the array, and `vn.explain` reports it.
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
        new.__dict__.update(q._assigned().__dict__)
        return new


@stored_as.register
def _(
    cache: QCache,
    update: Any,
    axes: Sequence[int | None],
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
    return QCache._of(q)


def packed_along(q: QArray, axis: int) -> QArray:
    """Returns an array whose codes are packed along an axis, counted from the end."""
    if q.packing is None or q.packing.axis == axis:
        return q
    bits = q.format.bits
    packed, packing = pack(unpack(q.packed, q.packing, bits), bits, axis)
    return q._assigned(packed=packed, packing=packing)
