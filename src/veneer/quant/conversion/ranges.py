"""Ranges, as they are recorded and kept: of the values of an array, and the scale for one."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..._core.surface.array import ImplicitArray
from ..formats import FORMATS, get_format
from ..formats.tiles import split_tiles
from .calibration import Range, find_range, has_zero_point, range_to_scale
from .quantize import Axes, QuantizeParams, TiledAxes, floating, quantize_params
from .scales import usable


def calibration_range(
    array: ArrayLike | ImplicitArray,
    qtype: DTypeLike,
    *,
    channelwise_axes: Axes = (),
    tiled_axes: TiledAxes | None = None,
    calibration_method: str | None = None,
) -> Range:
    """Returns the range that `vn.quant.quantize` finds in an array, tile by tile.

    **Arguments:** those of `vn.quant.quantize`.

    **Returns:** `(low, high)` of the shape of the scale, in f32 at least; `low` is None where the
    range is symmetric, from `-high`. A tile with a NaN or an infinity in it has the range NaN.

    **Raises:** what `vn.quant.quantize` does.

    >>> import jax.numpy as jnp, veneer as vn
    >>> low, high = vn.quant.calibration_range(
    ...     jnp.array([-1.0, 3.0]), "int8", calibration_method="minmax"
    ... )
    >>> low.tolist(), high.tolist()
    ([-1.0], [3.0])
    """
    dense = floating(array)
    params = quantize_params(dense, qtype, channelwise_axes, tiled_axes, calibration_method, None)
    return _find(dense, params)


@functools.partial(jax.jit, static_argnames="params")
def _find(array: jax.Array, params: QuantizeParams) -> Range:
    array = jax.lax.stop_gradient(array)
    tiles = split_tiles(array.astype(jnp.promote_types(array.dtype, jnp.float32)), params.counts)
    return find_range(
        params.calibration, tiles, tuple(range(1, tiles.ndim, 2)), FORMATS[params.format]
    )


def scale_of_range(
    qtype: DTypeLike, high: ArrayLike, low: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scale and the zero point with which codes cover a range.

    **Arguments:**

    - `qtype`: the format, by its name in `vn.quant.FORMATS`.
    - `high`: the largest value, of any shape, not negative; of a symmetric range the largest
      magnitude.
    - `low`: the least value, not positive, of the same shape, or None for a symmetric range.

    **Returns:** the scale, f32 or f64 of that shape; and the zero point, int8 or uint8, or None for
    a symmetric range in a format with codes below zero. An empty range has scale 1.

    **Raises:** `ValueError` for an unknown format, and for `low` where it has no zero point.

    >>> import veneer as vn
    >>> vn.quant.scale_of_range("int8", 1.275)
    (Array(0.01, dtype=float32), None)
    >>> scale, zero_point = vn.quant.scale_of_range("uint4", 2.0, -1.0)
    >>> float(scale), int(zero_point)
    (0.2..., 5)
    """
    format = get_format(qtype)
    if low is not None and not has_zero_point(format):
        raise ValueError(
            f"{format.name} has no zero_point, so it doesn't support asymmetric quantization: pass "
            "no `low`, or take an integer format"
        )
    wide = lambda end: jnp.asarray(end, jnp.promote_types(jnp.result_type(end), jnp.float32))
    ends = Range(None if low is None else jnp.minimum(wide(low), 0), jnp.maximum(wide(high), 0))
    scale, zero_point = range_to_scale(jax.lax.stop_gradient(ends), format)
    if zero_point is not None:
        zero_point = zero_point.astype(format.byte_dtype)
    return usable(scale), zero_point
