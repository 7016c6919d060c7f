"""Codes as other libraries pack them, and as a `QArray` stores them: bytes to bytes, in NumPy.

A *bit stream* has code after code, the lowest bit first, from the lowest place of the first byte
on; little-endian words of 32 bits in order are such bytes. Of 1, 2, 4 and 8 bits that is how
`QArray` packs codes too (quant/formats/packing.py), and nothing is done; others become bit planes.
"""

from collections.abc import Callable

import numpy as np

from ...quant import Packing
from ...quant.formats.packing import UNITS, packed_size

# Bits take a byte each while they are sorted: a few rows at a time.
_ROWS_BYTES = 2**20


def bytes_of(words: np.ndarray) -> np.ndarray:
    """The bytes of words `[..., n]`: `uint8[..., n * itemsize]`."""
    words = np.ascontiguousarray(words)
    return words.view(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * words.itemsize)


def packing_of(size: int, bits: int) -> Packing | None:
    """The packing of codes that lie along the last axis; None for a byte each."""
    return None if bits == 8 else Packing(-1, size)


def from_stream(data: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Packs as `QArray` does the first `size` codes of each row of bit streams.

    **Arguments:**

    - `data`: `uint8[..., bytes]`.

    **Returns:** `uint8[..., packed_size(size, bits)]`; what pads the last unit is of the stream.
    """
    width = packed_size(size, bits) if bits < 8 else size
    data = _padded(data, width)
    return data if bits in (1, 2, 4, 8) else _by_rows(lambda x: _swapped(x, 8, bits), data, width)


def to_stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """Undoes `from_stream`, but for what pads the last unit."""
    if bits in (1, 2, 4, 8):
        return packed
    return _by_rows(lambda x: _swapped(x, bits, 8), packed, packed.shape[-1])


def fields_of_stream(data: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpacks the first `size` codes of each row of bit streams: `uint8[..., size]`."""
    codes, bytes_ = UNITS.get(bits, (1, 1))
    units = -(-size // codes)

    def unpack(rows: np.ndarray) -> np.ndarray:
        separate = np.unpackbits(rows, axis=-1, bitorder="little")
        separate = separate.reshape(*rows.shape[:-1], units * codes, bits)
        fields = np.packbits(separate, axis=-1, bitorder="little")[..., 0]
        return fields[..., :size]

    if bits == 8:
        return _padded(data, size)
    return _by_rows(unpack, _padded(data, units * bytes_), size)


def stream_of_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes, `uint8[..., n]`, each row a bit stream of whole units of bytes."""
    if bits == 8:
        return np.ascontiguousarray(fields)
    codes, bytes_ = UNITS[bits]
    units = -(-fields.shape[-1] // codes)

    def pack(rows: np.ndarray) -> np.ndarray:
        separate = np.unpackbits(rows[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(separate.reshape(*rows.shape[:-1], -1), axis=-1, bitorder="little")

    return _by_rows(pack, _padded(fields, units * codes), units * bytes_)


def from_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes, `uint8[..., n]`, as `QArray` does along the last axis."""
    return from_stream(stream_of_fields(fields, bits), bits, fields.shape[-1])


def to_fields(packed: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpacks what `from_fields` packed: `uint8[..., size]`."""
    return fields_of_stream(to_stream(packed, bits), bits, size)


def fields_of_words(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpacks words of 32 bits, `[..., n]`, of which none shares a code with the next."""
    if 32 % bits == 0:
        return fields_of_stream(bytes_of(words), bits, size)
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)

    def unpack(rows: np.ndarray) -> np.ndarray:
        fields = (rows.view(np.uint32)[..., None] >> places) & np.uint32(2**bits - 1)
        return fields.astype(np.uint8).reshape(*rows.shape[:-1], -1)[..., :size]

    return _by_rows(unpack, np.ascontiguousarray(words), size)


def words_of_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes, `uint8[..., n]`, each row a bit stream of words: `int32[..., words]`."""
    width = -(-fields.shape[-1] * bits // 32) * 4
    return np.ascontiguousarray(_padded(stream_of_fields(fields, bits), width)).view(np.int32)


def with_high_bit_flipped(packed: np.ndarray, bits: int) -> np.ndarray:
    """Takes `2**(bits - 1)` from each code that is packed as `QArray` does, or puts it back."""
    if bits in (1, 2, 4, 8):
        high = sum(1 << place for place in range(bits - 1, 8, bits))
        return packed ^ np.uint8(high)
    highest = np.array([0] * (bits - 1) + [255], np.uint8)
    planes: np.ndarray = packed.reshape(*packed.shape[:-1], -1, bits) ^ highest
    return planes.reshape(packed.shape)


def with_nibbles_swapped(data: np.ndarray) -> np.ndarray:
    """The bytes with their halves exchanged."""
    return (data << np.uint8(4)) | (data >> np.uint8(4))


def _swapped(data: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """Transposes the bits of each unit, which lie as `[outer, inner]`."""
    separate = np.unpackbits(data, axis=-1, bitorder="little")
    separate = separate.reshape(*data.shape[:-1], -1, outer, inner).swapaxes(-1, -2)
    return np.packbits(separate.reshape(*data.shape[:-1], -1), axis=-1, bitorder="little")


def _padded(data: np.ndarray, width: int) -> np.ndarray:
    """The rows cut to a width, or filled up with zeros to it."""
    data = data[..., :width]
    lack = width - data.shape[-1]
    return np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, lack)]) if lack else data


def _by_rows(
    change: Callable[[np.ndarray], np.ndarray],
    data: np.ndarray,
    width: int,
) -> np.ndarray:
    """Changes rows to rows of `width`, few at a time."""
    rows = np.ascontiguousarray(data).reshape(-1, data.shape[-1])
    out = np.empty((len(rows), width), np.uint8)
    step = max(1, _ROWS_BYTES // max(rows.shape[-1] * rows.itemsize, 1))
    for start in range(0, len(rows), step):
        out[start : start + step] = change(rows[start : start + step])
    return out.reshape(*data.shape[:-1], width)
