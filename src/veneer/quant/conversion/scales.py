"""Stable scales, limits for scales, and the storage formats of scales.

A scale is stored as a float, as a power of two, or quantized (double quantization). Values are
divided by the stored scale, so rounding the scale adds no error.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..arrays.qarray import QArray
from ..formats import Format, get_format
from ..formats.format import round_to_dtype
from ..formats.tiles import over_tiles, split_tiles
from .calibration import Calibration, Tiles, as_divisor


def stable_scale(
    calibration: Calibration, tiles: Tiles, scale_dtype: str, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """Return stable scales and zero points: quantizing dequantized values again changes nothing.

    `calibration` is "absmax", "minmax" or "absmean". `scale_dtype` is the dtype of stored scales,
    and `dtype` the dtype of the dequantized values.

    Scales are stable because of two properties:

    - The value at an end of the range gets the last code.
    - The mantissa of a scale has 8 bits fewer than f32, so `code * scale` is exact in f32.

    If `dtype` has 16 bits, dequantized values are rounded to it. So with a zero point, a scale has
    one mantissa bit fewer than `dtype`. This can fail if codes have more bits than the mantissa, if
    the ends of a codebook have different magnitudes, or if the scale is subnormal in f16.
    """
    values, format = tiles.values, tiles.format
    is_finite = jnp.isfinite(tiles.largest_magnitude())
    info = jnp.finfo(values.dtype)
    mantissa_bits = info.nmant - 8
    if not calibration.symmetric and format.bits <= jnp.finfo(dtype).nmant:
        mantissa_bits = min(mantissa_bits, jnp.finfo(dtype).nmant - 1)

    def round_mantissa(scale: jax.Array) -> jax.Array:
        rounded = jax.lax.reduce_precision(scale, info.nexp, mantissa_bits)
        can_divide = (scale >= info.tiny) & (scale <= 1 / info.tiny)
        return jnp.where(is_finite, jnp.where(can_divide, rounded, scale), jnp.nan)

    if calibration.name == "absmean":
        return round_mantissa(_mean_of_nonzero(tiles)), None
    if calibration.symmetric:
        # In a codebook whose ends have different magnitudes, map both ends to the positive end.
        least, largest = format.ends
        as_positive = jnp.where(values < 0, values * (largest / least), values)
        scale = dataclasses.replace(tiles, values=as_positive).largest_magnitude() / largest
        return round_mantissa(scale), None
    low, high = tiles.limits()
    least, largest = format.code_range
    steps = largest - least

    def place_zero(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return how many codes are below zero, and how far the ends are from the last codes."""
        below, above = -low / scale, high / scale
        # Center the range in the codes, unless the range covers less than a quarter of the codes.
        unused_per_side = jnp.where(below + above < steps / 4, 0, steps - below - above) / 2
        centered = below + unused_per_side
        codes_below = jnp.clip(jnp.round(centered), 0, steps)
        return codes_below, jnp.abs(codes_below - centered) + unused_per_side

    scale = tiles.round_scale(round_mantissa((high - low) / steps))
    # An end of the range may be halfway between two codes, and then be rounded up or down. With a
    # slightly smaller scale, the end is beyond the last code, and always gets the last code.
    factor = 1.0
    if scale_dtype != "float8_e8m0fnu":
        factor -= 0.7 * max(float(jnp.finfo(scale_dtype).eps), 2.0**-mantissa_bits)
    _, distance = place_zero(scale)
    smaller = tiles.round_scale(round_mantissa(scale * factor))
    scale = jnp.where(distance > 0.5 - 2.0**-6, smaller, scale)
    codes_below, _ = place_zero(scale)
    return scale, codes_below + least


def _mean_of_nonzero(tiles: Tiles) -> jax.Array:
    """Return the mean magnitude of the values whose code is not 0, per tile.

    The mean is computed from differences to the largest magnitude. So it is exact if all these
    values have the same magnitude.
    """
    magnitudes, largest = jnp.abs(tiles.values), tiles.largest_magnitude()
    axes = tiles.inner_axes
    mean = jnp.mean(magnitudes, axis=axes, keepdims=True)
    # Values up to half the scale, which is the mean magnitude, get code 0.
    is_nonzero = magnitudes > mean / 2 if tiles.format.has_zero else jnp.full_like(magnitudes, True)
    differences = jnp.where(is_nonzero, tiles.expand(largest) - magnitudes, 0)
    return largest - differences.sum(axes) / jnp.maximum(is_nonzero.sum(axes), 1)


