"""What codes are worth, computed within a kernel: a tile of bytes becomes a tile of f32.

There is an entry for each way in which numbers follow from bits. What has none of its own is looked
up, as a platform does that.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..problem import Codes

Decode = Callable[[jax.Array], jax.Array]  # fields, i32, to what they are worth, f32


def decoder(codes: Codes, looked_up: Decode) -> Decode:
    """Returns what makes numbers, f32, of the fields of codes, i32 of their bits.

    **Arguments:**

    - `looked_up`: what finds them in `codes.values`, if they follow no rule.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.pallas.decode import decoder
    >>> from veneer.kernels.problem import Codes
    >>> decoder(Codes(8, "int8"), print)(jnp.arange(127, 130)).tolist()
    [127.0, -128.0, -127.0]
    """
    if codes.dtype in SMALL_FLOATS:
        return SMALL_FLOATS[codes.dtype].decode
    if codes.values == _E2M1:
        return SMALL_FLOATS["float4_e2m1fn"].decode
    values = codes.values or tuple(_worth_of_bytes(codes.dtype))
    for flipped in (0, len(values) // 2):
        less = flipped - values[0]
        if values == tuple((field ^ flipped) - less for field in range(len(values))):
            return functools.partial(_ordered, flipped, less)
    return looked_up


def _worth_of_bytes(dtype: str) -> list[float]:
    return [float(byte if dtype == "uint8" or byte < 128 else byte - 256) for byte in range(256)]


def _ordered(flipped: int, less: float, fields: jax.Array) -> jax.Array:
    """Integers in order, with a sign or without, less any number."""
    return (fields ^ flipped).astype(jnp.float32) - less


@dataclasses.dataclass(frozen=True)
class SmallFloat:
    """Floats of 8 bits or fewer: a sign, an exponent and a mantissa.

    **Arguments:**

    - `bits`: of all.
    - `mantissa`: how many of them are the mantissa.
    - `bias`: of the exponent.
    - `infinite`: the magnitude, without its sign, that is infinite; or None.
    - `nan`: the first magnitude that is no number; or None.
    """

    bits: int
    mantissa: int
    bias: int
    infinite: int | None = None
    nan: int | None = None

    def decode(self, fields: jax.Array) -> jax.Array:
        """Returns what fields are worth: the bits moved to their places in f32.

        No step makes or takes what is subnormal in f32, which devices may take for 0.
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


#: From the OCP's "8-bit Floating Point Specification" and "Microscaling Formats Specification".
SMALL_FLOATS = {
    "float8_e4m3fn": SmallFloat(8, mantissa=3, bias=7, nan=0x7F),
    "float8_e5m2": SmallFloat(8, mantissa=2, bias=15, infinite=0x7C, nan=0x7D),
    "float4_e2m1fn": SmallFloat(4, mantissa=1, bias=1),
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def by_selection(codes: Codes, fields: jax.Array) -> jax.Array:
    """Looks up what fields of at most 4 bits are worth by a tree of choices, a level a bit."""
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
    """Returns the codes at one place of each byte of a tile, as i32.

    **Arguments:**

    - `tile`: u8.
    - `place`: 0 is that of the lowest bits.
    """
    return tile.astype(jnp.int32) >> place * bits & (1 << bits) - 1


def scales_of(scale: jax.Array, is_exponent: bool) -> jax.Array:
    """Returns scales in f32.

    **Arguments:**

    - `scale`: floats; or the bytes of float8_e8m0fnu, u8.
    """
    if not is_exponent:
        return scale.astype(jnp.float32)
    bits = scale.astype(jnp.int32)
    number = lax.bitcast_convert_type(bits << 23, jnp.float32)
    number = jnp.where(bits == 0, jnp.float32(2.0**-127), number)
    return jnp.where(bits == 255, jnp.nan, number)
