"""Scales as they are stored: floats, powers of two, or codes of a format with scales of their own.

Codes are found from the scale as stored, so whatever a scale loses here, no code is wrong for it.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..arrays.qarray import QArray
from ..formats import Format, get_format
from ..formats.rounding import round_to_dtype
from ..formats.tiles import Shape, over_tiles, split_tiles


def usable(scale: jax.Array) -> jax.Array:
    """Returns a scale that can be divided by: 1 where it is too small, NaN where too large.

    XLA divides by multiplying with the reciprocal, so that must be a normal number, too.
    """
    tiny = jnp.finfo(scale.dtype).tiny
    return jnp.where(scale < tiny, 1, jnp.where(scale <= 1 / tiny, scale, jnp.nan))


def bounded_scale(
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
    limit = jnp.asarray(float(jnp.finfo(dtype).max), scale.dtype) / _reach(format, zero_point)
    if stored_in == "float8_e8m0fnu":  # The scale is rounded up to a power of two.
        limit = jnp.ldexp(jnp.ones((), scale.dtype), jnp.frexp(limit)[1] - 1)
    elif format.scale_tile is None:  # The scale is rounded to the nearest number of its dtype.
        limit *= 1 - float(jnp.finfo(stored_in).eps)
    return jnp.where(jnp.isfinite(scale), jnp.minimum(scale, limit), jnp.nan)


def _reach(format: Format, zero_point: jax.Array | None) -> jax.Array | float:
    """Return the largest magnitude of a code, before the scale."""
    if not format.is_integer:
        return float(max(map(abs, format.codebook or [format.bound])))
    least, largest = format.code_range
    if zero_point is None:
        return float(max(-least, largest))
    return jnp.maximum(zero_point - least, largest - zero_point)


def store_scale(
    scale: jax.Array, dtype: str, scale_tile: int | None, *, has_zero: bool = True
) -> tuple[jax.Array | QArray, jax.Array]:
    """Returns scales as they are stored, and what these are worth, which can be divided by.

    One that is too small to divide by is stored as 1, for its codes are 0; or, where no code is,
    as nothing, or the next to it.

    **Arguments:**

    - `scale`: f32 or f64, not negative; NaN stays NaN.
    - `dtype`: to store it in, or the format where `scale_tile` is not None.
    - `scale_tile`: how many share a scale of their own; 0 is all those of a matrix.
    - `has_zero`: whether the format has a code for 0.
    """
    if scale_tile is not None:
        # Rounded up, it can still be divided by.
        largest = 0.5 / jnp.finfo(scale.dtype).tiny
        quantized = _quantize(jnp.where(scale > largest, jnp.nan, scale), dtype, scale_tile)
        return quantized, quantized.dequantize().astype(scale.dtype)
    if dtype == "float8_e8m0fnu":
        power = _power_of_two(scale)
        least = jnp.asarray(2.0**-126, scale.dtype)
        stored = power if has_zero else jnp.where(scale < least, least, power)
        return stored.astype(dtype), power
    # Compared where it is divided by: a scale may be subnormal in f16, and not yet in f32.
    rounded = round_to_dtype(scale, dtype)
    worth = usable(rounded)
    stored = worth if has_zero else jnp.where(rounded < jnp.finfo(scale.dtype).tiny, 0, worth)
    return stored.astype(dtype), worth


def _power_of_two(scale: jax.Array) -> jax.Array:
    """Returns the least power of two from `scale` on, which is a normal number in f32."""
    fraction, exponent = jnp.frexp(usable(scale))  # fraction in [0.5, 1)
    exponent = jnp.clip(exponent - (fraction == 0.5), -126, 127)
    return jnp.where(jnp.isnan(scale), jnp.nan, jnp.ldexp(jnp.ones((), scale.dtype), exponent))


def _quantize(scale: jax.Array, qtype: str, tile: int) -> QArray:
    """Returns scales in a float format of 8 bits, `tile` of them to a scale in f32."""
    format = get_format(qtype)
    outer_counts = _outer_counts(scale.shape, tile)
    split = split_tiles(jnp.where(jnp.isnan(scale), 0, scale), outer_counts)
    largest = jnp.max(split, axis=range(1, split.ndim, 2), initial=0)
    outer = usable((largest / format.bound).astype(jnp.float32))
    # The least code is not 0, which could not be divided by.
    least = float(jnp.finfo(format.code_dtype).smallest_subnormal)
    codes = jnp.maximum(over_tiles(jnp.divide, scale, outer.astype(scale.dtype)), least)
    codes = jnp.where(jnp.isnan(scale), jnp.nan, format.encode(codes)).astype(format.code_dtype)
    return QArray.from_packed(codes, outer, qtype=qtype)


def _outer_counts(shape: Shape, tile: int) -> Shape:
    """Returns the shape of the scales of scales: in full but along the last two axes.

    There, `tile` neighbours share one, or the next smaller number that divides the axes: on the
    last axis as many as it has, and of the one before what is left. A tile of 0 is all of both.
    """
    counts = list(shape)
    left = tile
    for axis in reversed(range(len(shape))[-2:]):
        size = shape[axis]
        run = size if tile == 0 else max(d for d in range(1, max(left, 1) + 1) if size % d == 0)
        counts[axis] = size // max(run, 1)
        left //= max(run, 1)
    return tuple(counts)
