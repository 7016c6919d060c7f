"""Packing codes of fewer than 8 bits in bytes without gaps.

A *unit* is the smallest group of neighboring codes that fills whole bytes:

- one byte, with 8, 4 or 2 codes of 1, 2 or 4 bits. The first code is in the lowest bits.
- one byte, with 5 ternary codes as digits of base 3. The first code is the lowest digit.
- b bytes, with 8 codes of b = 3, 5, 6 or 7 bits. Each byte is a bit plane: it has the same bit of
  all 8 codes (`veneer.kernels.common.problem`).

JAX's own int4 arrays take one byte per value on CPU, and some operations of XLA reject them.
Therefore codes are stored in uint8, and converted to int8 or uint8 for arithmetic.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ...kernels.common.problem import pack_bits, unpack_bits

# From the bits per code to the number of codes and the number of bytes in a unit.
UNITS: dict[int | float, tuple[int, int]] = {1: (8, 1), 1.6: (5, 1), 2: (4, 1), 4: (2, 1)}
UNITS |= {bits: (8, bits) for bits in (3, 5, 6, 7)}


class Packing(NamedTuple):
    """The axis along which codes are packed, and its size before packing.

    **Arguments:**

    - `axis`: the axis, counted from the end, so always negative.
    - `size`: the number of codes along that axis, without padding.

    >>> import jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((2, 5)), "int4")
    >>> q.packing, q.packed.shape
    (Packing(axis=-1, size=5), (2, 3))
    """

    axis: int
    size: int


def packed_size(size: int, bits: int | float) -> int:
    """Return the number of bytes that store `size` codes. The last unit may be partly empty.

    >>> from veneer.quant.formats.packing import packed_size
    >>> packed_size(5, 4), packed_size(9, 3), packed_size(11, 1.6)
    (3, 6, 3)
    """
    codes, bytes_ = UNITS[bits]
    return -(-size // codes) * bytes_


def axis_to_pack(shape: Sequence[int], bits: int | float) -> int:
    """Return the axis of an array of `shape` along which to pack codes, counted from the end.

    This is the last axis if padding its codes to whole bytes adds less than an eighth. Otherwise,
    as in a convolution kernel `[out, in, 3, 3]`, it is the axis with the least padding. The first
    axis is packed only in arrays of rank 1.
    """
    if not shape:
        return -1
    codes, bytes_ = UNITS[bits]

    def padded_ratio(axis: int) -> float:
        """Return the size of `axis` after padding to whole bytes, divided by its size before."""
        return packed_size(shape[axis], bits) * codes / (bytes_ * max(shape[axis], 1))

    candidates = (-1, *range(-2, -len(shape), -1))
    return -1 if padded_ratio(-1) < 1.125 else min(candidates, key=padded_ratio)


def pack(fields: ArrayLike, bits: int | float, axis: int = -1) -> tuple[jax.Array, Packing]:
    """Pack codes along an axis, padded with zeros to whole bytes.

    **Arguments:**

    - `fields`: codes as unsigned integers in uint8, below `2**bits`, of rank 1 or more.
    - `bits`: the number of bits per code. With 1.6 bits, codes are 0, 1 or 2.

    **Returns:** the bytes, whose size along `axis` is `packed_size(size, bits)`, and the `Packing`
    that `unpack` needs.

    >>> import jax.numpy as jnp
    >>> from veneer.quant.formats.packing import pack, unpack
    >>> packed, packing = pack(jnp.array([1, 2, 15], jnp.uint8), 4)
    >>> packed.tolist(), packing
    ([33, 15], Packing(axis=-1, size=3))
    >>> unpack(packed, packing, 4).tolist()
    [1, 2, 15]
    """
    fields = jnp.asarray(fields)
    axis = axis % fields.ndim - fields.ndim
    packing = Packing(axis, fields.shape[axis])
    codes_per_unit, bytes_per_unit = UNITS[bits]
    if bytes_per_unit > 1:
        return pack_bits(fields, int(bits), axis), packing
    axis += fields.ndim
    padding = -packing.size % codes_per_unit
    fields = jnp.pad(fields, [(0, padding if i == axis else 0) for i in range(fields.ndim)])
    before, size, after = fields.shape[:axis], fields.shape[axis], fields.shape[axis + 1 :]
    units = fields.reshape(*before, size // codes_per_unit, codes_per_unit, *after)
    # Each byte is a number whose digits are the codes, the first code as the lowest digit.
    base = 3 if bits == 1.6 else 2 ** int(bits)
    packed = lax.index_in_dim(units, 0, axis + 1, keepdims=False)
    for place in range(1, codes_per_unit):
        digit = lax.index_in_dim(units, place, axis + 1, keepdims=False)
        packed = packed + digit * jnp.uint8(base**place)
    return packed, packing


def unpack(
    packed: ArrayLike, packing: Packing | None, bits: int | float, *, by_shifts: bool = False
) -> jax.Array:
    """Return the codes that `pack` packed, as unsigned integers in uint8.

    **Arguments:**

    - `packed`: the bytes.
    - `bits`: the number of bits per code.
    - `packing`: the packing that `pack` returned. None means one code per byte, in the lowest bits.
    - `by_shifts`: whether to unpack codes of 1, 2 or 4 bits with one broadcast shift, which is
      faster on GPUs, instead of one shift per code of a byte.
    """
    packed = jnp.asarray(packed)
    if packing is None:
        return _extract_code(packed, bits, 0)
    axis, size = packing
    codes_per_unit, bytes_per_unit = UNITS[bits]
    if bytes_per_unit > 1:
        return unpack_bits(packed, int(bits), axis, size)
    front_axis = packed.ndim + axis
    if by_shifts and bits != 1.6:
        # Shift by one amount per code of a byte, along a new axis after the packed axis.
        shifts = jnp.arange(0, 8, int(bits), dtype=packed.dtype).reshape(-1, *[1] * (-1 - axis))
        mask = jnp.asarray(2**bits - 1, packed.dtype)
        units = (jnp.expand_dims(packed, front_axis + 1) >> shifts) & mask
    else:
        codes = [_extract_code(packed, bits, place) for place in range(codes_per_unit)]
        units = jnp.stack(codes, front_axis + 1)
    before, after = packed.shape[:front_axis], packed.shape[front_axis + 1 :]
    padded = units.reshape(*before, codes_per_unit * packed.shape[front_axis], *after)
    return lax.slice_in_dim(padded, 0, size, axis=front_axis)


def _extract_code(packed: jax.Array, bits: int | float, place: int) -> jax.Array:
    """Return the code at index `place` of each byte. The code at index 0 is in the lowest bits."""
    if bits == 1.6:
        return packed // jnp.uint8(3**place) % jnp.uint8(3)
    bits = int(bits)
    if place:
        packed = packed >> (bits * place)
    is_highest = bits * (place + 1) == 8
    return packed if is_highest else packed & (2**bits - 1)


def split_neighbors(packed: ArrayLike, bits: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return two arrays: the codes at even and the codes at odd indices of the last axis.

    Each byte of both arrays has one code in the lowest bits. The other bits are not cleared.
    `packed` has `size` codes of 1, 2 or 4 bits along the last axis.
    """
    packed = jnp.asarray(packed)
    if bits < 4:  # Copy each byte once per pair of codes, with the pair in the lowest bits.
        shifts = jnp.arange(0, 8, 2 * bits, dtype=jnp.uint8)
        packed = (packed[..., None] >> shifts).reshape(*packed.shape[:-1], -1)
        packed = lax.slice_in_dim(packed, 0, -(-size // 2), axis=-1)
    return packed, packed >> bits


# For each byte, its five digits of base 3, and the same five ternary codes in 2 bits each.
_TERNARY_DIGITS = np.arange(256)[:, None] // 3 ** np.arange(5) % 3
_FIVE_INT2_CODES = ((_TERNARY_DIGITS - 1 & 3) << 2 * np.arange(5)).sum(1).astype(np.uint16)


@functools.partial(jax.jit, static_argnames="size")
def ternary_to_int2(packed: jax.Array, size: int) -> jax.Array:
    """Convert packed ternary codes, five per byte, to packed int2 codes, four per byte.

    `packed` is packed along the last axis, which has `size` codes. A table maps each byte to its
    five int2 codes, in 10 bits. This is three times as fast as computing the digits, because XLA
    (JAX 0.10) would compute them again for each output byte.
    """
    # Four bytes with five codes each become five bytes with four codes each.
    groups = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)])
    groups = groups.reshape(*packed.shape[:-1], -1, 4)
    ten_bits = jnp.asarray(_FIVE_INT2_CODES).at[groups].get(mode="promise_in_bounds")
    out_bytes = []
    for place in range(5):
        index, shift = divmod(8 * place, 10)  # where the output byte begins
        byte = ten_bits[..., index] >> shift
        if shift > 2:  # The output byte ends in the next 10 bits.
            byte |= ten_bits[..., index + 1] << 10 - shift
        out_bytes.append(byte.astype(jnp.uint8))
    # Without the barrier, XLA would compute all five expressions for each byte, and select one.
    out_bytes = lax.optimization_barrier(out_bytes)
    out = jnp.stack(out_bytes, -1).reshape(*packed.shape[:-1], -1)
    return out[..., : packed_size(size, 2)]
