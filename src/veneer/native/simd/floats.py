"""Instructions on vectors of f32: loads, stores, arithmetic and reductions.

Pairs of bf16 are in vectors of f32, too. A 32-bit lane holds two numbers that are adjacent along
the contracted axis, and some CPUs multiply both with one instruction.
"""

from typing import Any

from llvmlite import ir
from numba import types

from ..memory import F32, I16, I32, I64, pointer
from . import LANES
from .blocks import (
    FLOATS,
    Block,
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
    multiply_add,
    shuffle,
    split_lanes,
    store_vector,
)


@instruction
def zeros(rows, columns):
    """Return a block of `rows` times `columns` vectors of f32 zeros."""
    block = Block("f32", rows.literal_value, columns.literal_value)
    return block, lambda builder, *_: ir.Constant(block.llvm, [constant(FLOATS, 0.0)] * block.count)


@instruction
def splat(number):
    """Return one vector whose lanes all hold an f32."""
    return Block("f32", 1, 1), lambda builder, number: make_block(
        builder, [broadcast(builder, number)]
    )


@instruction
def load(address, columns):
    """Return the row of `columns` vectors at an address."""
    block = Block("f32", 1, columns.literal_value)

    def emit(builder, address, _):
        places = [advance(builder, address, c) for c in range(block.columns)]
        return make_block(builder, [load_vector(builder, place) for place in places])

    return block, emit


@instruction
def store(address, block):
    """Write the vectors of a row to an address."""

    def emit(builder, address, values):
        for c, value in enumerate(get_vectors(builder, values)):
            store_vector(builder, value, advance(builder, address, c))

    return types.void, emit


@instruction
def store_block(address, stride, block):
    """Write row r of a block to `address + r * stride`."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            store_vector(builder, value, advance(builder, address, column, row, stride))

    return types.void, emit


@instruction
def deinterleave(block):
    """Deinterleave a row of n vectors: vector i of the result has the numbers i, i + n, i + 2n, ...

    n is a power of two.
    """
    return block, lambda builder, values: make_block(
        builder, split_lanes(builder, get_vectors(builder, values))
    )


@instruction
def scale_block(block, scale):
    """Return `block[r][c] * scale[c]`, or `block[r][c] * scale` if `scale` is one vector."""

    def emit(builder, values, scales):
        values, scales = get_vectors(builder, values), get_vectors(builder, scales)
        products = [builder.fmul(x, scales[i % len(scales)]) for i, x in enumerate(values)]
        return make_block(builder, products)

    return block, emit


@instruction
def scale_rows(block, address, stride):
    """Return `block[r][c] * s[r]`, for the f32 `s[r]` at `address + r * stride`."""

    def emit(builder, values, address, stride):
        places = [advance(builder, address, 0, row, stride) for row in range(block.rows)]
        scales = [load_broadcast(builder, place) for place in places]
        values = get_vectors(builder, values)
        products = [builder.fmul(x, scales[i // block.columns]) for i, x in enumerate(values)]
        return make_block(builder, products)

    return block, emit


@instruction
def fma(block, scale, offset):
    """Return `block * scale + offset`, for three blocks of one shape."""
    return block, lambda builder, *blocks: map_blocks(
        builder, lambda x, scale, offset: multiply_add(builder, x, scale, offset), *blocks
    )


@instruction
def add_outer(total, x, stride, w):
    """Return `total[r][c] + x[r] * w[c]`, for the f32 `x[r]` at `x + r * stride`."""

    def emit(builder, totals, x, stride, ws):
        row = lambda r: load_broadcast(builder, advance(builder, x, 0, r, stride))
        return accumulate(builder, total, totals, ws, row, _add_product)

    return total, emit


@instruction
def add_inner(total, x, stride, w):
    """Return `total[r][c] + x[r] * w[c]`, for the vector `x[r]` at `x + r * stride`.

    The sum of the lanes of a total is an inner product.
    """

    def emit(builder, totals, x, stride, ws):
        row = lambda r: load_vector(builder, advance(builder, x, 0, r, stride))
        return accumulate(builder, total, totals, ws, row, _add_product)

    return total, emit


def _add_product(builder: Any, total: Any, x: Any, w: Any) -> Any:
    return multiply_add(builder, x, w, total)


@instruction
def add_scaled(address, stride, block, scale):
    """Add `scale_block(block, scale)` to the rows of f32 at `address + r * stride`."""

    def emit(builder, address, stride, values, scales):
        scales = get_vectors(builder, scales)
        for i, value in enumerate(get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            place = advance(builder, address, column, row, stride)
            scale, old = scales[column % len(scales)], load_vector(builder, place)
            store_vector(builder, multiply_add(builder, value, scale, old), place)

    return types.void, emit


@instruction
def store_sums(address, stride, block):
    """Write the sum of the lanes of vector [r][c] to `address + r * stride + 4 * c`."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            place = builder.add(advance(builder, address, 0, row, stride), I64(4 * column))
            total = builder.extract_element(_add_halves(builder, value, 1), I32(0))
            builder.store(total, pointer(builder, place, F32)).align = 1

    return types.void, emit


