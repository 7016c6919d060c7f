"""The block types of GGUF: one row per type says where a block holds codes, scales and minima.

A tensor's row is a sequence of blocks of 32 to 256 neighboring values. A type describes its blocks
as a `QArray`: the format of the codes, the tile size, and, for types whose scales and minima are
small integers, their format and the float that multiplies them.

The layouts are defined in `ggml-common.h` of llama.cpp. The `gguf` package is the reference.

A *field* is a nonnegative integer in a block, such as a code. Four classes say where fields are.
"""

import dataclasses
from typing import ClassVar

import ml_dtypes
import numpy as np

from .codes import pack, unpack


@dataclasses.dataclass(frozen=True)
class Bits:
    """The place of integers of 1, 2, 4 or 8 bits in a block.

    A byte holds `8 // bits` integers. Place 0 is its lowest bits, place 1 the next, and so on. The
    integers of a run of `size` bytes are ordered by place: first place 0 of each byte, then place
    1 of each byte. `groups` runs follow each other.

    **Arguments:**

    - `start`: the index in the block of the first byte of the first run.
    - `groups`, `size`: the number of runs, and of bytes per run.
    - `bits`: the number of bits of an integer.
    - `places`: the places of a byte that hold these integers. By default, all.
    """

    start: int
    groups: int
    size: int
    bits: int
    places: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of integers at this place in a block."""
        return self.groups * self.size * len(self._shifts())

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Read the integers at this place from blocks `uint8[..., bytes]`: `uint8[..., count]`."""
        bytes_ = np.ascontiguousarray(self._bytes(blocks))
        if self.bits == 8:
            return bytes_
        if self.size == 1 and self.places is None:
            return unpack(bytes_, self.bits, self.count)
        shifts = self._shifts()
        words = self._words(bytes_, 1)[..., 0, :]
        fields = np.empty((*words.shape[:-1], len(shifts), words.shape[-1]), words.dtype)
        mask = np.full(words.itemsize, 2**self.bits - 1, np.uint8).view(words.dtype)[0]
        for i, shift in enumerate(shifts):
            fields[..., i, :] = (words >> shift) & mask
        return fields.view(np.uint8).reshape(*blocks.shape[:-1], self.count)

    def write(self, blocks: np.ndarray, fields: np.ndarray) -> None:
        """Write integers `uint8[..., count]` to this place of blocks, whose bits there are 0."""
        bytes_ = self._bytes(blocks)
        if self.size == 1 and self.places is None:
            bytes_ |= pack(fields, self.bits)
            return
        shifts = self._shifts()
        fields = self._words(np.ascontiguousarray(fields), len(shifts))
        words = fields[..., 0, :] << shifts[0]
        for i, shift in enumerate(shifts[1:], 1):
            words |= fields[..., i, :] << shift
        bytes_ |= words.view(np.uint8).reshape(bytes_.shape)

    def _words(self, bytes_: np.ndarray, places: int) -> np.ndarray:
        """View bytes as unsigned integers, so that one operation applies to several bytes.

        The integers are the largest, up to 64 bits, whose size divides the bytes of a run.

        **Arguments:**

        - `bytes_`: `uint8[..., groups * places * size]`: the runs, with `places` of them per group.

        **Returns:** `[..., groups, places, words]`.
        """
        size = next(size for size in (8, 4, 2, 1) if self.size % size == 0)
        runs = (*bytes_.shape[:-1], self.groups, places, self.size // size)
        return bytes_.view(f"<u{size}").reshape(runs)

    def _bytes(self, blocks: np.ndarray) -> np.ndarray:
        return blocks[..., self.start : self.start + self.groups * self.size]

    def _shifts(self) -> list[int]:
        places = range(8 // self.bits) if self.places is None else self.places
        return [self.bits * place for place in places]


@dataclasses.dataclass(frozen=True)
class Joined:
    """The place of integers whose low bits and high bits are in different bytes of a block."""

    low: Bits
    high: Bits

    @property
    def count(self) -> int:
        """The number of integers at this place in a block."""
        return self.low.count

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Read the integers at this place from blocks `uint8[..., bytes]`: `uint8[..., count]`."""
        return self.low.read(blocks) | (self.high.read(blocks) << self.low.bits)

    def write(self, blocks: np.ndarray, fields: np.ndarray) -> None:
        """Write integers `uint8[..., count]` to this place of blocks, whose bits there are 0."""
        self.low.write(blocks, fields & (2**self.low.bits - 1))
        self.high.write(blocks, fields >> self.low.bits)


@dataclasses.dataclass(frozen=True)
class EightOfSixBits:
    """The place of the scales or the minima of Q4_K and Q5_K: 8 integers of 6 bits.

    A block has 12 bytes for both. Four bytes hold the first four scales in their low 6 bits, and
    the two high bits of the last four scales in their high 2 bits. The next four bytes hold the
    minima in the same way. Each of the last four bytes holds the four low bits of one of the last
    four scales, and of one of the last four minima.

    **Arguments:**

    - `start`: the index of the byte with the first of these integers.
    - `nibbles`: the index of the first of the last four bytes.
    - `shift`: the place of the low bits in the last four bytes: 0 for scales, 4 for minima.
    """

    start: int
    nibbles: int
    shift: int
    count: ClassVar[int] = 8

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Read the integers at this place from blocks `uint8[..., bytes]`: `uint8[..., count]`."""
        first = blocks[..., self.start : self.start + 4]
        low = (blocks[..., self.nibbles : self.nibbles + 4] >> self.shift) & 15
        return np.concatenate([first & 63, low | (first >> 6 << 4)], -1)

    def write(self, blocks: np.ndarray, fields: np.ndarray) -> None:
        """Write integers `uint8[..., count]` to this place of blocks, whose bits there are 0."""
        first, last = fields[..., :4], fields[..., 4:]
        blocks[..., self.start : self.start + 4] |= first | (last >> 4 << 6)
        blocks[..., self.nibbles : self.nibbles + 4] |= (last & 15) << self.shift


# The runs of a block of TQ1_0: first byte, number of bytes, digits per byte.
_DIGITS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))


