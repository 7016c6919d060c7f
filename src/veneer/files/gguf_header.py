"""Read and write the start of a GGUF file: its metadata, and the description of each tensor.

The metadata are typed values: strings, numbers, and arrays of them.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_blocks import BLOCK_TYPES, DENSE_TYPES, OTHER_TYPES

_BOOL, _STRING, _ARRAY = 7, 8, 9

# The dtypes of numbers, by the number of the type in GGUF.
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

# The most levels of nested arrays that are read.
_LEVELS = 4


class MetadataReader:
    """A reader of the values at the start of a GGUF file, from its first byte on.

    Its methods raise `ValueError` if the file ends within a value.
    """

    def __init__(self, content: memoryview):
        self._content = content
        self.offset = 0

    @property
    def size(self) -> int:
        """The number of bytes of the file."""
        return len(self._content)

    def integer(self, format: str) -> int:
        """Read an unsigned integer. `format` is "I" for 4 bytes or "Q" for 8, as in `struct`."""
        return struct.unpack_from(f"<{format}", self._take(struct.calcsize(f"<{format}")))[0]

    def count(self, least: int) -> int:
        """Read the number of entries that follow, such as the length of an array.

        **Raises:** `ValueError` if the rest of the file is too short for this number of entries, of
        at least `least` bytes each.
        """
        count = self.integer("Q")
        if count * least > len(self._content) - self.offset:
            raise ValueError(f"it ends within the {count} entries at byte {self.offset}")
        return count

    def string(self, errors: str = "strict") -> str:
        """Read a string: its length, and its bytes in UTF-8."""
        return str(self._take(self.count(1)), "utf-8", errors)

    def value(self, levels: int = _LEVELS) -> Any:
        """Read a type and a value of this type. Arrays can be nested up to `levels` deep.

        A number is a Python number if `write_value` writes it with the same type, else a NumPy
        number. Arrays of numbers are NumPy arrays, and other arrays are lists.
        """
        return self._value_of(self.integer("I"), levels)

    def _value_of(self, type: int, levels: int) -> Any:
        if type == _STRING:
            # Tokens are bytes, and some are not valid UTF-8.
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
    """Return a string as GGUF stores it: its length, and its bytes in UTF-8."""
    encoded = string.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def write_value(value: Any) -> bytes:
    """Return a value as GGUF stores it: its type, and its bytes.

    Python integers have 4 bytes, unsigned if possible, or 8 bytes if they do not fit. Python floats
    have 4 bytes. NumPy numbers and arrays keep their dtypes.

    **Raises:** `TypeError` for a value that GGUF cannot hold.
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
    """Return the number of the GGUF type for a Python or NumPy number, such as 6 for a float."""
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

# The limits of llama.cpp: the number of axes, and the bytes of a name.
MAX_AXES = 4
MAX_NAME_BYTES = 63

# The largest alignment that is accepted. Files have 32, or up to 4096.
_MAX_ALIGNMENT = 2**20


@dataclasses.dataclass(frozen=True)
class Entry:
    """The description of a tensor of a GGUF file.

    - `type`: the number of its block type, or of its dtype if it is dense.
    - `shape`: the shape of its values, such as `[out, in]`.
    - `start`, `nbytes`: the offset of its bytes from the beginning of the file, and their number.
    """

    type: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


def type_layout(number: int) -> tuple[str, int, int]:
    """Return the name of the GGUF type with a number, and the values and bytes of its blocks.

    **Raises:** `ValueError` for an unknown type.
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
    """Return the metadata of a file, and a dict of the descriptions of its tensors, in their order.

    **Arguments:**

    - `content`: the memory-mapped bytes of the file.

    **Raises:** `ValueError` if the file is truncated or has an invalid value.
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
    data = align(reader.offset, alignment)
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
        offset = align(offset + nbytes, alignment)
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
    """Read the description of a tensor. Return its name, and `(shape, type, offset)`.

    The offset counts from the beginning of the tensor data, not of the file.

    **Raises:** `ValueError` if the shape cannot be right.
    """
    name = reader.string()
    axes = reader.integer("I")
    if axes > MAX_AXES:
        raise ValueError(f"tensor {name!r} has {axes} axes, but GGUF has at most {MAX_AXES}")
    # GGUF lists the last axis first.
    shape = tuple(reader.integer("Q") for _ in range(axes))[::-1]
    # Every type has at least one bit per value.
    if math.prod(max(size, 1) for size in shape) > 8 * reader.size:
        raise ValueError(
            f"tensor {name!r} has shape {shape}, which has more values than the file has bits"
        )
    return name, (shape, reader.integer("I"), reader.integer("Q"))


def nbytes_of(shape: tuple[int, ...], type: int) -> int:
    """Return the number of bytes of a tensor with a shape and the number of a GGUF type.

    **Raises:** `ValueError` if the last axis is not a multiple of the block size.
    """
    name, values, nbytes = type_layout(type)
    if (shape[-1] if shape else 1) % values:
        raise ValueError(
            f"the last axis of {shape} is not a multiple of {values}, the block of {name}"
        )
    return math.prod(shape) // values * nbytes


def alignment_of(metadata: dict[str, Any]) -> int:
    """Return the alignment in bytes of the tensors of a file, which its metadata can state.

    **Raises:** `ValueError` if it is not a power of two up to 2**20.
    """
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment.bit_count() != 1 or alignment > _MAX_ALIGNMENT:
        raise ValueError(f"general.alignment must be a power of two up to 2**20, not {alignment!r}")
    return alignment


def align(offset: int, alignment: int) -> int:
    """Round an offset up to a multiple of `alignment`."""
    return -(-offset // alignment) * alignment


def map_file(path: Path) -> np.ndarray:
    """Map a file into memory: `uint8[bytes]`.

    **Raises:** `FileNotFoundError` if there is no file. `ValueError` if it is empty.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    return np.asarray(np.memmap(path, np.uint8, "r"))
