"""What stands before the tensors of a GGUF file: metadata, and their names, types and places."""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_blocks import BLOCK_TYPES, DENSE_TYPES, OTHER_TYPES

_BOOL, _STRING, _ARRAY = 7, 8, 9

# Types of numbers, by GGUF's number of each.
_NUMBERS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_NUMBER_OF = {dtype: number for number, dtype in _NUMBERS.items()}

# Deeper than any file goes.
_LEVELS = 4


class MetadataReader:
    """Reads what stands before the tensors, from the first byte on.

    **Raises:** `ValueError` wherever there is less than what is said to come.
    """

    def __init__(self, content: memoryview):
        self._content = content
        self.offset = 0

    @property
    def size(self) -> int:
        """The bytes of all."""
        return len(self._content)

    def integer(self, format: str) -> int:
        """Reads an integer, as `struct` names it: "I" of 4 bytes, "Q" of 8."""
        return struct.unpack_from(f"<{format}", self._take(struct.calcsize(f"<{format}")))[0]

    def count(self, least: int) -> int:
        """Reads how many things of at least so many bytes come, and looks that there is room."""
        count = self.integer("Q")
        if count * least > len(self._content) - self.offset:
            raise ValueError(f"it ends within the {count} entries at byte {self.offset}")
        return count

    def string(self, errors: str = "strict") -> str:
        """Reads a string: its length, and so many bytes of UTF-8."""
        return str(self._take(self.count(1)), "utf-8", errors)

    def value(self, levels: int = _LEVELS) -> Any:
        """Reads a type and a value of it.

        A number is Python's where `write_value` makes the same of that, and NumPy's elsewhere.
        Arrays of numbers are NumPy's, others lists.
        """
        return self._value_of(self.integer("I"), levels)

    def _value_of(self, type: int, levels: int) -> Any:
        if type == _STRING:
            # Tokens are bytes, and some are no UTF-8.
            return self.string("surrogateescape")
        if type == _ARRAY and levels:
            return self._array(levels - 1)
        if type not in _NUMBERS:
            raise ValueError(f"value type {type} at byte {self.offset - 4} is unknown")
        number = self._numbers(type, 1)[0]
        value = number.item()
        return value if _type_of(value) == type else number

    def _array(self, levels: int) -> np.ndarray | list[Any]:
        type = self.integer("I")
        if type in _NUMBERS:
            return self._numbers(type, self.count(_NUMBERS[type].itemsize))
        count = self.count(8)
        return [self._value_of(type, levels) for _ in range(count)]

    def _numbers(self, type: int, count: int) -> np.ndarray:
        dtype = _NUMBERS[type]
        bytes_ = np.frombuffer(self._take(count * dtype.itemsize), np.uint8)
        if type == _BOOL:
            return bytes_ != 0
        return bytes_.copy().view(dtype)

    def _take(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self._content):
            raise ValueError(f"it ends within the {size} bytes at byte {self.offset}")
        taken = self._content[self.offset : end]
        self.offset = end
        return taken


def write_string(string: str) -> bytes:
    """Returns the length of a string and its bytes."""
    encoded = string.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def write_value(value: Any) -> bytes:
    """Returns the type of a value and its bytes.

    Python's integers are of 4 bytes without a sign where that holds them, else with one, else of 8
    bytes; its floats are of 4. NumPy's numbers and arrays are of their dtypes.

    **Raises:** `TypeError` for what GGUF does not have.
    """
    type, content = _encode(value)
    return struct.pack("<I", type) + content


def _encode(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return _STRING, write_string(value)
    if isinstance(value, list | tuple):
        items = [_encode(item) for item in value]
        types = {type for type, _ in items} or {_STRING}
        if types <= _NUMBERS.keys() and len(types) > 1:
            return _encode(np.array(value))
        if len(types) > 1:
            raise TypeError(f"a GGUF array has one type, but this one has several: {value!r}")
        return _ARRAY, struct.pack("<IQ", types.pop(), len(items)) + b"".join(x for _, x in items)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype in _NUMBER_OF:
        type = _NUMBER_OF[value.dtype]
        return _ARRAY, struct.pack("<IQ", type, len(value)) + value.tobytes()
    type = _type_of(value)
    return type, np.array(value).astype(_NUMBERS[type]).tobytes()


def _type_of(value: Any) -> int:
    """The type that a number is written as."""
    if isinstance(value, np.generic) and value.dtype in _NUMBER_OF:
        return _NUMBER_OF[value.dtype]
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, float):
        return _NUMBER_OF[np.dtype("<f4")]
    if isinstance(value, int):
        for dtype in map(np.dtype, ("<u4", "<i4", "<i8", "<u8")):
            if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
                return _NUMBER_OF[dtype]
    raise TypeError(
        f"GGUF can hold strings, numbers of up to 64 bits and arrays of these, not {value!r}"
    )


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

