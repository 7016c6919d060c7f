"""`zeros`: a quantised array that programs write into, such as a cache of keys and values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._core.primitives.writing import stored_as
from .._core.value import Value, make_dense
from .._jax.primitives import find_primitive
from .conversion.quantize import Axes, TiledAxes, quantize_as, quantize_by, quantize_params
from .formats import get_format
from .formats.packing import pack, unpack
from .formats.tiles import Shape, tile_shape
from .qarray import QUANTIZABLE, QArray


class QCache(QArray):
    """A quantised array that stays one where a program writes into it.

    `jax.lax.dynamic_update_slice`, `.at[...].set` and `jnp.concatenate` quantise what they write by
    its own scales, into the format that is there already, as they would cast it to the dtype of a
    dense array. Of any other `QArray` what is written into is made dense. `vn.quant.zeros` makes
    one. Its other rules are those of a `QArray`.

    What is written must be whole groups of values that share a scale. Where it is a part of one, so
    that its neighbours would have to be rounded anew, the array is made dense, visibly.
    """

    __init__ = QArray.__init__

    def __post_init__(self) -> None:
        super().__post_init__()

    def _counts(self, shape: Shape, axes: Sequence[int | None]) -> Shape | None:
        """Returns the shape of the scale of an update; None where that is a part of a group."""
        counts = []
        for size, axis in zip(shape, axes, strict=True):
            if axis is None or self.tile_shape[axis] == 1:
                counts.append(size)
            elif size % self.tile_shape[axis] == 0:
                counts.append(size // self.tile_shape[axis])
            else:
                return None
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
def _(cache: QCache, update: Any, axes: Sequence[int | None]) -> Any:
    counts = cache._counts(jnp.shape(update), axes)
    if counts is None or isinstance(cache.scale, QArray) or cache.minimum is not None:
        return NotImplemented
    if isinstance(update, QArray) and cache._is_like(update, counts):
        return QCache._of(update)
    if isinstance(update, Value):
        (update,) = make_dense(find_primitive("dynamic_update_slice"), [update])
    q = quantize_as(update, cache, counts)
    return QCache._of(q if cache.packing is None else _packed_along(q, cache.packing.axis))


def zeros(
    shape: Sequence[int],
    qtype: DTypeLike,
    *,
    dtype: DTypeLike = jnp.float32,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
) -> QCache:
    """Makes a quantised array of zeros that programs write into: a cache.

    It is a `QArray` of which `jax.lax.dynamic_update_slice`, `.at[...].set` and `jnp.concatenate`
    keep what is stored: they quantise what they write, and read nothing of the rest. An axis along
    which single entries are written is channelwise, as that of the tokens here.

    **Arguments:**

    - `shape`: of the array.
    - `qtype`, `channelwise_axes`, `tiled_axes`, `scale_dtype`: as for `vn.quant.quantize`.
    - `dtype`: of the dense array that it stands for.
    - `calibration_method`: how what is written gives its range: "absmax", or "minmax", with zero
      points (integers only). None is the format's own.

    **Returns:** a `QCache`. Codes below 8 bits are packed along the last axis where values share a
    scale, so that what is written are whole bytes.

    **Raises:** what `vn.quant.quantize` raises. `ValueError` for another `calibration_method`,
    which would not be known where something is written, and for a format whose scales share one.

    >>> import jax.numpy as jnp, veneer as vn
    >>> keys = vn.quant.zeros((8, 128, 64), "int8", channelwise_axes=[0, 1])  # a scale a token
    >>> write = vn.implicit(lambda keys, key, at: keys.at[:, at].set(key))
    >>> keys = write(keys, jnp.ones((8, 64)), 3)
    >>> keys, keys.dequantize()[0, 2:5, 0].round(1).tolist()
    (QArray(q8[8,128,64] channelwise, 8.5 bits), [0.0, 1.0, 0.0])
    """
    format, shape = get_format(qtype), tuple(map(int, shape))
    if format.scale_tile is not None:
        raise ValueError(
            f"scales of {format.name} share a scale, so that nothing can be written by itself; "
            "a format with scales of its own is one for a cache"
        )
    if calibration_method not in (None, format.calibration, "minmax"):
        raise ValueError(
            f"calibration_method of a {format.name} array that is written into is "
            f"{format.calibration!r} or 'minmax', not {calibration_method!r}"
        )
    like = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if like.dtype not in QUANTIZABLE:
        raise TypeError(f"dtype is {like.dtype.name}; a QArray stands for a floating array")
    params = quantize_params(
        like,
        qtype,
        channelwise_axes,
        tiled_axes,
        calibration_method,
        scale_dtype,
    )
    # One tile, and all along the axis that is packed; the others are the same.
    tile = tile_shape(shape, params.counts)
    shared = [i for i, size in enumerate(tile) if size > 1] or [*range(len(shape))]
    pairs = zip(shape, tile, strict=True)
    small = [n if [i] == shared[-1:] else t for i, (n, t) in enumerate(pairs)]
    counts = [n // max(t, 1) for n, t in zip(small, tile, strict=True)]
    q = quantize_by(jnp.zeros(small, dtype), dataclasses.replace(params, counts=tuple(counts)))
    if q.packing is not None:
        q = _packed_along(q, shared[-1] - len(shape))
    packed = list(shape)
    if q.packing is not None:
        packed[shared[-1]] = q.packed.shape[shared[-1]]
    as_large = lambda leaf: leaf if leaf is None else jnp.broadcast_to(leaf, params.counts)
    return QCache.from_packed(
        jnp.broadcast_to(q.packed, packed),
        as_large(q.scale),
        as_large(q.zero_point),
        qtype=qtype,
        packing=q.packing,
        dense_dtype=dtype,
    )


def _packed_along(q: QArray, axis: int) -> QArray:
    """Returns an array whose codes are packed along an axis, counted from the end."""
    if q.packing is None or q.packing.axis == axis:
        return q
    bits = q.format.bits
    packed, packing = pack(unpack(q.packed, q.packing, bits), bits, axis)
    return q._assigned(packed=packed, packing=packing)
