"""Packing: codes of fewer than 8 bits, without gaps, in bytes.

A *unit* is the least run of neighbours that fills whole bytes: two codes of 4 bits a byte, eight of
3 bits in three. Where a unit is one byte, its codes lie in it in order, the first in the lowest
place: 8, 4 or 2 fields of 1, 2 or 4 bits, or 5 digits of base 3. Others are bit planes.

XLA's own int4 arrays take one byte a value on CPU and are refused by some of its operations, so
codes are uint8 in storage, and int8 or uint8 in arithmetic.
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

# Codes and bytes of a unit, by the bits of a code.
UNITS: dict[int | float, tuple[int, int]] = {
    1: (8, 1),
    1.6: (5, 1),
    2: (4, 1),
    3: (8, 3),
    4: (2, 1),
    5: (8, 5),
    6: (8, 6),
    7: (8, 7),
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
    """Returns the bytes that `size` codes take; the last unit may be partly empty.

    >>> from veneer.quant.formats.packing import packed_size
    >>> packed_size(5, 4), packed_size(9, 3), packed_size(11, 1.6)
    (3, 6, 3)
    """
    codes, bytes_ = UNITS[bits]
    return -(-size // codes) * bytes_


def axis_to_pack(shape: Sequence[int], bits: int | float) -> int:
    """Returns the axis, counted from the end, along which codes of an array are packed.

    The last; or another but the first, where units that are partly empty are an eighth more there,
    as for a convolution's kernel `[out, in, 3, 3]`.

    >>> from veneer.quant.formats.packing import axis_to_pack
    >>> axis_to_pack((64, 33), 4), axis_to_pack((128, 64, 3, 3), 4)
    (-1, -3)
    """
    if not shape:
        return -1
    codes, bytes_ = UNITS[bits]

    def excess(axis: int) -> float:
        return packed_size(shape[axis], bits) * codes / (bytes_ * max(shape[axis], 1))

    others = range(-2, -len(shape), -1)
    return -1 if excess(-1) < 1.125 else min((-1, *others), key=excess)


def pack(fields: ArrayLike, bits: int | float, axis: int = -1) -> tuple[jax.Array, Packing]:
    """Packs neighbours along `axis`.

    **Arguments:**

    - `fields`: uint8, each less than `2**bits` (3 for 1.6 bits), of rank 1 and up. The axis is
      padded with zeros to whole units.

    **Returns:** the bytes, uint8 with `packed_size(size, bits)` on that axis, and the packing to
    undo it.

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
    packed = jax.lax.index_in_dim(units, 0, at + 1, keepdims=False)
    for place in range(1, count):
        field = jax.lax.index_in_dim(units, place, at + 1, keepdims=False)
        packed = packed + field * jnp.uint8(_weight(bits, place))
    return packed, packing


def unpack(
    packed: ArrayLike, packing: Packing | None, bits: int | float, *, by_shifts: bool = False
) -> jax.Array:
    """Return the fields, uint8, that `pack` packed.

    **Arguments:**

    - `packing`: None means one field per byte, in the lowest place.
    - `by_shifts`: whether to shift each byte along a new axis instead of stacking its fields. This
      is faster on GPUs. It has no effect if codes take several bytes or are digits of base 3.
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
    return jax.lax.slice_in_dim(units.reshape(shape), 0, size, axis=at)


def _weight(bits: int | float, place: int) -> int:
    return 3**place if bits == 1.6 else 2 ** (int(bits) * place)


def _field(packed: jax.Array, bits: int | float, place: int) -> jax.Array:
    if bits == 1.6:
        return packed // jnp.uint8(3**place) % jnp.uint8(3)
    bits = int(bits)
    if place:
        packed = packed >> (bits * place)
    return packed if bits * (place + 1) == 8 else packed & (2**bits - 1)  # the highest is alone


@functools.partial(jax.jit, static_argnames="size")
def two_bits(packed: jax.Array, size: int) -> jax.Array:
    """Packs -1, 0 and 1, which lie five in a byte, four in a byte: of each 4 bytes, 5.

    Each byte is looked up, for XLA of JAX 0.10 does all that is here anew for each of the 5: with
    digits that are divided out it takes three times as long.
    """
    units = jnp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, -packed.shape[-1] % 4)])
    units = units.reshape(*packed.shape[:-1], -1, 4)
    tens = jnp.asarray(_TEN_BITS).at[units].get(mode="promise_in_bounds")

    def byte(place: int) -> jax.Array:
        first, shift = divmod(8 * place, 10)
        bits = tens[..., first] >> shift
        if shift > 2:
            bits |= tens[..., first + 1] << 10 - shift
        return bits.astype(jnp.uint8)

    bytes_ = [byte(place) for place in range(5)]
    bytes_ = lax.optimization_barrier(bytes_)  # XLA would ask for each byte which of 5 it is
    out = jnp.stack(bytes_, -1).reshape(*packed.shape[:-1], -1)
    return out[..., : packed_size(size, 2)]


def _ten_bits() -> np.ndarray:
    """Five digits of base 3 that a byte has, as -1, 0 and 1 in 2 bits each: `uint16[256]`."""
    digits = np.arange(256)[:, None] // 3 ** np.arange(5) % 3
    return ((digits - 1 & 3) << 2 * np.arange(5)).sum(1).astype(np.uint16)


_TEN_BITS = _ten_bits()
