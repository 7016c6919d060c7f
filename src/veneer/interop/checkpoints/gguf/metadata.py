"""The typed values of a GGUF file: strings, numbers, and arrays of them."""

import struct
from typing import Any

import numpy as np

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
