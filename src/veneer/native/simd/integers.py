"""Instructions on vectors of int32 and of bytes.

A 32-bit lane can hold four bytes that are adjacent along the contracted axis: uint8 codes of the
matrix, or int8 activations. `add_outer_bytes` and `add_inner_bytes` multiply such lanes. The last
instructions look bytes up in tables, and bring them into the order of these dot products.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from ..memory import F32, I8, I16, I32, pointer
from . import HAS_VNNI, IS_NEON, ISA, LANES
from .blocks import (
    BYTES,
    FLOATS,
    INTS,
    SHORTS,
    Block,
    Emit,
    accumulate,
    advance,
    broadcast,
    call_llvm,
    constant,
    get_vectors,
    instruction,
    load_broadcast,
    load_vector,
    make_block,
    map_blocks,
    merge_lanes,
    multiply_add,
    permute,
    shuffle,
    split_lanes,
    store_vector,
)

#: The number of bytes in a vector.
WIDTH = 4 * LANES
#: The difference between a uint8 code and its int8 value.
OFFSET = 128


@instruction
def load_ints(address, stride, rows, columns):
    """Return rows x columns of vectors of int32: row r is at `address + r * stride`."""
    return _load_rows("i32", INTS, rows, columns)


@instruction
def load_floats(address, stride, rows, columns):
    """Return rows x columns of vectors of f32: row r is at `address + r * stride`."""
    return _load_rows("f32", FLOATS, rows, columns)


def _load_rows(entry: str, vector: ir.Type, rows: Any, columns: Any) -> tuple[Block, Emit]:
    block = Block(entry, rows.literal_value, columns.literal_value)

    def emit(builder: Any, address: Any, stride: Any, *_: Any) -> Any:
        places = [
            advance(builder, address, column, row, stride)
            for row in range(block.rows)
            for column in range(block.columns)
        ]
        return make_block(builder, [load_vector(builder, place, vector) for place in places])

    return block, emit


@instruction
def load_first_ints(address, stride, rows, count):
    """Return one vector of int32 per row, at `address + r * stride`.

    Only its first `count` lanes are read. The others are 0.
    """
    return _load_first("i32", INTS, rows)


@instruction
def load_first_floats(address, stride, rows, count):
    """Return one vector of f32 per row, at `address + r * stride`.

    Only its first `count` lanes are read. The others are 0.
    """
    return _load_first("f32", FLOATS, rows)


def _load_first(entry: str, vector: ir.Type, rows: Any) -> tuple[Block, Emit]:
    block = Block(entry, rows.literal_value, 1)

    def emit(builder: Any, address: Any, stride: Any, _: Any, count: Any) -> Any:
        count = broadcast(builder, builder.trunc(count, I32))
        mask = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
        places = [advance(builder, address, 0, row, stride) for row in range(block.rows)]
        return make_block(builder, [_load_masked(builder, x, vector, mask, 1) for x in places])

    return block, emit


def _load_masked(builder: Any, address: Any, vector: ir.Type, mask: Any, alignment: int) -> Any:
    """Return the lanes of a vector where a mask is set, and 0 in the others, which are not read."""
    entry = "f32" if vector is FLOATS else "i32"
    name, zeros = f"llvm.masked.load.v{LANES}{entry}.p0", ir.Constant(vector, None)
    place = pointer(builder, address, vector)
    return call_llvm(builder, name, vector, place, I32(alignment), mask, zeros)


@instruction
def zero_ints():
    """Return one vector of int32 zeros."""
    return Block("i32", 1, 1), lambda builder: make_block(builder, [constant(INTS, 0)])


@instruction
def broadcast_vectors(address, stride, rows, columns):
    """Return a block whose vectors in row r are all the vector at `address + r * stride`."""

    def load(builder: Any, address: Any, stride: Any, row: int) -> Any:
        return load_vector(builder, advance(builder, address, 0, row, stride), INTS)

    return _repeat_by_row(rows, columns, load)


@instruction
def broadcast_ints(address, rows, columns):
    """Return a block whose lanes in row r are all the int32 at `address + 4 * r`."""

    def load(builder: Any, address: Any, row: int) -> Any:
        place = builder.add(address, ir.Constant(address.type, 4 * row))
        return load_broadcast(builder, place, I32)

    return _repeat_by_row(rows, columns, load)


def _repeat_by_row(rows: Any, columns: Any, load: Callable[..., Any]) -> tuple[Block, Emit]:
    block = Block("i32", rows.literal_value, columns.literal_value)

    def emit(builder: Any, *args: Any) -> Any:
        values = [load(builder, *args[:-2], row) for row in range(block.rows)]
        return make_block(builder, [value for value in values for _ in range(block.columns)])

    return block, emit


@instruction
def load_repeated(address, stride, count, shift, lanes):
    """Return a row of `count` vectors, of f32 that are each repeated in `1 << shift` lanes.

    Lane i of vector c is the f32 at `address + c * stride + 4 * (i >> shift)`. Only numbers for the
    first `lanes` lanes are read. The other numbers are 0.
    """
    block = Block("f32", 1, count.literal_value)

    def emit(builder, address, stride, _, shift, count):
        shift, count = (broadcast(builder, builder.trunc(n, I32)) for n in (shift, count))
        lanes = ir.Constant(INTS, [*range(LANES)])
        indices = builder.lshr(lanes, shift)
        mask = builder.icmp_unsigned("<", builder.shl(lanes, shift), count)
        places = [advance(builder, address, 0, c, stride) for c in range(block.columns)]
        values = [_load_masked(builder, place, FLOATS, mask, 4) for place in places]
        return make_block(builder, [permute(builder, value, indices) for value in values])

    return block, emit


@instruction
def add_outer_bytes(total, x, stride, w):
    """Return `total[r][c] + dot(x[r], w[c])`, for the four int8 `x[r]`.

    `x[r]` is at `x + r * stride` in memory. `w` is a row of vectors with four uint8 per lane.
    """

    def emit(builder, totals, x, stride, ws):
        row = lambda r: load_broadcast(builder, advance(builder, x, 0, r, stride), I32)
        return accumulate(builder, total, totals, ws, row, _dot)

    return total, emit


@instruction
def add_inner_bytes(total, x, stride, w):
    """Return `total[r][c] + dot(x[r], w[c])`, for four int8 per lane of the vector `x[r]`.

    `x[r]` is at `x + r * stride` in memory. `w` is a row of vectors with four uint8 per lane.
    """

    def emit(builder, totals, x, stride, ws):
        row = lambda r: load_vector(builder, advance(builder, x, 0, r, stride), INTS)
        return accumulate(builder, total, totals, ws, row, _dot)

    return total, emit


def _dot(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """Return `total` plus the dot products of four int8 of `x` and four uint8 of `w`, per lane."""
    if HAS_VNNI:
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, w, x)
    if ISA in ("neon_i8mm", "neon_dotprod"):
        return _dot_on_arm(builder, total, x, w)
    if ISA in ("neon", "portable"):
        for i in range(4):
            code = builder.and_(builder.lshr(w, constant(INTS, 8 * i)), constant(INTS, 255))
            number = builder.shl(x, constant(INTS, 24 - 8 * i))
            number = builder.ashr(number, constant(INTS, 24))
            total = builder.add(total, builder.mul(code, number))
        return total
    # Multiply 16-bit numbers. The instruction for bytes adds two products in 16 bits, which
    # saturates, because one product may need 16 bits.
    name = "avx512.pmaddw.d.512" if ISA == "avx512" else "avx2.pmadd.wd"
    w, x = builder.bitcast(w, SHORTS), builder.bitcast(x, SHORTS)
    eight = constant(SHORTS, 8)
    even = builder.and_(w, constant(SHORTS, 255)), builder.ashr(builder.shl(x, eight), eight)
    odd = builder.lshr(w, eight), builder.ashr(x, eight)
    for pair in (even, odd):
        total = builder.add(total, call_llvm(builder, f"llvm.x86.{name}", INTS, *pair))
    return total


def _dot_on_arm(builder: Any, total: Any, x: Any, w: Any) -> Any:
    x, codes = builder.bitcast(x, BYTES), builder.bitcast(w, BYTES)
    name = "llvm.aarch64.neon.{}dot.v4i32.v16i8"
    if ISA == "neon_i8mm":
        return call_llvm(builder, name.format("us"), INTS, total, codes, x)
    # This instruction takes two int8: dot(x, w) = dot(x, w - 128) - dot(x, -128).
    signed = builder.xor(codes, constant(BYTES, 0x80))
    error = call_llvm(builder, name.format("s"), INTS, constant(INTS, 0), constant(BYTES, -128), x)
    total = call_llvm(builder, name.format("s"), INTS, total, signed, x)
    return builder.sub(total, error)


@instruction
def add_byte_sums(total, address, bytes):
    """Return one vector: `total` plus, in each lane, the sum of four consecutive int8 at `address`.

    Only `bytes` bytes, a constant, are read.
    """
    count = bytes.literal_value // 4

    def emit(builder, total, address, _):
        ones = ir.Constant(INTS, [0x01010101] * LANES)
        values = load_vector(builder, address, ir.VectorType(I32, count))
        if count < LANES:
            zeros = ir.Constant(values.type, [0] * count)
            values = shuffle(builder, values, zeros, [min(i, count) for i in range(LANES)])
        return map_blocks(builder, lambda vector: _dot(builder, vector, values, ones), total)

    return total, emit


@instruction
def concatenate(a, b):
    """Return a row of the vectors of the row `a` and then of the row `b`."""
    block = Block("i32", 1, a.columns + b.columns)
    return block, lambda builder, *blocks: make_block(
        builder, [value for values in blocks for value in get_vectors(builder, values)]
    )


@instruction
def add_blocks(a, b):
    """Return `a + b`, for two blocks of int32 of one shape."""
    return a, lambda builder, a, b: map_blocks(builder, builder.add, a, b)


@instruction
def multiply_ints(block, number):
    """Return a block of int32 times the int32 `number`."""

    def emit(builder, values, number):
        factor = broadcast(builder, number)
        return map_blocks(builder, lambda value: builder.mul(value, factor), values)

    return block, emit


@instruction
def sum_lanes(vector):
    """Return the int32 sum of the lanes of one vector."""

    def emit(builder, vector):
        value = get_vectors(builder, vector)[0]
        return call_llvm(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, value)

    return types.int32, emit


@instruction
def add_scaled_ints(sums, total, of_rows, of_columns):
    """Return `sums[r][c] + f32(total[r][c]) * of_rows[r] * of_columns[c]`.

    `total` is a block of int32. The others are blocks of f32, with scales of rows and of columns.
    """

    def emit(builder, values, totals, of_rows, of_columns):
        values, of_rows, of_columns = (
            get_vectors(builder, x) for x in (values, of_rows, of_columns)
        )
        for i, number in enumerate(get_vectors(builder, totals)):
            row, column = divmod(i, total.columns)
            scale = builder.fmul(of_rows[row], of_columns[column])
            number = builder.sitofp(number, FLOATS)
            values[i] = multiply_add(builder, number, scale, values[i])
        return make_block(builder, values)

    return sums, emit


@instruction
def to_floats(block):
    """Convert int32 to f32, rounded if they have more than 24 bits."""
    return Block("f32", block.rows, block.columns), lambda builder, values: map_blocks(
        builder, lambda value: builder.sitofp(value, FLOATS), values
    )


# Bytes: lookup tables, and the order that dot products need.


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
    """Look up four bits of each byte of a block, from bit `shift` on, in a table of 16 bytes.

    `load_byte_table` returns the table. The result is a block of bytes.
    """

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
    """Reorder numbers of adjacent columns in the same way as `load_interleaved` reorders codes.

    A field is the position of a code in a byte, one of `fields`. The block has `4 * fields` vectors
    of columns in order. The result has four vectors with the columns of the first field, then four
    vectors of the second field, and so on.
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
