"""Columns contracted, few rows of x and short rows of W: what counts is to begin and to end a row.

So it is where a token attends to keys, of which each is as wide as a head. Some rows of W are
multiplied by some rows of x at once, in as many sums as a vector has lanes, whose lanes are added
up together. Matrices that lie side by side are swept together, in the order of memory.

A row of W has one scale, or some, for whole vectors; or rows that are neighbours share a row of
scales, as tokens do that have a scale for each channel: then those are multiplied into x.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import I64, load_f32, stack, store_f32, word
from ....native.simd.blocks import (
    Block,
    advance,
    get_vectors,
    instruction,
    load_broadcast,
    load_vector,
    make_block,
    multiply_add,
    shuffle,
)
from ....native.simd.floats import (
    add_inner,
    fma,
    load,
    scale_block,
    splat,
    store,
    store_sums,
    zeros,
)
from ...common.kinds import BITS
from ...common.limits import LEAST_TILE, SHORT, SHORT_VECTORS
from ..operands.codes import load_table
from ..operands.job import (
    BATCH,
    MINIMUM,
    NEXT_ROW,
    OUT,
    ROW_BYTES,
    SCALE,
    TABLE,
    TC,
    TR,
    C,
    JobFunctions,
    M,
    R,
    X,
    do_nothing,
    row_of,
)
from ..operands.minima import sum_of
from ..operands.scales import has_minima, read_tiles
from .decode import in_order

#: Columns that are decoded at once, of which a row has a few times as many.
_WIDTH = SHORT_VECTORS * LANES
#: Rows of W in a part.
_PART = 16 * LANES
_VECTOR = 4 * LANES
#: Bytes of the scales of as many rows of W as are multiplied at once, or that rows share.
_NUMBER_BYTES = 4 * max(SHORT, LANES * SHORT // LEAST_TILE) + _VECTOR
_TILE_BYTES = 4 * SHORT // LEAST_TILE
_ONE = np.float32(1)


@native
def _groups(job):
    """How many groups of matrices that lie side by side there are, and how many a part has."""
    beside = word(job, NEXT_ROW) // word(job, ROW_BYTES)
    return word(job, BATCH) // beside, max(1, _PART // word(job, R))


@native
def count(job):
    """How many parts there are."""
    groups, each = _groups(job)
    return (groups + each - 1) // each * ((word(job, R) + _PART - 1) // _PART)


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    by_1, by_2, by_4 = (_rows_by(kind, rows) for rows in (1, 2, 4))

    @native
    def multiply(job, outer, row, last):
        """Multiplies with some rows of matrices that lie side by side."""
        m, beside = word(job, M), word(job, NEXT_ROW) // word(job, ROW_BYTES)
        while row < last:
            count = LANES
            if _is_folded(job):
                count = min(last, (row // word(job, TR) + 1) * word(job, TR)) - row
            for batch in range(outer * beside, (outer + 1) * beside):
                done = 0
                while done < m:
                    if m - done >= 4:
                        by_4(job, batch, row, count, done)
                        done += 4
                    elif m - done >= 2:
                        by_2(job, batch, row, count, done)
                        done += 2
                    else:
                        by_1(job, batch, row, count, done)
                        done += 1
            row += count

    @native
    def work(job, part):
        parts = (word(job, R) + _PART - 1) // _PART
        all_groups, each = _groups(job)
        first, outer = part % parts * _PART, part // parts * each
        for i in range(outer, min(outer + each, all_groups)):
            multiply(job, i, first, min(first + _PART, word(job, R)))

    return JobFunctions(do_nothing, count, work, do_nothing)


@native
def _is_folded(job):
    """Whether neighbours in a row of W have scales of their own that rows share."""
    return word(job, TR) > 1 and word(job, TC) < word(job, C)


def _rows_by(kind: str, rows: int) -> Any:
    """Makes what multiplies some rows of W, from a row on or the last, by `rows` rows of x.

    They are a multiple of LANES, and share their scales if they are more.
    """
    add_products, GROUP = _products(kind, rows), LANES // rows
    add_tiled = _products(kind, rows, is_tiled=True)
    STEP, X_STEP = _WIDTH * BITS[kind] // 8, 4 * _WIDTH
    X_BYTES, SUMS_BYTES = 4 * SHORT * rows, 4 * rows

    @native
    def rows_by(job, batch, row, count, m):
        scales, minima = stack(_NUMBER_BYTES), stack(_NUMBER_BYTES)
        folded, of_minima, sums = stack(X_BYTES), stack(SUMS_BYTES), stack(_VECTOR)
        r, c, stride = word(job, R), word(job, C), word(job, NEXT_ROW)
        start, table = min(row, r - LANES), load_table(word(job, TABLE))
        w, number = row_of(job, batch, start), batch * word(job, M) + m
        x, y = word(job, X) + 4 * number * c, word(job, OUT) + 4 * (number * r + start)
        tiles, shift, is_folded = c // word(job, TC), 0, _is_folded(job)
        while LANES << shift < word(job, TC):
            shift += 1
        apart, some = 0, tiles  # from the scales of a row to those of the next; how many are read
        if word(job, TR) == 1:
            apart, some = 4 * tiles, LANES * tiles
        row_of_tiles = (batch * r + start) // word(job, TR)
        read_tiles(job, SCALE, row_of_tiles, 0, some, scales)
        if has_minima(job):
            read_tiles(job, MINIMUM, row_of_tiles, 0, some, minima)
        for i in range(rows):
            store_f32(of_minima + 4 * i, 0)
        of_rows = stack(_VECTOR)  # what sums are scaled by
        if tiles > 1:
            store(of_rows, splat(_ONE))
        elif apart:
            store(of_rows, load(scales, 1))
        else:
            store(of_rows, splat(load_f32(scales)))
        if is_folded:
            _fold(job, x, rows, scales, minima, folded, of_minima)
            x = folded
        for done in range(0, count, LANES):
            for group in range(0, LANES, GROUP):
                total, place = zeros(1, LANES), w + group * stride
                for k in range(c // _WIDTH):
                    of_x = x + X_STEP * k
                    if apart and tiles > 1:
                        by, first = scales + apart * group, SHORT_VECTORS * k
                        args = (of_x, 4 * c, table, place, stride, by, apart, shift, first)
                        total = add_tiled(total, *args)
                    else:
                        total = add_products(total, of_x, 4 * c, table, place, stride, 0, 0, 0, 0)
                    place += STEP
                result = _sums(total)
                if rows == 1:
                    result = fma(result, load(of_rows, 1), splat(load_f32(of_minima)))
                    if row == start:
                        store(y + 4 * done, result)
                store(sums, result)
                for i in range(rows if rows > 1 or row > start else 0):
                    for j in range(max(0, row - start - group), GROUP):
                        value = load_f32(sums + 4 * (i * GROUP + j))
                        if rows > 1:
                            value *= load_f32(of_rows + 4 * (group + j))
                            value += load_f32(of_minima + 4 * i)
                        store_f32(y + 4 * (i * r + done + group + j), value)
            w += LANES * stride
        if has_minima(job) and not is_folded:
            _add_minima(job, x, y, rows, minima, apart, row - start)

    return rows_by


@native
def _fold(job, x, rows, scales, minima, to, of_minima):
    """Writes rows of x times the scales of columns, and what minima add to each product with it."""
    c = word(job, C)
    _expand(job, scales)
    if has_minima(job):
        _expand(job, minima)
    for i in range(rows):
        for k in range(0, 4 * c, _VECTOR):
            store(to + k, scale_block(load(x + k, 1), load(scales + k, 1)))
        if has_minima(job):
            store_f32(of_minima + 4 * i, _product(x, minima, c))
        x, to = x + 4 * c, to + 4 * c


@native
def _expand(job, numbers):
    """Makes numbers of tiles those of columns, from the last on."""
    tile = word(job, TC)
    for i in range(word(job, C) - 1 if tile > 1 else 0, 0, -1):
        store_f32(numbers + 4 * i, load_f32(numbers + 4 * (i // tile)))


@native
def _product(a, b, count):
    """The sum of products of so many numbers, which are whole vectors."""
    total, sum = zeros(1, 1), stack(4)
    for i in range(0, 4 * count, _VECTOR):
        total = add_inner(total, a + i, 0, load(b + i, 1))
    store_sums(sum, 0, total)
    return load_f32(sum)


@native
def _add_minima(job, x, y, rows, minima, apart, first):
    """Adds minima of LANES rows, times the sums of x over tiles."""
    tile, tiles, of_tiles = word(job, TC), word(job, C) // word(job, TC), stack(_TILE_BYTES)
    for _ in range(rows):
        for t in range(tiles):
            store_f32(of_tiles + 4 * t, sum_of(x + 4 * tile * t, tile))
        for j in range(first, LANES):
            value, place = load_f32(y + 4 * j), minima + apart * j
            for t in range(tiles):
                value += load_f32(of_tiles + 4 * t) * load_f32(place + 4 * t)
            store_f32(y + 4 * j, value)
        x, y = x + 4 * word(job, C), y + 4 * word(job, R)


def _products(kind: str, rows: int, is_tiled: bool = False) -> Any:
    """Makes what adds the products of some columns of rows of x and of W: each has a vector.

    Where rows of W have scales for tiles of their own, those are `apart` bytes from row to row, and
    each is for `1 << shift` vectors. The first is number `first` of the row.
    """

    @instruction
    def add_products(total, x, stride, table, w, next_row, scales, apart, shift, first):
        def emit(builder, totals, x, stride, table, w, next_row, scales, apart, shift, first):
            totals, table = get_vectors(builder, totals), get_vectors(builder, table)
            numbers = [builder.add(first, I64(c)) for c in range(SHORT_VECTORS)]
            tiles = [builder.lshr(number, shift) for number in numbers]
            for j in range(LANES // rows):
                place = advance(builder, w, 0, j, next_row)
                values = in_order(builder, kind, table, place, SHORT_VECTORS)
                for c, value in enumerate(values):
                    if is_tiled:
                        here = advance(builder, scales, 0, j, apart)
                        here = builder.add(here, builder.mul(tiles[c], I64(4)))
                        value = builder.fmul(value, load_broadcast(builder, here))
                    for i in range(rows):
                        number = load_vector(builder, advance(builder, x, c, i, stride))
                        k = i * (LANES // rows) + j
                        totals[k] = multiply_add(builder, number, value, totals[k])
            return make_block(builder, totals)

        return total, emit

    return add_products


@instruction
def _sums(block):
    """The sum of the lanes of each of LANES vectors, as one."""

    def emit(builder, values):
        values = get_vectors(builder, values)
        while len(values) > 1:
            pairs = [*zip(values[::2], values[1::2], strict=True)]
            even, odd = (
                [shuffle(builder, *pair, [*range(i, 2 * LANES, 2)]) for pair in pairs]
                for i in (0, 1)
            )
            values = [builder.fadd(*pair) for pair in zip(even, odd, strict=True)]
        return make_block(builder, values)

    return Block("f32", 1, 1), emit
