"""Decode a tile of codes to f32 within a kernel.

Integers and small floats are computed from their bits. All other codes are looked up. Codes that
were extracted from their bytes are called fields.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..common.problem import Codes

Decode = Callable[[jax.Array], jax.Array]  # from i32 fields to f32 values


def decoder(codes: Codes, looked_up: Decode) -> Decode:
    """Return a function that decodes i32 fields to f32 values.

    **Arguments:**

    - `looked_up`: the function to return for codes that cannot be computed from their bits.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.tpu.decode import decoder
    >>> from veneer.kernels.common.problem import Codes
    >>> decoder(Codes(8, "int8"), print)(jnp.arange(127, 130)).tolist()
    [127.0, -128.0, -127.0]
    """
    if codes.dtype in SMALL_FLOATS:
        return SMALL_FLOATS[codes.dtype].decode
    if codes.values == _E2M1:
        return SMALL_FLOATS["float4_e2m1fn"].decode
    values = codes.values or tuple(_values_of_bytes(codes.dtype))
    for flipped in (0, len(values) // 2):
        less = flipped - values[0]
        if values == tuple((field ^ flipped) - less for field in range(len(values))):
            return functools.partial(_ordered, flipped, less)
    return looked_up


def _values_of_bytes(dtype: str) -> list[float]:
    return [float(byte if dtype == "uint8" or byte < 128 else byte - 256) for byte in range(256)]


def _ordered(flipped: int, less: float, fields: jax.Array) -> jax.Array:
    """Decode consecutive integers, signed or unsigned, and subtract a constant."""
    return (fields ^ flipped).astype(jnp.float32) - less


@dataclasses.dataclass(frozen=True)
class SmallFloat:
    """A float format of at most 8 bits: a sign, an exponent and a mantissa.

    **Arguments:**

    - `bits`: the number of bits.
    - `mantissa`: the number of mantissa bits.
    - `bias`: the exponent bias.
    - `infinite`: the bits of positive infinity, or None.
    - `nan`: the bits of the smallest positive NaN, or None.
    """

    bits: int
    mantissa: int
    bias: int
    infinite: int | None = None
    nan: int | None = None

    def decode(self, fields: jax.Array) -> jax.Array:
        """Decode fields by shifting their bits to the positions of f32.

        No step uses subnormal f32 numbers, because devices may flush them to 0.
        """
        magnitude = fields & (1 << self.bits - 1) - 1
        moved = (magnitude << 23 - self.mantissa) + (127 - self.bias << 23)
        number = lax.bitcast_convert_type(moved, jnp.float32)
        subnormal = magnitude.astype(jnp.float32) * 2.0 ** (1 - self.bias - self.mantissa)
        number = jnp.where(magnitude >> self.mantissa == 0, subnormal, number)
        if self.nan is not None:
            number = jnp.where(magnitude >= self.nan, jnp.nan, number)
        if self.infinite is not None:
            number = jnp.where(magnitude == self.infinite, jnp.inf, number)
        return jnp.where(fields >> self.bits - 1 == 0, number, -number)


#: See the OCP's "8-bit Floating Point Specification" and "Microscaling Formats Specification".
SMALL_FLOATS = {
    "float8_e4m3fn": SmallFloat(8, mantissa=3, bias=7, nan=0x7F),
    "float8_e5m2": SmallFloat(8, mantissa=2, bias=15, infinite=0x7C, nan=0x7D),
    "float4_e2m1fn": SmallFloat(4, mantissa=1, bias=1),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def select_value(codes: Codes, fields: jax.Array) -> jax.Array:
    """Look up the values of fields of at most 4 bits. Use a tree of selects, one level per bit."""
    values: list[Any] = [np.float32(value) for value in codes.values]
    bit = 0
    while len(values) > 1:
        is_set = (fields >> bit & 1) == 1
        values = [
            jnp.where(is_set, odd, even)
            for even, odd in zip(values[::2], values[1::2], strict=True)
        ]
        bit += 1
    return values[0]


def fields_of(tile: jax.Array, bits: int, place: int) -> jax.Array:
    """Extract one code from each byte of a tile, as i32.

    **Arguments:**

    - `tile`: uint8.
    - `place`: the index of the code in its byte. 0 is the lowest bits.
    """
    return tile.astype(jnp.int32) >> place * bits & (1 << bits) - 1


def scales_of(scale: jax.Array, is_exponent: bool) -> jax.Array:
    """Convert scales to f32.

    **Arguments:**

    - `scale`: floats, or float8_e8m0fnu stored as uint8.
    """
    if not is_exponent:
        return scale.astype(jnp.float32)
    bits = scale.astype(jnp.int32)
    number = lax.bitcast_convert_type(bits << 23, jnp.float32)
    number = jnp.where(bits == 0, jnp.float32(2.0**-127), number)
    return jnp.where(bits == 255, jnp.nan, number)
