"""Convert codes, scales and zero points between other libraries and a `QArray`, in NumPy.

Three layouts of a row of codes occur:

- *packed*: the layout of a `QArray` (quant/formats/packing.py). Codes of 1, 2, 4 and 8 bits are in
  order, the first in the lowest bits of a byte. Codes of 3, 5, 6 and 7 bits are bit planes.
- *stream*: codes of any width in order without gaps, the first in the lowest bits. Little-endian
  32-bit words have the same bytes. For 1, 2, 4 and 8 bits, this is the packed layout.
- *unpacked*: one code per byte.

JAX would compile a function for each size, so the conversions run in NumPy, a few rows at a time.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..quant import Packing, QArray
from ..quant.formats.packing import UNITS, packed_size
from ..types.basis import Permuted
from .stored_tensors import make_qarray


def pack(fields: np.ndarray, bits: int | float) -> np.ndarray:
    """Pack codes of `bits` bits along the last axis, in the layout of a `QArray`.

    **Arguments:**

    - `fields`: the codes, one per byte, `uint8[..., n]`. Each is less than `2**bits`, or less than
      3 for 1.6 bits.

    **Returns:** `uint8[..., bytes]`.

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
        # Treat the codes of a unit as one integer, and shift them together into its lowest byte.
        units = np.ascontiguousarray(fields).view(f"<u{count}")
        gathered = units.copy()
        for place in range(1, count):
            gathered |= units >> ((8 - int(bits)) * place)
        packed[..., 0] = gathered
    return packed.reshape(*leading, packed_size(size, bits))


def unpack(packed: np.ndarray, bits: int | float, size: int) -> np.ndarray:
    """Unpack the first `size` codes of each row, the inverse of `pack`.

    **Returns:** `uint8[..., size]`, with one code per byte.
    """
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


