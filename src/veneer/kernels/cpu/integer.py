"""Products of int8 activations and integer codes, exact in int32 within a tile.

    y[m, n] = x_scale[m] * sum of scale[tile, n] * (sum of x[m, k] * code[k, n] over the tile's k)

How a part is computed is the same whichever way the matrix is contracted. What is contracted is
cut into blocks, which no tile's end divides. Of a block, the activations are copied together, and
the codes of a panel of columns are decoded to bytes, in the order in which `dot` takes them: into
scratch that the fastest cache holds. Then a small kernel keeps sums of ROWS x COLUMNS vectors in
registers. They go on in int32 until the tile ends, and there in f32.

Codes are multiplied as bytes without a sign, larger by OFFSET. So sums begin with what has to be
taken off again: OFFSET times the sum of the activations.
"""

import functools
from typing import Any

import numpy as np

from . import integer_columns, integer_rows
from .integer_panel import BLOCK, PANEL, WIDTH, Orientation, multiply, offset
from .job import BATCH, OUT, ROW_BYTES, SCALE, SCRATCH, TABLE, TC, TR, X_SCALE, C, M, R, W, X
from .memory import free, load_f32, malloc, set_word, store_i32, word
from .native import native
from .simd import compiled, store, zeros
from .simd_integer import byte_table, load_ints, sum_bytes

#: After so many codes, int32 sums go on in f32: no sum may have more than 31 bits.
LONGEST = 32768


@functools.cache
def rows(kind: str) -> Any:
    """Returns a kernel where the rows of the matrix are contracted: its four functions of a job.

    `kind` is lookup1, lookup2, lookup4, int8 or uint8; what is looked up has to be integers from
    -128 to 127.
    """
    return _kernel(integer_rows.orientation(kind), offset(kind))


@functools.cache
def columns(kind: str) -> Any:
    """Returns a kernel where the columns are contracted; `kind` is as for `rows`."""
    return _kernel(integer_columns.orientation(kind), offset(kind))


@native
def _rows_of_part(job):
    m = word(job, M)
    parts = (m + 255) // 256
    return (m + parts - 1) // parts


def _kernel(orientation: Orientation, offset: int) -> Any:
    panels, sizes, span, copy, fetch, decode, scales, write = orientation

    @native
    def strips_of(job):
        """How many strips there are, and how many a part has."""
        _, n, _ = sizes(job)
        width = WIDTH * panels
        strips = (n + width - 1) // width
        sums = 1024 // _rows_of_part(job) // panels
        return strips, max(1, min(sums, max(1, 8 // panels)))

    @compiled
    def prepare(job):
        set_word(job, SCRATCH, 0)

    @compiled
    def count(job):
        strips, each = strips_of(job)
        m, rows = word(job, M), _rows_of_part(job)
        return word(job, BATCH) * ((m + rows - 1) // rows) * ((strips + each - 1) // each)

    @native
    def pack(x, k, rows, begin, count, stride, to, start):
        """Copies a block of activations, rows of which are `stride` bytes apart, and sums it."""
        for row in range(rows):
            place = to + row * stride
            for i in range(0, stride, WIDTH):
                store(place + i, zeros(1, 1))
            copy(x + row * k, count, begin, place)
            total = np.int32(0)
            for i in range(0, stride, WIDTH):
                total = sum_bytes(total, load_ints(place + i, 0, 1, 1))
            store_i32(start + 4 * row, np.int32(-offset * total))

    @compiled
    def work(job, part):
        k, n, tile = sizes(job)
        m = word(job, M)
        strips, each = strips_of(job)
        rows = _rows_of_part(job)
        row_parts, strip_parts = (m + rows - 1) // rows, (strips + each - 1) // each
        rest, strip_part = divmod(part, strip_parts)
        batch, row_part = divmod(rest, row_parts)
        first_strip, first_row = strip_part * each, row_part * rows
        each, rows = min(each, strips - first_strip), min(rows, m - first_row)

        _, length = span(tile % 8 and 7, min(tile, BLOCK))
        x_stride = (length + WIDTH - 1) // WIDTH * WIDTH
        sum_bytes_of_all = each * panels * rows * PANEL
        size = 64 + rows * x_stride + (rows + 15) // 16 * 64 + 2 * length * WIDTH
        size += 2 * panels * PANEL + 2 * sum_bytes_of_all
        allocated = malloc(size)
        if allocated == 0:
            set_word(job, SCRATCH, -1)
            return
        sums = (allocated + 63) // 64 * 64
        ints = sums + sum_bytes_of_all
        packed = ints + sum_bytes_of_all
        codes = packed + rows * x_stride
        fetched = codes + length * WIDTH
        scale = fetched + length * WIDTH
        scratch = scale + panels * PANEL
        start = scratch + panels * PANEL

        x = word(job, X) + (batch * m + first_row) * k
        matrix = word(job, W) + batch * word(job, R) * word(job, ROW_BYTES)
        all_scales = word(job, SCALE) + 4 * batch * (
            (word(job, R) // word(job, TR)) * (word(job, C) // word(job, TC))
        )
        table = byte_table(word(job, TABLE))
        for i in range(0, sum_bytes_of_all, WIDTH):
            store(sums + i, zeros(1, 1))
        for t in range(k // tile):
            end = (t + 1) * tile
            for at in range(t * tile, end, BLOCK):
                done = at - t * tile
                here = min(BLOCK, end - at)
                first = done % LONGEST == 0
                last = at + BLOCK >= end or (done + BLOCK) % LONGEST == 0
                begin, length = span(at, here)
                pack(x + at, k, rows, begin, here, x_stride, packed, start)
                for s in range(each):
                    strip = first_strip + s
                    place, stride = fetch(job, matrix, strip, at, length, fetched)
                    if last:
                        scales(job, all_scales, strip, t, scratch, scale)
                    for panel in range(panels):
                        decode(place, stride, length, panel, table, codes)
                        of = (s * panels + panel) * rows * PANEL
                        by = scale + panel * PANEL
                        multiply(
                            rows,
                            packed,
                            x_stride,
                            codes,
                            length // 4,
                            start,
                            ints + of,
                            sums + of,
                            by,
                            first,
                            last,
                        )
        width = WIDTH * panels
        for row in range(rows):
            index = batch * m + first_row + row
            x_scale = load_f32(word(job, X_SCALE) + 4 * index)
            for s in range(each):
                column = (first_strip + s) * width
                of = sums + (s * panels * rows + row) * PANEL
                to = word(job, OUT) + 4 * (index * n + column)
                write(of, rows * PANEL, x_scale, scratch, to, min(width, n - column))
        free(allocated)

    @compiled
    def finish(job):
        set_word(job, SCRATCH, 0)

    return prepare, count, work, finish