class Digits:
    """The place of the codes of TQ1_0: 256 digits of base 3, five per byte.

    The last four bytes hold four digits each. A byte `b` encodes the fraction `b / 256`, whose
    digits after the point in base 3 are the codes: the integer part of `3 * b / 256` is the first.
    """

    count = 256

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Read the integers at this place from blocks `uint8[..., bytes]`: `uint8[..., count]`."""
        runs = []
        for start, size, count in _DIGITS:
            rest = blocks[..., start : start + size]
            for _ in range(count):
                tripled = rest * np.uint16(3)
                runs.append((tripled >> 8).astype(np.uint8))
                rest = tripled.astype(np.uint8)
        return np.concatenate(runs, -1)

    def write(self, blocks: np.ndarray, fields: np.ndarray) -> None:
        """Write integers `uint8[..., count]` to this place of blocks, whose bits there are 0."""
        done = 0
        for start, size, count in _DIGITS:
            total = np.zeros((*blocks.shape[:-1], size), np.uint16)
            for place in range(count):
                digits = fields[..., done : done + size]
                total += digits * np.uint16(3 ** (4 - place))
                done += size
            # Rounded up, so that reading does not lose the last digit.
            blocks[..., start : start + size] = (total * 256 + 242) // 243


_F16 = np.dtype("<f2")
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

# The largest byte of an 8-bit float that is nonnegative and finite. llama.cpp decodes larger bytes
# to values that the dtypes do not have, and never writes them.
LARGEST_SCALES = {_E8M0: 0xFE, _E4M3: 0x7E}


Fields = Bits | Joined | EightOfSixBits | Digits


@dataclasses.dataclass(frozen=True)
class Floats:
    """The place of the scales or minima of a block: floats, or small integers times a float.

    **Arguments:**

    - `start`, `dtype`, `count`: the first byte of the floats, their dtype and their number.
    - `negated`: whether the file holds the negated floats.
    - `qtype`, `fields`, `flipped`: for integers that the float multiplies: their format, their
      place in the block, and the bits of each that are inverted in the file. `fields` is None if
      there are only floats.
    """

    start: int
    dtype: np.dtype = _F16
    count: int = 1
    _: dataclasses.KW_ONLY
    negated: bool = False
    qtype: str | None = None
    fields: Fields | None = None
    flipped: int = 0

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """Read the floats at this place from blocks `uint8[..., bytes]`: `[..., count]`.

        **Raises:** `ValueError` for 8-bit scales that are negative or NaN.
        """
        bytes_ = blocks[..., self.start : self.start + self.count * self.dtype.itemsize]
        bytes_ = np.ascontiguousarray(bytes_)
        largest = LARGEST_SCALES.get(self.dtype, 0xFF)
        if bytes_.size and bytes_.max() > largest:
            raise ValueError(f"it has scales that are negative or NaN: above 0x{largest:X}")
        floats = bytes_.view(self.dtype)
        return -floats if self.negated else floats

    def write(self, blocks: np.ndarray, floats: np.ndarray) -> None:
        """Write floats `[..., count]` to this place of blocks `uint8[..., bytes]`."""
        bytes_ = np.ascontiguousarray(-floats if self.negated else floats).view(np.uint8)
        blocks[..., self.start : self.start + bytes_.shape[-1]] = bytes_


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type of blocks, as a `QArray` with the value `codes * scale + minimum`.

    **Arguments:**

    - `name`, `number`: the name and the number of the type in GGUF, such as "Q4_0" and 2.
    - `values`, `nbytes`: the number of values and of bytes of a block.
    - `qtype`: the format of the codes.
    - `codes`: the place of the codes in a block.
    - `flipped`: the bits of a code that are inverted in the file. It is the highest bit if the file
      stores signed codes plus `2**(bits - 1)`.
    - `scale`, `minimum`: the place of the scales, and of the minima if there are any, in a block.
    """

    name: str
    number: int
    values: int
    nbytes: int
    _: dataclasses.KW_ONLY
    qtype: str
    codes: Fields
    flipped: int = 0
    scale: Floats = Floats(0)
    minimum: Floats | None = None


