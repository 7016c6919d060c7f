"""Rounding to a narrow float dtype, and stochastic rounding to the values of a format.

Stochastic rounding picks the next value of the format below or above at random. The nearer value
has the higher probability, so that the expected result is the exact value. Values that the format
represents exactly do not change, and values beyond its range are clipped.
"""

import itertools
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from .format import Format


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round values to the precision of a narrower signed float dtype, without a conversion.

    The result keeps the dtype of `x`. Ties are rounded to even, and values beyond the range become
    infinite, as in a conversion. The derivative is 1.

    Call this function before a conversion to a narrow dtype. By default, XLA for GPUs removes a
    conversion to 8 or 16 bits and back (`xla_allow_excess_precision`), so it would not round.

    >>> import jax.numpy as jnp
    >>> from veneer.quant.formats.rounding import round_to_dtype
    >>> round_to_dtype(jnp.array([0.33, 300.0, 0.003, 500.0]), "float8_e4m3fn").tolist()
    [0.34375, 288.0, 0.00390625, inf]
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    info, wide_info = jnp.finfo(dtype), jnp.finfo(wide.dtype)
    if info.bits >= wide_info.bits:
        return x
    rounded = jax.lax.reduce_precision(wide, wide_info.nexp, info.nmant)
    infinite = jnp.sign(rounded) * jnp.inf
    rounded = jnp.where(jnp.abs(rounded) > float(info.max), infinite, rounded)
    if info.tiny > wide_info.tiny:  # Otherwise both dtypes have the same exponents.
        # Below the smallest normal number, the numbers of a dtype have equal distances.
        step = float(info.smallest_subnormal)
        subnormal = jnp.round(wide / step) * step
        rounded = jnp.where(jnp.abs(wide) < float(info.tiny), subnormal, rounded)
    return rounded.astype(x.dtype)


@round_to_dtype.defjvp
def _round_to_dtype_jvp(dtype: DTypeLike, primals: tuple, tangents: tuple) -> tuple:
    return round_to_dtype(*primals, dtype), tangents[0]


def encode_stochastically(x: jax.Array, format: "Format", key: jax.Array) -> jax.Array:
    """Round each value up or down at random to a value of a format, and return the unpacked codes.

    `x` has f32 or f64 values that are already divided by their scale. NaN gets the code of 0.
    """
    x = jnp.where(jnp.isnan(x), 0, x)
    # A value is rounded up if `random` times the gap between the values below and above is less
    # than the distance to the value below. `random` is in [0, 1), so exact values do not change.
    random = jax.random.uniform(key, x.shape, x.dtype)
    if format.codebook is not None:
        return _encode_in_codebook(x, format, random)
    if not format.is_integer:
        return _encode_in_float8(x, format, random)
    if format.bits == 1:  # The gap between -1 and 1 is 2.
        return jnp.where(2 * random < x + 1, 1, -1).astype(format.byte_dtype)
    floor = jnp.floor(x)
    return jnp.clip(floor + (random < x - floor), *format.code_range).astype(format.byte_dtype)


def _encode_in_codebook(x: jax.Array, format: "Format", random: jax.Array) -> jax.Array:
    """Return codes of a codebook, rounded up or down by `random` numbers in [0, 1)."""
    ascending = format.sorted_codebook()
    code = jnp.full(x.shape, ascending[0][1], jnp.uint8)  # the code of the smallest value
    for (low, low_code), (high, high_code) in itertools.pairwise(ascending):
        start = jnp.asarray(low, x.dtype)
        gap = jnp.asarray(high, x.dtype) - start
        # `x` passes all gaps below it, and none above. It passes the gap around it if it rounds up.
        passes_gap = (random * gap < x - start).astype(jnp.uint8)
        code += passes_gap * jnp.uint8((high_code - low_code) % 256)
    return code


def _encode_in_float8(x: jax.Array, format: "Format", random: jax.Array) -> jax.Array:
    """Return float8 values, rounded up or down by `random` numbers in [0, 1)."""
    dtype = format.code_dtype
    x = jnp.clip(x, -format.bound, format.bound)
    magnitude = jnp.abs(x)
    to_value = lambda bits: jax.lax.bitcast_convert_type(bits, dtype).astype(x.dtype)
    # Positive floats have the same order as their bit patterns, so adding 1 gives the next float.
    nearest = round_to_dtype(magnitude, dtype)
    nearest_bits = jax.lax.bitcast_convert_type(nearest.astype(dtype), jnp.uint8)
    low_bits = nearest_bits - (nearest > magnitude).astype(jnp.uint8)
    low, high = to_value(low_bits), to_value(low_bits + 1)
    # If `low` is the largest float, `high` is NaN or infinity. Then `magnitude` equals `low`.
    rounds_up = (magnitude > low) & (random * (high - low) < magnitude - low)
    rounded = to_value(low_bits + rounds_up.astype(jnp.uint8))
    return jnp.where(x < 0, -rounded, rounded).astype(dtype)
