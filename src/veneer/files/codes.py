"""Codes as other libraries pack them, and as a `QArray` stores them: bytes to bytes, in NumPy.

A *bit stream* has code after code, the lowest bit first, from the lowest place of the first byte
on; little-endian words of 32 bits in order are such bytes. Of 1, 2, 4 and 8 bits that is how
`QArray` packs codes too (quant/formats/packing.py), and nothing is done; others become bit planes.
"""

import functools
from collections.abc import Callable

import numpy as np

from ..quant import Packing
from ..quant.formats.packing import UNITS, packed_size


def pack(fields: np.ndarray, bits: int | float) -> np.ndarray:
    """Packs fields, uint8 `[..., n]`, each below `2**bits` (3 for 1.6 bits): uint8 `[..., bytes]`.

    >>> import numpy as np
    >>> from veneer.files.codes import pack, unpack
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


# Codes take up to eight bytes each while they are moved: a few rows at a time.
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
    if bits in (1, 2, 4, 8):
        return data
    return by_rows(lambda rows: _moved(rows, "stream", "planes", bits), data, width)


def to_stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """Undoes `from_stream`, but for what pads the last unit."""
    if bits in (1, 2, 4, 8):
        return packed
    return by_rows(lambda rows: _moved(rows, "planes", "stream", bits), packed, packed.shape[-1])


def fields_of_stream(data: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpacks the first `size` codes of each row of bit streams: `uint8[..., size]`."""
    if bits in (1, 2, 4, 8):
        return to_fields(from_stream(data, bits, size), bits, size)
    change = lambda rows: _moved(rows, "stream", "fields", bits)[:, :size]
    return by_rows(change, _padded(data, packed_size(size, bits)), size)


def stream_of_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes, `uint8[..., n]`, each row a bit stream of whole units of bytes."""
    if bits in (1, 2, 4, 8):
        return from_fields(fields, bits)
    width = packed_size(fields.shape[-1], bits)
    change = lambda rows: _moved(rows, "fields", "stream", bits)
    return by_rows(change, _padded(fields, width // bits * 8), width)


def from_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes, `uint8[..., n]`, as `QArray` does along the last axis."""
    if bits == 8:
        return np.ascontiguousarray(fields)
    width = packed_size(fields.shape[-1], bits)
    return by_rows(lambda rows: pack(rows, bits), fields, width)


def to_fields(packed: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpacks what `from_fields` packed: `uint8[..., size]`."""
    return packed if bits == 8 else by_rows(lambda rows: unpack(rows, bits, size), packed, size)


def fields_of_words(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpacks words of 32 bits, `[..., n]`, of which none shares a code with the next."""
    if 32 % bits == 0:
        return fields_of_stream(bytes_of(words), bits, size)
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)

    def change(rows: np.ndarray) -> np.ndarray:
        fields = (rows.view(np.uint32)[..., None] >> places) & np.uint32(2**bits - 1)
        return fields.astype(np.uint8).reshape(*rows.shape[:-1], -1)[..., :size]

    return by_rows(change, words, size)


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


def _moved(data: np.ndarray, source: str, target: str, bits: int) -> np.ndarray:
    """Rows of eight codes after the other, laid out otherwise; by what each byte of eight becomes.

    A layout is "stream", "planes" (as `QArray` has them, of 3, 5, 6 and 7 bits) or "fields".
    """
    tables = _tables(source, target, bits)
    units = data.reshape(len(data), data.shape[-1] // len(tables), len(tables))
    moved = tables[0][units[..., 0]]
    for place in range(1, len(tables)):
        moved |= tables[place][units[..., place]]
    wanted = 8 if target == "fields" else bits
    separate = moved.view(np.uint8).reshape(*moved.shape, 8)[..., :wanted]
    return separate.reshape(len(data), moved.shape[1] * wanted)


@functools.cache
def _tables(source: str, target: str, bits: int) -> np.ndarray:
    """The bits of eight codes that each value of each of their bytes has: `uint64[bytes, 256]`."""
    code, bit = np.divmod(np.arange(8 * bits), bits)
    places = {"stream": bits * code + bit, "planes": 8 * bit + code, "fields": 8 * code + bit}
    values = np.arange(256, dtype="<u8")
    tables = np.zeros((8 if source == "fields" else bits, 256), "<u8")
    for before, after in zip(places[source], places[target], strict=True):
        tables[before // 8] |= (values >> np.uint64(before % 8) & np.uint64(1)) << np.uint64(after)
    return tables


def _padded(data: np.ndarray, width: int) -> np.ndarray:
    """The rows cut to a width, or filled up with zeros to it."""
    data = data[..., :width]
    lack = width - data.shape[-1]
    return np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, lack)]) if lack else data


def by_rows(
    change: Callable[[np.ndarray], np.ndarray],
    data: np.ndarray,
    width: int,
) -> np.ndarray:
    """Changes rows `[..., n]`, few at a time, to rows `uint8[..., width]`.

    A matrix that is a transpose is not copied as a whole.
    """
    rows = data if data.ndim == 2 else np.ascontiguousarray(data).reshape(-1, data.shape[-1])
    out = np.empty((len(rows), width), np.uint8)
    step = max(1, _ROWS_BYTES // max(rows.shape[-1] * rows.itemsize, 1))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step])
        out[start : start + step] = change(part)
    return out.reshape(*data.shape[:-1], width)
