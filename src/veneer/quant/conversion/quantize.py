"""From dense arrays to QArrays and back: `quantize`, `quantize_with_scale` and `dequantize`.

`calibration_range` and `scale_of_range` compute static scales for `quantize_with_scale`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import treedef_is_leaf
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface import check_key
from ..._core.surface.array import ImplicitArray
from ..._core.value import materialise_one
from ..._jax.frames import warn_user
from ..arrays import QUANTIZABLE, QArray, check_tiling
from ..formats import FORMATS, Format, get_format, is_format
from ..formats.tiles import Leaf, Shape, resolve_tile_size, split_tiles, tile_counts
from .calibration import (
    Range,
    as_divisor,
    check_calibration,
    find_range,
    range_to_scale,
    split_into_tiles,
)
from .compute import QuantizeParams, encode_with_scale, quantize_with_params, store_scale

Axes = Sequence[SupportsIndex]
TiledAxes = Mapping[SupportsIndex, SupportsIndex | float]

_QUANTIZABLE_NAMES = ", ".join(dtype.name for dtype in QUANTIZABLE)


def quantize(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
    key: jax.Array | None = None,
) -> QArray:
    """Quantize an array: round each value to the nearest value of a format.

    All values share one scale by default (per-tensor quantization). `channelwise_axes` gives a
    scale to each channel (per-channel), and `tiled_axes` to each group of neighbors (the group size
    of GPTQ and AWQ). The derivative is 0; for training use `vn.quant.fake_quantize` or `vn.ste`.

    **Arguments:**

    - `array`: float16, bfloat16, float32 or float64, of any shape. An implicit array is
      materialized.
    - `qtype`: the format: a name in `vn.quant.FORMATS`, such as "int8", or a dtype.
    - `channelwise_axes`: the axes with one scale per index.
    - `tiled_axes`: `{axis: tile size}`, the axes with one scale per tile. A float is a fraction of
      the axis. None means no tiles. But in a format with a fixed tile size, such as mxfp4, it means
      tiles along the last axis that is not in `channelwise_axes`, and one scale per index along all
      other axes.
    - `calibration_method`: how to choose the range that the codes of a tile cover (see the table).
      None selects the default method of the format. "mse" and "hqq" without numbers use the numbers
      in the table.
    - `scale_dtype`: the dtype of the scales. None means the scale dtype of the format if it has
      one, and otherwise the dtype of `array` (float32 for a float16 array in int16).
    - `key`: a key of `jax.random`, for stochastic rounding. The expected value of a result is then
      the exact value, unless it is clipped.

    | `calibration_method` | range of a tile |
    |---|---|
    | "absmax" | symmetric, up to the largest magnitude; "absmax,0.9": up to 0.9 times that |
    | "minmax" | from the smallest to the largest value, including 0; has a zero point |
    | "minmax,0.9" | 0.9 times the range of "minmax" |
    | "rms,7" | symmetric, up to 7 times the root mean square |
    | "absmean" | the scale is the mean magnitude (BitNet, arXiv 2402.17764) |
    | "fixed,6" | -6 to 6 |
    | "fixed,-1,3" | -1 to 3; has a zero point |
    | "percentile,99.9" | symmetric, up to the 99.9th percentile of the magnitudes |
    | "percentile,1,99" | from the 1st to the 99th percentile, including 0; has a zero point |
    | "mse,40,2" | the fraction n/40 of the full range with the least mean of `abs(error)**2` |
    | "hqq,0.7" | the range with the least sum of `abs(error)**0.7`, as in HQQ |
    | "oas" | Outlier Aware Scaling (arXiv 2603.08713), for mxfp8, mxfp8_16, mxfp4 |

    **Returns:** a `QArray` with the shape and dtype of `array`. A tile with a NaN or infinity
    becomes NaN.

    **Raises:**

    - `TypeError` if `array` or `scale_dtype` is not floating, `key` is not a key, or an argument
      has the wrong type.
    - `ValueError` for an unknown format or method, a method that the format does not support, an
      axis that is out of range or named twice, or a tile size that does not divide its axis.

    **Warns:** `UserWarning` if each value has its own scale and the result is not smaller.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.linspace(-1, 1, 8).reshape(4, 2)
    >>> q = vn.quant.quantize(w, "int4", channelwise_axes=[-1], tiled_axes={0: 2})
    >>> q.scale.shape, q.nbytes, w.nbytes
    ((2, 2), 20, 32)
    """
    if key is not None:
        check_key(key)
    dense = as_dense_floats(array)
    params = quantize_params(
        dense, qtype, channelwise_axes, tiled_axes, calibration_method, scale_dtype
    )
    q = quantize_with_params(dense, params, key)
    is_static = all(isinstance(n, int) for n in dense.shape)  # sizes are symbolic for export
    has_scale_per_value = is_static and params.scale_shape == dense.shape and dense.size > 1
    if has_scale_per_value and q.nbytes >= dense.nbytes:
        warn_user(
            f"{dense.dtype.name}{[*dense.shape]} gets one scale per value, so {qtype} takes "
            f"{8 * q.nbytes / dense.size:.3g} bits per value, more than the dense array: name "
            "fewer channelwise_axes, or use larger tiles"
        )
    return q


def quantize_params(
    array: jax.Array | jax.ShapeDtypeStruct,
    qtype: DTypeLike,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
    scale_dtype: DTypeLike | None = None,
) -> QuantizeParams:
    """Check the arguments of `quantize`, and return them as hashable `QuantizeParams`."""
    format, shape = get_format(qtype), array.shape
    calibration = check_calibration(calibration_method or format.calibration, format)
    if not isinstance(channelwise_axes, Iterable):
        raise TypeError(
            "channelwise_axes must be a list of axes, such as "
            f"[{0 if channelwise_axes is None else channelwise_axes}], not {channelwise_axes!r}"
        )
    if not isinstance(tiled_axes, Mapping | None):
        raise TypeError(
            f"tiled_axes must be {{axis: tile size}}, such as {{0: 64}}, not {tiled_axes!r}"
        )
    channelwise: Sequence[int] = [int(axis) for axis in channelwise_axes]
    tile_sizes = (tiled_axes or {}).items()
    tiled = {int(axis): resolve_tile_size(shape, int(axis), size) for axis, size in tile_sizes}
    tile = format.tile_size  # None if the format allows any tile size
    if tile is not None and tiled_axes is None:
        # Put the tiles along the last axis that is not channelwise. All others are channelwise.
        axes = range(len(shape))
        free_axes = [axis for axis in axes if axis not in {c % len(shape) for c in channelwise}]
        if not free_axes:
            raise ValueError(
                f"{format.name} needs an axis with tiles of {tile}, but channelwise_axes names "
                f"all axes of shape {shape}"
            )
        tiled = {free_axes[-1]: tile}
        channelwise = [axis for axis in axes if axis not in tiled]
    elif tile is not None and [*tiled.values()] != [tile]:
        raise ValueError(
            f"{format.name} needs tiles of {tile} along one axis, not tiled_axes={tiled}"
        )
    scale_shape = tile_counts(shape, channelwise, tiled)
    scale_dtype = choose_scale_dtype(format, array.dtype, scale_dtype)
    return QuantizeParams(format.name, scale_shape, calibration, scale_dtype)


def quantize_as(array: jax.Array, q: QArray, scale_shape: Shape) -> QArray:
    """Quantize an array in the format of `q`, with new scales of shape `scale_shape`.

    The scale dtype is also as in `q`. The new scales are stable: quantizing the dequantized result
    again does not change its values.
    """
    method = q.format.calibration if q.zero_point is None else "minmax"
    calibration = check_calibration(method, q.format)
    scale_dtype, stable_in = q.scale.dtype.name, array.dtype.name
    params = QuantizeParams(q.qtype, scale_shape, calibration, scale_dtype, stable_in)
    return quantize_with_params(array, params)


def as_dense_floats(array: ArrayLike | ImplicitArray) -> jax.Array:
    """Return the first argument of `quantize` as a dense array. Materialize an implicit array.

    **Raises:** `TypeError` if `array` is a format or a tree, or if its dtype cannot be quantized.
    """
    if isinstance(array, str | type | np.dtype):
        raise TypeError(
            f"the first argument of quantize is {array!r}. Pass the array first, then the format: "
            f"quantize(array, {array if is_format(array) else 'int8'!r})"
        )
    is_array = isinstance(array, ImplicitArray) or hasattr(array, "dtype")
    if not is_array and not treedef_is_leaf(jax.tree.structure(array)):
        raise TypeError(
            f"quantize takes one array, not a {type(array).__name__}. Call jnp.asarray for a list "
            "of numbers, or quantize_tree for a tree of arrays"
        )
    dense = materialise_one(array)
    dtype = jnp.result_type(dense)
    if dtype not in QUANTIZABLE:
        raise TypeError(f"array has dtype {dtype.name}, but quantize takes {_QUANTIZABLE_NAMES}")
    return jnp.asarray(dense)


def choose_scale_dtype(format: Format, dtype: DTypeLike, requested: DTypeLike | None) -> str:
    """Return the name of the dtype of scales.

    This is the dtype that the format prescribes, or else `requested`. If both are None, it is
    `dtype`, the dtype of the array, but float32 for a float16 array in a format above 8 bits.

    **Raises:** `ValueError` if the format prescribes another dtype than the requested dtype.
    `TypeError` if the requested dtype is not floating.
    """
    if format.scale_dtype is not None:
        if requested is not None and jnp.dtype(requested).name != format.scale_dtype:
            raise ValueError(
                f"{format.name} needs scale_dtype {format.scale_dtype}, not "
                f"{jnp.dtype(requested).name}"
            )
        return format.scale_dtype
    if requested is None and format.bits > 8 and jnp.dtype(dtype) == jnp.float16:
        return "float32"  # In int16, 2**-15 times the largest value can be subnormal in float16.
    name = jnp.dtype(dtype if requested is None else requested).name
    if jnp.dtype(name) not in (*QUANTIZABLE, jnp.float8_e8m0fnu):
        raise TypeError(f"scale_dtype is {name}, but must be one of {_QUANTIZABLE_NAMES}")
    return name


def quantize_with_scale(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    scale: Leaf | QArray | float,
    zero_point: Leaf | int | None = None,
    *,
    key: jax.Array | None = None,
) -> QArray:
    """Quantize an array with scales that are already known, such as static or learned scales.

    Values beyond the range of the codes are clipped. `vn.quant.scale_of_range` computes the scale
    and the zero point of a range. The derivative is 0, as for `vn.quant.quantize`.

    **Arguments:**

    - `array`, `qtype`, `key`: as for `vn.quant.quantize`.
    - `scale`: one positive number, or a floating array with the rank of `array` and one entry per
      tile. An array keeps its dtype, and a Python number gets the dtype of `array`, unless the
      format prescribes the dtype of scales. A scale that is 0 or too small to divide by becomes 1,
      or in int1 becomes 0.
    - `zero_point`: the code that represents 0, as one number or one entry per tile. Only integer
      formats have zero points.

    **Returns:** a `QArray`. If the values or the scale of a tile contain NaN or infinity, the tile
    becomes NaN.

    **Raises:**

    - `TypeError` if `array` or `scale` is not floating.
    - `ValueError` for an unknown format, or a zero point for a format that has none.
    - `ValueError` if an axis size of `scale` or `zero_point` does not divide the axis of `array`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.quantize_with_scale(jnp.array([1.0, 2.4, 9.0]), "int4", 0.5).dequantize().tolist()
    [1.0, 2.5, 3.5]
    """
    dense, format = as_dense_floats(array), get_format(qtype)
    if not isinstance(scale, QArray):
        scale = jnp.asarray(scale, getattr(scale, "dtype", dense.dtype))
        choose_scale_dtype(format, scale.dtype, None)  # This raises if the scale is not floating.
    scale = _fit_to_array("scale", scale, dense)
    if zero_point is not None:
        if not format.has_zero_point:
            raise ValueError(f"{format.name} has no zero_point: leave it out")
        zero_point = _fit_to_array("zero_point", jnp.asarray(zero_point), dense)
    return _quantize_with_scale(dense, scale, zero_point, key, format.name)


def _fit_to_array(name: str, scale: Any, array: jax.Array) -> Any:
    """Return a scale or zero point for `array`, with a scalar reshaped to the rank of the array.

    **Raises:** `ValueError` if an axis size of `scale` does not divide the axis of `array`. `name`
    is the name of the argument in the message: "scale" or "zero_point".
    """
    if scale.ndim == 0 and not isinstance(scale, QArray):
        scale = scale.reshape((1,) * array.ndim)
    check_tiling(name, scale.shape, "an array", array.shape)
    return scale


@functools.partial(jax.jit, static_argnames="qtype")
def _quantize_with_scale(
    array: jax.Array,
    scale: jax.Array | QArray,
    zero_point: jax.Array | None,
    key: jax.Array | None,
    qtype: str,
) -> QArray:
    format = FORMATS[qtype]
    array, scale = jax.lax.stop_gradient((array, scale))
    # The scale of a tile with NaN or infinity becomes NaN. `split_tiles` splits each axis into the
    # tiles and the values within a tile, at odd indices. Reduce the values.
    is_finite = jnp.isfinite(split_tiles(array, scale.shape)).all(range(1, 2 * array.ndim, 2))
    dtype = jnp.promote_types(array.dtype, jnp.float32)
    if isinstance(scale, QArray):
        scale = scale.replace(packed=jnp.where(is_finite, scale.packed, jnp.nan))
        divisor = as_divisor(scale.dequantize().astype(dtype))
        return encode_with_scale(array, format, scale, divisor, zero_point, key)
    if scale.dtype in QUANTIZABLE:  # JAX does not promote floats of 8 bits.
        dtype = jnp.promote_types(dtype, scale.dtype)
    wide = jnp.where(is_finite, scale.astype(dtype), jnp.nan)
    stored, divisor = store_scale(wide, format.scale_dtype or scale.dtype.name, format)
    return encode_with_scale(array, format, stored, divisor, zero_point, key)


def dequantize(q: QArray) -> jax.Array:
    """Return the dense array of a quantized array.

    Codes are multiplied by their scales in f32, or in f64 if the scale or `q` is f64. The result is
    then rounded to the dtype of `q`. Results are the same with and without `jax.jit`, except that
    XLA for GPUs may omit the rounding if the program continues in f32.

    **Arguments:**

    - `q`: a `QArray`.

    **Returns:** an array with the shape and dtype of `q`.

    **Raises:** `TypeError` if `q` is not a QArray.

    >>> import jax.numpy as jnp, veneer as vn
    >>> vn.quant.dequantize(vn.quant.quantize(jnp.array([0.0, -2.0]), "nf4")).tolist()
    [0.0, -2.0]
    """
    if not isinstance(q, QArray):
        raise TypeError(
            f"dequantize takes a QArray, not {type(q).__name__}: for any array, call vn.materialise"
        )
    return q.dequantize()


def calibration_range(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
) -> Range:
    """Return the range that `vn.quant.quantize` uses for each tile of an array.

    **Arguments:**

    - `array`, `qtype`, `channelwise_axes`, `tiled_axes`, `calibration_method`: as for
      `vn.quant.quantize`.

    **Returns:** `(low, high)`, two arrays with one entry per tile, in f32, or in f64 if `array` is
    f64. If `low` is None, the range is from `-high` to `high`. If a tile has a NaN or infinity, its
    range is NaN.

    **Raises:** the errors of `vn.quant.quantize`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> low, high = vn.quant.calibration_range(
    ...     jnp.array([-1.0, 3.0]), "int8", calibration_method="minmax"
    ... )
    >>> low.tolist(), high.tolist()
    ([-1.0], [3.0])
    """
    dense = as_dense_floats(array)
    params = quantize_params(dense, qtype, channelwise_axes, tiled_axes, calibration_method)
    return _find_range(dense, params)


@functools.partial(jax.jit, static_argnames="params")
def _find_range(array: jax.Array, params: QuantizeParams) -> Range:
    tiles = split_into_tiles(array, params.scale_shape, FORMATS[params.qtype])
    return find_range(params.calibration, tiles)


def scale_of_range(
    qtype: DTypeLike, high: ArrayLike, low: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scale and the zero point with which the codes of a format cover a range.

    **Arguments:**

    - `qtype`: the format.
    - `high`: the upper end of the range, at least 0. An array of any shape can hold several upper
      ends.
    - `low`: the lower end of the range, at most 0, with the shape of `high`. None means `-high`.

    **Returns:** `(scale, zero_point)` with the shape of `high`. The scale is f32, or f64 if `high`
    or `low` is f64. If `high` and `low` are 0, the scale is 1. The zero point is int8 or
    int16 in signed formats and uint8 in unsigned formats. If `low` is None, the zero point is None,
    except in unsigned integer formats.

    **Raises:** `ValueError` if the format is unknown, or if `low` is given and the format has no
    zero points.

    >>> import veneer as vn
    >>> vn.quant.scale_of_range("int8", 1.275)
    (Array(0.01, dtype=float32), None)
    >>> scale, zero_point = vn.quant.scale_of_range("uint4", 2.0, -1.0)
    >>> float(scale), int(zero_point)
    (0.2..., 5)
    """
    format = get_format(qtype)
    if low is not None and not format.has_zero_point:  # Qwix's tests match this message.
        raise ValueError(
            f"{format.name} has no zero_point, so it doesn't support asymmetric quantization: "
            "leave out `low`, or use an integer format"
        )
    to_wide = lambda end: jnp.asarray(end, jnp.promote_types(jnp.result_type(end), jnp.float32))
    low = None if low is None else jnp.minimum(to_wide(low), 0)
    ranges = jax.lax.stop_gradient(Range(low, jnp.maximum(to_wide(high), 0)))
    scale, zero_point = range_to_scale(ranges, format)
    if zero_point is not None:
        zero_point = zero_point.astype(format.byte_dtype)
    return as_divisor(scale), zero_point