_NIBBLES = Bits(2, 1, 16, 4)
_SCALES_OF_6 = EightOfSixBits(4, nibbles=12, shift=0)
_MINIMA_OF_6 = EightOfSixBits(8, nibbles=12, shift=4)

_ROWS = (
    BlockType("Q4_0", 2, 32, 18, qtype="int4", codes=_NIBBLES, flipped=8),
    BlockType("Q4_1", 3, 32, 20, qtype="uint4", codes=Bits(4, 1, 16, 4), minimum=Floats(2)),
    BlockType(
        *("Q5_0", 6, 32, 22),
        qtype="int5",
        codes=Joined(Bits(6, 1, 16, 4), Bits(2, 4, 1, 1)),
        flipped=16,
    ),
    BlockType(
        *("Q5_1", 7, 32, 24),
        qtype="uint5",
        codes=Joined(Bits(8, 1, 16, 4), Bits(4, 4, 1, 1)),
        minimum=Floats(2),
    ),
    BlockType("Q8_0", 8, 32, 34, qtype="int8", codes=Bits(2, 1, 32, 8)),
    BlockType(
        *("Q2_K", 10, 256, 84),
        qtype="uint2",
        codes=Bits(16, 2, 32, 2),
        scale=Floats(80, qtype="uint4", fields=Bits(0, 1, 16, 4, places=(0,))),
        minimum=Floats(82, negated=True, qtype="uint4", fields=Bits(0, 1, 16, 4, places=(1,))),
    ),
    BlockType(
        *("Q3_K", 11, 256, 110),
        qtype="int3",
        codes=Joined(Bits(32, 2, 32, 2), Bits(0, 1, 32, 1)),
        flipped=4,
        scale=Floats(
            108, qtype="int6", fields=Joined(Bits(96, 1, 8, 4), Bits(104, 1, 4, 2)), flipped=32
        ),
    ),
    BlockType(
        *("Q4_K", 12, 256, 144),
        qtype="uint4",
        codes=Bits(16, 4, 32, 4),
        scale=Floats(0, qtype="uint6", fields=_SCALES_OF_6),
        minimum=Floats(2, negated=True, qtype="uint6", fields=_MINIMA_OF_6),
    ),
    BlockType(
        *("Q5_K", 13, 256, 176),
        qtype="uint5",
        codes=Joined(Bits(48, 4, 32, 4), Bits(16, 1, 32, 1)),
        scale=Floats(0, qtype="uint6", fields=_SCALES_OF_6),
        minimum=Floats(2, negated=True, qtype="uint6", fields=_MINIMA_OF_6),
    ),
    BlockType(
        *("Q6_K", 14, 256, 210),
        qtype="int6",
        codes=Joined(Bits(0, 2, 64, 4), Bits(128, 2, 32, 2)),
        flipped=32,
        scale=Floats(208, qtype="int8", fields=Bits(192, 1, 16, 8)),
    ),
    BlockType("IQ4_NL", 20, 32, 18, qtype="iq4_nl", codes=_NIBBLES),
    BlockType(
        *("IQ4_XS", 23, 256, 136),
        qtype="iq4_nl",
        codes=Bits(8, 8, 16, 4),
        scale=Floats(
            0, qtype="int6", fields=Joined(Bits(4, 4, 1, 4), Bits(2, 2, 1, 2)), flipped=32
        ),
    ),
    BlockType("TQ1_0", 34, 256, 54, qtype="ternary", codes=Digits(), scale=Floats(52)),
    # The values of its fields are -1, 0, 1 and 2. Negated, they are signed integers of two bits.
    BlockType(
        *("TQ2_0", 35, 256, 66),
        qtype="int2",
        codes=Bits(0, 2, 32, 2),
        flipped=1,
        scale=Floats(64, negated=True),
    ),
    BlockType("MXFP4", 39, 32, 17, qtype="mxfp4", codes=Bits(1, 1, 16, 4), scale=Floats(0, _E8M0)),
    BlockType(
        "NVFP4", 40, 64, 36, qtype="nvfp4", codes=Bits(4, 4, 8, 4), scale=Floats(0, _E4M3, 4)
    ),
)

BLOCK_TYPES: dict[int, BlockType] = {row.number: row for row in _ROWS}

# The types of dense tensors: name and dtype by number.
DENSE_TYPES: dict[int, tuple[str, np.dtype]] = {
    0: ("F32", np.dtype("<f4")),
    1: ("F16", np.dtype("<f2")),
    24: ("I8", np.dtype("i1")),
    25: ("I16", np.dtype("<i2")),
    26: ("I32", np.dtype("<i4")),
    27: ("I64", np.dtype("<i8")),
    28: ("F64", np.dtype("<f8")),
    30: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}

# Other types of GGUF, which are not supported: name, values and bytes of a block by number.
OTHER_TYPES: dict[int, tuple[str, int, int]] = {
    9: ("Q8_1", 32, 40),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    29: ("IQ1_M", 256, 56),
    41: ("Q1_0", 128, 18),
}
