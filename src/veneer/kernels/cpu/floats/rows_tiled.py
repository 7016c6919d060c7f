"""Rows contracted, few of x, and each row of W has scales for tiles of its own, as the values of a
cache do that are quantised by token: numbers are scaled as they are decoded.

Parts are those of `rows_few.py`, and so is what adds up their results.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.isa import LANES
from ....native.memory import I64, prefetch_for_later, stack, word
from ....native.simd.blocks import (
    get_vectors,
    instruction,
    load_broadcast,
    make_block,
    multiply_add,
)
from ....native.simd.floats import add_outer, add_scaled, splat, zeros
from ...common.kinds import BITS
from ...common.limits import MOST_TILES
from ..operands.codes import load_table
from ..operands.job import MINIMUM, NEXT_ROW, SCALE, TABLE, TC, C, JobFunctions, M, R, X, row_of
from ..operands.scales import has_minima, read_tiles
from .decode import reader
from .rows_few import functions_of, part_of

#: Rows of W whose scales are read at once; and the bytes that those of so many have.
_BLOCK = 16
_NUMBERS = 4 * (_BLOCK * MOST_TILES + LANES)
#: Bytes on is what is fetched.
_AHEAD = 4096
_ONE = np.float32(1)


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    bits = BITS[kind]
    by_1, by_2, by_4, by_8 = (_product(kind, rows, False) for rows in (1, 2, 4, 8))
    and_1, and_2, and_4, and_8 = (_product(kind, rows, True) for rows in (1, 2, 4, 8))

    @native
    def multiply_block(job, batch, row, depth, first, last, y, numbers):
        """Multiplies with some rows of the matrix."""
        m, x_stride, y_stride = word(job, M), 4 * word(job, R), 4 * word(job, C)
        place = row_of(job, batch, row) + first * bits // 8, word(job, NEXT_ROW)
        size, table, done = (depth, last - first), word(job, TABLE), 0
        while done < m:
            x = word(job, X) + (batch * m + done) * x_stride + 4 * row
            args = ((x, x_stride), place, size, (y + done * y_stride, y_stride), numbers, table)
            left = m - done
            if left >= 8:
                and_8(*args) if has_minima(job) else by_8(*args)
                done += 8
            elif left >= 4:
                and_4(*args) if has_minima(job) else by_4(*args)
                done += 4
            elif left >= 2:
                and_2(*args) if has_minima(job) else by_2(*args)
                done += 2
            else:
                and_1(*args) if has_minima(job) else by_1(*args)
                done += 1

    @native
    def multiply(job, part):
        c, r, tile, shift = word(job, C), word(job, R), word(job, TC), 0
        batch, together, row, end, first, last, y = part_of(job, part)
        scales, minima = stack(_NUMBERS), stack(_NUMBERS)
        while LANES << shift < tile:
            shift += 1
        begin = first // tile  # the first tile, and how many there are
        tiles = (last + tile - 1) // tile - begin
        numbers = (scales, minima, 4 * tiles, first // LANES - (begin << shift), shift)
        while row < end:
            depth = min(_BLOCK, end - row)
            for i in range(together):
                number = (batch + i) * r + row
                _read(job, SCALE, number, begin, depth, tiles, scales)
                if has_minima(job):
                    _read(job, MINIMUM, number, begin, depth, tiles, minima)
                to = y + 4 * word(job, M) * c * i
                multiply_block(job, batch + i, row, depth, first, last, to, numbers)
            row += depth

    return functions_of(multiply)


@native
def _read(job, leaf, row, first, rows, tiles, to):
    """Writes the scales or minima of tiles of some rows, as f32."""
    if tiles == word(job, C) // word(job, TC):  # those of a row follow those of the one before
        read_tiles(job, leaf, row, 0, rows * tiles, to)
    else:
        for i in range(rows):
            read_tiles(job, leaf, row + i, first, tiles, to + 4 * tiles * i)


def _product(kind: str, rows: int, adds_minima: bool) -> Any:
    """Makes the innermost loop: some rows of x times a few vectors of columns of a block of W.

    `numbers` are where scales and minima are, the bytes from those of a row to those of the next,
    how many vectors behind a scale the first column is, and how many each is for: `1 << shift`.
    """
    decoded, ordered = reader(kind)
    bits, vectors = BITS[kind], 2 if rows == 8 else 4

    @native
    def product(x, w, size, y, numbers, table):
        prevent_inlining()
        values = load_table(table)
        depth, columns = size
        scales, minima, next_row, begin, shift = numbers
        ahead = (_AHEAD // w[1] + 1) * w[1]
        for column in range(0, columns, vectors * LANES):
            total, scale, minimum = zeros(rows, vectors), scales, minima
            place, first = w[0] + column * bits // 8, begin + column // LANES
            for k in range(depth):
                prefetch_for_later(place + ahead)
                row = decoded(values, place, vectors)
                row = _by_tiles(row, scale, minimum, first, shift, adds_minima)
                total = add_outer(total, x[0] + 4 * k, x[1], row)
                place, scale, minimum = place + w[1], scale + next_row, minimum + next_row
            add_scaled(y[0] + 4 * column, y[1], ordered(total), splat(_ONE))

    return product


@instruction
def _by_tiles(block, scales, minima, first, shift, adds_minima):
    """A row of vectors times the scales of their tiles, and their minima added, if they have any.

    The first is the vector of this number.
    """
    has_both = adds_minima.literal_value

    def emit(builder, block, scales, minima, first, shift, _):
        results = []
        for j, value in enumerate(get_vectors(builder, block)):
            behind = builder.shl(builder.lshr(builder.add(first, I64(j)), shift), I64(2))
            scale = load_broadcast(builder, builder.add(scales, behind))
            if has_both:
                minimum = load_broadcast(builder, builder.add(minima, behind))
                results.append(multiply_add(builder, value, scale, minimum))
            else:
                results.append(builder.fmul(value, scale))
        return make_block(builder, results)

    return block, emit
