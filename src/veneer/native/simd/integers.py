"""SIMD values of integers: four products of bytes at once.

A lane of 32 bits holds four numbers of 8 bits that are neighbours along what is contracted: codes
of the matrix, without a sign, or activations, with one. `add_outer_bytes` multiplies such lanes.
"""

from typing import Any

from llvmlite import ir
from numba import types

from ..isa import HAS_VNNI, ISA, LANES
from ..memory import I32, pointer
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
    load_vector,
    make_block,
    multiply_add,
    permute,
    shuffle,
)

#: How many bytes a vector holds.
WIDTH = 4 * LANES


# Memory.


@instruction
def load_ints(address, stride, rows, columns):
    """Reads rows of vectors of i32, `stride` bytes apart."""
    return _rows_of("i32", INTS, rows, columns)


@instruction
def load_first_ints(address, stride, rows, count):
    """Reads the first lanes of a vector of i32 in each of some rows; the others are 0, unread."""
    return _first_of("i32", INTS, rows)


@instruction
def load_first_floats(address, stride, rows, count):
    """Reads the first lanes of a vector of f32 in each of some rows; the others are 0, unread."""
    return _first_of("f32", FLOATS, rows)


def _first_of(entry: str, vector: ir.Type, rows: Any) -> tuple[Block, Emit]:
    block = Block(entry, rows.literal_value, 1)
    name, others = f"llvm.masked.load.v{LANES}{entry[0]}32.p0", ir.Constant(vector, None)

    def emit(builder: Any, address: Any, stride: Any, _: Any, count: Any) -> Any:
        count = broadcast(builder, builder.trunc(count, I32))
        exists = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
        values = []
        for row in range(block.rows):
            place = pointer(builder, advance(builder, address, 0, row, stride), vector)
            values.append(call_llvm(builder, name, vector, place, I32(1), exists, others))
        return make_block(builder, values)

    return block, emit


@instruction
def load_floats(address, stride, rows, columns):
    """Reads rows of vectors of f32, `stride` bytes apart."""
    return _rows_of("f32", FLOATS, rows, columns)


def _rows_of(entry: str, vector: ir.Type, rows: Any, columns: Any) -> tuple[Block, Emit]:
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
def zero_ints():
    """One vector of 0."""
    return Block("i32", 1, 1), lambda builder: make_block(builder, [constant(INTS, 0)])


@instruction
def broadcast_vectors(address, stride, rows, columns):
    """A block whose row r repeats the vector that is `r * stride` bytes on."""
    block = Block("i32", rows.literal_value, columns.literal_value)

    def emit(builder, address, stride, *_):
        values = []
        for row in range(block.rows):
            place = advance(builder, address, 0, row, stride)
            values += [load_vector(builder, place, INTS)] * block.columns
        return make_block(builder, values)

    return block, emit


@instruction
def broadcast_ints(address, rows, columns):
    """A block whose row r repeats the i32 at `address + 4 * r`."""
    block = Block("i32", rows.literal_value, columns.literal_value)

    def emit(builder, address, *_):
        values = []
        for row in range(block.rows):
            place = builder.add(address, ir.Constant(address.type, 4 * row))
            number = builder.load(pointer(builder, place, I32))
            number.align = 4
            values += [broadcast(builder, number)] * block.columns
        return make_block(builder, values)

    return block, emit


# Products.


@instruction
def add_outer_bytes(total, x, stride, w):
    """`total[r][c] + x[r] * w[c]`, by fours: bytes with a sign times bytes without.

    The four at `x`, rows of which are `stride` bytes apart, are multiplied by those of each lane.
    """

    def emit(builder, totals, x, stride, ws):
        def row(r):
            four = builder.load(pointer(builder, advance(builder, x, 0, r, stride), I32))
            four.align = 1
            return broadcast(builder, four)

        return accumulate(builder, total, totals, ws, row, _dot)

    return total, emit


@instruction
def add_inner_bytes(total, x, stride, w):
    """Return `total[r][c] + x[r] * w[c]` as `add_outer_bytes`, for vectors `x[r]` in memory."""

    def emit(builder, totals, x, stride, ws):
        row = lambda r: load_vector(builder, advance(builder, x, 0, r, stride), INTS)
        return accumulate(builder, total, totals, ws, row, _dot)

    return total, emit


@instruction
def add_byte_sums(total, address, bytes):
    """One vector `total`, and the sums of the four bytes of each lane at an address."""
    count = bytes.literal_value // 4

    def emit(builder, total, address, _):
        ones = ir.Constant(INTS, [0x01010101] * LANES)
        values = load_vector(builder, address, ir.VectorType(I32, count))
        if count < LANES:
            zeros = ir.Constant(values.type, [0] * count)
            values = shuffle(builder, values, zeros, [min(i, count) for i in range(LANES)])
        return make_block(builder, [_dot(builder, get_vectors(builder, total)[0], values, ones)])

    return total, emit


