"""Vectors of f32: made, read, written, and multiplied and added up."""

from typing import Any

from llvmlite import ir
from numba import types

from ..isa import LANES
from ..memory import F32, I32, I64, pointer
from .blocks import (
    FLOATS,
    Block,
    accumulate,
    advance,
    broadcast,
    constant,
    get_vectors,
    instruction,
    load_vector,
    make_block,
    multiply_add,
    shuffle,
    split_lanes,
    store_vector,
)

# Making blocks.


@instruction
def zeros(rows, columns):
    """A block of 0.0."""
    block = Block("f32", rows.literal_value, columns.literal_value)
    return block, lambda builder, *_: ir.Constant(block.llvm, [constant(FLOATS, 0.0)] * block.count)


@instruction
def load(address, columns):
    """Reads a row of vectors of f32."""
    block = Block("f32", 1, columns.literal_value)

    def emit(builder, address, _):
        reads = [load_vector(builder, advance(builder, address, c)) for c in range(block.columns)]
        return make_block(builder, reads)

    return block, emit


@instruction
def splat(number):
    """One vector of an f32."""
    return Block("f32", 1, 1), lambda builder, number: make_block(
        builder, [broadcast(builder, number)]
    )


@instruction
def store(address, block):
    """Writes a row of vectors."""

    def emit(builder, address, values):
        for c, value in enumerate(get_vectors(builder, values)):
            store_vector(builder, value, advance(builder, address, c))

    return types.void, emit


@instruction
def store_block(address, stride, block):
    """Writes rows of vectors, `stride` bytes apart."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            store_vector(builder, value, advance(builder, address, column, row, stride))

    return types.void, emit


@instruction
def deinterleave(block):
    """Split a row of n vectors, n a power of two, into n vectors of every n-th number."""
    return block, lambda builder, values: make_block(
        builder, split_lanes(builder, get_vectors(builder, values))
    )


# Arithmetic.


@instruction
def scale_block(block, scale):
    """`block * scale`, of which each row is multiplied by the row, or the one vector, `scale`."""

    def emit(builder, values, scales):
        by = get_vectors(builder, scales)
        products = [
            builder.fmul(value, by[i % len(by)])
            for i, value in enumerate(get_vectors(builder, values))
        ]
        return make_block(builder, products)

    return block, emit


@instruction
def scale_rows(block, address, stride):
    """A block of which row r is multiplied by the f32 at `address + r * stride`."""

    def emit(builder, values, address, stride):
        values, products = get_vectors(builder, values), []
        for row in range(block.rows):
            number = builder.load(pointer(builder, advance(builder, address, 0, row, stride), F32))
            number.align = 4
            by = broadcast(builder, number)
            some = values[row * block.columns : (row + 1) * block.columns]
            products += [builder.fmul(value, by) for value in some]
        return make_block(builder, products)

    return block, emit


@instruction
def fma(block, scale, offset):
    """`block * scale + offset`, of three blocks alike."""

    def emit(builder, *blocks):
        terms = zip(*(get_vectors(builder, block) for block in blocks), strict=True)
        return make_block(builder, [multiply_add(builder, *each) for each in terms])

    return block, emit


@instruction
def add_outer(total, x, stride, w):
    """`total[r][c] + x[r] * w[c]`: a number at `x`, `stride` bytes apart, times vectors."""

    def emit(builder, totals, x, stride, ws):
        def row(r):
            number = builder.load(pointer(builder, advance(builder, x, 0, r, stride), F32))
            number.align = 1
            return broadcast(builder, number)

        return accumulate(builder, total, totals, ws, row, _add_product)

    return total, emit


@instruction
def add_inner(total, x, stride, w):
    """`total[r][c] + x[r] * w[c]`: a vector at `x`, `stride` bytes apart, times vectors.

    The sums of its lanes are what is looked for in the end.
    """

    def emit(builder, totals, x, stride, ws):
        row = lambda r: load_vector(builder, advance(builder, x, 0, r, stride))
        return accumulate(builder, total, totals, ws, row, _add_product)

    return total, emit


def _add_product(builder: Any, total: Any, x: Any, w: Any) -> Any:
    return multiply_add(builder, x, w, total)


@instruction
def add_scaled(address, stride, block, scale):
    """Add `block * scale`, as by `scale_block`, to rows of f32 in memory, `stride` bytes apart."""

    def emit(builder, address, stride, values, scales):
        by = get_vectors(builder, scales)
        for i, value in enumerate(get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            place = advance(builder, address, column, row, stride)
            old = load_vector(builder, place)
            store_vector(builder, multiply_add(builder, value, by[column % len(by)], old), place)

    return types.void, emit


@instruction
def store_sums(address, stride, block):
    """Writes the sum of the lanes of each vector: f32 at `address + r * stride + 4 * c`."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            place = builder.add(advance(builder, address, 0, row, stride), I64(4 * column))
            builder.store(_sum(builder, value), pointer(builder, place, F32)).align = 1

    return types.void, emit


@instruction
def store_four_sums(address, stride, block):
    """Writes the sums of the lanes of each vector, of which a row has four."""

    def emit(builder, address, stride, values):
        values = get_vectors(builder, values)
        for row in range(block.rows):
            sums = _sums_of_four(builder, values[4 * row : 4 * row + 4])
            place = pointer(builder, advance(builder, address, 0, row, stride), sums.type)
            builder.store(sums, place).align = 4

    return types.void, emit


def _sums_of_four(builder: Any, values: list[Any]) -> Any:
    """The sums of the lanes of each of four vectors, as a vector of four."""
    # Of each 128 bits: the first and second of a, in turns with those of b, and the others; then
    # the two of a and b, and those of c and d.
    for order in ([0, 4, 1, 5], [2, 6, 3, 7]), ([0, 1, 4, 5], [2, 3, 6, 7]):
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [
            builder.fadd(*(shuffle(builder, a, b, _within_fours(half)) for half in order))
            for a, b in pairs
        ]
    (value,) = values
    count = LANES
    while count > 4:
        count //= 2
        low = shuffle(builder, value, value, range(count))
        high = shuffle(builder, value, value, range(count, 2 * count))
        value = builder.fadd(low, high)
    return value


def _within_fours(order: list[int]) -> list[int]:
    """An order of two times four lanes, in each four lanes of two vectors."""
    return [
        first + i if i < 4 else LANES + first + i - 4 for first in range(0, LANES, 4) for i in order
    ]


def _sum(builder: Any, value: Any) -> Any:
    """The sum of the lanes of a vector: halves are added up until one is left."""
    count = LANES
    while count > 1:
        count //= 2
        low = shuffle(builder, value, value, range(count))
        high = shuffle(builder, value, value, range(count, 2 * count))
        value = builder.fadd(low, high)
    return builder.extract_element(value, I32(0))
