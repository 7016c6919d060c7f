"""Products of few rows of int8 activations with integer codes, where columns are contracted.

Rows of the matrix are read as they are stored, four at a time, and multiplied by vectors of
activations that are in the order of their codes. Meanwhile, the same place of rows some way on is
fetched, and of scales. The lanes of int32 sums are scaled as a tile ends, and added up in f32; the
sums of lanes are what is looked for in the end. A row may end within a vector: of what follows,
nothing is read, and activations are 0 there.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import (
    free,
    load_f32,
    malloc,
    prefetch,
    set_word,
    stack,
    store_f32,
    word,
)
from ....native.simd.bytes import copy_by_fields, load_byte_table
from ....native.simd.floats import (
    fma,
    load,
    scale_block,
    splat,
    store,
    store_block,
    store_four_sums,
    zeros,
)
from ....native.simd.integers import (
    add_byte_sums,
    add_inner_bytes,
    add_scaled_ints,
    broadcast_vectors,
    load_first_ints,
    load_floats,
    load_ints,
    load_repeated,
    multiply_ints,
    to_floats,
    zero_ints,
)
from ...common.kinds import INTEGER_PLANES
from ...common.limits import ROWS
from ..operands.codes import load_table
from ..operands.job import (
    BATCH,
    FAILED,
    MINIMUM,
    OUT,
    ROW_BYTES,
    SCALE,
    SCRATCH,
    TABLE,
    TC,
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
    contiguous_part,
    free_scratch,
)
from ..operands.minima import build_minimum_adder, tile_sums_bytes, write_scaled_tile_sums
from ..operands.planes import load_plane_fields
from ..operands.scales import (
    STACK_BYTES,
    copy_padded,
    has_minima,
    locate_tile_values,
    prefetch_tile_values,
    read_tile_values,
)
from .panel import BITS, WIDTH, reader
from .panel import offset as code_offset

#: How many rows of the matrix a part has; the last has the rest, too.
PART = 64
#: Bytes on, or a few more, is what is fetched: so much is read in the time that memory takes.
_AHEAD = 4096
#: All lanes, as a power of two.
_ALL_LANES = LANES.bit_length() - 1
#: Codes of a group, at most.
_GROUP = 8 * WIDTH
_VECTOR, _FOUR = 4 * LANES, 4 * LANES * ROWS


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    offset = code_offset(kind)
    bits, in_planes = BITS[kind], kind in INTEGER_PLANES
    fields = 1 if in_planes else 8 // bits
    group = WIDTH * fields  # codes of a vector of bytes
    group_bytes = group * bits // 8
    LANE = 4 * fields  # and of a lane of it

    if in_planes:
        read = native(lambda table, codes, shift: codes)
        table_of = native(lambda job: load_table(word(job, TABLE)))

        def loader(rows):
            return native(
                lambda w, next_row, table: load_plane_fields(w, next_row, rows, bits, table)
            )

        @native
        def offset_of(job):
            return np.int32(load_f32(word(job, TABLE) + 4))

    else:
        read = reader(kind)
        table_of = native(lambda job: load_byte_table(word(job, TABLE)))

        def loader(rows):
            return native(lambda w, next_row, table: load_ints(w, next_row, rows, 1))

        offset_of = native(lambda job: np.int32(offset))

    @native
    def groups_of(job):
        """Groups of a row, of which the last may have fewer codes; how many share int32 sums."""
        return (word(job, C) + group - 1) // group, (word(job, TC) + group - 1) // group

    @native
    def x_step(job):
        """Bytes from a scale of activations to that of the next tile."""
        return 4 if word(job, X_SCALES) > 1 else 0

    def prepare(job):
        c = word(job, C)
        groups, each = groups_of(job)
        rows = word(job, BATCH) * word(job, M)
        size = groups * group + groups // each * WIDTH
        size += tile_sums_bytes(job) if has_minima(job) else 0
        allocated = malloc(64 + rows * size)
        if allocated == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, allocated)
        to = (allocated + 63) // 64 * 64
        start, last = to + rows * groups * group, stack(_GROUP)
        for row in range(rows):
            x, left = word(job, X) + row * c, c
            for _ in range(groups // each):
                total = zero_ints()
                for _ in range(each):
                    if left < group:
                        copy_padded(last, x, left, group)
                        x = last
                    copy_by_fields(x, to, fields, WIDTH)
                    for i in range(0, group, WIDTH):
                        total = add_byte_sums(total, to + i, WIDTH)
                    x += group
                    to += group
                    left -= group
                store_block(start, 0, multiply_ints(total, np.int32(-offset_of(job))))
                start += WIDTH
        if has_minima(job):
            for row in range(rows):
                scale, next = word(job, X_SCALE) + 4 * row * word(job, X_SCALES), x_step(job)
                to = start + row * tile_sums_bytes(job)
                write_scaled_tile_sums(job, word(job, X) + row * c, scale, next, to)

    @native
    def add_products(total, x, next_x, codes, table):
        """Adds the products of a vector of codes in each row."""
        for field in range(fields):
            total = add_inner_bytes(
                total, x + field * WIDTH, next_x, read(table, codes, field * bits)
            )
        return total

    def summer(m: int, together: int) -> Any:
        """Makes what multiplies m rows of x by some rows of the matrix: sums, in lanes."""
        add_minima, load_codes = build_minimum_adder(m, together), loader(together)

        @native
        def add_group(total, x, next_x, w, row_bytes, later, table):
            for row in range(together):
                prefetch(w + row * row_bytes + later)
            return add_products(total, x, next_x, load_codes(w, row_bytes, table), table)

        if m == 1:  # then scales are multiplied by those of x already

            @native
            def add_tile(sums, total, of_x, x_scale, scales, lanes):
                return fma(to_floats(total), scales, sums)

        else:

            @native
            def add_tile(sums, total, of_x, x_scale, scales, lanes):
                x_scales = load_repeated(x_scale, of_x[1], m, of_x[2], lanes)
                return add_scaled_ints(sums, total, x_scales, scales)

        @native
        def summed(x, start, sums_of_x, of_x, place, of_scales, table):
            next_x, tiles, each, left, w, row_bytes, later = place
            scale, minimum, apart, shift, count, next_of_x = of_scales
            x_scale, next_x_scale = of_x[0], of_x[3]
            next_start, next_scale = tiles * WIDTH, 4 * (LANES >> shift)
            sums = zeros(m, together)
            if minimum != 0:
                sums = add_minima(sums, sums_of_x, next_of_x, minimum, apart, count)
            for _ in range(tiles - 1 if left > 0 else tiles):
                total = broadcast_vectors(start, next_start, m, together)
                for _ in range(each):
                    total = add_group(total, x, next_x, w, row_bytes, later, table)
                    x, w = x + group, w + group_bytes
                scales = load_repeated(scale, apart, together, shift, LANES)
                sums = add_tile(sums, total, of_x, x_scale, scales, LANES)
                scale, x_scale = scale + next_scale, x_scale + next_x_scale
                start += WIDTH
            if left > 0:  # lanes of the last group
                total = broadcast_vectors(start, next_start, m, together)
                for _ in range(each - 1):
                    total = add_group(total, x, next_x, w, row_bytes, later, table)
                    x, w = x + group, w + group_bytes
                codes = load_first_ints(w, row_bytes, together, left)
                total = add_products(total, x, next_x, codes, table)
                scales = load_repeated(scale, apart, together, shift, left)
                sums = add_tile(sums, total, of_x, x_scale, scales, left)
            return sums

        return summed

    summed_1 = summer(1, 1)

    @native
    def multiply_1(x, start, sums_of_x, of_x, place, of_scales, table, y, next_y):
        """A row of the matrix after the other, in the order of memory: it is read sooner so."""
        next_x, tiles, each, left, w, row_bytes, later = place
        scale, minimum, apart, shift, count, next_of_x = of_scales
        sums = stack(_FOUR)
        for row in range(ROWS):
            place = next_x, tiles, each, left, w, row_bytes, later
            of_scales = scale, minimum, apart, shift, count, next_of_x
            sum = summed_1(x, start, sums_of_x, of_x, place, of_scales, table)
            store(sums + row * _VECTOR, sum)
            w, scale = w + row_bytes, scale + apart
            minimum = minimum + apart if minimum != 0 else 0
        store_four_sums(y, next_y, load_floats(sums, _FOUR, 1, ROWS))

    def multiplier(m: int) -> Any:
        summed = summer(m, ROWS)

        @native
        def multiply(x, start, sums_of_x, of_x, place, of_scales, table, y, next_y):
            store_four_sums(y, next_y, summed(x, start, sums_of_x, of_x, place, of_scales, table))

        return multiply

    multiply_2, multiply_4 = map(multiplier, (2, 4))

    @native
    def scale_by_x(job, batch, scales, count):
        """Multiplies rows of scales, so many numbers, by the scales of the only row of x."""
        size = word(job, X_SCALES)
        x_scale = word(job, X_SCALE) + 4 * batch * size
        if size == 1:
            by = splat(load_f32(x_scale))
            for i in range(0, count, LANES):
                store(scales + 4 * i, scale_block(load(scales + 4 * i, 1), by))
            return
        for at in range(scales, scales + 4 * count, 4 * size):
            for i in range(0, size // LANES * 4 * LANES, _VECTOR):
                store(at + i, scale_block(load(at + i, 1), load(x_scale + i, 1)))
            for i in range(size // LANES * 4 * LANES, 4 * size, 4):
                store_f32(at + i, load_f32(at + i) * load_f32(x_scale + i))

    def count(job):
        return word(job, BATCH) * max(1, word(job, R) // PART)

    @native
    def shift_of(job):
        """A scale is for so many lanes, as a power of two."""
        tile, shift = word(job, TC), 0
        while LANE << shift < tile and 1 << shift < LANES:
            shift += 1
        return shift

    def work(job, part):
        m, rows, row_bytes = word(job, M), word(job, R), word(job, ROW_BYTES)
        parts = max(1, rows // PART)
        batch, part = divmod(part, parts)
        part = contiguous_part(part, parts, word(job, THREADS))
        first = part * PART
        last = rows if part + 1 == parts else first + PART
        groups, each = groups_of(job)
        tiles, next_x, shared = groups // each, groups * group, word(job, TR)
        row_scales, left = word(job, C) // word(job, TC), word(job, C) % group // LANE
        all_x = word(job, BATCH) * m
        x = (word(job, SCRATCH) + 63) // 64 * 64
        start = x + all_x * next_x + batch * m * tiles * WIDTH
        next_of_x = tile_sums_bytes(job)
        sums_of_x = x + all_x * (next_x + tiles * WIDTH) + batch * m * next_of_x
        x += batch * m * next_x
        # Scales are read beforehand, all together: they are few, but for each row of the matrix.
        row_of_scales = (batch * rows + first) // shared
        numbers = ((batch * rows + last - 1) // shared + 1 - row_of_scales) * row_scales
        size = 4 * numbers + WIDTH
        needed = 2 * size if has_minima(job) else size
        scales = stack(STACK_BYTES)
        if needed > STACK_BYTES:
            scales = malloc(needed)
        if scales == 0:
            set_word(job, FAILED, 1)
            return
        read_tile_values(job, SCALE, row_of_scales, 0, numbers, scales)
        to_minimum = 0  # from a scale to the minimum of the same tile
        if has_minima(job):
            to_minimum = size
            read_tile_values(job, MINIMUM, row_of_scales, 0, numbers, scales + size)
        if m == 1:
            scale_by_x(job, batch, scales, numbers)
        ahead = (_AHEAD // row_bytes + ROWS) // ROWS * ROWS
        shift, apart = shift_of(job), row_scales * 4 if shared == 1 else 0
        x_apart, x_shift, next_x_scale = 4 * word(job, X_SCALES), shift, 4 * (LANES >> shift)
        if word(job, X_SCALES) == 1:  # for all lanes of all tiles
            x_shift, next_x_scale = _ALL_LANES, 0
        table, stored = table_of(job), locate_tile_values(job)
        for wanted in range(first, last, ROWS):
            n = min(wanted, last - ROWS)
            number = batch * rows + n
            w = word(job, W) + number * row_bytes
            later = ahead * row_bytes
            prefetch_tile_values(stored, number + PART, ROWS)
            at = (number if shared == 1 else number // shared) - row_of_scales
            scale = scales + at * row_scales * 4
            minimum = scale + to_minimum if to_minimum else 0
            of_scales = (scale, minimum, apart, shift, row_scales, next_of_x)
            place = (next_x, tiles, each, left, w, row_bytes, later)
            row = 0
            while row < m:
                few = 4 if m - row >= 4 else min(m, 2)
                row = min(row, m - few)  # one that is left is multiplied with the one before it
                at_x, at_start = x + row * next_x, start + row * tiles * WIDTH
                at_sums, index = sums_of_x + row * next_of_x, batch * m + row
                y, next_y = word(job, OUT) + 4 * (index * rows + n), 4 * rows
                x_scale = word(job, X_SCALE) + index * x_apart
                of_x = (x_scale, x_apart, x_shift, next_x_scale)
                if few == 4:
                    multiply_4(at_x, at_start, at_sums, of_x, place, of_scales, table, y, next_y)
                elif few == 2:
                    multiply_2(at_x, at_start, at_sums, of_x, place, of_scales, table, y, next_y)
                else:
                    multiply_1(at_x, at_start, at_sums, of_x, place, of_scales, table, y, next_y)
                row += few
        if needed > STACK_BYTES:
            free(scales)

    return JobFunctions(native(prepare), native(count), native(work), free_scratch)
