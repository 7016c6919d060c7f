"""Bit planes: codes of `bits` bits, for any number up to 8, in bytes without gaps.

Eight neighbors along an axis take `bits` bytes. Byte p holds bit p of each of them, with the first
neighbor in the lowest bit. So no code crosses a byte.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def planes_size(size: int, bits: int) -> int:
    """Return the bytes that `size` codes take. Some bits of the last bytes are unused."""
    return -(-size // 8) * bits


def pack_bits(codes: ArrayLike, bits: int, axis: int) -> jax.Array:
    """Pack codes along an axis, which is negative.

    **Arguments:**

    - `codes`: uint8, each less than `2**bits`.

    **Returns:** uint8 with `planes_size(size, bits)` on that axis.

    >>> import jax.numpy as jnp
    >>> from veneer.kernels.common.bit_planes import pack_bits, unpack_bits
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
