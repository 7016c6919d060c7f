"""Stochastic rounding: up or down, in proportion to how near both neighbours are.

So the expected value is the value itself, if the format reaches so far, and a value that the format
has is kept.
"""

import itertools

import jax
import jax.numpy as jnp

from .table import Format


def encode_stochastically(x: jax.Array, format: Format, key: jax.Array) -> jax.Array:
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


def _in_float8(x: jax.Array, format: Format, u: jax.Array) -> jax.Array:
    largest = float(jnp.finfo(format.code_dtype).max)
    x = jnp.clip(x, -largest, largest)
    magnitude = jnp.abs(x)
    worth = lambda bits: jax.lax.bitcast_convert_type(bits, format.code_dtype).astype(x.dtype)
    # The bits of positive floats are in the order of their values.
    nearest = jax.lax.bitcast_convert_type(magnitude.astype(format.code_dtype), jnp.uint8)
    below = nearest - (worth(nearest) > magnitude).astype(jnp.uint8)
    low = worth(below)
    # Next to the largest there is no number, and nothing to go up for.
    up = (magnitude > low) & (u * (worth(below + 1) - low) < magnitude - low)
    bits = below + up.astype(jnp.uint8)
    return jnp.where(x < 0, -worth(bits), worth(bits)).astype(format.code_dtype)
