"""Rows contracted, few of them: what counts is how fast the matrix is read, and it is read once.

Codes go from memory to registers, where they are decoded and multiplied with x. A block is so many
rows of the matrix, side by side in memory; it is swept from left to right, as it lies there, and
what it contributes to the result is multiplied with scales once, at the end of each column. While
it is, the same place of the next block is fetched.

Each part has some rows of the matrix, and most or all columns. What parts share is the result: each
but the first of them has one of its own, and they are added up in the end.
"""

from typing import Any

from .decode import BITS, reader
from .isa import LANES
from .job import BATCH, OUT, ROW_BYTES, SCRATCH, TABLE, TR, C, M, R, W, X
from .memory import free, malloc, prefetch, set_word, stack, word
from .rows_many import PANEL, Multiplier, add_rows, clear, copy_rows, expand
from .simd import add_scaled, compiled, load, load_table, outer, zeros

#: Rows of x that this is made for, at most.
MOST = 8
#: Rows of the matrix in a block. Tiles with fewer rows than `LEAST` are not for this.
_BLOCK, LEAST = 16, 16
#: Columns of a part, times rows of x, at most: its results stay in the first cache.
_WIDTH = 4096
_SCALE_BYTES = 4 * (_WIDTH + PANEL)
#: Parts, if there are enough rows for each.
_PARTS, _PART_ROWS = 16, 64
_SUMS_BYTES = 4 * MOST * PANEL


