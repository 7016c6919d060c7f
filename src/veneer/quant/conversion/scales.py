"""Scales: stable ones, bounded ones, and how scales are stored.

A scale is stored as a float, as a power of two, or as a code that has a scale, too (double
quantization). Codes are computed with the stored scale, so its rounding adds no error to them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..arrays.qarray import QArray
from ..formats import Format, get_format
from ..formats.rounding import round_to_dtype
from ..formats.tiles import over_tiles, split_tiles
from .calibration import Calibration, Tiles, as_divisor


def stable_scale(
    calibration: Calibration, tiles: Tiles, scale_dtype: str, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """Return scales and zero points that quantizing the dequantized values gives again.

    Dequantizing and quantizing again must not change values. Two properties ensure this:

    - The value at an end of the range gets the last code.
    - For f32 values, a scale has 8 bits fewer than f32. Its product with a code is then exact.

    If `dtype` has 16 bits, dequantized values are rounded once more. With a zero point, both ends
    of the range are rounded, so the scale has one bit fewer than `dtype`. This is not always enough
    if codes have more bits than the mantissa of `dtype`, if the ends of a codebook have different
    magnitudes, or if the scale is subnormal in f16.

    **Arguments:**

    - `calibration`: "absmax", "minmax" or "absmean".
    - `scale_dtype`: the dtype of stored scales.
    - `dtype`: the dtype of the dequantized values.
    """
    values, format = tiles.values, tiles.format
    is_finite = jnp.isfinite(tiles.largest_magnitude())
    info = jnp.finfo(values.dtype)
    nmant = info.nmant - 8
    if not calibration.symmetric and format.bits <= jnp.finfo(dtype).nmant:
        nmant = min(nmant, jnp.finfo(dtype).nmant - 1)

    def round_bits(scale: jax.Array) -> jax.Array:
        few_bits = jax.lax.reduce_precision(scale, info.nexp, nmant)
        is_usable = (scale >= info.tiny) & (scale <= 1 / info.tiny)
        return jnp.where(is_finite, jnp.where(is_usable, few_bits, scale), jnp.nan)

    if calibration.name == "absmean":
        return round_bits(_mean_of_nonzero(tiles)), None
    if calibration.symmetric:
        least, largest = format.ends
        as_positive = jnp.where(values < 0, values * (largest / least), values)
        scale = dataclasses.replace(tiles, values=as_positive).largest_magnitude() / largest
        return round_bits(scale), None
    low, high = tiles.limits()
    least, largest = format.code_range
    steps = largest - least

    def place_zero(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the number of codes below zero, and the distance of the ends to the last codes."""
        below, above = -low / scale, high / scale
        slack = jnp.where(below + above < steps / 4, 0, steps - below - above) / 2
        middle = below + slack
        zero = jnp.clip(jnp.round(middle), 0, steps)
        return zero, jnp.abs(zero - middle) + slack

    scale = tiles.round_scale(round_bits((high - low) / steps))
    # An end of the range may lie halfway between two codes. A smaller scale moves it past the last.
    factor = 1.0
    if scale_dtype != "float8_e8m0fnu":
        factor -= 0.7 * max(float(jnp.finfo(scale_dtype).eps), 2.0**-nmant)
    is_halfway = place_zero(scale)[1] > 0.5 - 2.0**-6
    scale = jnp.where(is_halfway, tiles.round_scale(round_bits(scale * factor)), scale)
    return scale, place_zero(scale)[0] + least


def _mean_of_nonzero(tiles: Tiles) -> jax.Array:
    """Return the mean of the magnitudes with a nonzero code. It is exact if they are all equal."""
    magnitudes, largest = jnp.abs(tiles.values), tiles.largest_magnitude()
    mean = jnp.mean(magnitudes, axis=tiles.axes, keepdims=True)
    has_code = magnitudes > mean / 2 if tiles.format.has_zero else jnp.full_like(magnitudes, True)
    differences = jnp.where(has_code, tiles.expand(largest) - magnitudes, 0)
    return largest - differences.sum(tiles.axes) / jnp.maximum(has_code.sum(tiles.axes), 1)


