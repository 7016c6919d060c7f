"""Bit planes: small numbers of b bits each, packed in bytes without gaps, for any b up to 8.

Eight neighbours along an axis become b bytes, one after the other: byte p holds bit p of each of
them, that of the first in the lowest place. So 3 bits take 3 bits, and no number lies across bytes.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def planes_size(size: int, bits: int) -> int:
    """Returns the bytes that `size` numbers take; the last of them are partly empty."""
    return -(-size // 8) * bits


def pack_bits(codes: ArrayLike, bits: int, axis: int) -> jax.Array:
    """Packs numbers along an axis, which counts from the end.

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
    pad = -codes.shape[at] % 8
    codes = jnp.pad(codes, [(0, pad if i == at else 0) for i in range(codes.ndim)])
    eights = codes.reshape(*codes.shape[:at], -(-codes.shape[at] // 8), 8, *codes.shape[at + 1 :])
    places = _places(axis)
    planes = [(((eights >> bit) & 1) << places).sum(at + 1, dtype=jnp.uint8) for bit in range(bits)]
    packed = jnp.stack(planes, at + 1)
    return packed.reshape(*codes.shape[:at], codes.shape[at] // 8 * bits, *codes.shape[at + 1 :])


def unpack_bits(packed: ArrayLike, bits: int, axis: int, size: int) -> jax.Array:
    """Returns the `size` numbers that `pack_bits` packed, as uint8."""
    packed = jnp.asarray(packed)
    at = packed.ndim + axis
    before, after = packed.shape[:at], packed.shape[at + 1 :]
    count = packed.shape[at] // bits
    planes = packed.reshape(*before, count, bits, *after)
    places = _places(axis)
    codes = jnp.zeros((), jnp.uint8)
    for bit in range(bits):
        plane = jax.lax.slice_in_dim(planes, bit, bit + 1, axis=at + 1)
        codes = codes | (((plane >> places) & 1) << bit)
    codes = codes.reshape(*before, count * 8, *after)
    return jax.lax.slice_in_dim(codes, 0, size, axis=at)


def _places(axis: int) -> jax.Array:
    """0 to 7 along the axis after an axis counted from the end."""
    return jnp.arange(8, dtype=jnp.uint8).reshape(8, *[1] * (-1 - axis))
