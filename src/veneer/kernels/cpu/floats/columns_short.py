"""Columns contracted, few rows of x and short rows of W: what counts is to begin and to end a row.

So it is where a token attends to keys, of which each is as wide as a head. Some rows of W are
multiplied by some rows of x at once, in as many sums as a vector has lanes, whose lanes are added
up together. Matrices that lie side by side are swept together, in the order of memory.
"""

from typing import Any

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import load_f32, stack, store_f32, word
from ....native.simd.blocks import (
    Block,
    at,
    block_of,
    instruction,
    load_vector,
    multiply_add,
    shuffled,
    vectors,
)
from ....native.simd.codes import load_table
from ....native.simd.floats import store, zeros
from ..job import BATCH, NEXT_ROW, OUT, ROW_BYTES, SCALE, TABLE, TR, C, M, R, X
from ..kinds import BITS
from ..place import row_of
from ..scales import read_tiles
from ..variants import SHORT_VECTORS
from .decode import in_order

#: Columns that are decoded at once, of which a row has a few times as many.
_WIDTH = SHORT_VECTORS * LANES
#: Rows of W in a part.
_PART = 16 * LANES
_VECTOR = 4 * LANES


@native
def count(job):
    """How many parts there are."""
    beside = word(job, NEXT_ROW) // word(job, ROW_BYTES)
    return word(job, BATCH) // beside * ((word(job, R) + _PART - 1) // _PART)


def worker(kind: str) -> Any:
    """Makes what computes a part, for codes of a kind."""
    by_1, by_2, by_4 = (_rows_by(kind, rows) for rows in (1, 2, 4))

    @native
    def work(job, part):
        parts, m = (word(job, R) + _PART - 1) // _PART, word(job, M)
        beside = word(job, NEXT_ROW) // word(job, ROW_BYTES)
        first, outer = part % parts * _PART, part // parts
        for row in range(first, min(first + _PART, word(job, R)), LANES):
            for batch in range(outer * beside, (outer + 1) * beside):
                done = 0
                while done < m:
                    if m - done >= 4:
                        by_4(job, batch, row, done)
                        done += 4
                    elif m - done >= 2:
                        by_2(job, batch, row, done)
                        done += 2
                    else:
                        by_1(job, batch, row, done)
                        done += 1

    return work


def _rows_by(kind: str, rows: int) -> Any:
    """Makes what multiplies LANES rows of W, from a row on or the last, by `rows` rows of x."""
    add_products, GROUP = _products(kind, rows), LANES // rows
    STEP = _WIDTH * BITS[kind] // 8

    @native
    def rows_by(job, batch, row, m):
        scales, sums = stack(_VECTOR), stack(_VECTOR)
        r, c, stride = word(job, R), word(job, C), word(job, NEXT_ROW)
        start, table = min(row, r - LANES), load_table(word(job, TABLE))
        w, number = row_of(job, batch, start), batch * word(job, M) + m
        x, y = word(job, X) + 4 * number * c, word(job, OUT) + 4 * (number * r + start)
        if word(job, TR) == 1:
            read_tiles(job, SCALE, 0, batch * r + start, LANES, scales)
        else:
            read_tiles(job, SCALE, 0, batch, 1, scales)
            for i in range(1, LANES):
                store_f32(scales + 4 * i, load_f32(scales))
        for group in range(0, LANES, GROUP):
            total, place = zeros(1, LANES), w + group * stride
            for k in range(c // _WIDTH):
                total = add_products(total, x + 4 * _WIDTH * k, 4 * c, table, place, stride)
                place += STEP
            store(sums, _sums(total))
            for i in range(rows):
                for j in range(max(0, row - start - group), GROUP):
                    value = load_f32(sums + 4 * (i * GROUP + j))
                    value *= load_f32(scales + 4 * (group + j))
                    store_f32(y + 4 * (i * r + group + j), value)

    return rows_by


def _products(kind: str, rows: int) -> Any:
    """Makes what adds the products of some columns of rows of x and of W: each has a vector."""

    @instruction
    def add_products(total, x, stride, table, w, next_row):
        def emit(builder, totals, x, stride, table, w, next_row):
            totals, table = vectors(builder, totals), vectors(builder, table)
            for j in range(LANES // rows):
                place = at(builder, w, 0, j, next_row)
                values = in_order(builder, kind, table, place, SHORT_VECTORS)
                for c, value in enumerate(values):
                    for i in range(rows):
                        number = load_vector(builder, at(builder, x, c, i, stride))
                        k = i * (LANES // rows) + j
                        totals[k] = multiply_add(builder, number, value, totals[k])
            return block_of(builder, totals)

        return total, emit

    return add_products


@instruction
def _sums(block):
    """The sum of the lanes of each of LANES vectors, as one."""

    def emit(builder, values):
        values = vectors(builder, values)
        while len(values) > 1:
            pairs = [*zip(values[::2], values[1::2], strict=True)]
            even, odd = (
                [shuffled(builder, *pair, [*range(i, 2 * LANES, 2)]) for pair in pairs]
                for i in (0, 1)
            )
            values = [builder.fadd(*pair) for pair in zip(even, odd, strict=True)]
        return block_of(builder, values)

    return Block("f32", 1, 1), emit
