"""The kernel for many rows of int8 activations and integer codes: decode panels block by block.

K is divided into blocks of up to `BLOCK` codes. `prepare` packs the activations of each block
contiguously. A part computes a range of rows and a range of strips, which are groups of neighboring
panels. For each block and each strip, it decodes the codes of a panel to scratch memory that fits
the L1 cache, and multiplies all its rows by the panel. The sums of a few rows stay in registers
while a panel is multiplied. In between they are in memory that fits the L2 cache: as int32 until a
tile ends, and then, multiplied by the scales, as f32. `Orientation` has the steps that depend on
which side of the matrix is contracted.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.memory import free, load_f32, malloc, set_word, stack, store_f32, store_i32, word
from ....native.simd.floats import add_outer, load, store, store_block, zeros
from ....native.simd.integers import load_byte_table, load_floats
from ...common.table import LONGEST
from ..job import (
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
from ..scales import has_minima, tile_sums_bytes, write_scaled_tile_sums
from .panels import (
    BLOCK,
    PANEL_ROW,
    WIDTH,
    Orientation,
    build_columns_orientation,
    build_rows_orientation,
    build_sum,
    code_offset,
    multiply,
)

_ONE = np.float32(1)
#: The rows of activations that a part packs. `prepare` itself packs at most this many.
_PACKED_ROWS = 32

_sum_activations = build_sum(16)


def _build_minimum_adder(rows: int) -> Any:
    """Return a function that adds products of minima with sums of activations over tiles.

    It adds them to f32 sums of `rows` rows of activations in a panel, for `tiles` tiles along K.
    """

    @native
    def add(sums, x_sums, next_x, minima, next_tile, tiles):
        total = load_floats(sums, PANEL_ROW, rows, 4)
        for _ in range(tiles):
            total = add_outer(total, x_sums, next_x, load(minima, 4))
            x_sums, minima = x_sums + 4, minima + next_tile
        store_block(sums, PANEL_ROW, total)

    return add


_add_minima_4, _add_minima_1 = map(_build_minimum_adder, (4, 1))


def build_rows(kind: str) -> JobFunctions:
    """Return the native functions of the kernel that contracts the rows of the matrix.

    `kind` names the encoding of the codes of the matrix, such as "lookup4" (see `Codes.kind`).
    """
    return _build_functions(build_rows_orientation(kind), code_offset(kind))


def build_columns(kind: str) -> JobFunctions:
    """Return the native functions of the kernel that contracts the columns of the matrix.

    `kind` names the encoding of the codes of the matrix, such as "lookup4" (see `Codes.kind`).
    """
    return _build_functions(build_columns_orientation(kind), code_offset(kind))


def _build_functions(side: Orientation, offset: int) -> JobFunctions:
    """Return the native functions of the kernel that contracts the rows or columns of the matrix.

    `side` has the functions that depend on which of them are contracted. `offset` is the number
    that `side.decode` adds to codes.
    """
    panels, decode_step, sizes, span = side.panels, side.decode_step, side.sizes, side.span
    reorder, fetch, decode, ahead = side.reorder, side.fetch, side.decode, side.ahead
    scales_bytes, part_scales = side.scales_bytes, side.part_scales
    load_scales, write = side.load_scales, side.write
    width = WIDTH * panels  # the columns of a strip

    @native
    def rows_per_part(job):
        # Divide M into equal ranges of at most 256.
        m = word(job, M)
        parts = (m + 255) // 256
        return (m + parts - 1) // parts

    @native
    def divide_strips(job):
        """Return the number of strips of the result, and how many of them one part computes."""
        _, n, _ = sizes(job)
        strips = (n + width - 1) // width
        # Several parts per thread balance the load. Wide parts read more of a row of the matrix
        # before the next row.
        balanced = strips // max(4, 2 * word(job, THREADS))
        return strips, max(1, min(1024 // rows_per_part(job) // panels, 64 // panels, balanced))

    @native
    def divide_k(job):
        """Return the tiles per block, and the numbers of segments, blocks and starts along K.

        The tiles per block are 0 if a tile does not fit into a block, or is not aligned to it. A
        segment is a block of whole tiles, or else a tile or as much of it as int32 can sum. A start
        is the value that an int32 sum begins with. Each row of activations has one per tile of a
        segment, or one for the segment.
        """
        k, _, tile = sizes(job)
        step = decode_step(word(job, M))
        _, length = span(0, tile)
        if tile <= step and length == tile and tile % 16 == 0:
            tiles = step // tile
            blocks = (k // tile + tiles - 1) // tiles
            return tiles, blocks, blocks, k // tile
        segments = k // tile * ((tile + LONGEST - 1) // LONGEST)
        return 0, segments, k // tile * ((tile + BLOCK - 1) // BLOCK), segments

    @native
    def segment(job, index, tiles):
        """Return the first code along K of segment `index`, the code after its last, and its tiles.

        `tiles` is the number of tiles per block. If it is 0, a segment is within a tile, and has 0
        tiles.
        """
        k, _, tile = sizes(job)
        if tiles:
            first = index * tiles
            tiles = min(tiles, k // tile - first)
            return first * tile, (first + tiles) * tile, tiles
        t, within = divmod(index, (tile + LONGEST - 1) // LONGEST)
        begin = t * tile + within * LONGEST
        return begin, min(begin + LONGEST, (t + 1) * tile), 0

    @native
    def packed_stride(job, tiles):
        """Return the bytes of one row of the packed activations of a block of `tiles` tiles.

        If `tiles` is 0, the block is a tile, or as much of a tile as fits into a panel.
        """
        _, _, tile = sizes(job)
        _, length = span(tile % 8 and 7, tiles * tile if tiles else min(tile, BLOCK))
        return (length + WIDTH - 1) // WIDTH * WIDTH

    @native
    def scratch_address(job):
        # SCRATCH has the packed activations `[BATCH, blocks, M, stride]`, the starts, i32
        # `[BATCH, starts, M]`, and the sums over tiles.
        return (word(job, SCRATCH) + 63) // 64 * 64

    @native
    def tile_sums_address(job, row):
        # `row` is counted over all matrices.
        tiles, _, blocks, starts = divide_k(job)
        rows = word(job, BATCH) * word(job, M)
        row_bytes = blocks * packed_stride(job, tiles) + starts * 4
        return scratch_address(job) + rows * row_bytes + row * tile_sums_bytes(job)

    @native
    def x_scale_address(job, row, tile, unit_scale):
        """Return the address of the scale of a row of activations for a tile along K.

        Also return the bytes to the scale of the next tile. If a row has a single scale, return
        `unit_scale`, the address of the number 1, and 0. Then `write_row` applies the scale.
        """
        scales = word(job, X_SCALES)
        if scales > 1:
            return word(job, X_SCALE) + 4 * (row * scales + tile), 4
        return unit_scale, 0

    @native
    def pack_rows(job, first, last):
        """Write rows `first` to `last` of activations to SCRATCH, in the order of decoded codes.

        Also write the numbers that their int32 sums begin with.
        """
        k, _, tile = sizes(job)
        m = word(job, M)
        tiles, segments, blocks, starts = divide_k(job)
        stride, unit_scale = packed_stride(job, tiles), stack(4)
        store_f32(unit_scale, 1)
        rows, packed = word(job, BATCH) * m, scratch_address(job)
        for row in range(first, last):
            batch, m_row = divmod(row, m)
            row_x = word(job, X) + row * k
            if has_minima(job):
                scale, next_scale = x_scale_address(job, row, 0, unit_scale)
                write_scaled_tile_sums(job, row_x, scale, next_scale, tile_sums_address(job, row))
            to = packed + (batch * blocks * m + m_row) * stride
            start = packed + rows * blocks * stride + (batch * starts * m + m_row) * 4
            for index in range(segments):
                begin, end, whole_tiles = segment(job, index, tiles)
                total = np.int32(0)
                for k_begin in range(begin, end, BLOCK):
                    count = min(BLOCK, end - k_begin)
                    position, _ = span(k_begin, count)
                    # Pad with zeros. `reorder` moves activations by less than 128 bytes.
                    for i in range(0 if position else count // 128 * 128, stride, WIDTH):
                        store(to + i, zeros(1, 1))
                    reorder(row_x + k_begin, count, position, to)
                    for i in range(whole_tiles):
                        total = _sum_activations(to + i * tile, tile)
                        store_i32(start, np.int32(-offset * total))
                        start += 4 * m
                    if not whole_tiles:
                        total += _sum_activations(to, stride)
                    to += m * stride
                if not whole_tiles:
                    store_i32(start, np.int32(-offset * total))
                    start += 4 * m

    def prepare(job):
        # Pack a few rows here, or let the FIRST parts pack many rows.
        m = word(job, M)
        tiles, _, blocks, starts = divide_k(job)
        rows = word(job, BATCH) * m
        row_bytes = blocks * packed_stride(job, tiles) + starts * 4
        row_bytes += tile_sums_bytes(job) if has_minima(job) else 0
        allocated = malloc(64 + rows * row_bytes)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, allocated)
        if rows > _PACKED_ROWS:
            set_word(job, FIRST, (rows + _PACKED_ROWS - 1) // _PACKED_ROWS)
        else:
            pack_rows(job, 0, rows)

    def count(job):
        strips, strips_per_part = divide_strips(job)
        m, rows = word(job, M), rows_per_part(job)
        row_parts = word(job, BATCH) * ((m + rows - 1) // rows)
        return word(job, FIRST) + row_parts * ((strips + strips_per_part - 1) // strips_per_part)

    @native
    def write_row(job, row, first_strip, strips, rows, sums, scratch):
        """Write the sums of one row of activations to `strips` strips of the result.

        The strips begin with `first_strip`. `row` is counted over all matrices. `sums` is the
        address of the sums of the row in the first strip. The sums of a panel are `[rows, WIDTH]`,
        for all rows of the part.
        """
        _, n, _ = sizes(job)
        x_scale = load_f32(word(job, X_SCALE) + 4 * row) if word(job, X_SCALES) == 1 else _ONE
        for strip in range(first_strip, first_strip + strips):
            column = strip * width
            to = word(job, OUT) + 4 * (row * n + column)
            write(sums, rows * PANEL_ROW, x_scale, scratch, to, min(width, n - column))
            sums += panels * rows * PANEL_ROW

    @native
    def add_minima(job, first_row, rows, first_strip, strips, sums, scratch):
        """Add products of minima with sums of activations over tiles to the f32 sums at `sums`.

        The sums belong to a part, which has `rows` rows of activations from `first_row` on, counted
        over all matrices, and `strips` strips from `first_strip` on.
        """
        k, _, tile = sizes(job)
        batch, tiles = first_row // word(job, M), k // tile
        size = tiles * panels * PANEL_ROW
        strip_minima = malloc(size + scales_bytes(job, MINIMUM, strips))
        if strip_minima == 0:
            set_word(job, FAILED, 1)
            return
        minima = part_scales(job, MINIMUM, batch, first_strip, strips, strip_minima + size)
        x_sums, next_x = tile_sums_address(job, first_row), tile_sums_bytes(job)
        for strip in range(first_strip, first_strip + strips):
            for t in range(tiles):
                to = strip_minima + t * panels * PANEL_ROW
                load_scales(job, MINIMUM, minima, strip, t, scratch, to)
            for panel in range(panels):
                panel_minima, row = strip_minima + panel * PANEL_ROW, 0
                while row < rows:
                    to, row_x = sums + row * PANEL_ROW, x_sums + row * next_x
                    if rows - row >= 4:
                        _add_minima_4(to, row_x, next_x, panel_minima, panels * PANEL_ROW, tiles)
                        row += 4
                    else:
                        _add_minima_1(to, row_x, next_x, panel_minima, panels * PANEL_ROW, tiles)
                        row += 1
                sums += rows * PANEL_ROW
        free(strip_minima)

    @native
    def multiply_part(job, part):
        # Find the rows and the strips of the part.
        _, _, tile = sizes(job)
        m = word(job, M)
        strips, strips_per_part = divide_strips(job)
        rows = rows_per_part(job)
        tiles, segments, blocks, starts = divide_k(job)
        stride = packed_stride(job, tiles)
        step = BLOCK if tiles else decode_step(m)
        row_parts = (m + rows - 1) // rows
        rest, strip_part = divmod(part, (strips + strips_per_part - 1) // strips_per_part)
        batch, row_part = divmod(rest, row_parts)
        first_strip, first_row = strip_part * strips_per_part, row_part * rows
        strips, rows = min(strips_per_part, strips - first_strip), min(rows, m - first_row)

        # Allocate the sums, a panel, copied codes, scales of a strip, and scratch for `side`.
        sums_bytes = strips * panels * rows * PANEL_ROW
        panel_bytes = (stride if step == BLOCK else step) * WIDTH
        strip_scales_bytes = max(1, tiles) * panels * PANEL_ROW
        size = 64 + 2 * (sums_bytes + panel_bytes) + strip_scales_bytes
        size += WIDTH * WIDTH + panels * PANEL_ROW
        allocated = malloc(size + scales_bytes(job, SCALE, strips))
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        sums = (allocated + 63) // 64 * 64
        ints = sums + sums_bytes
        codes = ints + sums_bytes
        fetched = codes + panel_bytes
        strip_scales = fetched + panel_bytes + WIDTH * WIDTH
        scratch = strip_scales + strip_scales_bytes
        for i in range(0, sums_bytes, WIDTH):
            store(sums + i, zeros(1, 1))
        unit_scale = stack(4)
        store_f32(unit_scale, 1)
        x_row = batch * m + first_row
        if has_minima(job):
            add_minima(job, x_row, rows, first_strip, strips, sums, scratch)

        # Multiply segment by segment, block by block, step by step, strip by strip.
        x = scratch_address(job)
        start = x + word(job, BATCH) * blocks * m * stride
        x += (batch * blocks * m + first_row) * stride
        start += (batch * starts * m + first_row) * 4
        matrix = word(job, W) + batch * word(job, R) * word(job, ROW_BYTES)
        scales = part_scales(job, SCALE, batch, first_strip, strips, allocated + size)
        table = load_byte_table(word(job, TABLE))
        for index in range(segments):
            begin, end, whole_tiles = segment(job, index, tiles)
            for block in range(begin, end, BLOCK):
                for k in range(block, min(block + BLOCK, end), step):
                    count = min(step, end - k)
                    is_first, is_last = k == begin, k + step >= end
                    _, length = span(k, count)
                    for s in range(strips):
                        strip = first_strip + s
                        stored, stored_stride = fetch(job, matrix, strip, k, length, fetched)
                        if is_last:
                            for i in range(max(1, whole_tiles)):
                                to = strip_scales + i * panels * PANEL_ROW
                                load_scales(job, SCALE, scales, strip, k // tile + i, scratch, to)
                        # Prefetch the next codes: of the next strip, or else of the next rows.
                        next_strip, next_k = strip + 1, k
                        if step < BLOCK:
                            next_strip, next_k = strip, k + step
                        elif s + 1 == strips:
                            next_strip, next_k = first_strip, k + count
                        for panel in range(panels):
                            decode(stored, stored_stride, length, panel, table, codes)
                            sums_offset = (s * panels + panel) * rows * PANEL_ROW
                            later = ahead(job, matrix, next_strip, next_k, length, panel)
                            for i in range(max(1, whole_tiles)):
                                tile_codes = codes + i * tile // 4 * PANEL_ROW
                                tile_steps = (tile if whole_tiles else length) // 4
                                tile_scales = strip_scales + (i * panels + panel) * PANEL_ROW
                                decoded = tile_codes, tile_steps, tile_scales, is_first, is_last
                                x_scale, next_tile = x_scale_address(
                                    job, x_row, k // tile + i, unit_scale
                                )
                                next_x_scale = next_tile * word(job, X_SCALES)
                                tile_x = x + k - block + i * tile, stride, x_scale, next_x_scale
                                to = start + 4 * i * m, ints + sums_offset, sums + sums_offset
                                multiply(rows, tile_x, decoded, to, later)
                                later = (later[0], later[1], 0, later[3])  # prefetch only once
                x += m * stride
            start += 4 * m * max(1, whole_tiles)
        for row in range(rows):
            write_row(job, x_row + row, first_strip, strips, rows, sums, scratch)
            sums += PANEL_ROW
        free(allocated)

    def work(job, part):
        first = word(job, FIRST)
        if part < first:
            last_row = min((part + 1) * _PACKED_ROWS, word(job, BATCH) * word(job, M))
            pack_rows(job, part * _PACKED_ROWS, last_row)
        else:
            multiply_part(job, part - first)

    return JobFunctions(native(prepare), native(count), native(work), free_scratch)