@instruction
def concatenate(a, b):
    """A row of vectors, those of `a` and then those of `b`."""
    block = Block("i32", 1, a.columns + b.columns)
    return block, lambda builder, *blocks: make_block(
        builder, [value for values in blocks for value in get_vectors(builder, values)]
    )


@instruction
def add_blocks(a, b):
    """The sum of two blocks alike."""

    def emit(builder, *blocks):
        pairs = zip(*(get_vectors(builder, block) for block in blocks), strict=True)
        return make_block(builder, [builder.add(*pair) for pair in pairs])

    return a, emit


@instruction
def multiply_ints(block, number):
    """A block times an int32."""

    def emit(builder, values, number):
        by = broadcast(builder, number)
        return make_block(
            builder, [builder.mul(value, by) for value in get_vectors(builder, values)]
        )

    return block, emit


@instruction
def sum_lanes(vector):
    """The sum of the lanes of one vector, an int32."""

    def emit(builder, vector):
        value = get_vectors(builder, vector)[0]
        return call_llvm(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, value)

    return types.int32, emit


def _dot(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """Adds four products of bytes to each lane: `w` has no sign, `x` has one."""
    if HAS_VNNI:
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, w, x)
    if ISA in ("neon_i8mm", "neon_dotprod"):
        return _dot_of_arm(builder, total, x, w)
    if ISA in ("neon", "portable"):
        for i in range(4):
            code = builder.and_(builder.lshr(w, constant(INTS, 8 * i)), constant(INTS, 255))
            number = builder.shl(x, constant(INTS, 24 - 8 * i))
            number = builder.ashr(number, constant(INTS, 24))
            total = builder.add(total, builder.mul(code, number))
        return total
    # Of 16 bits each: a product of two of 8 bits may need all 16, which is why they are not
    # multiplied by the instruction that adds two of them up to 16 bits.
    name = "avx512.pmaddw.d.512" if ISA == "avx512" else "avx2.pmadd.wd"
    w, x = builder.bitcast(w, SHORTS), builder.bitcast(x, SHORTS)
    eight = constant(SHORTS, 8)
    even = builder.and_(w, constant(SHORTS, 255)), builder.ashr(builder.shl(x, eight), eight)
    odd = builder.lshr(w, eight), builder.ashr(x, eight)
    for pair in (even, odd):
        total = builder.add(total, call_llvm(builder, f"llvm.x86.{name}", INTS, *pair))
    return total


def _dot_of_arm(builder: Any, total: Any, x: Any, w: Any) -> Any:
    """The same by Arm's instructions, some of which take but bytes with a sign on both sides."""
    x, codes = builder.bitcast(x, BYTES), builder.bitcast(w, BYTES)
    name = "llvm.aarch64.neon.{}dot.v4i32.v16i8"
    if ISA == "neon_i8mm":
        return call_llvm(builder, name.format("us"), INTS, total, codes, x)
    # Codes less 128 have a sign. What that takes from the sum is -128 times that of x.
    less = builder.xor(codes, constant(BYTES, 0x80))
    taken = call_llvm(builder, name.format("s"), INTS, constant(INTS, 0), constant(BYTES, -128), x)
    total = call_llvm(builder, name.format("s"), INTS, total, less, x)
    return builder.sub(total, taken)


@instruction
def add_scaled_ints(sums, total, of_rows, of_columns):
    """`sums + total * scale` in f32, where scales are of a row times of a column."""

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
def load_repeated(address, stride, count, shift, lanes):
    """A row of vectors of f32 each of which stands for 1 << shift of so many lanes, in turn.

    They are `stride` bytes apart. What is beside them is not read, and other lanes are 0.
    """
    block = Block("f32", 1, count.literal_value)

    def emit(builder, address, stride, _, shift, count):
        shift, count = (broadcast(builder, builder.trunc(n, I32)) for n in (shift, count))
        lanes = ir.Constant(INTS, [*range(LANES)])
        indices = builder.lshr(lanes, shift)
        there = builder.icmp_unsigned("<", builder.shl(lanes, shift), count)
        values = []
        for row in range(block.columns):
            place = pointer(builder, advance(builder, address, 0, row, stride), FLOATS)
            name = f"llvm.masked.load.v{LANES}f32.p0"
            few = call_llvm(builder, name, FLOATS, place, I32(4), there, constant(FLOATS, 0.0))
            values.append(permute(builder, few, indices))
        return make_block(builder, values)

    return block, emit


@instruction
def to_floats(block):
    """Integers as f32, rounded where they have more than 24 bits."""
    result = Block("f32", block.rows, block.columns)
    return result, lambda builder, values: make_block(
        builder, [builder.sitofp(value, FLOATS) for value in get_vectors(builder, values)]
    )
