"""Convert the blocks of a GGUF tensor to a `QArray` and back, a few rows at a time."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..quant import Format, Packing, QArray, get_format
from .codes import pack, unpack
from .gguf_blocks import BLOCK_TYPES, LARGEST_SCALES, BlockType, Floats

# The number of values that are converted at once. As bytes, they fit in a processor's cache.
_VALUES_AT_ONCE = 2**18


def decode(
    rows: np.ndarray, type: BlockType, shape: tuple[int, ...], order: np.ndarray | None = None
) -> QArray:
    """Return the `QArray` of the blocks of a tensor. Its leaves are NumPy arrays.

    **Arguments:**

    - `rows`: the bytes of the tensor, `uint8[rows, bytes]`.
    - `type`: the type of its blocks.
    - `shape`: the shape of the values, `[..., n]`, with `rows` rows of `n` values.
    - `order`: the row of the file for each row of the result. None for the order of the file.

    **Raises:** `ValueError` for 8-bit scales that are negative or NaN.
    """
    leaves: list[np.ndarray] = []
    for part in _slice_rows(len(rows), shape[-1]):
        bytes_ = rows[part] if order is None else rows[order[part]]
        blocks = bytes_.reshape(len(bytes_), shape[-1] // type.values, type.nbytes)
        decoded = [*_read_leaves(blocks, type)]
        leaves = leaves or [np.empty((len(rows), x.shape[1]), x.dtype) for x in decoded]
        for leaf, x in zip(leaves, decoded, strict=True):
            leaf[part] = x
    arrays = iter([leaf.reshape(*shape[:-1], leaf.shape[1]) for leaf in leaves])

    def quantized(qtype: str, size: int, scale: Floats, minimum: Floats | None) -> QArray:
        packing = None if get_format(qtype).bits == 8 else Packing(-1, size)
        # A code times a 16-bit scale is exact in float32.
        return QArray.from_packed(
            next(arrays),
            floats(scale),
            minimum=None if minimum is None else floats(minimum),
            qtype=qtype,
            packing=packing,
            dense_dtype="float32",
        )

    def floats(part: Floats) -> Any:
        if part.fields is None:
            return next(arrays)
        count = shape[-1] // type.values * part.fields.count
        return quantized(str(part.qtype), count, dataclasses.replace(part, fields=None), None)

    return quantized(type.qtype, shape[-1], type.scale, type.minimum)


def _slice_rows(rows: int, values: int) -> Iterator[slice]:
    """Yield slices of a few rows each, so that a slice has at most `_VALUES_AT_ONCE` values."""
    step = max(1, _VALUES_AT_ONCE // max(values, 1))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def _read_leaves(blocks: np.ndarray, type: BlockType) -> Iterator[np.ndarray]:
    """Yield the leaves of the `QArray` that blocks `uint8[rows, blocks, bytes]` encode.

    Each leaf has the shape `[rows, ...]`. The order is codes, scales, minima. If scales or minima
    are quantized themselves, their codes precede their scales.
    """
    yield _pack_fields(type.codes.read(blocks), type.qtype, type.flipped)
    for part in (type.scale, type.minimum):
        if part is None:
            continue
        if part.fields is not None:
            yield _pack_fields(part.fields.read(blocks), str(part.qtype), part.flipped)
        yield _join_blocks(part.read(blocks))


def _pack_fields(fields: np.ndarray, qtype: str, flipped: int) -> np.ndarray:
    format = get_format(qtype)
    fields = _join_blocks(fields ^ np.uint8(flipped) if flipped else fields)
    return pack(fields, format.bits).view(format.storage_dtype)


def _join_blocks(x: np.ndarray) -> np.ndarray:
    """Join the blocks of each row: from `[rows, blocks, n]` to `[rows, blocks * n]`."""
    return x.reshape(len(x), x.shape[1] * x.shape[2])


_E4M3 = "float8_e4m3fn"


def with_factors(q: QArray, factors: Any, expert: int | None = None) -> QArray:
    """Multiply the e4m3 scales of a `QArray` by factors. The scales become a `QArray`.

    **Arguments:**

    - `q`: an NVFP4 matrix, or a stack of them, such as one per expert.
    - `factors`: float32, `[1]` or one per matrix of the stack.
    - `expert`: if `q` is only one matrix of the stack, its index, else None.

    **Raises:** `ValueError` if the factors have another shape or dtype.
    """
    if expert is not None and factors.shape != (1,):
        factors = factors[expert : expert + 1]
    matrices = q.shape[0] if q.ndim == 3 else 1
    if factors.dtype != np.float32 or factors.shape not in ((), (1,), (matrices,)):
        raise ValueError(f"its scale is {factors.dtype.name} {factors.shape}, not one f32")
    factors = np.asarray(factors).reshape(-1, *[1] * (q.ndim - 1))
    packed: Any = q.scale
    return q.replace(scale=QArray.from_packed(packed, factors, qtype=_E4M3, dense_dtype="float32"))


def without_factors(q: QArray) -> tuple[QArray, np.ndarray | None]:
    """Separate the factors of e4m3 scales, which GGUF stores as another tensor.

    **Returns:** the `QArray` with plain e4m3 scales, and the factors, one per matrix. If `q` has no
    such factors, `q` itself and None.
    """
    scale = q.scale
    if not isinstance(scale, QArray) or scale.qtype != _E4M3 or isinstance(scale.scale, QArray):
        return q, None
    factors = np.asarray(scale.scale)
    if factors.size != factors.shape[0] or q.ndim < 2 or (q.ndim < 3 and factors.size > 1):
        return q, None
    return q.replace(scale=scale.packed), factors.astype(np.float32).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A `QArray` that is about to be written as blocks.

    **Arguments:**

    - `type`: the type of the blocks.
    - `q`: the array.
    - `floats`: a triple for the scales and, if the type has them, for the minima: their place in a
      block, the floats, and the integers that the floats multiply, or None without integers.
    """

    type: BlockType
    q: QArray
    floats: Sequence[tuple[Floats, np.ndarray, np.ndarray | None]]

    def parts(self, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """Yield the blocks of a few rows at a time: `uint8[rows, bytes]`.

        **Arguments:**

        - `order`: the row of the array for each row of the file. None for the order of the array.
        """
        *leading, size = self.q.shape
        count = size // self.type.values
        fields_of = _field_reader(self.q, get_format(self.type.qtype))
        for part in _slice_rows(math.prod(leading), size):
            rows = part if order is None else order[part]
            fields = fields_of(rows)
            blocks = np.zeros((len(fields), count, self.type.nbytes), np.uint8)
            fields = fields.reshape(*blocks.shape[:2], self.type.values)
            self.type.codes.write(blocks, fields ^ np.uint8(self.type.flipped))
            for place, floats, scale_fields in self.floats:
                place.write(blocks, floats[rows].reshape(*blocks.shape[:2], place.count))
                if place.fields is not None and scale_fields is not None:
                    fields = scale_fields[rows].reshape(*blocks.shape[:2], place.fields.count)
                    place.fields.write(blocks, fields ^ np.uint8(place.flipped))
            yield blocks.reshape(len(blocks), count * self.type.nbytes)


def encode(q: QArray) -> Encoded:
    """Return a `QArray` as blocks of the smallest block type that holds it exactly.

    **Raises:** `ValueError`, with the reason for each type, if no type holds it.
    """
    if q.ndim == 0:
        raise ValueError("it is a scalar, but blocks of GGUF have at least 32 values")
    reasons = []
    for type in _find_candidates(q):
        try:
            return _encode_as(q, type)
        except _Misfit as reason:
            reasons.append(f"{type.name}: {reason}")
    raise ValueError("; ".join(reasons) or f"GGUF has no type with codes of {q.qtype}")


class _Misfit(Exception):
    """The reason that a `QArray` cannot be written as blocks of a type."""


def _find_candidates(q: QArray) -> list[BlockType]:
    """Return the block types whose codes can hold the codes of `q`, the smallest type first."""
    format = q.format
    if format.is_integer:
        low, high = format.code_range
        if q.zero_point is not None and q.zero_point.size:
            zero = np.asarray(q.zero_point).astype(int)
            low, high = low - int(zero.max()), high - int(zero.min())
    fitting = []
    for type in BLOCK_TYPES.values():
        other = get_format(type.qtype)
        if format.is_integer and other.is_integer:
            fits = other.code_range[0] <= low and high <= other.code_range[1]
        else:
            fits = format.codebook is not None and format.codebook == other.codebook
        if fits:
            fitting.append(type)
    return sorted(fitting, key=lambda type: type.nbytes / type.values)


def _encode_as(q: QArray, type: BlockType) -> Encoded:
    if q.shape[-1] % type.values:
        raise _Misfit(f"the last axis of {q.shape} is not a multiple of {type.values}")
    floats = [(type.scale, *_split_floats(q.scale, q.shape, type, type.scale, "scale"))]
    if type.minimum is not None:
        minimum = np.zeros([1] * q.ndim, np.float16) if q.minimum is None else q.minimum
        floats.append(
            (type.minimum, *_split_floats(minimum, q.shape, type, type.minimum, "minimum"))
        )
    elif q.minimum is not None:
        raise _Misfit("it must not have a minimum")
    return Encoded(type, q, floats)


def _split_floats(
    leaf: Any, shape: tuple[int, ...], type: BlockType, place: Floats, name: str
) -> tuple[np.ndarray, np.ndarray | None]:
    """Split scales or minima into the floats and the integers that a block type stores.

    **Arguments:**

    - `leaf`: the scales or minima of a `QArray`, `QArray`s themselves if they have integers.
    - `shape`: the shape of the `QArray`.
    - `type`, `place`: the block type, and the place of the scales or minima in it.
    - `name`: "scale" or "minimum", for errors.

    **Returns:** the floats `[rows, n]`, and the integers that they multiply `[rows, m]`. The
    integers are None if the type has only floats.

    **Raises:** `_Misfit` if the block type cannot hold them.
    """
    fields = None
    count = shape[-1] // type.values
    if place.fields is not None:
        if not isinstance(leaf, QArray) or leaf.qtype != place.qtype or leaf.zero_point is not None:
            raise _Misfit(
                f"its {name} must be {place.qtype} with one float per {type.values} values"
            )
        own = _field_reader(leaf, leaf.format)(slice(None)).reshape(leaf.shape)
        fields = _repeat_to(own, (*shape[:-1], count * place.fields.count), name)
        leaf = leaf.scale
    else:
        count *= place.count
    wide = np.asarray(leaf.dequantize() if isinstance(leaf, QArray) else leaf)
    floats = _repeat_to(_cast_exactly(wide, place.dtype, name), (*shape[:-1], count), name)
    return floats, fields


def _cast_exactly(floats: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Cast floats to `dtype`. Raise `_Misfit`, with their `name`, if a value changes."""
    floats = floats if floats.dtype == np.float64 else floats.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = floats.astype(dtype)
    back = narrow.astype(floats.dtype)
    if not np.all((back == floats) | (np.isnan(back) & np.isnan(floats))):
        raise _Misfit(f"its {name} must be exact in {dtype.name}")
    largest = LARGEST_SCALES.get(dtype, 0xFF)
    if narrow.size and dtype.itemsize == 1 and narrow.view(np.uint8).max() > largest:
        raise _Misfit(f"its {name} must be {dtype.name}, nonnegative and not NaN")
    return narrow


def _repeat_to(leaf: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Repeat the entries of an array along its axes until it has the given shape.

    `name` is the name of the array in errors.

    **Returns:** the repeated array as a matrix: all axes except the last are flattened to rows.

    **Raises:** `_Misfit` if a size of `leaf` does not divide the size in `shape`.
    """
    for axis, (size, count) in enumerate(zip(shape, leaf.shape, strict=True)):
        if count and size % count:
            raise _Misfit(f"its {name} must have {size} entries along axis {axis}, not {count}")
        leaf = leaf if size == count else np.repeat(leaf, size // max(count, 1), axis)
    return leaf.reshape(math.prod(shape[:-1]), shape[-1])


def _field_reader(q: QArray, format: Format) -> Callable[[slice | np.ndarray], np.ndarray]:
    """Return a function that reads some rows of the codes of `q`, as nonnegative integers.

    It takes a slice or indices of rows and returns `uint8[rows, n]`, where `n` is the size of the
    last axis of `q`. All other axes are flattened to rows.

    **Arguments:**

    - `format`: the format of the result, which can represent the codes of `q` minus its zero
      points.
    """
    *leading, size = q.shape
    count = math.prod(leading)
    at_last_axis = q.packing is None or q.packing.axis == -1
    if q.qtype == format.name and q.zero_point is None and at_last_axis:
        packed = np.asarray(q.packed).reshape(count, q.packed.shape[-1])
        if q.format.bits == 8 or q.packing is None:
            return lambda part: packed[part].view(np.uint8)
        return lambda part: unpack(packed[part], q.format.bits, size)
    codes = np.asarray(q.codes())
    if q.zero_point is not None:
        zero = _repeat_to(np.asarray(q.zero_point), q.shape, "zero_point").reshape(q.shape)
        codes = (codes.astype(np.int16) - zero).astype(format.byte_dtype)
    fields = np.asarray(format.to_fields(jnp.asarray(codes))).reshape(count, size)
    return lambda part: fields[part]