@instruction
def store_four_sums(address, stride, block):
    """Write the same as `store_sums`, for a block of four columns, with fewer instructions."""

    def emit(builder, address, stride, values):
        values = get_vectors(builder, values)
        for row in range(block.rows):
            sums = _sum_four_vectors(builder, values[4 * row : 4 * row + 4])
            place = pointer(builder, advance(builder, address, 0, row, stride), sums.type)
            builder.store(sums, place).align = 4

    return types.void, emit


def _sum_four_vectors(builder: Any, values: list[Any]) -> Any:
    """Return a vector of the four sums of the lanes of four vectors."""
    # In each 128 bits, the first step adds (a0, b0, a1, b1) and (a2, b2, a3, b3), and likewise for
    # c and d. The second step adds (a, b, c, d) and (a, b, c, d), of the two halves of the results.
    for order in ([0, 4, 1, 5], [2, 6, 3, 7]), ([0, 1, 4, 5], [2, 3, 6, 7]):
        halves = [
            [
                first + i if i < 4 else LANES + first + i - 4
                for first in range(0, LANES, 4)
                for i in lanes
            ]
            for lanes in order
        ]
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [
            builder.fadd(*(shuffle(builder, a, b, half) for half in halves)) for a, b in pairs
        ]
    return _add_halves(builder, values[0], 4)


def _add_halves(builder: Any, value: Any, count: int) -> Any:
    """Add the upper half of a vector to the lower half until `count` lanes are left."""
    size = LANES
    while size > count:
        size //= 2
        low = shuffle(builder, value, value, range(size))
        high = shuffle(builder, value, value, range(size, 2 * size))
        value = builder.fadd(low, high)
    return value


# Pairs of bf16.


class _BF16(ir.Type):
    """The type bfloat of LLVM, which llvmlite 0.50 does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BF16)

    def __hash__(self) -> int:
        return hash(_BF16)


_HALF, _PAIRS = ir.VectorType(_BF16(), LANES), ir.VectorType(_BF16(), 2 * LANES)


@instruction
def pair_as_bf16(first, second):
    """Return one vector of pairs `(bf16(first[i]), bf16(second[i]))`, for two vectors of f32."""

    def emit(builder, first, second):
        def pair(a, b):
            words = ir.VectorType(I16, LANES)
            a, b = (builder.bitcast(builder.fptrunc(x, _HALF), words) for x in (a, b))
            lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
            return builder.bitcast(shuffle(builder, a, b, lanes), FLOATS)

        return map_blocks(builder, pair, first, second)

    return Block("f32", 1, 1), emit


@instruction
def add_outer_pairs(total, x, stride, w):
    """Return `total[r][c] + x[r][0] * w[c][0] + x[r][1] * w[c][1]`, for pairs of bf16.

    `x[r]` is the pair at `x + r * stride` in memory. `w` is a row of vectors of pairs.
    """

    def emit(builder, totals, x, stride, ws):
        def row(r):
            pairs = load_broadcast(builder, advance(builder, x, 0, r, stride), I32)
            return builder.bitcast(pairs, _PAIRS)

        def add(builder: Any, total: Any, x: Any, w: Any) -> Any:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return call_llvm(builder, name, FLOATS, total, x, builder.bitcast(w, _PAIRS))

        return accumulate(builder, total, totals, ws, row, add)

    return total, emit
