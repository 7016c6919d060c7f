"""Codes packed as a QArray holds them, in NumPy and along the last axis; `quant.formats.packing`.

Files are read a part of a tensor at a time, of any size. JAX would compile for each.
"""

import numpy as np

from ...quant.formats.packing import UNITS, packed_size


def pack(fields: np.ndarray, bits: int | float) -> np.ndarray:
    """Packs fields, uint8 `[..., n]`, each below `2**bits` (3 for 1.6 bits): uint8 `[..., bytes]`.

    >>> import numpy as np
    >>> from veneer.interop.checkpoints.packing import pack, unpack
    >>> pack(np.array([1, 2, 15], np.uint8), 4).tolist()
    [33, 15]
    >>> unpack(np.array([33, 15], np.uint8), 4, 3).tolist()
    [1, 2, 15]
    """
    if bits == 8:
        return fields
    count, bytes_ = UNITS[bits]
    *leading, size = fields.shape
    if pad := -size % count:
        fields = np.concatenate([fields, np.zeros((*leading, pad), np.uint8)], -1)
    packed = np.empty((*leading, (size + pad) // count, bytes_), np.uint8)
    if count == 8:
        for bit in range(bytes_):
            packed[..., bit] = np.packbits(fields & (1 << bit), axis=-1, bitorder="little")
    elif bits == 1.6:
        units = fields.reshape(*packed.shape[:-1], count)
        packed[..., 0] = units[..., 0]
        for place in range(1, count):
            packed[..., 0] += units[..., place] * np.uint8(3**place)
    else:
        # A unit as one number, of which the lowest byte gathers the others.
        units = np.ascontiguousarray(fields).view(f"<u{count}")
        gathered = units.copy()
        for place in range(1, count):
            gathered |= units >> ((8 - int(bits)) * place)
        packed[..., 0] = gathered
    return packed.reshape(*leading, packed_size(size, bits))


def unpack(packed: np.ndarray, bits: int | float, size: int) -> np.ndarray:
    """Returns the fields, uint8 `[..., size]`, that `pack` packed."""
    if bits == 8:
        return packed
    count, bytes_ = UNITS[bits]
    units = packed.shape[-1] // bytes_
    leading = packed.shape[:-1]
    if count == 8:
        planes = packed.reshape(*leading, units, bytes_)
        fields = np.zeros((*leading, units * count), np.uint8)
        for bit in range(bytes_):
            fields |= np.unpackbits(planes[..., bit], axis=-1, bitorder="little") << bit
    elif bits == 1.6:
        fields = _DIGITS[packed]
    else:
        one = packed.astype(f"<u{count}")
        spread = one.copy()
        for place in range(1, count):
            spread |= one << ((8 - int(bits)) * place)
        spread &= np.full(count, 2 ** int(bits) - 1, np.uint8).view(spread.dtype)
        fields = spread.view(np.uint8)
    return fields.reshape(*leading, units * count)[..., :size]


# The five digits of each byte, of those that `pack` never makes, too: `[256, 5]`.
_DIGITS = (np.arange(256)[:, None] // 3 ** np.arange(5) % 3).astype(np.uint8)
