"""Convert integers with scales and zero points to a `QArray` and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..quant import QArray
from ..quant.formats.packing import packed_size
from ..types.basis import Permuted
from . import codes
from .codes import pack
from .stored_tensors import make_qarray


class UnsupportedByFormat(ValueError):
    """The error that the format of another library cannot hold a weight, with the reason."""


class EncodedWeight(NamedTuple):
    """A weight in the format of another library.

    - `tensors`: the stored tensors, by the suffixes that follow the name of the module.
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
        packed = codes.flip_high_bits(packed, bits)
        packed = packed.view(np.int8) if bits == 8 else packed
    packing = codes.last_axis_packing(size, bits)
    return make_qarray(packed, scale, zero_point, qtype=qtype, packing=packing, dtype=dtype)


def _pack_zero_points(zero: np.ndarray, bits: int) -> np.ndarray | QArray:
    """Return zero points `[out, groups]`, packed as a `QArray` if that takes fewer bytes."""
    groups = zero.shape[1]
    if packed_size(groups, bits) >= groups:
        return zero
    one, packing = np.ones((1, 1), np.float32), codes.last_axis_packing(groups, bits)
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
    """Return the array if it is a nonempty `QArray` of rank 2.

    **Raises:** `UnsupportedByFormat` if it is not.
    """
    if not isinstance(value, QArray):
        raise UnsupportedByFormat(f"it is a {type(value).__name__}, not a QArray")
    if value.ndim != 2 or 0 in value.shape:
        raise UnsupportedByFormat(f"its shape is {list(value.shape)}, but it must be a matrix")
    return value


def unsigned_codes(q: QArray) -> np.ndarray:
    """Return the integer codes of a matrix, signed ones plus half their range: `uint8[out, in]`."""
    bits, packed = int(q.format.bits), np.asarray(q.packed)
    if bits == 8:
        fields = packed.view(np.uint8)
    elif q.packing is None:
        fields = packed & np.uint8(2**bits - 1)
    elif q.packing.axis == -2:
        fields = codes.unpack_rows(np.ascontiguousarray(packed.T), bits, q.packing.size).T
    else:
        fields = codes.unpack_rows(packed, bits, q.packing.size)
    return fields ^ np.uint8(2 ** (bits - 1)) if q.format.signed else fields


def entries_per_row(entries: Any, out: int, size: int) -> np.ndarray:
    """Repeat the scales, zero points or minima of a `QArray` `[out, in]` to one row per output.

    **Returns:** `[out, groups]`.

    **Raises:** `UnsupportedByFormat` if they are a `QArray`, or if their tiles do not divide the
    inputs.
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