def limit_scale(
    scale: jax.Array, zero_point: jax.Array | None, format: Format, dtype: DTypeLike, stored_in: str
) -> jax.Array:
    """Reduce scales that are so large that the largest code would be dequantized to infinity.

    Otherwise values near the maximum of `dtype`, the dtype of the dense array, could be rounded up
    to infinity. Scales that are not finite become NaN. Scales are stored in the dtype `stored_in`.
    """
    largest_code: jax.Array | float
    if zero_point is not None:
        least, largest = format.code_range
        largest_code = jnp.maximum(zero_point - least, largest - zero_point)
    else:
        numbers = format.code_range if format.is_integer else format.codebook or [format.bound]
        largest_code = float(max(map(abs, numbers)))
    limit = jnp.asarray(float(jnp.finfo(dtype).max), scale.dtype) / largest_code
    if stored_in == "float8_e8m0fnu":  # The scale is rounded up to a power of two.
        limit = jnp.ldexp(jnp.ones((), scale.dtype), jnp.frexp(limit)[1] - 1)
    elif format.scale_tile is None:  # The scale is rounded to the nearest number of its dtype.
        limit *= 1 - float(jnp.finfo(stored_in).eps)
    return jnp.where(jnp.isfinite(scale), jnp.minimum(scale, limit), jnp.nan)


def store_scale(
    scale: jax.Array, dtype: str, format: Format
) -> tuple[jax.Array | QArray, jax.Array]:
    """Convert scales to the dtype in which they are stored, or quantize them.

    A scale that is too small to divide by is stored as 1, because all codes of its tile are 0. In a
    format without a code for 0, it is stored as 0, or in float8_e8m0fnu as 2**-126.

    **Arguments:**

    - `scale`: f32 or f64, not negative. NaN stays NaN.
    - `dtype`: the dtype of stored scales, or the format of quantized scales.
    - `format`: the format of the values. Scales are quantized if it has a `scale_tile`.

    **Returns:** `(stored, divisor)`: the stored scales, and the numbers to divide values by. The
    numbers are the stored scales in the dtype of `scale`, but 1 for scales that are too small.
    """
    has_zero = format.has_zero
    if format.scale_tile is not None:
        # This limit is half of what `as_divisor` allows, because scales can be rounded up.
        largest = 0.5 / jnp.finfo(scale.dtype).tiny
        scale = jnp.where(scale > largest, jnp.nan, scale)
        quantized = _quantize_scales(scale, dtype, format.scale_tile)
        return quantized, quantized.dequantize().astype(scale.dtype)
    if dtype == "float8_e8m0fnu":
        # Round up to a power of two that is a normal number in f32. `fraction` is in [0.5, 1).
        fraction, exponent = jnp.frexp(as_divisor(scale))
        exponent = jnp.clip(exponent - (fraction == 0.5), -126, 127)
        power = jnp.ldexp(jnp.ones((), scale.dtype), exponent)
        power = jnp.where(jnp.isnan(scale), jnp.nan, power)
        least = jnp.asarray(2.0**-126, scale.dtype)
        stored = power if has_zero else jnp.where(scale < least, least, power)
        return stored.astype(dtype), power
    # Values are divided in f32 or f64, where the subnormal numbers of f16 are normal numbers.
    rounded = round_to_dtype(scale, dtype)
    divisor = as_divisor(rounded)
    stored = divisor if has_zero else jnp.where(rounded < jnp.finfo(scale.dtype).tiny, 0, divisor)
    return stored.astype(dtype), divisor


def _quantize_scales(scale: jax.Array, qtype: str, tile: int) -> QArray:
    """Quantize scales in a float8 format, with one f32 scale per group of at most `tile` scales.

    A group is a block of the last two axes. It is as long as possible along the last axis, and then
    along the axis before. If `tile` is 0, a group has all scales of both axes.
    """
    format = get_format(qtype)
    outer_shape, limit = list(scale.shape), tile  # `limit` is the largest size of a group
    for axis in reversed(range(scale.ndim)[-2:]):
        size = scale.shape[axis]
        group = size if tile == 0 else max(d for d in range(1, limit + 1) if size % d == 0)
        group = max(group, 1)  # An axis can have size 0.
        outer_shape[axis] = size // group
        limit //= group
    split = split_tiles(jnp.where(jnp.isnan(scale), 0, scale), tuple(outer_shape))
    largest = jnp.max(split, axis=range(1, split.ndim, 2), initial=0)
    outer_scale = as_divisor((largest / format.bound).astype(jnp.float32))
    # A code of 0 would make a scale that cannot be divided by, so use at least the next code.
    least = float(jnp.finfo(format.code_dtype).smallest_subnormal)
    scaled = jnp.maximum(over_tiles(jnp.divide, scale, outer_scale.astype(scale.dtype)), least)
    codes = jnp.where(jnp.isnan(scale), jnp.nan, format.encode(scaled)).astype(format.code_dtype)
    return QArray.from_packed(codes, outer_scale, qtype=qtype)
