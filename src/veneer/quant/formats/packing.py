"""Packing codes of fewer than 8 bits in bytes without gaps.

A *unit* is the smallest number of neighboring codes that fills whole bytes, such as two codes of 4
bits in one byte or eight codes of 3 bits in three bytes. In units of one byte, the first code is in
the lowest bits: 8, 4 or 2 codes of 1, 2 or 4 bits, or 5 digits of base 3. Other units are bit
planes (`veneer.kernels.bit_planes`).

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

from ...kernels.bit_planes import pack_bits, unpack_bits

# The number of codes and of bytes in a unit, by the bits of a code.
UNITS: dict[int | float, tuple[int, int]] = {
    **{1: (8, 1), 1.6: (5, 1), 2: (4, 1), 4: (2, 1)},
    **{bits: (8, bits) for bits in (3, 5, 6, 7)},
}


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
    """Return the axis along which to pack the codes of an array, counted from the end.

    It is the last axis if padding there adds less than an eighth. Otherwise it is the axis with the
    least padding, except the first, as in a convolution kernel `[out, in, 3, 3]`.
    """
    if not shape:
        return -1
    codes, bytes_ = UNITS[bits]

    def excess(axis: int) -> float:
        return packed_size(shape[axis], bits) * codes / (bytes_ * max(shape[axis], 1))

    others = range(-2, -len(shape), -1)
    return -1 if excess(-1) < 1.125 else min((-1, *others), key=excess)


def pack(fields: ArrayLike, bits: int | float, axis: int = -1) -> tuple[jax.Array, Packing]:
    """Pack codes along an axis.

    **Arguments:**

    - `fields`: codes as unsigned integers in uint8, below `2**bits` (below 3 for 1.6 bits). The
      rank is at least 1. The axis is padded with zeros to whole units.

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
    count, bytes_ = UNITS[bits]
    if bytes_ > 1:
        return pack_bits(fields, int(bits), axis), packing
    at = fields.ndim + axis
    pad = -packing.size % count
    fields = jnp.pad(fields, [(0, pad if i == at else 0) for i in range(fields.ndim)])
    shape = (*fields.shape[:at], fields.shape[at] // count, count, *fields.shape[at + 1 :])
    units = fields.reshape(shape)
    base = 3 if bits == 1.6 else 2 ** int(bits)
    packed = lax.index_in_dim(units, 0, at + 1, keepdims=False)
    for place in range(1, count):
        field = lax.index_in_dim(units, place, at + 1, keepdims=False)
        packed = packed + field * jnp.uint8(base**place)
    return packed, packing


def unpack(
    packed: ArrayLike, packing: Packing | None, bits: int | float, *, by_shifts: bool = False
) -> jax.Array:
    """Return the codes that `pack` packed, as unsigned integers in uint8.

    **Arguments:**

    - `packing`: the packing that `pack` returned. None means one code per byte, in the lowest bits.
    - `by_shifts`: whether to shift each byte along a new axis instead of stacking its codes, which
      is faster on GPUs. It has no effect on bit planes and digits of base 3.
    """
    packed = jnp.asarray(packed)
    if packing is None:
        return _field(packed, bits, 0)
    axis, size = packing
    count, bytes_ = UNITS[bits]
    if bytes_ > 1:
        return unpack_bits(packed, int(bits), axis, size)
    at = packed.ndim + axis
    if by_shifts and bits != 1.6:
        places = jnp.arange(0, 8, int(bits), dtype=packed.dtype).reshape(-1, *[1] * (-1 - axis))
        units = (jnp.expand_dims(packed, at + 1) >> places) & jnp.asarray(2**bits - 1, packed.dtype)
    else:
        units = jnp.stack([_field(packed, bits, place) for place in range(count)], at + 1)
    shape = (*packed.shape[:at], count * packed.shape[at], *packed.shape[at + 1 :])
    return lax.slice_in_dim(units.reshape(shape), 0, size, axis=at)


def _field(packed: jax.Array, bits: int | float, place: int) -> jax.Array:
    if bits == 1.6:
        return packed // jnp.uint8(3**place) % jnp.uint8(3)
    bits = int(bits)
    if place:
        packed = packed >> (bits * place)
    is_highest = bits * (place + 1) == 8
    return packed if is_highest else packed & (2**bits - 1)


def split_neighbors(packed: ArrayLike, bits: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Unpack the codes at even and at odd indices of the last axis into two arrays.

    Each byte of a result has one code, in its lowest bits. Its other bits are not cleared.

    **Arguments:**

    - `packed`: codes of 1, 2 or 4 bits, packed along the last axis.
    - `size`: the number of codes along that axis.
    """
    packed = jnp.asarray(packed)
    if bits < 4:  # make one byte per pair of neighbors, with the pair in its lowest bits
        places = jnp.arange(0, 8, 2 * bits, dtype=jnp.uint8)
        packed = (packed[..., None] >> places).reshape(*packed.shape[:-1], -1)
        packed = lax.slice_in_dim(packed, 0, -(-size // 2), axis=-1)
    return packed, packed >> bits


# The five digits of base 3 in each byte, as codes of -1, 0 and 1 with 2 bits each: uint16[256].
_DIGITS = np.arange(256)[:, None] // 3 ** np.arange(5) % 3
_TEN_BITS = ((_DIGITS - 1 & 3) << 2 * np.arange(5)).sum(1).astype(np.uint16)


@functools.partial(jax.jit, static_argnames="size")
def ternary_to_int2(packed: jax.Array, size: int) -> jax.Array:
    """Convert packed ternary codes, five per byte, to packed int2 codes, four per byte.

    Four bytes become five. Each byte is looked up in a table of its five codes, because XLA (JAX
    0.10) computes the input of each of the five results anew. Dividing out the digits instead takes
    three times as long.

    **Arguments:**

    - `packed`: codes packed along the last axis.
    - `size`: the number of codes along that axis.
    """
    units = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)])
    units = units.reshape(*packed.shape[:-1], -1, 4)
    ten_bits = jnp.asarray(_TEN_BITS).at[units].get(mode="promise_in_bounds")
    bytes_ = []
    for place in range(5):
        first, shift = divmod(8 * place, 10)
        byte = ten_bits[..., first] >> shift
        if shift > 2:
            byte |= ten_bits[..., first + 1] << 10 - shift
        bytes_.append(byte.astype(jnp.uint8))
    # Without the barrier, XLA would select one of the five expressions for each byte.
    bytes_ = lax.optimization_barrier(bytes_)
    out = jnp.stack(bytes_, -1).reshape(*packed.shape[:-1], -1)
    return out[..., : packed_size(size, 2)]
