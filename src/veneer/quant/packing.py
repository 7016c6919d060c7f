"""Packing: two codes of 4 bits a byte, the first in the low nibble.

XLA's own int4 arrays take one byte a value on CPU and are refused by some of its operations, so
4-bit codes are uint8 in storage, and int8 or uint8 in arithmetic.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


class Packing(NamedTuple):
    """Which axis of an array of codes is packed.

    **Arguments:**

    - `axis`: counted from the end, so negative: leading axes may come and go.
    - `size`: of that axis before packing. Packed it is `ceil(size / 2)` bytes.

    >>> import jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((2, 5)), "int4")
    >>> q.packing, q.packed.shape
    (Packing(axis=-1, size=5), (2, 3))
    """

    axis: int
    size: int


def packed_size(size: int) -> int:
    """Returns the bytes that `size` codes take; the last one is half empty where `size` is odd."""
    return (size + 1) // 2


def pack(codes: ArrayLike, axis: int = -1) -> tuple[jax.Array, Packing]:
    """Packs neighbours along `axis`, two a byte, the first in the low nibble.

    **Arguments:**

    - `codes`: int8 in [-8, 7] or uint8 in [0, 15], of rank 1 and up. An odd axis is padded with one
      zero nibble.

    **Returns:** the bytes, uint8 with `ceil(size / 2)` on that axis, and the packing to undo it.

    >>> import jax.numpy as jnp
    >>> from veneer.quant.packing import pack, unpack
    >>> packed, packing = pack(jnp.array([1, 2, -1], jnp.int8))
    >>> packed.tolist(), packing
    ([33, 15], Packing(axis=-1, size=3))
    >>> unpack(packed, packing, signed=True).tolist()
    [1, 2, -1]
    """
    codes = jnp.asarray(codes)
    axis = axis % codes.ndim
    size = codes.shape[axis]
    nibbles = codes.astype(jnp.uint8) & 0xF
    pairs = _split_pairs(jnp.pad(nibbles, _pad_width(codes.ndim, axis, size % 2)), axis)
    low, high = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | high << 4, Packing(axis - codes.ndim, size)


def unpack(packed: ArrayLike, packing: Packing | None, *, signed: bool) -> jax.Array:
    """Returns the codes that `pack` packed: int8 where `signed`, else uint8.

    `packing=None` is one code a byte, in the low nibble.
    """
    packed = jnp.asarray(packed)
    if packing is None:
        nibbles = packed & 0xF
    else:
        axis = packing.axis % packed.ndim
        pairs = jnp.stack([packed & 0xF, packed >> 4], axis + 1)
        shape = (*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
        nibbles = jax.lax.slice_in_dim(pairs.reshape(shape), 0, packing.size, axis=axis)
    # Flipping the sign bit and taking its weight off extends the sign.
    return (nibbles.astype(jnp.int8) ^ 8) - 8 if signed else nibbles


def _split_pairs(nibbles: jax.Array, axis: int) -> jax.Array:
    shape = nibbles.shape
    return nibbles.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])


def _pad_width(ndim: int, axis: int, after: int) -> list[tuple[int, int]]:
    return [(0, after if i == axis else 0) for i in range(ndim)]
