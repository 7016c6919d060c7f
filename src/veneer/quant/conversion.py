"""`quantize` and `dequantize`: from dense arrays to QArrays and back."""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .._core.array import ImplicitArray
from .._core.value import materialise_one
from .calibration import calibrate, check_calibration
from .formats import FORMATS, Format, get_format
from .qarray import QUANTISABLE, QArray, pack_codes
from .scales import store_scale
from .tiles import Shape, split_tiles, tile_counts


def quantize(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Sequence[int] = (),
    tiled_axes: Mapping[int, int] | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
) -> QArray:
    """Quantises an array, rounding each value to the nearest that the format has.

    **Arguments:**

    - `array`: f16, bf16, f32 or f64, of any shape. An implicit array is materialised.
    - `qtype`: the format, by its name in `vn.quant.FORMATS`.
    - `channelwise_axes`: axes with one scale an index.
    - `tiled_axes`: axes with one scale a tile, `{axis: tile size}`. Axes in neither share a scale,
      and may count from the end. A format with a tile of its own (mxfp4) tiles the last axis that
      is not channelwise if None, with all others channelwise.
    - `calibration_method`: how a tile gives its scale; "absmax" maps its largest magnitude to the
      format's bound. None is the format's own.
    - `scale_dtype`: the dtype of the scale; that of the format, or else of `array`, if None. Codes
      are found from the scale as stored, whatever its precision.

    **Returns:** a `QArray` that stands for an array of the shape and dtype of `array`. A tile of
    zeros has scale 1; one with a NaN or an infinity in it is NaN, the others are not touched by it.

    **Raises:** `TypeError` if `array` or the scale is not floating. `ValueError` for an unknown
    format or method, an axis out of range or named twice, and a tile that does not divide its axis
    (with sizes that would) or is not that of the format.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    >>> q = vn.quant.quantize(w, "int4", channelwise_axes=[-1], tiled_axes={0: 2})
    >>> q.scale.shape, q.nbytes, w.nbytes
    ((2, 2), 20, 32)
    >>> float(abs(q.dequantize() - w).max()) < 0.07
    True
    """
    format = get_format(qtype)
    method = calibration_method or format.calibration
    check_calibration(method, format)
    array = materialise_one(array)
    dtype = jnp.result_type(array)
    if dtype not in QUANTISABLE:
        raise TypeError(f"array is {dtype.name}; quantize takes {_names(QUANTISABLE)}")
    shape = jnp.shape(array)
    channelwise_axes, tiled_axes = _tiles_of(format, shape, channelwise_axes, tiled_axes)
    return _quantize(
        jnp.asarray(array),
        format=format.name,
        counts=tile_counts(shape, channelwise_axes, tiled_axes),
        method=method,
        scale_dtype=_scale_dtype(format, dtype, scale_dtype),
    )


def _names(dtypes: Sequence) -> str:
    return ", ".join(jnp.dtype(dtype).name for dtype in dtypes)


def _tiles_of(
    format: Format, shape: Shape, channelwise: Sequence[int], tiled: Mapping[int, int] | None
) -> tuple[Sequence[int], Mapping[int, int]]:
    size = format.tile_size
    if size is None:
        return channelwise, tiled or {}
    axes = range(len(shape))
    if tiled is None:
        free = [axis for axis in axes if axis not in {c % len(shape) for c in channelwise}]
        if not free:
            raise ValueError(f"{format.name} tiles an axis by {size}, and {shape} has none left")
        return [axis for axis in axes if axis != free[-1]], {free[-1]: size}
    if [*tiled.values()] != [size]:
        raise ValueError(
            f"{format.name} is defined for tiles of {size} along one axis, not {dict(tiled)}"
        )
    return channelwise, tiled


def _scale_dtype(format: Format, dtype: jnp.dtype, given: DTypeLike | None) -> str:
    if format.scale_dtype is not None:
        if given is not None and jnp.dtype(given).name != format.scale_dtype:
            raise ValueError(
                f"{format.name} is defined with scales of {format.scale_dtype}, "
                f"not {jnp.dtype(given).name}"
            )
        return format.scale_dtype
    name = jnp.dtype(dtype if given is None else given).name
    if jnp.dtype(name) not in (*QUANTISABLE, jnp.float8_e8m0fnu):
        raise TypeError(f"scale_dtype is {name}; quantize takes {_names(QUANTISABLE)}")
    return name


# Compiled as one, for no temporary of it then has the size of the array in f32.
@functools.partial(jax.jit, static_argnames=("format", "counts", "method", "scale_dtype"))
def _quantize(
    array: jax.Array, *, format: str, counts: Shape, method: str, scale_dtype: str
) -> QArray:
    row = FORMATS[format]
    tiles = split_tiles(array.astype(jnp.promote_types(array.dtype, jnp.float32)), counts)
    scale, zero_point = calibrate(tiles, tuple(range(1, tiles.ndim, 2)), row, method)
    stored, wide = store_scale(scale, scale_dtype, row.scale_tile)
    alternate = [part for count in counts for part in (count, 1)]
    scaled = tiles / wide.reshape(alternate)
    if zero_point is not None:
        scaled += zero_point.reshape(alternate)
        zero_point = zero_point.astype(jnp.int8 if row.signed else jnp.uint8)
    packed, packing = pack_codes(row.encode(scaled).reshape(array.shape), row)
    return QArray.from_packed(
        packed, stored, zero_point, qtype=format, packing=packing, dense_dtype=array.dtype
    )


def dequantize(q: QArray) -> jax.Array:
    """Returns the dense array that `q` stands for.

    It is computed in the precision of the scale, f32 at least, and rounded once to `q.dtype`.

    **Raises:** `TypeError` if `q` is not a QArray.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.dequantize(vn.quant.quantize(jnp.array([0.0, -2.0]), "nf4")).tolist()
    [0.0, -2.0]
    """
    if not isinstance(q, QArray):
        raise TypeError(
            f"dequantize takes a QArray, not {type(q).__name__}; veneer.materialise takes any array"
        )
    return q.dequantize()
