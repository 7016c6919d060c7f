"""Products of int8 activations and integer codes: decoded to panels, block by block.

What is contracted is cut into blocks, which no tile's end divides. `prepare` copies the activations
of each together. Of a part's columns, the codes of a panel are decoded into scratch that the
fastest cache holds, and then all rows are multiplied by it. So the sums of a part, which the next
fastest cache holds, are gone through once a block.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.memory import free, load_f32, malloc, set_word, stack, store_f32, store_i32, word
from ....native.simd.bytes import load_byte_table
from ....native.simd.floats import add_outer, load, store, store_block, zeros
from ....native.simd.integers import add_byte_sums, load_floats, sum_lanes, zero_ints
from ...common.limits import LONGEST
from ..operands.job import (
    BATCH,
    FAILED,
    FIRST,
    MINIMUM,
    OUT,
    ROW_BYTES,
    SCALE,
    SCRATCH,
    TABLE,
    THREADS,
    X_SCALE,
    X_SCALES,
    JobFunctions,
    M,
    R,
    W,
    X,
    free_scratch,
)
from ..operands.minima import tile_sums_bytes, write_scaled_tile_sums
from ..operands.scales import has_minima
from .panel import BLOCK, PANEL, WIDTH, Orientation, multiply

_ONE = np.float32(1)
#: Of more rows of activations than so many, a part packs so many.
PACKED = 32


def _adder(rows: int) -> Any:
    @native
    def add(sums, of_x, next_x, minima, next_tile, tiles):
        """Adds the products of some rows of sums of activations with minima of a panel."""
        total = load_floats(sums, PANEL, rows, 4)
        for _ in range(tiles):
            total = add_outer(total, of_x, next_x, load(minima, 4))
            of_x, minima = of_x + 4, minima + next_tile
        store_block(sums, PANEL, total)

    return add


_add_4, _add_1 = map(_adder, (4, 1))


def functions_of(orientation: Orientation, offset: int) -> JobFunctions:
    """Return the functions of the kernel for many rows of activations."""
    panels, step_of, sizes, span, copy, fetch, decode, *others = orientation
    part_size, of_part, scales, write, ahead = others
    width = WIDTH * panels

    @native
    def rows_of(job):
        """How many rows of activations a part has."""
        m = word(job, M)
        parts = (m + 255) // 256
        return (m + parts - 1) // parts

    @native
    def strips_of(job):
        """How many strips there are, and how many a part has."""
        _, n, _ = sizes(job)
        strips = (n + width - 1) // width
        # Each thread has some parts, so that one that is late leaves the others something to do.
        # But the wider a part is, the more of a row of the matrix is read before the next.
        each = strips // max(4, 2 * word(job, THREADS))
        return strips, max(1, min(1024 // rows_of(job) // panels, 64 // panels, each))

    @native
    def cut(job):
        """How many tiles a block has, or 0; how many segments, blocks, and sums there are.

        A segment is a block of whole tiles, or else a tile, or as much of one as has int32 sums.
        """
        k, _, tile = sizes(job)
        step = step_of(word(job, M))
        _, length = span(0, tile)
        if tile <= step and length == tile and tile % 16 == 0:
            each = step // tile
            blocks = (k // tile + each - 1) // each
            return each, blocks, blocks, k // tile
        segments = k // tile * ((tile + LONGEST - 1) // LONGEST)
        return 0, segments, k // tile * ((tile + BLOCK - 1) // BLOCK), segments

    @native
    def segment_of(job, index, tiles):
        """Where a segment begins and ends, and how many whole tiles it has, if blocks have."""
        k, _, tile = sizes(job)
        if tiles:
            first = index * tiles
            tiles = min(tiles, k // tile - first)
            return first * tile, (first + tiles) * tile, tiles
        t, of_tile = divmod(index, (tile + LONGEST - 1) // LONGEST)
        begin = t * tile + of_tile * LONGEST
        return begin, min(begin + LONGEST, (t + 1) * tile), 0

    @native
    def stride_of(job, tiles):
        """How many bytes a row of the activations of a block takes."""
        _, _, tile = sizes(job)
        _, length = span(tile % 8 and 7, tiles * tile if tiles else min(tile, BLOCK))
        return (length + WIDTH - 1) // WIDTH * WIDTH

    @native
    def sums_of_x(job, row):
        """Where the sums of a row of activations over tiles are: behind what is packed."""
        tiles, _, blocks, starts = cut(job)
        rows = word(job, BATCH) * word(job, M)
        packed = (word(job, SCRATCH) + 63) // 64 * 64
        return (
            packed
            + rows * (blocks * stride_of(job, tiles) + starts * 4)
            + row * tile_sums_bytes(job)
        )

    @native
    def x_scale_of(job, row, tile, one):
        """Where the scale of activations of a tile is, and how far on is that of the next tile.

        Where all tiles of a row share one, sums are multiplied by it at last, and by 1 before.
        """
        scales = word(job, X_SCALES)
        return (word(job, X_SCALE) + 4 * (row * scales + tile), 4) if scales > 1 else (one, 0)

    @native
    def pack(x, begin, count, to, stride):
        """Copies a block of activations to `stride` bytes."""
        # Activations are moved no further than this. Where there are none, there have to be zeros.
        for i in range(0 if begin else count // 128 * 128, stride, WIDTH):
            store(to + i, zeros(1, 1))
        copy(x, count, begin, to)

    @native
    def sum_of(x, count):
        """The sum of packed activations, of which there are a multiple of 16."""
        total = zero_ints()
        whole = count // WIDTH * WIDTH
        for i in range(0, whole, WIDTH):
            total = add_byte_sums(total, x + i, WIDTH)
        for i in range(whole, count, 16):
            total = add_byte_sums(total, x + i, 16)
        return sum_lanes(total)

    @native
    def pack_rows(job, first, last):
        """Copies so many rows of activations together, and writes what their sums begin with."""
        k, _, tile = sizes(job)
        m = word(job, M)
        tiles, segments, blocks, starts = cut(job)
        stride, one = stride_of(job, tiles), stack(4)
        store_f32(one, 1)
        rows = word(job, BATCH) * m
        packed = (word(job, SCRATCH) + 63) // 64 * 64
        for row in range(first, last):
            batch, at_row = divmod(row, m)
            if has_minima(job):
                scale, next_scale = x_scale_of(job, row, 0, one)
                at_x, to_sums = word(job, X) + row * k, sums_of_x(job, row)
                write_scaled_tile_sums(job, at_x, scale, next_scale, to_sums)
            to = packed + (batch * blocks * m + at_row) * stride
            start = packed + rows * blocks * stride + (batch * starts * m + at_row) * 4
            for index in range(segments):
                begin, end, whole = segment_of(job, index, tiles)
                total = np.int32(0)
                for at in range(begin, end, BLOCK):
                    here = min(BLOCK, end - at)
                    lead, _ = span(at, here)
                    pack(word(job, X) + row * k + at, lead, here, to, stride)
                    for i in range(whole):
                        total = sum_of(to + i * tile, tile)
                        store_i32(start, np.int32(-offset * total))
                        start += 4 * m
                    if not whole:
                        total += sum_of(to, stride)
                    to += m * stride
                if not whole:
                    store_i32(start, np.int32(-offset * total))
                    start += 4 * m

    def prepare(job):
        m = word(job, M)
        tiles, _, blocks, starts = cut(job)
        stride = stride_of(job, tiles)
        rows = word(job, BATCH) * m
        size = blocks * stride + starts * 4 + (tile_sums_bytes(job) if has_minima(job) else 0)
        allocated = malloc(64 + rows * size)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, allocated)
        if rows > PACKED:
            set_word(job, FIRST, (rows + PACKED - 1) // PACKED)
            return
        for first in range(0, rows, PACKED):
            pack_rows(job, first, rows)

    def count(job):
        strips, each = strips_of(job)
        m, rows = word(job, M), rows_of(job)
        parts = word(job, BATCH) * ((m + rows - 1) // rows) * ((strips + each - 1) // each)
        return word(job, FIRST) + parts

    @native
    def write_row(job, row, first_strip, strips, rows, sums, scratch):
        """Writes a row of a part's sums, the panels of which have so many rows."""
        _, n, _ = sizes(job)
        x_scale = load_f32(word(job, X_SCALE) + 4 * row) if word(job, X_SCALES) == 1 else _ONE
        for strip in range(first_strip, first_strip + strips):
            column = strip * width
            to = word(job, OUT) + 4 * (row * n + column)
            write(sums, rows * PANEL, x_scale, scratch, to, min(width, n - column))
            sums += panels * rows * PANEL

    @native
    def add_minima(job, first_row, rows, first_strip, strips, sums, scratch):
        """Adds to a part's sums the products of minima with the sums of activations over tiles."""
        k, _, tile = sizes(job)
        batch, tiles = first_row // word(job, M), k // tile
        size = tiles * panels * PANEL
        of_strip = malloc(size + part_size(job, MINIMUM, strips))
        if of_strip == 0:
            set_word(job, FAILED, 1)
            return
        minima = of_part(job, MINIMUM, batch, first_strip, strips, of_strip + size)
        of_x, next_x = sums_of_x(job, first_row), tile_sums_bytes(job)
        for strip in range(first_strip, first_strip + strips):
            for t in range(tiles):
                scales(job, MINIMUM, minima, strip, t, scratch, of_strip + t * panels * PANEL)
            for panel in range(panels):
                place, row = of_strip + panel * PANEL, 0
                while row < rows:
                    to, at_x = sums + row * PANEL, of_x + row * next_x
                    if rows - row >= 4:
                        _add_4(to, at_x, next_x, place, panels * PANEL, tiles)
                        row += 4
                    else:
                        _add_1(to, at_x, next_x, place, panels * PANEL, tiles)
                        row += 1
                sums += rows * PANEL
        free(of_strip)

    @native
    def multiply_part(job, part):
        _, _, tile = sizes(job)
        m = word(job, M)
        strips, each = strips_of(job)
        rows = rows_of(job)
        tiles, segments, blocks, starts = cut(job)
        stride = stride_of(job, tiles)
        step = BLOCK if tiles else step_of(m)
        row_parts, strip_parts = (m + rows - 1) // rows, (strips + each - 1) // each
        rest, strip_part = divmod(part, strip_parts)
        batch, row_part = divmod(rest, row_parts)
        first_strip, first_row = strip_part * each, row_part * rows
        each, rows = min(each, strips - first_strip), min(rows, m - first_row)

        size_of_sums = each * panels * rows * PANEL
        size_of_codes = (stride if step == BLOCK else step) * WIDTH
        size_of_scales = max(1, tiles) * panels * PANEL
        size = 64 + 2 * (size_of_sums + size_of_codes) + size_of_scales
        size += WIDTH * WIDTH + panels * PANEL
        allocated = malloc(size + part_size(job, SCALE, each))
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        sums = (allocated + 63) // 64 * 64
        ints = sums + size_of_sums
        codes = ints + size_of_sums
        fetched = codes + size_of_codes
        scale = fetched + size_of_codes + WIDTH * WIDTH
        scratch = scale + size_of_scales
        for i in range(0, size_of_sums, WIDTH):
            store(sums + i, zeros(1, 1))
        one = stack(4)
        store_f32(one, 1)
        if has_minima(job):
            row = batch * m + first_row
            add_minima(job, row, rows, first_strip, each, sums, scratch)

        x = (word(job, SCRATCH) + 63) // 64 * 64
        start = x + word(job, BATCH) * blocks * m * stride
        x += (batch * blocks * m + first_row) * stride
        start += (batch * starts * m + first_row) * 4
        matrix = word(job, W) + batch * word(job, R) * word(job, ROW_BYTES)
        all_scales = of_part(job, SCALE, batch, first_strip, each, allocated + size)
        table = load_byte_table(word(job, TABLE))
        for index in range(segments):
            begin, end, whole = segment_of(job, index, tiles)
            for block in range(begin, end, BLOCK):
                for at in range(block, min(block + BLOCK, end), step):
                    here = min(step, end - at)
                    first, last = at == begin, at + step >= end
                    _, length = span(at, here)
                    for s in range(each):
                        strip = first_strip + s
                        place, apart = fetch(job, matrix, strip, at, length, fetched)
                        if last:
                            for i in range(max(1, whole)):
                                to = scale + i * panels * PANEL
                                scales(job, SCALE, all_scales, strip, at // tile + i, scratch, to)
                        next_strip, next_at = strip + 1, at
                        if step < BLOCK:
                            next_strip, next_at = strip, at + step
                        elif s + 1 == each:
                            next_strip, next_at = first_strip, at + here
                        for panel in range(panels):
                            decode(place, apart, length, panel, table, codes)
                            of = (s * panels + panel) * rows * PANEL
                            next = ahead(job, matrix, next_strip, next_at, length, panel)
                            for i in range(max(1, whole)):
                                row = batch * m + first_row
                                x_scale, next_tile = x_scale_of(job, row, at // tile + i, one)
                                multiply(
                                    rows,
                                    x + at - block + i * tile,
                                    stride,
                                    codes + i * tile // 4 * PANEL,
                                    (tile if whole else length) // 4,
                                    start + 4 * i * m,
                                    ints + of,
                                    sums + of,
                                    scale + (i * panels + panel) * PANEL,
                                    (x_scale, next_tile * word(job, X_SCALES)),
                                    first,
                                    last,
                                    next,
                                )
                                next = (next[0], next[1], 0, next[3])
                x += m * stride
            start += 4 * m * max(1, whole)
        for row in range(rows):
            write_row(job, batch * m + first_row + row, first_strip, each, rows, sums, scratch)
            sums += PANEL
        free(allocated)

    def work(job, part):
        first = word(job, FIRST)
        if part < first:
            pack_rows(job, part * PACKED, min((part + 1) * PACKED, word(job, BATCH) * word(job, M)))
        else:
            multiply_part(job, part - first)

    return JobFunctions(native(prepare), native(count), native(work), free_scratch)
