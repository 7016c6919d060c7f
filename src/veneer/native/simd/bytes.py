"""Bytes in SIMD values: what codes are worth as bytes, and the order that products of them need.

`integers.py` multiplies lanes of four bytes that are neighbours along what is contracted.
"""

from typing import Any

from llvmlite import ir
from numba import types

from ..isa import IS_NEON, ISA, LANES
from ..memory import F32, I8, I16, I32
from .blocks import (
    BYTES,
    INTS,
    SHORTS,
    Block,
    advance,
    call_llvm,
    constant,
    get_vectors,
    instruction,
    load_vector,
    make_block,
    merge_lanes,
    shuffle,
    split_lanes,
    store_vector,
)
from .integers import WIDTH

#: How much larger a code is as a number without a sign.
OFFSET = 128


# Codes.


@instruction
def load_byte_table(address):
    """Reads what 16 fields are worth, f32, as bytes for `look_up_bytes`."""

    def emit(builder, address):
        sixteen = ir.VectorType(F32, 16)
        values = builder.fptosi(load_vector(builder, address, sixteen), ir.VectorType(I32, 16))
        values = builder.add(values, ir.Constant(values.type, [OFFSET] * 16))
        values = builder.trunc(values, ir.VectorType(I8, 16))
        everywhere = shuffle(builder, values, values, [i % 16 for i in range(WIDTH)])
        return make_block(builder, [builder.bitcast(everywhere, INTS)])

    return Block("i32", 1, 1), emit


@instruction
def look_up_bytes(table, block, shift):
    """What the fields are worth that begin at bit `shift` of each byte."""

    def emit(builder, table, values, shift):
        table = builder.bitcast(get_vectors(builder, table)[0], BYTES)
        by = builder.trunc(shift, I16)
        undefined = ir.Constant(SHORTS, ir.Undefined)
        by = builder.insert_element(undefined, by, I32(0))
        by = shuffle(builder, by, undefined, [0] * SHORTS.count)
        worth = []
        for value in get_vectors(builder, values):
            # Bits of the next byte come along. They are cut off, or the table repeats over them.
            fields = builder.lshr(builder.bitcast(value, SHORTS), by)
            fields = builder.and_(builder.bitcast(fields, BYTES), constant(BYTES, 15))
            worth.append(builder.bitcast(_look_up(builder, table, fields), INTS))
        return make_block(builder, worth)

    return block, emit


def _look_up(builder: Any, table: Any, indices: Any) -> Any:
    """Bytes of a table of 16, which each 128 bits of a vector have, at indices below 16."""
    if ISA.startswith("avx512"):
        return call_llvm(builder, "llvm.x86.avx512.pshuf.b.512", BYTES, table, indices)
    if ISA == "avx2":
        return call_llvm(builder, "llvm.x86.avx2.pshuf.b", BYTES, table, indices)
    if IS_NEON:
        return call_llvm(builder, "llvm.aarch64.neon.tbl1.v16i8", BYTES, table, indices)
    value = ir.Constant(BYTES, ir.Undefined)
    for lane in range(WIDTH):
        index = builder.zext(builder.extract_element(indices, I32(lane)), I32)
        value = builder.insert_element(value, builder.extract_element(table, index), I32(lane))
    return value


@instruction
def to_unsigned(block):
    """Bytes with a sign, each larger by OFFSET, which makes them bytes without one."""
    return block, lambda builder, values: make_block(
        builder,
        [
            builder.xor(value, ir.Constant(INTS, [0x80808080] * LANES))
            for value in get_vectors(builder, values)
        ],
    )


# The order of bytes.


@instruction
def load_interleaved(address, stride):
    """Reads a vector of each of four rows, and returns lanes that have one byte of each.

    They are in the order of `to_panels`: 128 bits of a vector hold 4 of 16 neighbours.
    """

    def emit(builder, address, stride):
        rows = [
            load_vector(builder, advance(builder, address, 0, r, stride), BYTES) for r in range(4)
        ]
        first, second = (_unpacked(builder, rows[i], rows[i + 1], BYTES) for i in (0, 2))
        return make_block(
            builder,
            [
                builder.bitcast(value, INTS)
                for a, b in zip(first, second, strict=True)
                for value in _unpacked(builder, a, b, SHORTS)
            ],
        )

    return Block("i32", 1, 4), emit


@instruction
def load_transposed(address, stride):
    """Reads 16 bytes of each of LANES rows; row i is the i-th four of each of them, in order."""

    def emit(builder, address, stride):
        four = ir.VectorType(I32, 4)
        rows = [
            load_vector(builder, advance(builder, address, 0, r, stride), four)
            for r in range(LANES)
        ]
        # Neighbours are 128 bits of different vectors, so that no more than these are mixed.
        a, b, c, d = (_joined(builder, rows[i::4]) for i in range(4))
        (a, c), (b, d) = _unpacked(builder, a, c, INTS), _unpacked(builder, b, d, INTS)
        values = (*_unpacked(builder, a, b, INTS), *_unpacked(builder, c, d, INTS))
        return make_block(builder, values)

    return Block("i32", 4, 1), emit


def _unpacked(builder: Any, a: Any, b: Any, type: ir.VectorType) -> tuple[Any, Any]:
    """Entries of two vectors in turns, in each 128 bits: those of their lower and upper halves."""
    a, b = builder.bitcast(a, type), builder.bitcast(b, type)
    count = 4 * type.count // LANES
    halves = (
        [
            i
            for start in range(0, type.count, count)
            for entry in range(start + half, start + half + count // 2)
            for i in (entry, type.count + entry)
        ]
        for half in (0, count // 2)
    )
    low, high = (shuffle(builder, a, b, half) for half in halves)
    return low, high


def _joined(builder: Any, parts: list[Any]) -> Any:
    """Vectors one after the other as one."""
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(builder, a, b, lanes) for a, b in pairs]
    return parts[0]


@instruction
def to_panels(block, fields):
    """Neighbours in the order that fields of bytes have once they are `load_interleaved`.

    A block of `4 * fields` vectors; those of the first field are followed by those of the next.
    """

    def emit(builder, values, _):
        count, values = fields.literal_value, get_vectors(builder, values)
        quarters = [
            split_lanes(builder, values[i : i + count]) for i in range(0, len(values), count)
        ]
        panels = zip(*quarters, strict=True)
        return make_block(builder, [v for panel in panels for v in split_lanes(builder, panel, 4)])

    return block, emit


@instruction
def from_panels(block, fields):
    """Undoes `to_panels`."""

    def emit(builder, values, _):
        values = get_vectors(builder, values)
        panels = [merge_lanes(builder, values[i : i + 4], 4) for i in range(0, len(values), 4)]
        quarters = zip(*panels, strict=True)
        return make_block(builder, [v for each in quarters for v in merge_lanes(builder, each)])

    return Block("f32", 1, block.count), emit


@instruction
def copy_by_fields(address, to, fields, width):
    """Copies `width` bytes a field: first every `fields`-th of them, then those after them, ...

    So `look_up_bytes` gets to the codes of a row, one field of `width` of its bytes at a time.
    """
    count, size = fields.literal_value, width.literal_value

    def emit(builder, address, to, *_):
        values = load_vector(builder, address, ir.VectorType(I8, size * count))
        order = [i for start in range(count) for i in range(start, size * count, count)]
        store_vector(builder, shuffle(builder, values, values, order), to)

    return types.void, emit
