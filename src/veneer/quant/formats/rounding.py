"""Rounding to the nearest value of a dtype, and stochastic rounding to the values of a format.

Stochastic rounding goes up or down, in proportion to how near both neighbors are. The expected
result is the value itself, if it is in the range of the format. Values of the format are kept.
"""

import itertools
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from .table import Format


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to_dtype(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round values to the nearest ones of a narrower float dtype, but keep the dtype of `x`.

    Use this before each conversion to a narrow dtype that the same program may undo. XLA for GPUs
    removes a conversion to 8 or 16 bits and back (`xla_allow_excess_precision`, the default), and
    the rounding with it. Quantization in float8 would then round nothing, and codes would not match
    a scale that is stored in 16 bits. After this function, the conversion itself is exact.

    The derivative is 1, as for a conversion.

    `dequantize` does not use this function for its 16-bit results. A GPU may keep more bits of such
    a result until the program returns it, as in any JAX program.

    **Arguments:**

    - `dtype`: a float dtype with a sign. Ties are rounded to even, as in a conversion. Values
      beyond its range become infinite.

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
def _round_to_dtype_jvp(
    dtype: DTypeLike, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return round_to_dtype(*primals, dtype), tangents[0]


def encode_stochastically(x: jax.Array, format: "Format", key: jax.Array) -> jax.Array:
    """Returns what `format.encode` does, but one of the two codes next to each value at random.

    **Arguments:**

    - `x`: values already divided by their scale, of any shape; f32 or f64.
    - `key`: of `jax.random`.
    """
    x = jnp.where(jnp.isnan(x), 0, x)
    # Below 1 by more than what rounding `u * gap` may add: a value that the format has is kept.
    u = jax.random.uniform(key, x.shape, x.dtype)
    if format.codebook is not None:
        return _in_codebook(x, format.codebook, u)
    if not format.is_integer:
        return _in_float8(x, format, u)
    if format.bits == 1:
        return jnp.where(2 * u < x + 1, 1, -1).astype(format.byte_dtype)
    below = jnp.floor(x)
    return jnp.clip(below + (u < x - below), *format.code_range).astype(format.byte_dtype)


def _in_codebook(x: jax.Array, codebook: tuple[float, ...], u: jax.Array) -> jax.Array:
    values = {value: code for code, value in reversed([*enumerate(codebook)])}
    ascending = sorted(values.items())
    code = jnp.full(x.shape, ascending[0][1], jnp.uint8)
    for (low, below), (high, above) in itertools.pairwise(ascending):
        start = jnp.asarray(low, x.dtype)
        gap = jnp.asarray(high, x.dtype) - start
        # All gaps below that of x are passed, and none above.
        code += (u * gap < x - start).astype(jnp.uint8) * jnp.uint8((above - below) % 256)
    return code


def _in_float8(x: jax.Array, format: "Format", u: jax.Array) -> jax.Array:
    largest = float(jnp.finfo(format.code_dtype).max)
    x = jnp.clip(x, -largest, largest)
    magnitude = jnp.abs(x)
    worth = lambda bits: jax.lax.bitcast_convert_type(bits, format.code_dtype).astype(x.dtype)
    # The bits of positive floats are in the order of their values.
    rounded = round_to_dtype(magnitude, format.code_dtype)
    nearest = jax.lax.bitcast_convert_type(rounded.astype(format.code_dtype), jnp.uint8)
    below = nearest - (rounded > magnitude).astype(jnp.uint8)
    low = worth(below)
    # Next to the largest there is no number, and nothing to go up for.
    up = (magnitude > low) & (u * (worth(below + 1) - low) < magnitude - low)
    bits = below + up.astype(jnp.uint8)
    return jnp.where(x < 0, -worth(bits), worth(bits)).astype(format.code_dtype)
