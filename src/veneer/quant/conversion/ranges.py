"""Ranges of values, and the scale and zero point of a range, for static calibration."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..formats import FORMATS, get_format
from .calibration import Range, as_divisor, find_range, range_to_scale, split_into_tiles
from .compute import QuantizeParams
from .quantize import Axes, TiledAxes, as_dense_floats, quantize_params


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
