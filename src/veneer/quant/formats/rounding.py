"""Rounding to a narrow float dtype, and stochastic rounding to the values of a format.

Stochastic rounding picks one of the two nearest values, the nearer one with higher probability, so
that the expected result is the exact value if it is in the range of the format. Values that the
format represents exactly do not change.
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
    """Round values to the nearest ones of a narrower signed float dtype, but keep their own dtype.

    Use this before each conversion to a narrow dtype that the same program may undo. XLA for GPUs
    removes a conversion to 8 or 16 bits and back (`xla_allow_excess_precision`, the default), and
    the rounding with it. Quantization in float8 would then round nothing, and codes would not match
    a scale that is stored in 16 bits. After this function, the conversion itself is exact.

    Ties are rounded to even, and values beyond the range become infinite, as in a conversion. The
    derivative is 1.

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
    if info.tiny > wide_info.tiny:  # otherwise both dtypes have the same subnormal numbers
        step = float(info.smallest_subnormal)
        subnormal = jnp.round(wide / step) * step
        rounded = jnp.where(jnp.abs(wide) < float(info.tiny), subnormal, rounded)
    return rounded.astype(x.dtype)


@round_to_dtype.defjvp
def _round_to_dtype_jvp(dtype: DTypeLike, primals: tuple, tangents: tuple) -> tuple:
    return round_to_dtype(*primals, dtype), tangents[0]


def encode_stochastically(x: jax.Array, format: "Format", key: jax.Array) -> jax.Array:
    """Return codes like `format.encode`, but round each value up or down at random.

    **Arguments:**

    - `x`: values that are already divided by their scale, of any shape, in f32 or f64.
    - `key`: a key of `jax.random`.
    """
    x = jnp.where(jnp.isnan(x), 0, x)
    # Below, `u * gap` is never rounded up to `gap`, so exact values of the format do not change.
    u = jax.random.uniform(key, x.shape, x.dtype)
    if format.codebook is not None:
        return _encode_in_codebook(x, format, u)
    if not format.is_integer:
        return _encode_in_float8(x, format, u)
    if format.bits == 1:
        return jnp.where(2 * u < x + 1, 1, -1).astype(format.byte_dtype)
    below = jnp.floor(x)
    return jnp.clip(below + (u < x - below), *format.code_range).astype(format.byte_dtype)


def _encode_in_codebook(x: jax.Array, format: "Format", u: jax.Array) -> jax.Array:
    ascending = format.sorted_codebook()
    code = jnp.full(x.shape, ascending[0][1], jnp.uint8)
    for (low, code_below), (high, code_above) in itertools.pairwise(ascending):
        start = jnp.asarray(low, x.dtype)
        gap = jnp.asarray(high, x.dtype) - start
        # True for all gaps below `x`, False for all above, and random for the gap around `x`.
        is_beyond = (u * gap < x - start).astype(jnp.uint8)
        code += is_beyond * jnp.uint8((code_above - code_below) % 256)
    return code


def _encode_in_float8(x: jax.Array, format: "Format", u: jax.Array) -> jax.Array:
    dtype = format.code_dtype
    x = jnp.clip(x, -format.bound, format.bound)
    magnitude = jnp.abs(x)
    to_value = lambda bits: jax.lax.bitcast_convert_type(bits, dtype).astype(x.dtype)
    # The bit patterns of positive floats are in the order of their values.
    rounded = round_to_dtype(magnitude, dtype)
    nearest = jax.lax.bitcast_convert_type(rounded.astype(dtype), jnp.uint8)
    below = nearest - (rounded > magnitude).astype(jnp.uint8)
    low = to_value(below)
    # If `low` is the largest value, it equals `magnitude`, and the pattern above is not used.
    is_up = (magnitude > low) & (u * (to_value(below + 1) - low) < magnitude - low)
    bits = below + is_up.astype(jnp.uint8)
    return jnp.where(x < 0, -to_value(bits), to_value(bits)).astype(dtype)
