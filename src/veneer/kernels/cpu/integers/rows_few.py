"""Multiply a few rows of int8 activations by integer codes, with rows contracted.

Reading the matrix takes most of the time, so each byte is read once, in the order of memory. K is
divided into splits (split-K), and N into strips of `WIDTH` bytes of each row of the matrix. A part
computes a range of strips of one split. It takes a block of a few rows of the matrix, and sweeps it
strip by strip. Four rows at a time are interleaved in registers, so that a 32-bit lane holds four
codes of one column, and are multiplied there. A sweep prefetches the same place of a later block.

Parts have most or all columns, because narrow parts would look up each page of memory again. The
last parts add up the splits of a result: as int32 if they belong to one tile, which is then scaled,
otherwise as f32 sums of whole tiles. The number of splits, and therefore the result, does not
depend on the number of threads.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.memory import (
    free,
    load_f32,
    load_i32,
    malloc,
    prefetch,
    prefetch_for_later,
    set_word,
    stack,
    store_f32,
    store_i32,
    word,
)
from ....native.simd.floats import add_scaled, load, scale_rows, splat, store, store_block, zeros
from ....native.simd.integers import (
    add_blocks,
    add_outer_bytes,
    concatenate,
    load_byte_table,
    load_interleaved,
    load_ints,
    to_floats,
)
from ...common.problem import BITS
from ..job import (
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
from .panels import PANEL_ROW, WIDTH, build_reader, build_rows_orientation, build_sum, code_offset

#: The rows of the matrix in a block. With one row of x, a smaller block is faster, because its rows
#: are read sooner after each other.
_BLOCK, _BLOCK_OF_1 = 32, 4
#: Prefetch the first block that is at least this many bytes after the current one.
_AHEAD = 8192
#: The most splits of K, and the fewest codes along K in each.
_SPLITS, _SPLIT = 4, 128
#: The most columns of a part, times rows of x, so that their sums stay in the caches.
_COLUMNS = 8192
#: The strips that one of the last parts adds up.
_ADDED_STRIPS = 16
_ONE = np.float32(1)

_sum_activations = build_sum(4)


@native
def _pack(x, stride, rows, count, to):
    """Copy int8 activations to `to`: the first four of each row, then the next four of each row.

    `sweep` reads them in this order. The rows at `x` are `stride` bytes apart, and have `count`
    activations.
    """
    for k in range(0, count, 4):
        for row in range(rows):
            store_i32(to + k * rows + 4 * row, load_i32(x + row * stride + k))


@native
def _divide_k(job):
    """Return how K is divided: the number of splits, the splits per tile, and the codes per split.

    A split is a range of K that one part multiplies. The splits per tile are 0 if a split consists
    of whole tiles.
    """
    k, tile = word(job, R), word(job, TR)
    wanted = max(1, min(_SPLITS, k // _SPLIT))
    per_tile = max(1, wanted * tile // k)
    if per_tile > 1 or tile * wanted > k:
        length = ((tile + per_tile - 1) // per_tile + 3) // 4 * 4
        per_tile = (tile + length - 1) // length
        return k // tile * per_tile, per_tile, length
    length = (k // tile + wanted - 1) // wanted * tile
    return (k + length - 1) // length, 0, length


def _build_sweep(kind: str) -> Any:
    """Return `sweep`, the function that multiplies rows of x by a block of the matrix."""
    bits, read = BITS[kind], build_reader(kind)
    fields = 8 // bits
    strip_bytes = fields * PANEL_ROW

    def build_product(rows: int) -> Any:
        # The same as `sweep`, for the first `rows` of the m packed rows of x.
        together = 2 if rows <= 2 and fields > 1 else 1  # fields whose sums fit into registers
        columns = 4 * together
        # With more rows, it takes longer until a sweep reaches the prefetched memory.
        fetch = prefetch if rows == 1 else prefetch_for_later

        @native
        def product(m, x, w, stride, count, strips, ints, table, later):
            prevent_inlining()
            for _ in range(strips):
                for field in range(0, fields, together):
                    to, group_x = ints + field * PANEL_ROW, x
                    total = load_ints(to, strip_bytes, rows, columns)
                    group_w, fetched = w, later
                    for _ in range(0, count, 4):
                        if field == 0:
                            for row in range(4):
                                fetch(fetched + row * stride)
                        stored = load_interleaved(group_w, stride)
                        codes = read(table, stored, field * bits)
                        if together == 2:
                            codes = concatenate(codes, read(table, stored, (field + 1) * bits))
                        total = add_outer_bytes(total, group_x, 4, codes)
                        group_x += 4 * m
                        group_w, fetched = group_w + 4 * stride, fetched + 4 * stride
                    store_block(to, strip_bytes, total)
                w, later, ints = w + WIDTH, later + WIDTH, ints + m * strip_bytes

        return product

    product_of_1, product_of_2, product_of_4 = map(build_product, (1, 2, 4))

    @native
    def sweep(m, x, w, stride, count, strips, ints, table, later):
        """Add the products of m packed rows of x and a block of the matrix to int32 sums.

        **Arguments:**

        - `x`: the address of the rows, as `_pack` writes them.
        - `w`, `stride`: the address of the block, and the bytes between its `count` rows.
        - `strips`: the number of strips, `WIDTH` bytes of each row of the block, to multiply.
        - `ints`: the address of the sums, `[strips, m]` ranges of `strip_bytes` bytes.
        - `table`: the lookup table of codes.
        - `later`: the address of a later block, to prefetch.
        """
        row = 0
        while row < m:
            row_x, to = x + 4 * row, ints + row * strip_bytes
            if m - row >= 4:
                product_of_4(m, row_x, w, stride, count, strips, to, table, later)
                row += 4
            elif m - row >= 2:
                product_of_2(m, row_x, w, stride, count, strips, to, table, later)
                row += 2
            else:
                product_of_1(m, row_x, w, stride, count, strips, to, table, later)
                row += 1

    return sweep


def build(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of the matrix, such as "lookup4" (see `Codes.kind`).
    """
    offset = code_offset(kind)
    sweep = _build_sweep(kind)
    side = build_rows_orientation(kind)
    fetch, load_scales, write = side.fetch, side.load_scales, side.write
    width = side.panels * WIDTH  # the columns of a strip
    strip_bytes = side.panels * PANEL_ROW  # the sums of a strip, for one row of x

    @native
    def divide_strips(job):
        """Return the number of strips of the matrix, and how many of them a part multiplies.

        A strip is `WIDTH` bytes of each row of the matrix.
        """
        splits, _, _ = _divide_k(job)
        strips = (word(job, C) + width - 1) // width
        parts = (2 * word(job, THREADS) + splits - 1) // splits
        per_part = min(_COLUMNS // word(job, M) // width, (strips + parts - 1) // parts)
        return strips, max(1, per_part)

    def prepare(job):
        # Allocate the sums of all splits. The FIRST parts multiply, and the others add splits.
        splits, _, _ = _divide_k(job)
        strips, per_part = divide_strips(job)
        split_bytes = word(job, BATCH) * strips * word(job, M) * strip_bytes
        allocated = malloc(64 + splits * split_bytes)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, allocated)
        set_word(job, FIRST, word(job, BATCH) * splits * ((strips + per_part - 1) // per_part))

    def count(job):
        strips, _ = divide_strips(job)
        return word(job, FIRST) + word(job, BATCH) * ((strips + _ADDED_STRIPS - 1) // _ADDED_STRIPS)

    @native
    def sums_address(job, batch, split, strip):
        """Return the address in SCRATCH of the sums of a strip, for one split of K.

        The sums are int32 if a split is within a tile, otherwise f32. They take `strip_bytes` bytes
        per row of x.
        """
        splits, _, _ = _divide_k(job)
        strips, _ = divide_strips(job)
        index = (batch * splits + split) * strips + strip
        return (word(job, SCRATCH) + 63) // 64 * 64 + index * word(job, M) * strip_bytes

    @native
    def start_sums(m, x, x_stride, length, strips, ints):
        """Set the int32 sums of `strips` strips to `-offset` times the sum of each row of x.

        A row has `length` activations. `sweep` multiplies codes to which `offset` was added, and
        the start of a sum corrects this. `ints` is the address of the sums.
        """
        for row in range(m):
            start = np.int32(-offset * _sum_activations(x + row * x_stride, length))
            for strip in range(strips):
                to = ints + (strip * m + row) * strip_bytes
                for i in range(0, strip_bytes, 4):
                    store_i32(to + i, start)

    @native
    def add_scaled_ints(job, batch, tile, strip, ints, sums, scale, scratch):
        """Add the int32 sums of a strip at `ints`, times the scales of a tile, to f32 at `sums`.

        `scale` and `scratch` are the addresses of memory for the scales of the strip.
        """
        first = batch * (word(job, R) // word(job, TR))
        load_scales(job, SCALE, first, strip, tile, scratch, scale)
        m, x_scales, one = word(job, M), word(job, X_SCALES), stack(4)
        store_f32(one, 1)
        for row in range(m):
            # A scale that all tiles share is applied when the result is written.
            x_scale = word(job, X_SCALE) + 4 * ((batch * m + row) * x_scales + tile)
            x_scale = x_scale if x_scales > 1 else one
            to = row * strip_bytes
            for at in range(to, to + strip_bytes, PANEL_ROW):
                total = to_floats(load_ints(ints + at, 0, 1, 4))
                total = scale_rows(total, x_scale, 0)
                add_scaled(sums + at, 0, total, load(scale + at - to, 4))

    @native
    def multiply_part(job, part):
        m, stride, x_stride = word(job, M), word(job, ROW_BYTES), word(job, R)
        splits, per_tile, length = _divide_k(job)
        strips, per_part = divide_strips(job)
        rest, first_strip = divmod(part, (strips + per_part - 1) // per_part)
        batch, split = divmod(rest, splits)
        first_strip *= per_part
        strips = min(per_part, strips - first_strip)
        # The last strip of the matrix can have fewer bytes. `fetch` copies them.
        full_strips = min(strips, stride // WIDTH - first_strip)
        size = strips * m * strip_bytes
        allocated = malloc(64 + size + 2 * strip_bytes + _BLOCK * (WIDTH + m))
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        ints = (allocated + 63) // 64 * 64
        scale = ints + size
        scratch = scale + strip_bytes
        copied = scratch + strip_bytes
        packed = copied + _BLOCK * WIDTH
        sums = sums_address(job, batch, split, first_strip)
        if per_tile:  # `add_part` adds up the int32 sums of a tile before they are scaled.
            ints = sums
            tile, within = divmod(split, per_tile)
            row = tile * word(job, TR) + within * length
            last = min(row + length, (tile + 1) * word(job, TR))
        else:
            row, last = split * length, min((split + 1) * length, word(job, R))
            for i in range(0, size, WIDTH):
                store(sums + i, zeros(1, 1))
        table = load_byte_table(word(job, TABLE))
        x = word(job, X) + batch * m * x_stride
        matrix = word(job, W) + batch * word(job, R) * stride
        block = _BLOCK if m > 1 else _BLOCK_OF_1
        ahead = max(block, (_AHEAD // stride + 3) // 4 * 4) * stride
        while row < last:
            tile = row // word(job, TR)
            tile_end = min(last, (tile + 1) * word(job, TR))
            start_sums(m, x + row, x_stride, tile_end - row, strips, ints)
            while row < tile_end:
                rows, w = min(block, tile_end - row), matrix + row * stride + first_strip * WIDTH
                _pack(x + row, x_stride, m, rows, packed)
                sweep(m, packed, w, stride, rows, full_strips, ints, table, w + ahead)
                if full_strips < strips:
                    fetch(job, matrix, first_strip + full_strips, row, rows, copied)
                    to = ints + full_strips * m * strip_bytes
                    left = strips - full_strips
                    sweep(m, packed, copied, WIDTH, rows, left, to, table, copied)
                row += rows
            if not per_tile:
                for i in range(strips):
                    at, strip = i * m * strip_bytes, first_strip + i
                    add_scaled_ints(job, batch, tile, strip, ints + at, sums + at, scale, scratch)
        free(allocated)

    @native
    def add_splits_of_tiles(job, batch, strip, sums, scale, scratch):
        """Write the f32 sums of a strip to `sums`: int32 sums of all splits, scaled tile by tile.

        `scale` and `scratch` are the addresses of memory for the scales of the strip.
        """
        splits, per_tile, _ = _divide_k(job)
        size = word(job, M) * strip_bytes
        for i in range(0, size, WIDTH):
            store(sums + i, zeros(1, 1))
        for tile in range(splits // per_tile):
            ints = sums_address(job, batch, tile * per_tile, strip)
            for split in range(1, per_tile):
                split_ints = sums_address(job, batch, tile * per_tile + split, strip)
                for i in range(0, size, WIDTH):
                    split_total = load_ints(split_ints + i, 0, 1, 1)
                    total = add_blocks(load_ints(ints + i, 0, 1, 1), split_total)
                    store_block(ints + i, 0, total)
            add_scaled_ints(job, batch, tile, strip, ints, sums, scale, scratch)

    @native
    def add_splits(job, batch, strip):
        """Add up the f32 sums of a strip over all splits of K, in place. Return their address."""
        sums = sums_address(job, batch, 0, strip)
        splits, _, _ = _divide_k(job)
        for split in range(1, splits):
            split_sums = sums_address(job, batch, split, strip)
            for i in range(0, word(job, M) * strip_bytes, WIDTH):
                add_scaled(sums + i, 0, load(split_sums + i, 1), splat(_ONE))
        return sums

    @native
    def add_part(job, part):
        # Add up the splits of `_ADDED_STRIPS` strips, and write the result. `part` counts only the
        # parts that add, from 0.
        m, c = word(job, M), word(job, C)
        _, per_tile, _ = _divide_k(job)
        strips, _ = divide_strips(job)
        batch, first = divmod(part, (strips + _ADDED_STRIPS - 1) // _ADDED_STRIPS)
        first *= _ADDED_STRIPS
        allocated = malloc(64 + (m + 2) * strip_bytes)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        scale = (allocated + 63) // 64 * 64
        scratch, has_one_scale = scale + strip_bytes, word(job, X_SCALES) == 1
        for strip in range(first, min(first + _ADDED_STRIPS, strips)):
            if per_tile:
                sums = scratch + strip_bytes
                add_splits_of_tiles(job, batch, strip, sums, scale, scratch)
            else:
                sums = add_splits(job, batch, strip)
            for row in range(batch * m, (batch + 1) * m):
                x_scale = load_f32(word(job, X_SCALE) + 4 * row) if has_one_scale else _ONE
                to = word(job, OUT) + 4 * (row * c + strip * width)
                write(sums, PANEL_ROW, x_scale, scratch, to, min(width, c - strip * width))
                sums += strip_bytes
        free(allocated)

    def work(job, part):
        if part < word(job, FIRST):
            multiply_part(job, part)
        else:
            add_part(job, part - word(job, FIRST))

    return JobFunctions(native(prepare), native(count), native(work), free_scratch)