# The five base-3 digits of each byte value: `[256, 5]`.
_DIGITS = (np.arange(256)[:, None] // 3 ** np.arange(5) % 3).astype(np.uint8)


# The bytes of rows that are converted at once. Intermediate results are eight times as large.
_ROWS_BYTES = 2**20


def as_bytes(words: np.ndarray) -> np.ndarray:
    """Return the bytes of an array along its last axis: `uint8[..., n * itemsize]`."""
    words = np.ascontiguousarray(words)
    return words.view(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * words.itemsize)


def last_axis_packing(size: int, bits: int) -> Packing | None:
    """Return the `Packing` of a `QArray` for rows of `size` codes along its last axis.

    It is None for 8 bits, because such codes are not packed.
    """
    return None if bits == 8 else Packing(-1, size)


def stream_to_packed(data: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Convert the first `size` codes of each row from consecutive bits to the layout of a `QArray`.

    **Arguments:**

    - `data`: `uint8[..., bytes]`.

    **Returns:** `uint8[..., packed_size(size, bits)]`. Bits after the last code are arbitrary.
    """
    width = packed_size(size, bits) if bits < 8 else size
    data = _pad_or_cut(data, width)
    if bits in (1, 2, 4, 8):
        return data
    return map_rows(lambda rows: _convert_units(rows, "stream", "planes", bits), data, width)


def packed_to_stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """Convert rows of packed codes from the layout of a `QArray` to consecutive bits."""
    if bits in (1, 2, 4, 8):
        return packed
    return map_rows(
        lambda rows: _convert_units(rows, "planes", "stream", bits), packed, packed.shape[-1]
    )


def unpack_stream(data: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpack the first `size` codes of rows of consecutive bits: `uint8[..., size]`."""
    if bits in (1, 2, 4, 8):
        return unpack_rows(stream_to_packed(data, bits, size), bits, size)
    change = lambda rows: _convert_units(rows, "stream", "fields", bits)[:, :size]
    return map_rows(change, _pad_or_cut(data, packed_size(size, bits)), size)


def pack_to_stream(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of codes `uint8[..., n]` as consecutive bits: `uint8[..., bytes]`.

    Zeros fill up the last unit of a row: eight codes, or one byte for 1, 2, 4 and 8 bits.
    """
    if bits in (1, 2, 4, 8):
        return pack_rows(fields, bits)
    width = packed_size(fields.shape[-1], bits)
    change = lambda rows: _convert_units(rows, "fields", "stream", bits)
    return map_rows(change, _pad_or_cut(fields, width // bits * 8), width)


def pack_rows(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes `uint8[..., n]` like `pack`, a few rows at a time to limit memory."""
    if bits == 8:
        return np.ascontiguousarray(fields)
    width = packed_size(fields.shape[-1], bits)
    return map_rows(lambda rows: pack(rows, bits), fields, width)


def unpack_rows(packed: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpack codes like `unpack`, a few rows at a time to limit memory: `uint8[..., size]`."""
    return packed if bits == 8 else map_rows(lambda rows: unpack(rows, bits, size), packed, size)


def unpack_words(words: np.ndarray, bits: int, size: int) -> np.ndarray:
    """Unpack the first `size` codes of rows of 32-bit words `[..., n]`: `uint8[..., size]`.

    No code spans two words. If `bits` does not divide 32, the highest bits of a word are unused.
    """
    if 32 % bits == 0:
        return unpack_stream(as_bytes(words), bits, size)
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)

    def change(rows: np.ndarray) -> np.ndarray:
        fields = (rows.view(np.uint32)[..., None] >> places) & np.uint32(2**bits - 1)
        return fields.astype(np.uint8).reshape(*rows.shape[:-1], -1)[..., :size]

    return map_rows(change, words, size)


def pack_to_words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes `uint8[..., n]` as consecutive bits of 32-bit words: `int32[..., words]`."""
    width = -(-fields.shape[-1] * bits // 32) * 4
    return np.ascontiguousarray(_pad_or_cut(pack_to_stream(fields, bits), width)).view(np.int32)


def flip_high_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """Flip the highest bit of each packed code.

    It converts signed codes `q` (in two's complement) to the nonnegative codes
    `q + 2**(bits - 1)`, and back.
    """
    if bits in (1, 2, 4, 8):
        high = sum(1 << place for place in range(bits - 1, 8, bits))
        return packed ^ np.uint8(high)
    highest = np.array([0] * (bits - 1) + [255], np.uint8)
    planes: np.ndarray = packed.reshape(*packed.shape[:-1], -1, bits) ^ highest
    return planes.reshape(packed.shape)


def swap_nibbles(data: np.ndarray) -> np.ndarray:
    """Exchange the two halves of each byte."""
    return (data << np.uint8(4)) | (data >> np.uint8(4))


def _convert_units(data: np.ndarray, source: str, target: str, bits: int) -> np.ndarray:
    """Convert rows of codes from one layout to another, eight codes at a time, by lookup tables.

    **Arguments:**

    - `data`: `uint8[rows, bytes]`, with a multiple of eight codes per row.
    - `source`, `target`: the layout of `data`, and of the result: "stream" (consecutive bits),
      "planes" (as in a `QArray` of 3, 5, 6 or 7 bits) or "fields" (a byte per code).
    """
    tables = _conversion_tables(source, target, bits)
    units = data.reshape(len(data), data.shape[-1] // len(tables), len(tables))
    moved = tables[0][units[..., 0]]
    for place in range(1, len(tables)):
        moved |= tables[place][units[..., place]]
    wanted = 8 if target == "fields" else bits
    separate = moved.view(np.uint8).reshape(*moved.shape, 8)[..., :wanted]
    return separate.reshape(len(data), moved.shape[1] * wanted)


@functools.cache
def _conversion_tables(source: str, target: str, bits: int) -> np.ndarray:
    """Return the lookup tables that convert eight codes from one layout to another.

    `tables[i, value]` has the bits that byte `i` of the source contributes to the target if it has
    this value. The eight codes in the target layout are the OR over all bytes `i`.

    **Returns:** `uint64[bytes, 256]`.
    """
    code, bit = np.divmod(np.arange(8 * bits), bits)
    places = {"stream": bits * code + bit, "planes": 8 * bit + code, "fields": 8 * code + bit}
    values = np.arange(256, dtype="<u8")
    tables = np.zeros((8 if source == "fields" else bits, 256), "<u8")
    for before, after in zip(places[source], places[target], strict=True):
        tables[before // 8] |= (values >> np.uint64(before % 8) & np.uint64(1)) << np.uint64(after)
    return tables


def _pad_or_cut(data: np.ndarray, width: int) -> np.ndarray:
    """Cut or zero-pad the last axis to `width` entries."""
    data = data[..., :width]
    missing = width - data.shape[-1]
    return np.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, missing)]) if missing else data


def map_rows(
    change: Callable[[np.ndarray], np.ndarray],
    data: np.ndarray,
    width: int,
) -> np.ndarray:
    """Apply a function to a few rows at a time, to limit memory.

    **Arguments:**

    - `change`: a function from rows `[rows, n]` to `uint8[rows, width]`.
    - `data`: `[..., n]`. A transposed matrix is copied a few rows at a time.

    **Returns:** `uint8[..., width]`.
    """
    rows = data if data.ndim == 2 else np.ascontiguousarray(data).reshape(-1, data.shape[-1])
    out = np.empty((len(rows), width), np.uint8)
    step = max(1, _ROWS_BYTES // max(rows.shape[-1] * rows.itemsize, 1))
    for start in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[start : start + step])
        out[start : start + step] = change(part)
    return out.reshape(*data.shape[:-1], width)


# Integers with scales and zero points.


class UnsupportedByFormat(ValueError):
    """The error that the format of another library cannot hold a weight, with the reason."""


class EncodedWeight(NamedTuple):
    """A weight in the format of another library.

    - `tensors`: a dict from suffixes to the stored tensors. A suffix, such as ".qweight", follows
      the name of the module.
    - `settings`: the facts about this weight that `config.json` states, such as the group size.
    """

    tensors: Mapping[str, np.ndarray]
    settings: dict[str, Any]


class AffineParts(NamedTuple):
    """The parts of a quantized matrix `[out, in]`, whose value is `(fields - zero) * scale`.

    - `fields`: nonnegative codes of `bits` bits, `uint8[out, in]`.
    - `scale`, `zero`: `[out, groups]`.
    - `tile`: the number of inputs that share a scale.
    - `group_of`: the group of each input, `int32[in]`. None if groups are contiguous and in order.
    """

    bits: int
    fields: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    tile: int
    group_of: np.ndarray | None

    @property
    def is_symmetric(self) -> bool:
        """True if every zero point is the middle of the code range."""
        return bool((self.zero == 2 ** (self.bits - 1)).all())


def make_affine(
    packed: np.ndarray, scale: np.ndarray, zero: np.ndarray, *, bits: int, size: int, dtype: str
) -> QArray:
    """Return the `QArray` of nonnegative codes with zero points.

    If all zero points are the middle of the code range, the codes become signed and the result has
    no zero points.

    **Arguments:**

    - `packed`: `uint8[out, bytes]`, packed as in a `QArray`.
    - `scale`, `zero`: `[out, groups]`.
    - `size`: the number of codes in a row.
    - `dtype`: the dtype of the dense matrix.
    """
    qtype = f"uint{bits}"
    zero_point: Any = zero if bits == 8 else _pack_zero_points(zero, bits)
    if (zero == 2 ** (bits - 1)).all():
        qtype, zero_point = f"int{bits}", None
        packed = flip_high_bits(packed, bits)
        packed = packed.view(np.int8) if bits == 8 else packed
    packing = last_axis_packing(size, bits)
    return make_qarray(packed, scale, zero_point, qtype=qtype, packing=packing, dtype=dtype)


def _pack_zero_points(zero: np.ndarray, bits: int) -> np.ndarray | QArray:
    """Return zero points `[out, groups]`, packed as a `QArray` if that takes fewer bytes."""
    groups = zero.shape[1]
    if packed_size(groups, bits) >= groups:
        return zero
    one, packing = np.ones((1, 1), np.float32), last_axis_packing(groups, bits)
    fields = zero.astype(np.uint8)
    return QArray.from_packed(pack(fields, bits), one, qtype=f"uint{bits}", packing=packing)


def split_affine(value: Any) -> AffineParts:
    """Split a quantized matrix into codes, scales and zero points.

    **Arguments:**

    - `value`: a `QArray` `[out, in]`, or a `Permuted` whose inputs are permuted.

    **Raises:** `UnsupportedByFormat` for any other array, such as one with a minimum.
    """
    order = None
    if isinstance(value, Permuted):
        if value.axis != -1 or value.order.size != value.order.shape[-1]:
            raise UnsupportedByFormat("it is permuted along an axis other than its inputs")
        order, value = np.asarray(value.order).reshape(-1), value.array
    q = require_matrix(value)
    if not q.format.is_integer or q.format.bits not in range(2, 9):
        raise UnsupportedByFormat(f"its codes are {q.qtype}, not integers of 2 to 8 bits")
    if q.minimum is not None:
        raise UnsupportedByFormat("it has a minimum per group, not a zero point")
    bits, (out, size) = int(q.format.bits), q.shape
    fields = unsigned_codes(q)
    scale = entries_per_row(q.scale, out, size)
    zero = np.zeros((1, 1), np.int16)
    if q.zero_point is not None:
        zero = np.asarray(q.zero_points()).astype(np.int16)
    zero = zero + np.int16(2 ** (bits - 1) if q.format.signed else 0)
    if zero.size and not 0 <= zero.min() <= zero.max() < 2**bits:
        raise UnsupportedByFormat(f"its zero points are not codes of {bits} bits")
    if zero.shape[1] > scale.shape[1]:
        raise UnsupportedByFormat("it has more zero points than scales")
    zero = np.repeat(entries_per_row(zero, out, size), scale.shape[1] // zero.shape[1], 1)
    group_of = None
    tile = size // scale.shape[1]
    if order is not None:
        group_of = np.empty(size, np.int32)
        group_of[order] = np.arange(size) // tile
        in_order = np.empty_like(fields)
        in_order[:, order] = fields
        fields = in_order
    return AffineParts(bits, fields, scale, zero, tile, group_of)


def require_matrix(value: Any) -> QArray:
    """Return `value` if it is a nonempty `QArray` of rank 2.

    **Raises:** `UnsupportedByFormat` if it is not.
    """
    if not isinstance(value, QArray):
        raise UnsupportedByFormat(f"it is a {type(value).__name__}, not a QArray")
    if value.ndim != 2 or 0 in value.shape:
        raise UnsupportedByFormat(f"its shape is {list(value.shape)}, but it must be a matrix")
    return value


def unsigned_codes(q: QArray) -> np.ndarray:
    """Return the integer codes of a matrix as nonnegative numbers: `uint8[out, in]`.

    `2**(bits - 1)` is added to signed codes.
    """
    bits, packed = int(q.format.bits), np.asarray(q.packed)
    if bits == 8:
        fields = packed.view(np.uint8)
    elif q.packing is None:
        fields = packed & np.uint8(2**bits - 1)
    elif q.packing.axis == -2:
        fields = unpack_rows(np.ascontiguousarray(packed.T), bits, q.packing.size).T
    else:
        fields = unpack_rows(packed, bits, q.packing.size)
    return fields ^ np.uint8(2 ** (bits - 1)) if q.format.signed else fields


def entries_per_row(entries: Any, out: int, size: int) -> np.ndarray:
    """Repeat the scales of a quantized matrix so that each output has a row of them.

    **Arguments:**

    - `entries`: the scales, zero points or minima, `[rows, groups]`. `rows` divides `out`: several
      outputs may share a row.
    - `out`, `size`: the numbers of outputs and of inputs of the matrix.

    **Returns:** `[out, groups]`.

    **Raises:** `UnsupportedByFormat` if `entries` is a `QArray`, or if `groups` does not divide the
    number of inputs.
    """
    if isinstance(entries, QArray):
        raise UnsupportedByFormat("its scales are quantized")
    entries = np.asarray(entries)
    if entries.shape[0] != out:
        entries = np.repeat(entries, out // entries.shape[0], 0)
    if size % entries.shape[1]:
        raise UnsupportedByFormat("its tiles do not divide its inputs")
    return entries


def most_common(values: Sequence[Any]) -> Any:
    """Return the most frequent value of a sequence. The first one wins a tie."""
    return max(values, key=values.count)
