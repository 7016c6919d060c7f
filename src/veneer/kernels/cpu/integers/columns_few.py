"""Products of few rows of int8 activations with integer codes, where columns are contracted.

Rows of the matrix are read as they are stored, four at a time, and multiplied by vectors of
activations that are in the order of their codes. Meanwhile, the same place of the next four is
fetched. The lanes of int32 sums are scaled as a tile ends, and added up in f32; the sums of lanes
are what is looked for in the end.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import load_f32, malloc, prefetch_for_later, set_word, stack, store_f32, word
from ....native.simd.bytes import byte_table, copy_by_fields
from ....native.simd.floats import store_block, store_sums, zeros
from ....native.simd.integers import (
    add_scaled_ints,
    add_sums,
    dot_lanes,
    load_ints,
    spread,
    start_lanes,
    times,
    zero_ints,
)
from ..job import (
    BATCH,
    FAILED,
    OUT,
    ROW_BYTES,
    SCALE,
    SCRATCH,
    TABLE,
    TC,
    TR,
    X_SCALE,
    C,
    M,
    R,
    W,
    X,
)
from .blocks import LONGEST
from .panel import BITS, WIDTH, reader

#: How many rows of the matrix are multiplied at once.
ROWS = 4
#: How many rows of the matrix a part has; the last has the rest, too.
PART = 64
FEW = 16


def kernel(kind: str, offset: int) -> Any:
    """Returns (prepare, count, work), not compiled, and what says of a job whether they can."""
    bits, read = BITS[kind], reader(kind)
    fields = 8 // bits
    group = WIDTH * fields  # codes of a vector of bytes

    @native
    def fits(job):
        c, tile = word(job, C), word(job, TC)
        shared = word(job, TR)
        whole = c % group == 0 and word(job, R) >= ROWS and tile <= LONGEST
        whole = whole and (shared == 1 or (shared % ROWS == 0 and word(job, R) % ROWS == 0))
        split = group % tile == 0 and tile % (group // LANES) == 0
        return word(job, M) <= FEW and whole and (tile % group == 0 or split)

    @native
    def groups_of(job):
        """Groups of a row, and how many of them share int32 sums."""
        return word(job, C) // group, max(1, word(job, TC) // group)

    def prepare(job):
        c = word(job, C)
        groups, each = groups_of(job)
        rows = word(job, BATCH) * word(job, M)
        allocated = malloc(64 + rows * (c + groups // each * WIDTH))
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, allocated)
        to = (allocated + 63) // 64 * 64
        start = to + rows * c
        x = word(job, X)
        for _ in range(rows * (groups // each)):
            total = zero_ints()
            for _ in range(each):
                copy_by_fields(x, to, fields, WIDTH)
                for i in range(0, group, WIDTH):
                    total = add_sums(total, to + i, WIDTH)
                x += group
                to += group
            store_block(start, 0, times(total, np.int32(-offset)))
            start += WIDTH

    def multiply(m: int) -> Any:
        @native
        def multiply(x, start, place, table, products):
            c, tiles, each, w, row_bytes, scale, scales_apart, shift = place
            sums = zeros(m, ROWS)
            for _ in range(tiles):
                total = start_lanes(start, tiles * WIDTH, m, ROWS)
                for _ in range(each):
                    for row in range(ROWS):
                        prefetch_for_later(w + (row + ROWS) * row_bytes)
                    codes = load_ints(w, row_bytes, ROWS, 1)
                    for field in range(fields):
                        total = dot_lanes(total, x, c, read(table, codes, field * bits))
                        x += WIDTH
                    w += WIDTH
                sums = add_scaled_ints(sums, total, spread(scale, scales_apart, ROWS, shift))
                scale += 4 * (LANES >> shift)
                start += WIDTH
            store_sums(products, ROWS * 4, sums)

        return multiply

    multiply_1, multiply_2, multiply_4 = map(multiply, (1, 2, 4))

    def count(job):
        return word(job, BATCH) * max(1, word(job, R) // PART)

    def work(job, part):
        m, c, rows, row_bytes = word(job, M), word(job, C), word(job, R), word(job, ROW_BYTES)
        parts = max(1, rows // PART)
        batch, part = divmod(part, parts)
        first = part * PART
        last = rows if part + 1 == parts else first + PART
        groups, each = groups_of(job)
        tiles, row_scales, shared = groups // each, c // word(job, TC), word(job, TR)
        shift = 0  # a scale is for so many lanes, as a power of two
        while word(job, TC) * LANES > group << shift and 1 << shift < LANES:
            shift += 1
        x = (word(job, SCRATCH) + 63) // 64 * 64
        start = x + (word(job, BATCH) * c + batch * tiles * WIDTH) * m
        x += batch * m * c
        scales = word(job, SCALE) + batch * (rows // shared) * row_scales * 4
        apart = row_scales * 4 if shared == 1 else 0
        table = byte_table(word(job, TABLE))
        products = stack(64)
        for wanted in range(first, last, ROWS):
            n = min(wanted, last - ROWS)
            w = word(job, W) + (batch * rows + n) * row_bytes
            scale = scales + n // shared * row_scales * 4
            place = (c, tiles, each, w, row_bytes, scale, apart, shift)
            row = 0
            while row < m:
                at_x, at_start = x + row * c, start + row * tiles * WIDTH
                done = 4 if m - row >= 4 else 2 if m - row >= 2 else 1
                if done == 4:
                    multiply_4(at_x, at_start, place, table, products)
                elif done == 2:
                    multiply_2(at_x, at_start, place, table, products)
                else:
                    multiply_1(at_x, at_start, place, table, products)
                for i in range(done):
                    index = batch * m + row + i
                    x_scale = load_f32(word(job, X_SCALE) + 4 * index)
                    to = word(job, OUT) + 4 * (index * rows + n)
                    for j in range(ROWS):
                        store_f32(to + 4 * j, load_f32(products + 4 * (i * ROWS + j)) * x_scale)
                row += done

    return prepare, count, work, fits
