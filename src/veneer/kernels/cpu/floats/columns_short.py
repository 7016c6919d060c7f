"""Multiply few rows of activations x by a matrix W with short rows: `x @ W.T`.

This is the product of queries with the keys of attention: a row of W is a key, and is as wide as a
head. The start and the end of a row take most of the time of other kernels. So this kernel keeps as
many sums in registers as a vector has lanes, for some rows of x times some rows of W, and adds up
the lanes of all of them together. If rows of several matrices alternate in memory, the matrices are
computed together, because their rows with the same index are neighbors.

Scales are one per row of W, or one per tile of whole vectors in a row. Or neighboring rows share a
row of scales (keys with a scale per channel), which is then multiplied into x.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.memory import I64, load_f32, stack, store_f32, word
from ....native.simd import LANES
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
from ...common.problem import BITS
from ...common.table import LEAST_TILE, SHORT, SHORT_VECTORS
from ..decoding import decode_in_order, load_table
from ..job import (
    BATCH,
    MINIMUM,
    NEXT_ROW,
    OUT,
    SCALE,
    TABLE,
    TC,
    TR,
    C,
    JobFunctions,
    M,
    R,
    X,
    count_interleaved,
    do_nothing,
    row_address,
)
from ..scales import has_minima, read_tile_values, sum_floats

#: Columns that are decoded at once. C is a multiple of them.
_WIDTH = SHORT_VECTORS * LANES
#: Rows of W in a part.
_PART_ROWS = 16 * LANES
_VECTOR = 4 * LANES
#: The most bytes of scales of LANES rows of W, or of rows that share scales.
_SCALE_BYTES = 4 * max(SHORT, LANES * SHORT // LEAST_TILE) + _VECTOR
_TILE_BYTES = 4 * SHORT // LEAST_TILE
_ONE = np.float32(1)


@native
def _count_groups(job):
    """Return the number of groups of matrices, and the number of groups per part of the work.

    A group is the matrices whose rows alternate in memory, or one matrix.
    """
    groups = word(job, BATCH) // count_interleaved(job)
    return groups, max(1, _PART_ROWS // word(job, R))


@native
def count(job):
    """Return the number of parts into which threads divide the product that `job` describes."""
    groups, part_groups = _count_groups(job)
    row_parts = (word(job, R) + _PART_ROWS - 1) // _PART_ROWS
    return (groups + part_groups - 1) // part_groups * row_parts


def build(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    multiply_1, multiply_2, multiply_4 = (_build_product(kind, rows) for rows in (1, 2, 4))

    @native
    def multiply_group(job, group, row, last):
        # A group is the matrices whose rows alternate in memory, or one matrix.
        m, heads = word(job, M), count_interleaved(job)
        while row < last:
            count = LANES
            if _folds_scales(job):
                count = min(last, (row // word(job, TR) + 1) * word(job, TR)) - row
            for batch in range(group * heads, (group + 1) * heads):
                done = 0
                while done < m:
                    if m - done >= 4:
                        multiply_4(job, batch, row, count, done)
                        done += 4
                    elif m - done >= 2:
                        multiply_2(job, batch, row, count, done)
                        done += 2
                    else:
                        multiply_1(job, batch, row, count, done)
                        done += 1
            row += count

    @native
    def work(job, part):
        row_parts = (word(job, R) + _PART_ROWS - 1) // _PART_ROWS
        groups, part_groups = _count_groups(job)
        first, group = part % row_parts * _PART_ROWS, part // row_parts * part_groups
        for i in range(group, min(group + part_groups, groups)):
            multiply_group(job, i, first, min(first + _PART_ROWS, word(job, R)))

    return JobFunctions(do_nothing, count, work, do_nothing)


@native
def _folds_scales(job):
    """Return whether scales are multiplied into x, not into W.

    They are if several rows of W share a row of several scales.
    """
    return word(job, TR) > 1 and word(job, TC) < word(job, C)


def _build_product(kind: str, rows: int) -> Any:
    """Return a function that writes the product of `rows` rows of x with `count` rows of W.

    The rows of x begin with row `m`, and the rows of W with `row`. `count` is LANES, or a multiple
    of LANES for rows of W that share scales. If fewer than LANES rows of W are left, the last LANES
    rows are multiplied, and only the results from `row` on are written.
    """
    add_products, GROUP = _build_vector_product(kind, rows), LANES // rows
    add_tiled_products = _build_vector_product(kind, rows, has_tiles=True)
    STEP, X_STEP = _WIDTH * BITS[kind] // 8, 4 * _WIDTH
    X_BYTES, SUMS_BYTES = 4 * SHORT * rows, 4 * rows

    @native
    def multiply(job, batch, row, count, m):
        scales, minima = stack(_SCALE_BYTES), stack(_SCALE_BYTES)
        folded, minimum_terms, sums = stack(X_BYTES), stack(SUMS_BYTES), stack(_VECTOR)
        r, c, stride = word(job, R), word(job, C), word(job, NEXT_ROW)
        start, table = min(row, r - LANES), load_table(word(job, TABLE))
        w, number = row_address(job, batch, start), batch * word(job, M) + m
        x, y = word(job, X) + 4 * number * c, word(job, OUT) + 4 * (number * r + start)
        tiles, shift, folds_scales = c // word(job, TC), 0, _folds_scales(job)
        while LANES << shift < word(job, TC):
            shift += 1
        next_scale, numbers = 0, tiles  # bytes between the scales of rows, and scales to read
        if word(job, TR) == 1:
            next_scale, numbers = 4 * tiles, LANES * tiles
        tile_row = (batch * r + start) // word(job, TR)
        read_tile_values(job, SCALE, tile_row, 0, numbers, scales)
        if has_minima(job):
            read_tile_values(job, MINIMUM, tile_row, 0, numbers, minima)
        for i in range(rows):
            store_f32(minimum_terms + 4 * i, 0)
        row_scales = stack(_VECTOR)  # factors of the sums of LANES rows of W
        if tiles > 1:
            store(row_scales, splat(_ONE))
        elif next_scale:
            store(row_scales, load(scales, 1))
        else:
            store(row_scales, splat(load_f32(scales)))
        if folds_scales:
            _fold_scales(job, x, rows, scales, minima, folded, minimum_terms)
            x = folded
        for done in range(0, count, LANES):
            for group in range(0, LANES, GROUP):
                total, place = zeros(1, LANES), w + group * stride
                for k in range(c // _WIDTH):
                    x_part = x + X_STEP * k
                    if next_scale and tiles > 1:
                        group_scales, first = scales + next_scale * group, SHORT_VECTORS * k
                        args = (table, place, stride, group_scales, next_scale, shift, first)
                        total = add_tiled_products(total, x_part, 4 * c, *args)
                    else:
                        total = add_products(total, x_part, 4 * c, table, place, stride, 0, 0, 0, 0)
                    place += STEP
                result = _sum_lanes(total)
                if rows == 1:  # The lanes are LANES rows of W: scale and write them together.
                    minimum_term = splat(load_f32(minimum_terms))
                    result = fma(result, load(row_scales, 1), minimum_term)
                    if row == start:
                        store(y + 4 * done, result)
                store(sums, result)
                # Write the other results one by one, from `row` on.
                for i in range(rows if rows > 1 or row > start else 0):
                    for j in range(max(0, row - start - group), GROUP):
                        value = load_f32(sums + 4 * (i * GROUP + j))
                        if rows > 1:
                            value *= load_f32(row_scales + 4 * (group + j))
                            value += load_f32(minimum_terms + 4 * i)
                        store_f32(y + 4 * (i * r + done + group + j), value)
            w += LANES * stride
        if has_minima(job) and not folds_scales:
            _add_minima(job, x, y, rows, minima, next_scale, row - start)

    return multiply


@native
def _fold_scales(job, x, rows, scales, minima, to, minimum_terms):
    """Multiply `rows` rows of x by a scale per column, and write them to `to`.

    Also write the product of each row with the minima of the columns to `minimum_terms`. The
    numbers at `scales` and `minima`, one per tile, are replaced by one number per column.
    """
    c = word(job, C)
    _expand_tiles(job, scales)
    if has_minima(job):
        _expand_tiles(job, minima)
    for i in range(rows):
        for k in range(0, 4 * c, _VECTOR):
            store(to + k, scale_block(load(x + k, 1), load(scales + k, 1)))
        if has_minima(job):
            store_f32(minimum_terms + 4 * i, _dot(x, minima, c))
        x, to = x + 4 * c, to + 4 * c


@native
def _expand_tiles(job, numbers):
    """Replace one f32 per tile at `numbers` by one f32 per column, in place."""
    tile = word(job, TC)
    for i in range(word(job, C) - 1 if tile > 1 else 0, 0, -1):
        store_f32(numbers + 4 * i, load_f32(numbers + 4 * (i // tile)))


@native
def _dot(a, b, count):
    total, sum = zeros(1, 1), stack(4)
    for i in range(0, 4 * count, _VECTOR):
        total = add_inner(total, a + i, 0, load(b + i, 1))
    store_sums(sum, 0, total)
    return load_f32(sum)


@native
def _add_minima(job, x, y, rows, minima, next_minimum, first):
    """Add products of minima with sums of x over tiles to the results at `y`.

    The results are for `rows` rows of x and LANES rows of W. The first `first` of these rows of W
    are skipped. The minima of neighboring rows of W are `next_minimum` bytes apart.
    """
    tile, tiles, tile_sums = word(job, TC), word(job, C) // word(job, TC), stack(_TILE_BYTES)
    for _ in range(rows):
        for t in range(tiles):
            store_f32(tile_sums + 4 * t, sum_floats(x + 4 * tile * t, tile))
        for j in range(first, LANES):
            value, place = load_f32(y + 4 * j), minima + next_minimum * j
            for t in range(tiles):
                value += load_f32(tile_sums + 4 * t) * load_f32(place + 4 * t)
            store_f32(y + 4 * j, value)
        x, y = x + 4 * word(job, C), y + 4 * word(job, R)


def _build_vector_product(kind: str, rows: int, has_tiles: bool = False) -> Any:
    """Return an instruction that multiplies `rows` rows of x by `LANES / rows` rows of W.

    For each pair of a row of x and a row of W, it adds the products of SHORT_VECTORS vectors of
    columns to one vector of sums. If
    `has_tiles`, decoded values are scaled: the scales of rows of W are `next_scale` bytes apart,
    `1 << shift` vectors share a scale, and `first` vectors of the row come before these columns.
    Otherwise these arguments are ignored.
    """

    @instruction
    def add_products(total, x, stride, table, w, next_row, scales, next_scale, shift, first):
        def emit(builder, totals, x, stride, table, w, next_row, scales, next_scale, shift, first):
            totals, table = get_vectors(builder, totals), get_vectors(builder, table)
            numbers = [builder.add(first, I64(c)) for c in range(SHORT_VECTORS)]
            tiles = [builder.lshr(number, shift) for number in numbers]
            for j in range(LANES // rows):
                place = advance(builder, w, 0, j, next_row)
                values = decode_in_order(builder, kind, table, place, SHORT_VECTORS)
                for c, value in enumerate(values):
                    if has_tiles:
                        scale = advance(builder, scales, 0, j, next_scale)
                        scale = builder.add(scale, builder.mul(tiles[c], I64(4)))
                        value = builder.fmul(value, load_broadcast(builder, scale))
                    for i in range(rows):
                        number = load_vector(builder, advance(builder, x, c, i, stride))
                        k = i * (LANES // rows) + j
                        totals[k] = multiply_add(builder, number, value, totals[k])
            return make_block(builder, totals)

        return total, emit

    return add_products


@instruction
def _sum_lanes(block):
    """Return a vector whose lane i is the sum of the lanes of vector i of a block."""

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
