"""Rows contracted, few of them: what counts is how fast the matrix is read, and it is read once.

Codes go from memory to registers, where they are decoded and multiplied with x. A block is so many
rows of the matrix, side by side in memory; it is swept from left to right, as it lies there, and
what it contributes to the result is multiplied with scales once, at its end. While it is, the same
place of the next block is fetched.

Each part has some rows of the matrix, and most or all columns, and those of matrices that lie
beside it, if they are few: narrow ones would look up each page of memory again. What parts share is
the result: each but the first of them has one of its own, and the last parts add them up.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.isa import LANES, REGISTERS
from ....native.memory import (
    load_i64,
    malloc,
    prefetch_for_later,
    set_word,
    stack,
    store_i64,
    word,
)
from ....native.simd.floats import add_outer, add_scaled, load, store, zeros
from ...common.kinds import BITS
from ...common.limits import FLOATS_BY_ROWS
from ..operands.codes import load_table
from ..operands.job import (
    BATCH,
    FAILED,
    FIRST,
    MINIMUM,
    NEXT_ROW,
    OUT,
    ROW_BYTES,
    SCALE,
    SCRATCH,
    TABLE,
    THREADS,
    TR,
    C,
    JobFunctions,
    M,
    R,
    X,
    free_scratch,
    row_of,
)
from ..operands.minima import sum_of
from ..operands.scales import has_minima
from . import rows_many
from .decode import reader, row_bytes
from .rows_many import PANEL, add, add_rows, clear, copy_rows, expand

#: So few rows of x are multiplied with codes from where they are, by blocks of so many rows. More
#: of them come back to the same codes, which are copied to where they do not drive out each other
#: from the first cache, as rows of 4096 bytes do; then blocks may have more rows.
_DIRECT, _BLOCK, _DEEP = 2, 16, 32
#: The last columns are multiplied from where they are, too, if they are so many, or a multiple.
_NARROW = 4 * LANES
#: Columns of a part, times rows of x, at most: its results stay in the caches.
_WIDTH = 8192
#: Parts for each thread, if there are enough rows for each; the fewer, the less is to be added up.
_PARTS, _PART_ROWS = 2, 64
#: Numbers of the result that a part adds up.
_ADDED = 4096
_ONE = np.float32(1)
_SCALE_BYTES, _SUMS_BYTES = 4 * (_WIDTH + PANEL), 4 * FLOATS_BY_ROWS * PANEL


@native
def _columns(job):
    """How many columns a part has."""
    c = word(job, C)
    most = max(PANEL, _WIDTH // word(job, M) // PANEL * PANEL)
    count = (c + most - 1) // most
    each = (c + count - 1) // count
    return (each + PANEL - 1) // PANEL * PANEL


@native
def _together(job):
    """How many matrices that lie side by side a part has: all, or one of them."""
    beside = word(job, NEXT_ROW) // word(job, ROW_BYTES)
    return beside if beside * _columns(job) * word(job, M) <= _WIDTH else 1


@native
def _rows(job):
    """How many rows of the matrix a part has."""
    r, width = word(job, R), _columns(job)
    others = word(job, BATCH) // _together(job) * ((word(job, C) + width - 1) // width)
    parts = _PARTS * max(2, word(job, THREADS))
    each = max(_PART_ROWS, (r * others + parts - 1) // parts)
    return (each + _BLOCK - 1) // _BLOCK * _BLOCK


@native
def _depths(job):
    """How many parts share the same results."""
    rows = _rows(job)
    return max(1, (word(job, R) + rows - 1) // rows)


@native
def prepare(job):
    """Allocates the results of all parts but the first ones."""
    others = _depths(job) - 1
    if others == 0:
        return
    memory = malloc(4 * others * _size(job))
    if memory == 0:
        set_word(job, FAILED, 1)
        return
    set_word(job, SCRATCH, memory)
    set_word(job, FIRST, _products(job))


@native
def count(job):
    """How many parts there are."""
    added = (_size(job) + _ADDED - 1) // _ADDED if word(job, FIRST) else 0
    return _products(job) + added


@native
def _products(job):
    """How many parts multiply."""
    width = _columns(job)
    return word(job, BATCH) // _together(job) * ((word(job, C) + width - 1) // width) * _depths(job)


@native
def part_of(job, part):
    """What a part that multiplies has, and where its result is, of which it has made zeros.

    It is the first matrix and how many there are, the first row and the last, and the same of
    columns.
    """
    m, r, c = word(job, M), word(job, R), word(job, C)
    width, rows = _columns(job), _rows(job)
    depths, widths = _depths(job), (c + width - 1) // width
    depth, rest = part % depths, part // depths
    together, next_y = _together(job), 4 * m * c
    first, batch = rest % widths * width, rest // widths * together
    last = min(c, first + width)
    y = word(job, OUT)
    if depth > 0:
        y = word(job, SCRATCH) + 4 * (depth - 1) * word(job, BATCH) * m * c
    y += 4 * (batch * m * c + first)
    for i in range(together):
        clear(y + i * next_y, 4 * c, m, last - first)
    return batch, together, depth * rows, min(r, (depth + 1) * rows), first, last, y


@native
def _size(job):
    return word(job, BATCH) * word(job, M) * word(job, C)


@native
def _add_up(job, part):
    """Adds what the parts that multiply have written, for so many numbers of the result."""
    prevent_inlining()
    size, first = _size(job), part * _ADDED
    count = min(_ADDED, size - first)
    for other in range(_depths(job) - 1):
        product = word(job, SCRATCH) + 4 * (size * other + first)
        add(product, count, _ONE, word(job, OUT) + 4 * first)


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    return functions_of(_multiplier(kind))


def _multiplier(kind: str) -> Any:
    """Return the function that multiplies by the part of a matrix that a part of a job has."""
    bits = BITS[kind]
    add_product = rows_many.multiplier(kind).add_product
    panel_row = PANEL * bits // 8
    panel_bytes = _DEEP * panel_row
    copy_panel = _copy_of_panel(panel_row)
    product_of_1, product_of_2, product_of_4, product_of_8 = (
        _product(kind, rows, 8) for rows in (1, 2, 4, 8)
    )
    narrow_of_1, narrow_of_2 = (_product(kind, rows, _NARROW // LANES) for rows in (1, 2))

    @native
    def sweep(job, batch, row, depth, first, last, y, scales):
        """Multiplies with a block of the matrix."""
        m, x_stride, y_stride = word(job, M), 4 * word(job, R), 4 * word(job, C)
        stride, table = word(job, NEXT_ROW), word(job, TABLE)
        x = word(job, X) + batch * m * x_stride + 4 * row
        place = row_of(job, batch, row) + first * bits // 8
        panel, sums = stack(panel_bytes), stack(_SUMS_BYTES)
        while first < last:
            columns, from_here, to_there = last - first, (place, stride), (y, y_stride)
            is_narrow = columns < PANEL and columns % _NARROW == 0
            is_tail = columns < PANEL and not is_narrow
            later = (place + _DEEP * stride, stride)
            if is_tail:  # what is behind the last column may be no memory at all
                copy_rows(place, stride, depth, row_bytes(columns, bits), panel, panel_row)
                clear(sums, 4 * PANEL, m, PANEL)
                from_here, to_there = (panel, panel_row), (sums, 4 * PANEL)
            elif is_narrow or m <= _DIRECT:
                columns = columns if is_narrow else columns // PANEL * PANEL
                later = (place + _BLOCK * stride, stride)
            else:
                columns = PANEL
                copy_panel(place, stride, depth, panel)
                from_here = (panel, panel_row)
            size, done = (depth, columns if is_narrow else max(PANEL, columns)), 0
            while done < m:
                top = (x + done * x_stride, x_stride)
                to = (to_there[0] + done * to_there[1], to_there[1])
                if m - done >= 8:
                    product_of_8(top, from_here, size, to, scales, table, later)
                    done += 8
                elif m - done >= 4:
                    product_of_4(top, from_here, size, to, scales, table, later)
                    done += 4
                elif m - done >= 2:
                    if is_narrow:
                        narrow_of_2(top, from_here, size, to, scales, table, later)
                    else:
                        product_of_2(top, from_here, size, to, scales, table, later)
                    done += 2
                else:
                    if is_narrow:
                        narrow_of_1(top, from_here, size, to, scales, table, later)
                    else:
                        product_of_1(top, from_here, size, to, scales, table, later)
                    done += 1
            if is_tail:
                add_rows(sums, 4 * PANEL, m, columns, y, y_stride)
            first, place = first + columns, place + columns * bits // 8
            y, scales = y + 4 * columns, scales + 4 * columns

    @native
    def multiply(job, part):
        m, r, c = word(job, M), word(job, R), word(job, C)
        batch, together, row, end, first, last, y = part_of(job, part)
        next_y, width = 4 * m * c, _columns(job)
        scales, minima = stack(_SCALE_BYTES), stack(_SCALE_BYTES)
        block_rows = _BLOCK if m <= _DIRECT else _DEEP
        while row < end:
            tile = row // word(job, TR)
            tile_end = min(end, (tile + 1) * word(job, TR))
            are_finite = True
            for i in range(together):
                to = scales + 4 * width * i
                are_finite &= expand(job, SCALE, batch + i, tile, first, last - first, to)
            if are_finite:
                for i in range(m * together if has_minima(job) else 0):
                    if i % m == 0:
                        expand(job, MINIMUM, batch + i // m, tile, first, last - first, minima)
                    x = word(job, X) + 4 * ((batch * m + i) * r + row)
                    add(minima, last - first, sum_of(x, tile_end - row), y + 4 * c * i)
                while row < tile_end:
                    block = min(block_rows, tile_end - row)
                    for i in range(together):
                        of_scales = scales + 4 * width * i
                        sweep(job, batch + i, row, block, first, last, y + i * next_y, of_scales)
                    row += block
            else:  # infinity times a sum is not the sum of what is times infinity
                for i in range(together):
                    for column in range(first, last, PANEL):
                        to = y + i * next_y + 4 * (column - first)
                        add_product(job, batch + i, row, tile_end - row, column, 0, m, to)
                row = tile_end

    return multiply


def functions_of(multiply: Any) -> JobFunctions:
    """Return the functions of a kernel whose last parts add up the results of the first ones."""

    @native
    def work(job, part):
        if part >= word(job, FIRST) > 0:
            _add_up(job, part - word(job, FIRST))
        else:
            multiply(job, part)

    return JobFunctions(prepare, count, work, free_scratch)


def _copy_of_panel(row_bytes: int) -> Any:
    """Makes what copies a panel's bytes, row after row."""
    vectors, words = row_bytes // (4 * LANES), row_bytes % (4 * LANES) // 8
    behind = 4 * LANES * vectors

    @native
    def copy_panel(w, stride, rows, to):
        prevent_inlining()
        for _ in range(rows):
            if vectors:
                store(to, load(w, vectors))
            for i in range(words):
                store_i64(to + behind + 8 * i, load_i64(w + behind + 8 * i))
            w, to = w + stride, to + row_bytes

    return copy_panel


def _product(kind: str, rows: int, most: int) -> Any:
    """Makes the innermost loop: some rows of x times a few columns of a block of the matrix.

    Those are at most so many vectors at once.

    What is in rows is given by the address of the first, and how many bytes on the next is. `later`
    is what will be multiplied with after this.
    """
    decoded, ordered = reader(kind)
    bits, vectors = BITS[kind], max(2, min(most, REGISTERS // 2 // rows))
    step_bytes = vectors * LANES * bits // 8

    @native
    def product(x, w, size, y, scales, table, later):
        prevent_inlining()
        values = load_table(table)
        depth, columns = size
        for column in range(0, columns, vectors * LANES):
            total = zeros(rows, vectors)
            place, later_place = w[0] + column * bits // 8, later[0] + column * bits // 8
            for k in range(depth):
                for byte in range(0, step_bytes, 64):
                    prefetch_for_later(later_place + byte)
                total = add_outer(total, x[0] + 4 * k, x[1], decoded(values, place, vectors))
                place, later_place = place + w[1], later_place + later[1]
            scale = load(scales + 4 * column, vectors)
            add_scaled(y[0] + 4 * column, y[1], ordered(total), scale)

    return product