# llama.cpp's limits: axes, and bytes of a name.
MOST_AXES = 4
LONGEST_NAME = 63

# The largest alignment that is believed; usual are 32 and, for other memory, up to 4096.
_MOST_ALIGNMENT = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor: its type's number, the shape of its values `[out, in]`, and where its bytes are."""

    type: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


def type_layout(number: int) -> tuple[str, int, int]:
    """Returns the name of a type, and the values and bytes of a block of it.

    **Raises:** `ValueError` where there is no such type.
    """
    if number in BLOCK_TYPES:
        row = BLOCK_TYPES[number]
        return row.name, row.values, row.nbytes
    if number in DENSE_TYPES:
        name, dtype = DENSE_TYPES[number]
        return name, 1, dtype.itemsize
    if number in OTHER_TYPES:
        return OTHER_TYPES[number]
    raise ValueError(f"tensor type {number} is unknown")


def read_header(content: np.ndarray) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Returns the metadata and the tensors of a file, by name and in its order.

    **Arguments:**

    - `content`: the bytes of the file, mapped.

    **Raises:** `ValueError` where a part is missing, or is not what can be at its place.
    """
    reader = MetadataReader(content.data)
    _check_version(reader)
    tensors = reader.count(24)
    metadata: dict[str, Any] = {}
    for _ in range(reader.count(13)):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"{key!r} occurs twice")
        metadata[key] = reader.value()
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(tensors):
        name, info = _read_info(reader)
        if name in infos:
            raise ValueError(f"tensor {name!r} occurs twice")
        infos[name] = info
    alignment = alignment_of(metadata)
    data = aligned(reader.offset, alignment)
    entries = {}
    offset = 0
    for name, (shape, type, stated) in infos.items():
        try:
            if stated != offset:
                raise ValueError(f"it starts at {stated}, but the previous one ends at {offset}")
            nbytes = nbytes_of(shape, type)
            if data + offset + nbytes > len(content):
                raise ValueError(f"it takes {nbytes} bytes, but the file ends before")
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
        entries[name] = Entry(type, shape, data + offset, nbytes)
        offset = aligned(offset + nbytes, alignment)
    return metadata, entries


def _check_version(reader: MetadataReader) -> None:
    if reader.integer("I") != int.from_bytes(MAGIC, "little"):
        raise ValueError("it is not a GGUF file: it does not start with 'GGUF'")
    version = reader.integer("I")
    if version and not version & 0xFFFF:
        raise ValueError(
            "it is big-endian: convert it with gguf-convert-endian of the package gguf"
        )
    if version not in VERSIONS:
        raise ValueError(f"its GGUF version {version} is not supported; versions 2 and 3 are")


def _read_info(reader: MetadataReader) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    """Name, and shape, type and offset, of a tensor."""
    name = reader.string()
    axes = reader.integer("I")
    if axes > MOST_AXES:
        raise ValueError(f"tensor {name!r} has {axes} axes, but GGUF has at most {MOST_AXES}")
    # The fastest first.
    shape = tuple(reader.integer("Q") for _ in range(axes))[::-1]
    # No type has less than a bit a value.
    if math.prod(max(size, 1) for size in shape) > 8 * reader.size:
        raise ValueError(
            f"tensor {name!r} has shape {shape}, which has more values than the file has bits"
        )
    return name, (shape, reader.integer("I"), reader.integer("Q"))


def nbytes_of(shape: tuple[int, ...], type: int) -> int:
    """Returns the bytes of a tensor.

    **Raises:** `ValueError` where the last axis is not of whole blocks.
    """
    name, values, nbytes = type_layout(type)
    if (shape[-1] if shape else 1) % values:
        raise ValueError(
            f"the last axis of {shape} is not a multiple of {values}, the block of {name}"
        )
    return math.prod(shape) // values * nbytes


def alignment_of(metadata: dict[str, Any]) -> int:
    """Returns what the offsets of tensors are multiples of.

    **Raises:** `ValueError` where that is no power of two, of up to 2**20.
    """
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment.bit_count() != 1 or alignment > _MOST_ALIGNMENT:
        raise ValueError(f"general.alignment must be a power of two up to 2**20, not {alignment!r}")
    return alignment


def aligned(offset: int, alignment: int) -> int:
    """Returns the first multiple of `alignment` from `offset` on."""
    return -(-offset // alignment) * alignment


def mapped(path: Path) -> np.ndarray:
    """Returns the bytes of a file, mapped into memory: uint8 `[bytes]`.

    **Raises:** `FileNotFoundError`; `ValueError` for an empty file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    return np.asarray(np.memmap(path, np.uint8, "r"))