def limit_scale(
    scale: jax.Array, zero_point: jax.Array | None, format: Format, dtype: DTypeLike, stored_in: str
) -> jax.Array:
    """Reduce scales that would make the largest code infinite.

    Rounding can take a value near the largest number of `dtype` beyond it. Under the smaller scale
    the value is clipped instead. A scale that is not finite becomes NaN.

    **Arguments:**

    - `scale`, `zero_point`: in f32 or f64.
    - `dtype`: the dtype of the represented array.
    - `stored_in`: the dtype of the stored scale.
    """
    largest_code: jax.Array | float
    if not format.is_integer:
        largest_code = float(max(map(abs, format.codebook or [format.bound])))
    elif zero_point is None:
        largest_code = float(max(map(abs, format.code_range)))
    else:
        least, largest = format.code_range
        largest_code = jnp.maximum(zero_point - least, largest - zero_point)
    limit = jnp.asarray(float(jnp.finfo(dtype).max), scale.dtype) / largest_code
    if stored_in == "float8_e8m0fnu":  # The scale is rounded up to a power of two.
        limit = jnp.ldexp(jnp.ones((), scale.dtype), jnp.frexp(limit)[1] - 1)
    elif format.scale_tile is None:  # The scale is rounded to the nearest number of its dtype.
        limit *= 1 - float(jnp.finfo(stored_in).eps)
    return jnp.where(jnp.isfinite(scale), jnp.minimum(scale, limit), jnp.nan)


def store_scale(
    scale: jax.Array, dtype: str, scale_tile: int | None, *, has_zero: bool = True
) -> tuple[jax.Array | QArray, jax.Array]:
    """Convert scales to their storage format.

    A scale that is too small to divide by is stored as 1, because all codes of its tile are 0. In a
    format without a code for 0, it is stored as 0, or as the smallest power of two.

    **Arguments:**

    - `scale`: f32 or f64, not negative. NaN stays NaN.
    - `dtype`: the dtype of stored scales, or their format if `scale_tile` is not None.
    - `scale_tile`: the number of scales that share a scale of their own. 0 is all of a matrix.
    - `has_zero`: whether the format of the values has a code for 0.

    **Returns:** the stored scales, and their values in the dtype of `scale`, to divide by.
    """
    if scale_tile is not None:
        # The limit leaves room for rounding up.
        largest = 0.5 / jnp.finfo(scale.dtype).tiny
        quantized = _quantize_scales(jnp.where(scale > largest, jnp.nan, scale), dtype, scale_tile)
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
    # Scales divide in f32, where the subnormal numbers of f16 are normal numbers.
    rounded = round_to_dtype(scale, dtype)
    divisor = as_divisor(rounded)
    stored = divisor if has_zero else jnp.where(rounded < jnp.finfo(scale.dtype).tiny, 0, divisor)
    return stored.astype(dtype), divisor


def _quantize_scales(scale: jax.Array, qtype: str, tile: int) -> QArray:
    """Quantize scales in a float format of 8 bits, with one f32 scale per `tile` of them.

    Tiles extend over the last two axes. Along each of these, their size is the largest number that
    divides the axis and makes tiles of at most `tile` scales, first along the last axis. A tile
    size of 0 means both axes.
    """
    format = get_format(qtype)
    counts, left = list(scale.shape), tile
    for axis in reversed(range(scale.ndim)[-2:]):
        size = scale.shape[axis]
        run = size if tile == 0 else max(d for d in range(1, max(left, 1) + 1) if size % d == 0)
        counts[axis] = size // max(run, 1)
        left //= max(run, 1)
    split = split_tiles(jnp.where(jnp.isnan(scale), 0, scale), tuple(counts))
    largest = jnp.max(split, axis=range(1, split.ndim, 2), initial=0)
    outer = as_divisor((largest / format.bound).astype(jnp.float32))
    # A code of 0 would make a scale that cannot be divided by.
    least = float(jnp.finfo(format.code_dtype).smallest_subnormal)
    codes = jnp.maximum(over_tiles(jnp.divide, scale, outer.astype(scale.dtype)), least)
    codes = jnp.where(jnp.isnan(scale), jnp.nan, format.encode(codes)).astype(format.code_dtype)
    return QArray.from_packed(codes, outer, qtype=qtype)
