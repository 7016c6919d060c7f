"""Codes: the kinds that kernels read, the values of codes, and bit planes.

The names of kinds are part of the names of kernels. Codes of 1, 2, 4 and 8 bits are packed in bytes
one after the other. All other codes are in bit planes: eight neighbors along an axis take as many
bytes as a code has bits. Byte p holds bit p of each of them, with the first neighbor in the lowest
bit. So no code crosses a byte.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

#: The bits of codes whose values are looked up in a table.
LOOKUP_BITS = {"lookup1": 1, "lookup2": 2, "lookup4": 4}
SIX_BIT_FLOATS = ("float6_e2m3fn", "float6_e3m2fn")
#: The bits of codes in bit planes.
PLANE_BITS = {"planes3": 3, "planes5": 5, "planes6": 6, "planes7": 7} | dict.fromkeys(
    SIX_BIT_FLOATS, 6
)
#: Dtypes of codes of 8 bits.
BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")

#: The bits of a code of each kind.
BITS = LOOKUP_BITS | PLANE_BITS | dict.fromkeys(BYTES, 8)

#: The kinds that kernels multiply by int8 activations. Only the kernel for few rows of activations
#: that contracts columns reads the planes.
INTEGERS = (*LOOKUP_BITS, "int8", "uint8")
INTEGER_PLANES = ("planes3", "planes5", "planes6", "planes7")

#: The dtypes of activations. Compiled code contains the index of a dtype here.
ACTIVATIONS = ("float32", "int8", "bfloat16")

#: The dtypes of scales and minima. Compiled code contains the index of a dtype here.
FLOATS = ("float32", "float16", "bfloat16", "float8_e8m0fnu")
#: The dtypes of zero points, whose indices follow the dtypes in `FLOATS`.
ZERO_POINTS = ("int8", "uint8")
#: Scales and minima that are codes are int8, or bit planes of `PLANES` bits with this index.
PLANES_TYPE, PLANES = len(FLOATS) + len(ZERO_POINTS), 6


def byte_of_planes(kind: str) -> str:
    """Return the dtype of a code in bit planes after it was expanded to a byte."""
    return kind if kind in SIX_BIT_FLOATS else "int8"


def row_bytes(columns: int, bits: int) -> int:
    """Return the bytes that a row of codes takes.

    Codes whose bits divide 8 share bytes. Eight neighbors of other codes take `bits` bytes.

    >>> row_bytes(9, 4), row_bytes(9, 3)
    (5, 6)
    """
    if 8 % bits:
        return (columns + 7) // 8 * bits
    return (columns * bits + 7) // 8


@dataclasses.dataclass(frozen=True)
class Codes:
    """The encoding of a matrix `[R, C]` of codes, and the value of each code before its scale.

    Codes of 8 bits are numbers of a dtype. Codes of 1, 2 and 4 bits share bytes with their
    neighbors along C, with the first in the lowest bits, and kernels look their values up. Codes of
    other bits are in bit planes of 8 neighbors: floats of 6 bits, and integers in order.

    **Arguments:**

    - `bits`: the bits of a code, 1 to 8.
    - `dtype`: the dtype of codes of 8 bits (int8, uint8, float8_e4m3fn or float8_e5m2) or of floats
      of 6 bits (float6_e2m3fn or float6_e3m2fn). "" for all other codes.
    - `values`: the `2**bits` values of all other codes, in the order of the stored fields. In bit
      planes, they are the fields with or without a sign, minus an integer.

    **Raises:** `ValueError` if no kernel reads such codes.

    >>> from veneer.kernels.common.codes import Codes
    >>> Codes(2, values=(0.0, 1.0, -2.0, -1.0)).kind
    'lookup2'
    >>> Codes(8, "int8").is_integer
    True
    >>> Codes(3, values=(0.0, 1.0, 2.0, 3.0, -4.0, -3.0, -2.0, -1.0)).kind
    'planes3'
    """

    bits: int
    dtype: str = ""
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        has_values = not self.dtype and len(self.values) == 2**self.bits
        is_narrow = has_values and (
            self.bits in LOOKUP_BITS.values() or self._plane_constants is not None
        )
        dtypes = {8: BYTES, 6: SIX_BIT_FLOATS}.get(self.bits, ())
        if not is_narrow and not (self.dtype in dtypes and not self.values):
            raise ValueError(
                f"no kernel reads codes of {self.bits} bits with dtype {self.dtype!r} and "
                f"{len(self.values)} values. Codes of 8 bits need a dtype: {', '.join(BYTES)}. "
                f"Codes of 6 bits can have one: {', '.join(SIX_BIT_FLOATS)}. Other codes need one "
                "value per code and no dtype; values of 3, 5, 6 and 7 bits are integers in order"
            )

    @property
    def kind(self) -> str:
        """The name of the encoding: `dtype`, or else "lookup" or "planes" followed by `bits`."""
        return self.dtype or f"{'planes' if 8 % self.bits else 'lookup'}{self.bits}"

    @property
    def is_integer(self) -> bool:
        """True if the value of every code is an integer that int8 or uint8 can hold."""
        if self.dtype:
            return self.dtype in ("int8", "uint8")
        return all(value == int(value) and -128 <= value <= 127 for value in self.values)

    @property
    def table(self) -> tuple[float, ...]:
        """The 16 numbers that a kernel decodes with.

        They are the values of the codes, repeated. For bit planes, they are the mask by which a
        field is flipped, the number that is subtracted, and zeros. Otherwise, they are zeros.
        """
        if self.dtype:
            first = (32.0, 32.0) if self.bits == 6 else (0.0, 0.0)
        elif self._plane_constants is not None:
            first = self._plane_constants
        else:
            return self.values * (16 // len(self.values))
        return (*first, *(0.0,) * 14)

    @property
    def _plane_constants(self) -> tuple[float, float] | None:
        """The mask and the number by which values in bit planes are `(field ^ mask) - number`.

        None if the values have no such form.
        """
        if self.bits not in PLANE_BITS.values() or len(self.values) != 2**self.bits:
            return None
        for mask in (0, 2 ** (self.bits - 1)):
            number = mask - self.values[0]
            values = tuple((field ^ mask) - number for field in range(2**self.bits))
            is_small = abs(number) <= 2 ** (self.bits - 1) and number == int(number)
            if values == self.values and is_small:
                return float(mask), float(number)
        return None


# Bit planes.


def planes_size(size: int, bits: int) -> int:
    """Return the bytes that `size` codes take. Some bits of the last bytes are unused."""
    return -(-size // 8) * bits


def pack_bits(codes: ArrayLike, bits: int, axis: int) -> jax.Array:
    """Pack codes along an axis, which is negative.

    **Arguments:**

    - `codes`: uint8, each less than `2**bits`.

    **Returns:** uint8 with `planes_size(size, bits)` on that axis.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.common.codes import pack_bits, unpack_bits
    >>> packed = pack_bits(jnp.array([5, 0, 1], jnp.uint8), bits=3, axis=-1)
    >>> packed.tolist()
    [5, 0, 1]
    >>> unpack_bits(packed, 3, -1, 3).tolist()
    [5, 0, 1]
    """
    codes = jnp.asarray(codes)
    at = codes.ndim + axis
    before, after, size = codes.shape[:at], codes.shape[at + 1 :], codes.shape[at]
    codes = jnp.pad(codes, [(0, -size % 8 if i == at else 0) for i in range(codes.ndim)])
    eights = codes.reshape(*before, -(-size // 8), 8, *after)
    shifts = _shifts(axis)
    planes = [(((eights >> bit) & 1) << shifts).sum(at + 1, dtype=jnp.uint8) for bit in range(bits)]
    return jnp.stack(planes, at + 1).reshape(*before, planes_size(size, bits), *after)


def unpack_bits(packed: ArrayLike, bits: int, axis: int, size: int) -> jax.Array:
    """Return the `size` codes that `pack_bits` packed along an axis, as uint8."""
    packed = jnp.asarray(packed)
    at = packed.ndim + axis
    before, after = packed.shape[:at], packed.shape[at + 1 :]
    count = packed.shape[at] // bits
    planes = packed.reshape(*before, count, bits, *after)
    shifts = _shifts(axis)
    codes = jnp.zeros((), jnp.uint8)
    for bit in range(bits):
        plane = jax.lax.slice_in_dim(planes, bit, bit + 1, axis=at + 1)
        codes = codes | (((plane >> shifts) & 1) << bit)
    codes = codes.reshape(*before, count * 8, *after)
    return jax.lax.slice_in_dim(codes, 0, size, axis=at)


def _shifts(axis: int) -> jax.Array:
    """Return the bit of each of eight neighbors in a byte: 0 to 7, along their axis.

    `axis` is the negative axis of the codes, before eight neighbors get an axis of their own.
    """
    return jnp.arange(8, dtype=jnp.uint8).reshape(8, *[1] * (-1 - axis))
