"""Products of few rows of int8 activations with integer codes, where rows are contracted.

What counts is how fast the matrix is read, and it is read once, as it lies. A block is so many rows
of the matrix, side by side in memory; it is swept from left to right, a strip of WIDTH bytes of
each row at a time. Four rows are interleaved in registers, as for a panel, and multiplied from
there. While a block is swept, the same place of the next is fetched.

Parts have rows of the matrix each, and most or all columns: narrow ones would look up each page of
memory again. So there is a sum for each depth of a result, and other parts, after these, add them
up: int32 sums where depths are of the same tile, which is then scaled, or else f32 sums of whole
tiles. How many depths there are has nothing to do with threads, and so the result has not.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.memory import (
    free,
    load_f32,
    load_i8,
    load_i32,
    malloc,
    prefetch,
    prefetch_for_later,
    set_word,
    stack,
    store_f32,
    store_i8,
    store_i32,
    word,
)
from ....native.simd.bytes import load_byte_table, load_interleaved
from ....native.simd.floats import add_scaled, load, scale_rows, splat, store, store_block, zeros
from ....native.simd.integers import (
    add_blocks,
    add_byte_sums,
    add_outer_bytes,
    concatenate,
    load_ints,
    sum_lanes,
    to_floats,
    zero_ints,
)
from ..operands.job import (
    BATCH,
    FAILED,
    FIRST,
    OUT,
    ROW_BYTES,
    SCALE,
    SCRATCH,
    TABLE,
    THREADS,
    TR,
    X_SCALE,
    X_SCALES,
    C,
    JobFunctions,
    M,
    R,
    W,
    X,
    free_scratch,
)
from . import rows
from .panel import BITS, PANEL, WIDTH, reader
from .panel import offset as code_offset

#: Rows of a block, if x has more than one; else four, for rows are read sooner one after the other.
_BLOCK, _BLOCK_OF_1 = 32, 4
#: Bytes on, or a few more, is what is fetched while a block is swept, or else the next block.
_AHEAD = 8192
#: Depths, at most, and rows that each has at least.
_DEPTHS, _DEPTH = 4, 128
#: Columns of a part, times rows of x, at most: their sums stay in the caches.
_COLUMNS = 8192
#: Strips that a part adds up.
_ADDED = 16
_ONE = np.float32(1)


@native
def _sum_of(x, count):
    """The sum of so many activations, a multiple of four."""
    total = zero_ints()
    whole = count // WIDTH * WIDTH
    for i in range(0, whole, WIDTH):
        total = add_byte_sums(total, x + i, WIDTH)
    for i in range(whole, count, 4):
        total = add_byte_sums(total, x + i, 4)
    return sum_lanes(total)


@native
def _pack(x, stride, rows, depth, to):
    """Copies activations so that the fours of all rows that meet the same codes are neighbours."""
    for k in range(0, depth, 4):
        for row in range(rows):
            store_i32(to + k * rows + 4 * row, load_i32(x + row * stride + k))


@native
def _copy(w, stride, rows, size, to):
    """Copies so many bytes of each row to rows of WIDTH bytes, which is returned."""
    for row in range(rows):
        for byte in range(size):
            store_i8(to + row * WIDTH + byte, load_i8(w + row * stride + byte))
    return WIDTH


@native
def _depths(job):
    """How many depths there are, how many of them a tile has, and how many rows each has."""
    k, tile = word(job, R), word(job, TR)
    wanted = max(1, min(_DEPTHS, k // _DEPTH))
    each = max(1, wanted * tile // k)
    if each > 1 or tile * wanted > k:
        length = ((tile + each - 1) // each + 3) // 4 * 4
        each = (tile + length - 1) // length
        return k // tile * each, each, length
    length = (k // tile + wanted - 1) // wanted * tile
    return (k + length - 1) // length, 0, length


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    offset = code_offset(kind)
    bits, read = BITS[kind], reader(kind)
    fields = 8 // bits
    orientation = rows.orientation(kind)
    width = fields * WIDTH  # columns of a strip
    strip_size = fields * PANEL  # bytes of its sums, for a row of x

    @native
    def strips_of(job):
        """How many strips there are, and how many a part has that multiplies."""
        depths, _, _ = _depths(job)
        strips = (word(job, C) + width - 1) // width
        parts = (2 * word(job, THREADS) + depths - 1) // depths
        each = min(_COLUMNS // word(job, M) // width, (strips + parts - 1) // parts)
        return strips, max(1, each)

    def prepare(job):
        depths, _, _ = _depths(job)
        strips, each = strips_of(job)
        of_depth = word(job, BATCH) * strips * word(job, M) * strip_size
        allocated = malloc(64 + depths * of_depth)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, allocated)
        set_word(job, FIRST, word(job, BATCH) * depths * ((strips + each - 1) // each))

    def count(job):
        strips, _ = strips_of(job)
        return word(job, FIRST) + word(job, BATCH) * ((strips + _ADDED - 1) // _ADDED)

    @native
    def sums_of(job, batch, depth, strip):
        """Where sums of a depth are: `[BATCH, depths, strips, M]` of strips."""
        depths, _, _ = _depths(job)
        strips, _ = strips_of(job)
        index = (batch * depths + depth) * strips + strip
        return (word(job, SCRATCH) + 63) // 64 * 64 + index * word(job, M) * strip_size

    def product(rows: int) -> Any:
        together = 2 if rows <= 2 and fields > 1 else 1  # fields whose sums registers hold
        columns = 4 * together
        fetch = prefetch if rows == 1 else prefetch_for_later  # more rows take longer to get there

        @native
        def product(m, x, w, stride, depth, strips, ints, table, later):
            """Adds to int32 sums the products of some rows of x with strips of a block."""
            prevent_inlining()
            for _ in range(strips):
                for field in range(0, fields, together):
                    to, at_x = ints + field * PANEL, x
                    total = load_ints(to, strip_size, rows, columns)
                    place, fetched = w, later
                    for _ in range(0, depth, 4):
                        if field == 0:
                            for row in range(4):
                                fetch(fetched + row * stride)
                        bytes = load_interleaved(place, stride)
                        codes = read(table, bytes, field * bits)
                        if together == 2:
                            codes = concatenate(codes, read(table, bytes, (field + 1) * bits))
                        total = add_outer_bytes(total, at_x, 4, codes)
                        at_x += 4 * m
                        place, fetched = place + 4 * stride, fetched + 4 * stride
                    store_block(to, strip_size, total)
                w, later, ints = w + WIDTH, later + WIDTH, ints + m * strip_size

        return product

    product_of_1, product_of_2, product_of_4 = map(product, (1, 2, 4))

    @native
    def sweep(m, x, w, stride, depth, strips, ints, table, later):
        """Adds to int32 sums the products with strips of a block."""
        row = 0
        while row < m:
            at_x, to = x + 4 * row, ints + row * strip_size
            if m - row >= 4:
                product_of_4(m, at_x, w, stride, depth, strips, to, table, later)
                row += 4
            elif m - row >= 2:
                product_of_2(m, at_x, w, stride, depth, strips, to, table, later)
                row += 2
            else:
                product_of_1(m, at_x, w, stride, depth, strips, to, table, later)
                row += 1

    @native
    def begin(m, x, x_stride, length, strips, ints):
        """Writes what int32 sums begin with, for so many rows of the matrix."""
        for row in range(m):
            start = np.int32(-offset * _sum_of(x + row * x_stride, length))
            for strip in range(strips):
                at = ints + (strip * m + row) * strip_size
                for i in range(0, strip_size, 4):
                    store_i32(at + i, start)

    @native
    def end(job, batch, tile, strip, ints, sums, scale, scratch):
        """Adds int32 sums of a strip, times the scales of a tile, to f32 ones."""
        first = batch * (word(job, R) // word(job, TR))
        orientation.scales(job, SCALE, first, strip, tile, scratch, scale)
        m, x_scales, one = word(job, M), word(job, X_SCALES), stack(4)
        store_f32(one, 1)
        for row in range(m):
            # Where all tiles share one, sums are multiplied by it at last.
            x_scale = word(job, X_SCALE) + 4 * ((batch * m + row) * x_scales + tile)
            x_scale = x_scale if x_scales > 1 else one
            to = row * strip_size
            for at in range(to, to + strip_size, PANEL):
                total = to_floats(load_ints(ints + at, 0, 1, 4))
                total = scale_rows(total, x_scale, 0)
                add_scaled(sums + at, 0, total, load(scale + at - to, 4))

    @native
    def multiply(job, part):
        m, stride, x_stride = word(job, M), word(job, ROW_BYTES), word(job, R)
        depths, of_tile, length = _depths(job)
        strips, each = strips_of(job)
        rest, first_strip = divmod(part, (strips + each - 1) // each)
        batch, depth = divmod(rest, depths)
        first_strip *= each
        # Of the last strip, there may be fewer bytes, and what is behind them may be no memory.
        strips = min(each, strips - first_strip)
        there = min(WIDTH, stride - (first_strip + strips - 1) * WIDTH)
        whole = strips if there == WIDTH else strips - 1
        size = strips * m * strip_size
        allocated = malloc(64 + size + 2 * strip_size + _BLOCK * (WIDTH + m))
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        ints = (allocated + 63) // 64 * 64
        scale = ints + size
        scratch = scale + strip_size
        copied = scratch + strip_size
        packed = copied + _BLOCK * WIDTH
        sums = sums_of(job, batch, depth, first_strip)
        if of_tile:
            ints = sums
            tile, at = divmod(depth, of_tile)
            row = tile * word(job, TR) + at * length
            last = min(row + length, (tile + 1) * word(job, TR))
        else:
            row, last = depth * length, min((depth + 1) * length, word(job, R))
            for i in range(0, size, WIDTH):
                store(sums + i, zeros(1, 1))
        table = load_byte_table(word(job, TABLE))
        x = word(job, X) + batch * m * x_stride
        matrix = word(job, W) + batch * word(job, R) * stride + first_strip * WIDTH
        block = _BLOCK if m > 1 else _BLOCK_OF_1
        ahead = max(block, (_AHEAD // stride + 3) // 4 * 4) * stride
        while row < last:
            tile = row // word(job, TR)
            tile_end = min(last, (tile + 1) * word(job, TR))
            begin(m, x + row, x_stride, tile_end - row, strips, ints)
            while row < tile_end:
                rows, w = min(block, tile_end - row), matrix + row * stride
                _pack(x + row, x_stride, m, rows, packed)
                sweep(m, packed, w, stride, rows, whole, ints, table, w + ahead)
                if whole < strips:
                    wide = _copy(w + whole * WIDTH, stride, rows, there, copied)
                    to = ints + whole * m * strip_size
                    sweep(m, packed, copied, wide, rows, strips - whole, to, table, copied)
                row += rows
            if not of_tile:
                for i in range(strips):
                    to = i * m * strip_size
                    end(job, batch, tile, first_strip + i, ints + to, sums + to, scale, scratch)
        free(allocated)

    @native
    def add_ints(job, batch, strip, sums, scale, scratch):
        """Adds up int32 sums of each tile, and these, scaled, to f32 sums."""
        depths, of_tile, _ = _depths(job)
        size = word(job, M) * strip_size
        for i in range(0, size, WIDTH):
            store(sums + i, zeros(1, 1))
        for tile in range(depths // of_tile):
            ints = sums_of(job, batch, tile * of_tile, strip)
            for depth in range(1, of_tile):
                others = sums_of(job, batch, tile * of_tile + depth, strip)
                for i in range(0, size, WIDTH):
                    total = add_blocks(load_ints(ints + i, 0, 1, 1), load_ints(others + i, 0, 1, 1))
                    store_block(ints + i, 0, total)
            end(job, batch, tile, strip, ints, sums, scale, scratch)

    @native
    def add_floats(job, batch, strip):
        """Adds up the f32 sums of all depths to those of the first."""
        sums = sums_of(job, batch, 0, strip)
        depths, _, _ = _depths(job)
        for depth in range(1, depths):
            others = sums_of(job, batch, depth, strip)
            for i in range(0, word(job, M) * strip_size, WIDTH):
                add_scaled(sums + i, 0, load(others + i, 1), splat(_ONE))
        return sums

    @native
    def add_up(job, part):
        m, c = word(job, M), word(job, C)
        _, of_tile, _ = _depths(job)
        strips, _ = strips_of(job)
        batch, first = divmod(part, (strips + _ADDED - 1) // _ADDED)
        first *= _ADDED
        allocated = malloc(64 + (m + 2) * strip_size)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        scale = (allocated + 63) // 64 * 64
        scratch, is_one = scale + strip_size, word(job, X_SCALES) == 1
        for strip in range(first, min(first + _ADDED, strips)):
            if of_tile:
                sums = scratch + strip_size
                add_ints(job, batch, strip, sums, scale, scratch)
            else:
                sums = add_floats(job, batch, strip)
            for row in range(batch * m, (batch + 1) * m):
                x_scale = load_f32(word(job, X_SCALE) + 4 * row) if is_one else _ONE
                to = word(job, OUT) + 4 * (row * c + strip * width)
                orientation.write(sums, PANEL, x_scale, scratch, to, min(width, c - strip * width))
                sums += strip_size
        free(allocated)

    def work(job, part):
        if part < word(job, FIRST):
            multiply(job, part)
        else:
            add_up(job, part - word(job, FIRST))

    return JobFunctions(native(prepare), native(count), native(work), free_scratch)
