"""Multiply few rows of activations x by a stored matrix W, and contract its rows: `x @ W`.

Reading W takes most of the time, so each byte is read once.

A part is a range of rows of W, and all of its columns or a wide range of them, because narrow
ranges would look up each memory page many times. If rows of a few matrices alternate in memory, the
matrices belong to the same part. The kernel loops over blocks of rows of W, and over the columns of
a block from left to right. It decodes codes in registers and multiplies them by x there, with sums
in registers for the rows of the block. The sums are scaled once at the end of a block, and added to
the result. Meanwhile the next block is prefetched.

The products of different ranges of rows of W are summed up. Parts of the first range write to the
result, and parts of other ranges to SCRATCH. After them, other parts add SCRATCH to the result.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.memory import (
    load_i64,
    malloc,
    prefetch_for_later,
    set_word,
    stack,
    store_i64,
    word,
)
from ....native.simd import LANES, REGISTERS
from ....native.simd.floats import add_outer, add_scaled, load, store, zeros
from ...common.problem import BITS
from ...common.table import FLOATS_BY_ROWS
from ..decoding import build_decoder, load_table, row_bytes
from ..job import (
    BATCH,
    FAILED,
    FIRST,
    MINIMUM,
    NEXT_ROW,
    OUT,
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
    count_interleaved,
    free_scratch,
    row_address,
)
from ..scales import has_minima, sum_floats
from .rows_many import (
    PANEL,
    add_rows,
    add_scaled_floats,
    build_block_functions,
    clear_rows,
    copy_rows,
    expand_tile_row,
)

#: Up to _DIRECT rows of x are multiplied by codes in place, in blocks of _BLOCK rows of W. More
#: rows of x return to the same codes. Rows of 4096 bytes would evict each other from the first
#: cache, so these codes are copied to contiguous memory first, and blocks have _DEEP rows.
_DIRECT, _BLOCK, _DEEP = 2, 16, 32
#: Columns after the last panel are also multiplied in place, if they are a multiple of _NARROW.
_NARROW = 4 * LANES
#: The most columns of a part, times rows of x. The caches hold its results.
_WIDTH = 8192
#: Parts per thread, and the fewest rows of W in a part. Each part adds a result to sum up.
_PARTS, _PART_ROWS = 2, 64
#: Numbers of the result that one part sums up.
_SUMMED = 4096
_ONE = np.float32(1)
_SCALE_BYTES, _SUMS_BYTES = 4 * (_WIDTH + PANEL), 4 * FLOATS_BY_ROWS * PANEL


@native
def _count_columns(job):
    # Columns per part.
    c = word(job, C)
    most = max(PANEL, _WIDTH // word(job, M) // PANEL * PANEL)
    count = (c + most - 1) // most
    columns = (c + count - 1) // count
    return (columns + PANEL - 1) // PANEL * PANEL


@native
def _count_matrices(job):
    """Return the number of matrices that one part of the work has.

    If rows of several matrices alternate in memory, they are in one part, unless their results
    would not fit into the caches. Otherwise a part has one matrix.
    """
    heads = count_interleaved(job)
    return heads if heads * _count_columns(job) * word(job, M) <= _WIDTH else 1


@native
def _count_rows(job):
    # Rows of W per part.
    r, width = word(job, R), _count_columns(job)
    column_ranges = word(job, BATCH) // _count_matrices(job) * ((word(job, C) + width - 1) // width)
    parts = _PARTS * max(2, word(job, THREADS))
    rows = max(_PART_ROWS, (r * column_ranges + parts - 1) // parts)
    return (rows + _BLOCK - 1) // _BLOCK * _BLOCK


@native
def _count_ranges(job):
    """Return the number of ranges of rows that each stored matrix is divided into, at least 1."""
    rows = _count_rows(job)
    return max(1, (word(job, R) + rows - 1) // rows)


@native
def _count_results(job):
    return word(job, BATCH) * word(job, M) * word(job, C)


@native
def _count_products(job):
    # Parts that multiply. Other parts add their results up.
    width = _count_columns(job)
    widths = (word(job, C) + width - 1) // width
    return word(job, BATCH) // _count_matrices(job) * widths * _count_ranges(job)


@native
def prepare(job):
    """Allocate memory at SCRATCH for the results of all ranges of rows of W except the first.

    The last parts add SCRATCH to the result. With one range, nothing is allocated.
    """
    # SCRATCH has the results of all ranges of rows of W except the first. The parts that multiply
    # must be complete before the parts that add up the results.
    later_ranges = _count_ranges(job) - 1
    if later_ranges == 0:
        return
    memory = malloc(4 * later_ranges * _count_results(job))
    if memory == 0:
        set_word(job, FAILED, 1)
        return
    set_word(job, SCRATCH, memory)
    set_word(job, FIRST, _count_products(job))


@native
def count(job):
    """Return the number of parts into which threads divide the product that `job` describes."""
    sums = (_count_results(job) + _SUMMED - 1) // _SUMMED if word(job, FIRST) else 0
    return _count_products(job) + sums


@native
def start_part(job, part):
    """Fill the result of part `part` with zeros, and return which rows and columns the part has.

    It must be a part that multiplies, not one that sums up results.

    **Returns:** the first matrix, the number of matrices, the first row of W and the row after the
    last, the first column and the column after the last, and the address of the result.
    """
    m, r, c = word(job, M), word(job, R), word(job, C)
    width, rows = _count_columns(job), _count_rows(job)
    ranges, widths = _count_ranges(job), (c + width - 1) // width
    index, rest = part % ranges, part // ranges
    matrices, next_y = _count_matrices(job), 4 * m * c
    first, batch = rest % widths * width, rest // widths * matrices
    last = min(c, first + width)
    y = word(job, OUT)
    if index > 0:
        y = word(job, SCRATCH) + 4 * (index - 1) * word(job, BATCH) * m * c
    y += 4 * (batch * m * c + first)
    for i in range(matrices):
        clear_rows(y + i * next_y, 4 * c, m, last - first)
    return batch, matrices, index * rows, min(r, (index + 1) * rows), first, last, y


@native
def _sum_ranges(job, part):
    # Add the products of all ranges of rows except the first, in SCRATCH, to `_SUMMED` entries of
    # the result, which has the product of the first. `part` counts only the parts that add, from 0.
    prevent_inlining()
    size, first = _count_results(job), part * _SUMMED
    count = min(_SUMMED, size - first)
    for i in range(_count_ranges(job) - 1):
        product = word(job, SCRATCH) + 4 * (size * i + first)
        add_scaled_floats(product, count, _ONE, word(job, OUT) + 4 * first)


def build_functions(multiply: Any) -> JobFunctions:
    """Return the native functions of a kernel that divides W into parts as this module does.

    `multiply(job, part)` computes a part that multiplies. It calls `start_part`. All other parts
    sum up results.
    """

    @native
    def work(job, part):
        if part >= word(job, FIRST) > 0:
            _sum_ranges(job, part - word(job, FIRST))
        else:
            multiply(job, part)

    return JobFunctions(prepare, count, work, free_scratch)


def build(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    bits = BITS[kind]
    add_product = build_block_functions(kind).add_product
    panel_row = PANEL * bits // 8
    panel_bytes = _DEEP * panel_row
    copy_panel = _build_panel_copy(panel_row)
    multiply_1, multiply_2, multiply_4, multiply_8 = (
        _build_product(kind, rows, 8) for rows in (1, 2, 4, 8)
    )
    narrow_1, narrow_2 = (_build_product(kind, rows, _NARROW // LANES) for rows in (1, 2))

    @native
    def multiply_block(job, batch, row, depth, first, last, y, scales):
        """Add the product of x and a block of matrix `batch` to the result at `y`.

        The block is columns `first` to `last` of `depth` rows of W, from row `row` on. `scales` is
        the address of the f32 scale of each of its columns.
        """
        m, x_stride, y_stride = word(job, M), 4 * word(job, R), 4 * word(job, C)
        stride, table = word(job, NEXT_ROW), word(job, TABLE)
        x = word(job, X) + batch * m * x_stride + 4 * row
        place = row_address(job, batch, row) + first * bits // 8
        panel, sums = stack(panel_bytes), stack(_SUMS_BYTES)
        while first < last:
            # Columns are multiplied in place, or panel by panel from a copy. Behind the last panel,
            # a narrow range of columns is multiplied in place, and any other tail from a copy.
            columns, source, target = last - first, (place, stride), (y, y_stride)
            is_narrow = columns < PANEL and columns % _NARROW == 0
            is_tail = columns < PANEL and not is_narrow
            later = (place + _DEEP * stride, stride)
            if is_tail:  # Memory after the last column may not be readable.
                copy_rows(place, stride, depth, row_bytes(columns, bits), panel, panel_row)
                clear_rows(sums, 4 * PANEL, m, PANEL)
                source, target = (panel, panel_row), (sums, 4 * PANEL)
            elif is_narrow or m <= _DIRECT:
                columns = columns if is_narrow else columns // PANEL * PANEL
                later = (place + _BLOCK * stride, stride)
            else:
                columns = PANEL
                copy_panel(place, stride, depth, panel)
                source = (panel, panel_row)
            size, done = (depth, columns if is_narrow else max(PANEL, columns)), 0
            while done < m:
                x_rows = (x + done * x_stride, x_stride)
                to = (target[0] + done * target[1], target[1])
                if m - done >= 8:
                    multiply_8(x_rows, source, size, to, scales, table, later)
                    done += 8
                elif m - done >= 4:
                    multiply_4(x_rows, source, size, to, scales, table, later)
                    done += 4
                elif m - done >= 2:
                    if is_narrow:
                        narrow_2(x_rows, source, size, to, scales, table, later)
                    else:
                        multiply_2(x_rows, source, size, to, scales, table, later)
                    done += 2
                else:
                    if is_narrow:
                        narrow_1(x_rows, source, size, to, scales, table, later)
                    else:
                        multiply_1(x_rows, source, size, to, scales, table, later)
                    done += 1
            if is_tail:
                add_rows(sums, 4 * PANEL, m, columns, y, y_stride)
            first, place = first + columns, place + columns * bits // 8
            y, scales = y + 4 * columns, scales + 4 * columns

    @native
    def multiply(job, part):
        # Compute a part tile by tile along K, and block by block in a tile.
        m, r, c = word(job, M), word(job, R), word(job, C)
        batch, matrices, row, end, first, last, y = start_part(job, part)
        next_y, width = 4 * m * c, _count_columns(job)
        scales, minima = stack(_SCALE_BYTES), stack(_SCALE_BYTES)
        block_rows = _BLOCK if m <= _DIRECT else _DEEP
        while row < end:
            tile = row // word(job, TR)
            tile_end = min(end, (tile + 1) * word(job, TR))
            is_finite = True
            for i in range(matrices):
                to = scales + 4 * width * i
                is_finite &= expand_tile_row(job, SCALE, batch + i, tile, first, last - first, to)
            if is_finite:
                for i in range(m * matrices if has_minima(job) else 0):
                    if i % m == 0:
                        matrix = batch + i // m
                        expand_tile_row(job, MINIMUM, matrix, tile, first, last - first, minima)
                    x = word(job, X) + 4 * ((batch * m + i) * r + row)
                    x_sum = sum_floats(x, tile_end - row)
                    add_scaled_floats(minima, last - first, x_sum, y + 4 * c * i)
                while row < tile_end:
                    block = min(block_rows, tile_end - row)
                    for i in range(matrices):
                        matrix_scales = scales + 4 * width * i
                        multiply_block(
                            job, batch + i, row, block, first, last, y + i * next_y, matrix_scales
                        )
                    row += block
            else:  # An infinite scale times a sum is not the sum of infinite products, so decode W.
                for i in range(matrices):
                    for column in range(first, last, PANEL):
                        to = y + i * next_y + 4 * (column - first)
                        add_product(job, batch + i, row, tile_end - row, column, 0, m, to)
                row = tile_end

    return build_functions(multiply)


def _build_panel_copy(row_bytes: int) -> Any:
    """Return a function that copies a panel, rows of `row_bytes` bytes, to contiguous memory."""
    vectors, words = row_bytes // (4 * LANES), row_bytes % (4 * LANES) // 8
    vector_bytes = 4 * LANES * vectors

    @native
    def copy_panel(w, stride, rows, to):
        prevent_inlining()
        for _ in range(rows):
            if vectors:
                store(to, load(w, vectors))
            for i in range(words):
                store_i64(to + vector_bytes + 8 * i, load_i64(w + vector_bytes + 8 * i))
            w, to = w + stride, to + row_bytes

    return copy_panel


def _build_product(kind: str, rows: int, most_vectors: int) -> Any:
    """Return a function that adds the product of `rows` rows of x and a block of W to the result y.

    At most `most_vectors` vectors of columns are multiplied at once. The function's arguments `x`,
    `w`, `y` and `later`, the block that is prefetched, are pairs of an address and a row stride.
    `size` is a pair of the rows and the columns of the block. The product is multiplied by a scale
    per column of W, at `scales`.
    """
    decode_row, restore_order = build_decoder(kind)
    bits, vectors = BITS[kind], max(2, min(most_vectors, REGISTERS // 2 // rows))
    step_bytes = vectors * LANES * bits // 8

    @native
    def multiply(x, w, size, y, scales, table, later):
        prevent_inlining()
        values = load_table(table)
        depth, columns = size
        for column in range(0, columns, vectors * LANES):
            total = zeros(rows, vectors)
            place, later_place = w[0] + column * bits // 8, later[0] + column * bits // 8
            for k in range(depth):
                for byte in range(0, step_bytes, 64):
                    prefetch_for_later(later_place + byte)
                row = decode_row(values, place, vectors)
                total = add_outer(total, x[0] + 4 * k, x[1], row)
                place, later_place = place + w[1], later_place + later[1]
            scale = load(scales + 4 * column, vectors)
            add_scaled(y[0] + 4 * column, y[1], restore_order(total), scale)

    return multiply