@compiled
def _columns(job):
    """How many columns a part has."""
    c = word(job, C)
    most = max(PANEL, _WIDTH // word(job, M) // PANEL * PANEL)
    count = (c + most - 1) // most
    each = (c + count - 1) // count
    return (each + PANEL - 1) // PANEL * PANEL


@compiled
def _rows(job):
    """How many rows of the matrix a part has."""
    r, width = word(job, R), _columns(job)
    others = word(job, BATCH) * ((word(job, C) + width - 1) // width)
    each = max(_PART_ROWS, (r * others + _PARTS - 1) // _PARTS)
    return (each + _BLOCK - 1) // _BLOCK * _BLOCK


@compiled
def _depths(job):
    """How many parts share the same results."""
    rows = _rows(job)
    return (word(job, R) + rows - 1) // rows


@compiled
def prepare(job):
    """Allocates the results of all parts but the first ones."""
    others = _depths(job) - 1
    if others == 0:
        return
    memory = malloc(4 * others * word(job, BATCH) * word(job, M) * word(job, C))
    set_word(job, SCRATCH, memory if memory else -1)


@compiled
def count(job):
    """How many parts there are."""
    width = _columns(job)
    return word(job, BATCH) * ((word(job, C) + width - 1) // width) * _depths(job)


@compiled
def finish(job):
    """Adds up the results of all parts."""
    size = word(job, BATCH) * word(job, M) * word(job, C)
    out, memory = word(job, OUT), word(job, SCRATCH)
    for other in range(_depths(job) - 1):
        add_rows(memory + 4 * size * other, 0, 1, size, out, 0)
    if memory:
        free(memory)


def worker(kind: str, multiplier: Multiplier) -> Any:
    """Makes what computes a part, for codes of a kind."""
    bits = BITS[kind]
    add_product = multiplier.add_product
    panel_bytes = PANEL * bits // 8
    tail_bytes = _BLOCK * panel_bytes
    product_of_1, product_of_2, product_of_4, product_of_8 = (
        _product(kind, rows) for rows in (1, 2, 4, 8)
    )

    @compiled
    def multiply(x, x_stride, m, w, stride, depth, y, y_stride, scales, table):
        row = 0
        while row + 8 <= m:
            product_of_8(
                x + row * x_stride,
                x_stride,
                w,
                stride,
                depth,
                y + row * y_stride,
                y_stride,
                scales,
                table,
            )
            row += 8
        if row + 4 <= m:
            product_of_4(
                x + row * x_stride,
                x_stride,
                w,
                stride,
                depth,
                y + row * y_stride,
                y_stride,
                scales,
                table,
            )
            row += 4
        if row + 2 <= m:
            product_of_2(
                x + row * x_stride,
                x_stride,
                w,
                stride,
                depth,
                y + row * y_stride,
                y_stride,
                scales,
                table,
            )
            row += 2
        if row < m:
            product_of_1(
                x + row * x_stride,
                x_stride,
                w,
                stride,
                depth,
                y + row * y_stride,
                y_stride,
                scales,
                table,
            )

    @compiled
    def multiply_tail(x, x_stride, m, w, stride, depth, y, y_stride, scales, table, columns):
        """The same where a panel has fewer columns than all."""
        tail, sums = stack(tail_bytes), stack(_SUMS_BYTES)
        copy_rows(w, stride, depth, (columns * bits + 7) // 8, tail, panel_bytes)
        clear(sums, 4 * PANEL, m, PANEL)
        multiply(x, x_stride, m, tail, panel_bytes, depth, sums, 4 * PANEL, scales, table)
        add_rows(sums, 4 * PANEL, m, columns, y, y_stride)

    @compiled
    def sweep(job, batch, row, depth, first, last, y, y_stride, scales):
        """Multiplies with a block of the matrix."""
        m, x_stride, stride = word(job, M), 4 * word(job, R), word(job, ROW_BYTES)
        x = word(job, X) + batch * m * x_stride + 4 * row
        w = word(job, W) + (batch * word(job, R) + row) * stride + first * bits // 8
        table = word(job, TABLE)
        for column in range(0, last - first, PANEL):
            columns = last - first - column
            place, scale = w + column * bits // 8, scales + 4 * column
            if columns >= PANEL:
                multiply(
                    x, x_stride, m, place, stride, depth, y + 4 * column, y_stride, scale, table
                )
            else:
                multiply_tail(
                    x,
                    x_stride,
                    m,
                    place,
                    stride,
                    depth,
                    y + 4 * column,
                    y_stride,
                    scale,
                    table,
                    columns,
                )

    @compiled
    def work(job, part):
        m, r, c = word(job, M), word(job, R), word(job, C)
        width, rows = _columns(job), _rows(job)
        depths, widths = _depths(job), (c + width - 1) // width
        depth, rest = part % depths, part // depths
        first, batch = rest % widths * width, rest // widths
        last = min(c, first + width)
        y = word(job, OUT)
        if depth > 0:
            y = word(job, SCRATCH) + 4 * (depth - 1) * word(job, BATCH) * m * c
        y += 4 * (batch * m * c + first)
        clear(y, 4 * c, m, last - first)
        row, end = depth * rows, min(r, (depth + 1) * rows)
        scales = stack(_SCALE_BYTES)
        tr = word(job, TR)
        while row < end:
            tile = row // tr
            tile_end = min(end, (tile + 1) * tr)
            if expand(job, batch, tile, first, last - first, scales):
                while row < tile_end:
                    block = min(_BLOCK, tile_end - row)
                    sweep(job, batch, row, block, first, last, y, 4 * c, scales)
                    row += block
            else:  # infinity times a sum is not the sum of what is times infinity
                for column in range(first, last, PANEL):
                    add_product(
                        job, batch, row, tile_end - row, column, 0, m, y + 4 * (column - first)
                    )
                row = tile_end

    return work


def _product(kind: str, rows: int) -> Any:
    """Makes the innermost loop: some rows of x times a panel of a block of the matrix."""
    decoded, ordered = reader(kind)
    columns = max(2, min(8, LANES // rows))
    bits = BITS[kind]
    step_bytes = columns * LANES * bits // 8

    @compiled
    def product(x, x_stride, w, stride, depth, y, y_stride, scales, table):
        values = load_table(table)
        for column in range(0, PANEL, columns * LANES):
            total = zeros(rows, columns)
            place = w + column * bits // 8
            for k in range(depth):
                for byte in range(0, step_bytes, 64):
                    prefetch(place + _BLOCK * stride + byte)
                total = outer(total, x + 4 * k, x_stride, decoded(values, place, columns))
                place += stride
            scale = load(scales + 4 * column, columns)
            add_scaled(y + 4 * column, y_stride, ordered(total), scale)

    return product
