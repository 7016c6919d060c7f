"""Integers under scales and zero points, as most families have them: to a `QArray`, and back."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..quant import QArray
from ..quant.formats.packing import packed_size
from ..types.basis import Permuted
from . import codes
from .codes import pack
from .stored_tensors import quantized


class UnsupportedByFormat(ValueError):
    """Why a format cannot hold a weight; who knows its name says it."""


class Stored(NamedTuple):
    """A weight as a format has it: tensors by suffixes, and what the configuration says of it."""

    tensors: Mapping[str, np.ndarray]
    stated: dict[str, Any]


class AffineParts(NamedTuple):
    """A matrix `[out, in]`: `(fields - zero) * scale`.

    `fields` is uint8, `zero` of integers, `scale` and `zero` are `[out, groups]`, of which each
    stands for `tile` values, and `group_of` the group of each column where they are not in order.
    """

    bits: int
    fields: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    tile: int
    group_of: np.ndarray | None

    @property
    def is_symmetric(self) -> bool:
        """Whether all zero points are the middle of the codes."""
        return bool((self.zero == 2 ** (self.bits - 1)).all())


def affine(
    packed: np.ndarray, scale: np.ndarray, zero: np.ndarray, *, bits: int, size: int, dtype: str
) -> QArray:
    """The array of unsigned codes under zero points, which are none where codes can be signed.

    **Arguments:**

    - `packed`: `uint8[out, bytes]`, as a `QArray` packs `size` codes.
    - `scale`, `zero`: `[out, groups]`.
    - `dtype`: the dense one.
    """
    qtype = f"uint{bits}"
    zero_point: Any = zero if bits == 8 else _packed_zero_points(zero, bits)
    if (zero == 2 ** (bits - 1)).all():
        qtype, zero_point = f"int{bits}", None
        packed = codes.with_high_bit_flipped(packed, bits)
        packed = packed.view(np.int8) if bits == 8 else packed
    packing = codes.packing_of(size, bits)
    return quantized(packed, scale, zero_point, qtype=qtype, packing=packing, dtype=dtype)


def _packed_zero_points(zero: np.ndarray, bits: int) -> np.ndarray | QArray:
    """Zero points packed as codes are, along the groups, where that takes fewer bytes."""
    groups = zero.shape[1]
    if packed_size(groups, bits) >= groups:
        return zero
    one, packing = np.ones((1, 1), np.float32), codes.packing_of(groups, bits)
    fields = zero.astype(np.uint8)
    return QArray.from_packed(pack(fields, bits), one, qtype=f"uint{bits}", packing=packing)


def affine_parts(value: Any) -> AffineParts:
    """Undoes `affine`, also of columns that are permuted.

    **Raises:** `UnsupportedByFormat` where the array is none of that kind.
    """
    order = None
    if isinstance(value, Permuted):
        if value.axis != -1 or value.order.size != value.order.shape[-1]:
            raise UnsupportedByFormat("it is permuted along an axis other than its inputs")
        order, value = np.asarray(value.order).reshape(-1), value.array
    q = matrix(value)
    if not q.format.is_integer or q.format.bits not in range(2, 9):
        raise UnsupportedByFormat(f"its codes are {q.qtype}, not integers of 2 to 8 bits")
    if q.minimum is not None:
        raise UnsupportedByFormat("it has a minimum per group, not a zero point")
    bits, (out, size) = int(q.format.bits), q.shape
    fields = fields_of(q)
    scale = by_rows(q.scale, out, size)
    zero = np.zeros((1, 1), np.int16)
    if q.zero_point is not None:
        zero = np.asarray(q.zero_points()).astype(np.int16)
    zero = zero + np.int16(2 ** (bits - 1) if q.format.signed else 0)
    if zero.size and not 0 <= zero.min() <= zero.max() < 2**bits:
        raise UnsupportedByFormat(f"its zero points are not codes of {bits} bits")
    if zero.shape[1] > scale.shape[1]:
        raise UnsupportedByFormat("it has more zero points than scales")
    zero = np.repeat(by_rows(zero, out, size), scale.shape[1] // zero.shape[1], 1)
    group_of = None
    tile = size // scale.shape[1]
    if order is not None:
        group_of = np.empty(size, np.int32)
        group_of[order] = np.arange(size) // tile
        in_order = np.empty_like(fields)
        in_order[:, order] = fields
        fields = in_order
    return AffineParts(bits, fields, scale, zero, tile, group_of)


def matrix(value: Any) -> QArray:
    """The array, if it is quantized and a matrix that is not empty.

    **Raises:** `UnsupportedByFormat` where it is not.
    """
    if not isinstance(value, QArray):
        raise UnsupportedByFormat(f"it is a {type(value).__name__}, not a QArray")
    if value.ndim != 2 or 0 in value.shape:
        raise UnsupportedByFormat(f"its shape is {list(value.shape)}, but it must be a matrix")
    return value


def fields_of(q: QArray) -> np.ndarray:
    """The codes of a matrix, of integers, as they are where none is negative: `uint8[out, in]`."""
    bits, packed = int(q.format.bits), np.asarray(q.packed)
    if bits == 8:
        fields = packed.view(np.uint8)
    elif q.packing is None:
        fields = packed & np.uint8(2**bits - 1)
    elif q.packing.axis == -2:
        fields = codes.to_fields(np.ascontiguousarray(packed.T), bits, q.packing.size).T
    else:
        fields = codes.to_fields(packed, bits, q.packing.size)
    return fields ^ np.uint8(2 ** (bits - 1)) if q.format.signed else fields


def by_rows(entries: Any, out: int, size: int) -> np.ndarray:
    """Scales, or the like, of a matrix of tiles, with a row for each of its rows.

    **Raises:** `UnsupportedByFormat` where they are quantized in turn.
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
    """The value that is there most often, and first."""
    return max(values, key=values.count)
