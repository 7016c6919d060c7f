"""Instructions on vectors of bytes: lookup tables, and the order that dot products need.

`integers.py` multiplies lanes of four bytes that are adjacent along the contracted axis.
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
    broadcast,
    call_llvm,
    constant,
    get_vectors,
    instruction,
    load_vector,
    make_block,
    map_blocks,
    merge_lanes,
    shuffle,
    split_lanes,
    store_vector,
)
from .integers import WIDTH

#: The difference between a uint8 code and its int8 value.
OFFSET = 128


@instruction
def load_byte_table(address):
    """Read 16 f32 at an address. Return a table for `look_up_bytes`, of bytes `value + OFFSET`."""

    def emit(builder, address):
        sixteen = ir.VectorType(F32, 16)
        values = builder.fptosi(load_vector(builder, address, sixteen), ir.VectorType(I32, 16))
        values = builder.add(values, ir.Constant(values.type, [OFFSET] * 16))
        values = builder.trunc(values, ir.VectorType(I8, 16))
        repeated = shuffle(builder, values, values, [i % 16 for i in range(WIDTH)])
        return make_block(builder, [builder.bitcast(repeated, INTS)])

    return Block("i32", 1, 1), emit


@instruction
def look_up_bytes(table, block, shift):
    """Return, for each byte of a block, the entry of a table for its four bits from bit `shift`."""

    def emit(builder, table, values, shift):
        table = builder.bitcast(get_vectors(builder, table)[0], BYTES)
        shifts = broadcast(builder, builder.trunc(shift, I16), SHORTS.count)

        def look_up(value):
            # This shifts bits of the next byte in. The mask clears them, or the table has the same
            # entries for all their values.
            fields = builder.lshr(builder.bitcast(value, SHORTS), shifts)
            fields = builder.and_(builder.bitcast(fields, BYTES), constant(BYTES, 15))
            return builder.bitcast(_look_up(builder, table, fields), INTS)

        return map_blocks(builder, look_up, values)

    return block, emit


def _look_up(builder: Any, table: Any, indices: Any) -> Any:
    """Return `table[indices]`, for indices below 16. Each 128 bits of `table` hold all entries."""
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
    """Add OFFSET to the int8 in the bytes of a block. The sums are uint8."""
    sign_bits = ir.Constant(INTS, [0x80808080] * LANES)
    return block, lambda builder, values: map_blocks(
        builder, lambda value: builder.xor(value, sign_bits), values
    )


@instruction
def load_interleaved(address, stride):
    """Return four vectors, whose lanes have one byte of each of four rows.

    Row r is a vector at `address + r * stride`. Each 128 bits of the result hold 4 of 16 adjacent
    columns, in the order of `to_panels`.
    """

    def emit(builder, address, stride):
        rows = [
            load_vector(builder, advance(builder, address, 0, r, stride), BYTES) for r in range(4)
        ]
        first, second = (_zip_halves(builder, rows[i], rows[i + 1], BYTES) for i in (0, 2))
        return make_block(
            builder,
            [
                builder.bitcast(value, INTS)
                for a, b in zip(first, second, strict=True)
                for value in _zip_halves(builder, a, b, SHORTS)
            ],
        )

    return Block("i32", 1, 4), emit


@instruction
def load_transposed(address, stride):
    """Return four vectors: lane r of vector i holds bytes 4i to 4i + 3 of row r.

    Row r has 16 bytes at `address + r * stride`, for LANES rows.
    """

    def emit(builder, address, stride):
        four = ir.VectorType(I32, 4)
        rows = [
            load_vector(builder, advance(builder, address, 0, r, stride), four)
            for r in range(LANES)
        ]
        # Four adjacent rows are the same 128 bits of four vectors, so no lane leaves its 128 bits.
        a, b, c, d = (_concatenate(builder, rows[i::4]) for i in range(4))
        (a, c), (b, d) = _zip_halves(builder, a, c, INTS), _zip_halves(builder, b, d, INTS)
        values = (*_zip_halves(builder, a, b, INTS), *_zip_halves(builder, c, d, INTS))
        return make_block(builder, values)

    return Block("i32", 4, 1), emit


def _zip_halves(builder: Any, a: Any, b: Any, type: ir.VectorType) -> tuple[Any, Any]:
    """Return two vectors that alternate the entries of `a` and `b`, read as vectors of a type.

    The first has the entries in the lower half of each 128 bits, and the second the others.
    """
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


def _concatenate(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        lanes = range(2 * parts[0].type.count)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(builder, a, b, lanes) for a, b in pairs]
    return parts[0]


@instruction
def to_panels(block, fields):
    """Reorder numbers of adjacent columns as `load_interleaved` reorders the fields of bytes.

    The block has `4 * fields` vectors. In the result, four vectors of each field follow each other.
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
    """Undo the reordering by `to_panels` of a row of vectors of f32."""

    def emit(builder, values, _):
        values = get_vectors(builder, values)
        panels = [merge_lanes(builder, values[i : i + 4], 4) for i in range(0, len(values), 4)]
        quarters = zip(*panels, strict=True)
        return make_block(builder, [v for each in quarters for v in merge_lanes(builder, each)])

    return Block("f32", 1, block.count), emit


@instruction
def copy_by_fields(address, to, fields, width):
    """Copy `width * fields` bytes: first bytes 0, fields, 2 * fields, ..., then 1, fields + 1, ...

    Then `look_up_bytes` reads a field of `width` bytes at a time. Both counts are constants.
    """
    count, size = fields.literal_value, width.literal_value

    def emit(builder, address, to, *_):
        values = load_vector(builder, address, ir.VectorType(I8, size * count))
        order = [i for start in range(count) for i in range(start, size * count, count)]
        store_vector(builder, shuffle(builder, values, values, order), to)

    return types.void, emit
