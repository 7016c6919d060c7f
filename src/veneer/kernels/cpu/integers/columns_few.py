"""Multiply a few rows of int8 activations by integer codes, with columns contracted.

Each row of the matrix is read once, in the order of memory. A part has 64 rows. Four of them at a
time are multiplied by up to four rows of x: a vector of codes by a vector of activations, which
`prepare` has brought into the order of the codes. The sums are in registers, one vector for each
pair of rows. Their int32 lanes are multiplied by the scales when a tile ends, and added in f32.
After the last tile, the lanes of each vector are added up. Meanwhile, later rows are prefetched.
A row can end within a vector. Nothing beyond its end is read.
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.memory import free, load_f32, malloc, prefetch, set_word, stack, store_f32, word
from ....native.simd import LANES
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
    copy_by_fields,
    load_byte_table,
    load_first_ints,
    load_floats,
    load_ints,
    load_repeated,
    multiply_ints,
    to_floats,
    zero_ints,
)
from ...common.problem import BITS, INTEGER_PLANES
from ...common.table import ROWS
from ..decoding import load_plane_fields, load_table
from ..job import (
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
from ..scales import (
    STACK_BYTES,
    build_minimum_adder,
    copy_padded,
    has_minima,
    locate_tile_values,
    prefetch_tile_values,
    read_tile_values,
    tile_sums_bytes,
    write_scaled_tile_sums,
)
from .panels import WIDTH, build_reader, code_offset

#: The rows of the matrix in a part. The last part also has the rest.
PART = 64
#: Prefetch the first rows that are at least this many bytes after the current ones.
_AHEAD = 4096
#: The binary logarithm of `LANES`: a scale with this shift is for all lanes.
_ALL_LANES = LANES.bit_length() - 1
#: The most codes of a group.
_GROUP = 8 * WIDTH
_VECTOR, _ROWS_OF_VECTORS = 4 * LANES, 4 * LANES * ROWS


def _fields_of(kind: str) -> int:
    # Bit planes are decoded to one code per byte.
    return 1 if kind in INTEGER_PLANES else 8 // BITS[kind]


def _build_products(kind: str) -> list[Any]:
    """Return three functions, which multiply 1, 2 and 4 rows of x by `ROWS` rows of the matrix.

    Their arguments are tuples, because Numba functions have no other structures. "Bytes between
    rows" are the distance from one row to the next:

    - `x`: the address of the reordered activations, the bytes between rows, the address of the
      vectors that int32 sums begin with, and the address of the sums over tiles, with the bytes
      between their rows.
    - `w`: the address of the codes, the bytes between rows, and the bytes to prefetch ahead.
    - `x_scales`: the address of the scales, the bytes between rows, the binary logarithm of the
      lanes per scale, and the bytes between tiles.
    - `w_scales`: the address of the scales, the address of the minima or 0, the bytes between rows,
      the binary logarithm of the lanes per scale, and the scales per row.
    - `tiling`: the tiles per row, the groups per tile, and the lanes of the last group if not all.
    - `table`: the table of codes. `y`, `next_y`: the address of the result, and the bytes between
      its rows.
    """
    bits, fields, in_planes = BITS[kind], _fields_of(kind), kind in INTEGER_PLANES
    group = WIDTH * fields
    group_bytes = group * bits // 8
    read = native(lambda table, codes, shift: codes) if in_planes else build_reader(kind)

    def build_loader(rows: int) -> Any:
        if in_planes:
            return native(lambda w, stride, table: load_plane_fields(w, stride, rows, bits, table))
        return native(lambda w, stride, table: load_ints(w, stride, rows, 1))

    @native
    def add_products(total, x, next_x, codes, table):
        """Return `total` plus the products of rows of x with a group of codes of each row of W.

        A group is a vector of bytes of codes. Rows of x are `next_x` bytes apart.
        """
        for field in range(fields):
            field_codes = read(table, codes, field * bits)
            total = add_inner_bytes(total, x + field * WIDTH, next_x, field_codes)
        return total

    def build_sum(m: int, rows: int) -> Any:
        # The sums of a pair of rows are in the lanes of a vector of f32.
        add_minima, load_codes = build_minimum_adder(m, rows), build_loader(rows)

        @native
        def add_group(total, x, next_x, w, row_bytes, later, table):
            for row in range(rows):
                prefetch(w + row * row_bytes + later)
            return add_products(total, x, next_x, load_codes(w, row_bytes, table), table)

        if m == 1:  # `_scale_by_x` has multiplied the scales of W by the scales of x

            @native
            def add_tile(sums, total, x_scales, x_scale, scales, lanes):
                return fma(to_floats(total), scales, sums)

        else:

            @native
            def add_tile(sums, total, x_scales, x_scale, scales, lanes):
                row_scales = load_repeated(x_scale, x_scales[1], m, x_scales[2], lanes)
                return add_scaled_ints(sums, total, row_scales, scales)

        @native
        def multiply_in_lanes(x, w, x_scales, w_scales, tiling, table):
            group_x, next_x, start, x_sums, next_x_sums = x
            group_w, row_bytes, later = w
            scale, minimum, stride, shift, count = w_scales
            tiles, groups, left = tiling
            x_scale, next_x_scale = x_scales[0], x_scales[3]
            next_start, next_scale = tiles * WIDTH, 4 * (LANES >> shift)
            sums = zeros(m, rows)
            if minimum != 0:
                sums = add_minima(sums, x_sums, next_x_sums, minimum, stride, count)
            for _ in range(tiles - 1 if left > 0 else tiles):
                total = broadcast_vectors(start, next_start, m, rows)
                for _ in range(groups):
                    total = add_group(total, group_x, next_x, group_w, row_bytes, later, table)
                    group_x, group_w = group_x + group, group_w + group_bytes
                scales = load_repeated(scale, stride, rows, shift, LANES)
                sums = add_tile(sums, total, x_scales, x_scale, scales, LANES)
                scale, x_scale = scale + next_scale, x_scale + next_x_scale
                start += WIDTH
            if left > 0:  # The last group of each row ends within a vector.
                total = broadcast_vectors(start, next_start, m, rows)
                for _ in range(groups - 1):
                    total = add_group(total, group_x, next_x, group_w, row_bytes, later, table)
                    group_x, group_w = group_x + group, group_w + group_bytes
                codes = load_first_ints(group_w, row_bytes, rows, left)
                total = add_products(total, group_x, next_x, codes, table)
                scales = load_repeated(scale, stride, rows, shift, left)
                sums = add_tile(sums, total, x_scales, x_scale, scales, left)
            return sums

        return multiply_in_lanes

    multiply_in_lanes_1 = build_sum(1, 1)

    @native
    def multiply_1(x, w, x_scales, w_scales, tiling, table, y, next_y):
        # One row after the other: with a single row of x, sequential reads are faster.
        row_w, row_bytes, later = w
        scale, minimum, stride, shift, count = w_scales
        sums = stack(_ROWS_OF_VECTORS)
        for row in range(ROWS):
            w, w_scales = (row_w, row_bytes, later), (scale, minimum, stride, shift, count)
            lanes = multiply_in_lanes_1(x, w, x_scales, w_scales, tiling, table)
            store(sums + row * _VECTOR, lanes)
            row_w, scale = row_w + row_bytes, scale + stride
            minimum = minimum + stride if minimum != 0 else 0
        store_four_sums(y, next_y, load_floats(sums, _ROWS_OF_VECTORS, 1, ROWS))

    def build_multiply(m: int) -> Any:
        multiply_in_lanes = build_sum(m, ROWS)

        @native
        def multiply(x, w, x_scales, w_scales, tiling, table, y, next_y):
            sums = multiply_in_lanes(x, w, x_scales, w_scales, tiling, table)
            store_four_sums(y, next_y, sums)

        return multiply

    return [multiply_1, build_multiply(2), build_multiply(4)]


@native
def _scale_by_x(job, batch, scales, count):
    """Multiply `count` f32 scales of the matrix, in place, by the scales of the single row of x.

    A row of x has one scale, or as many as a row of the matrix.
    """
    size = word(job, X_SCALES)
    x_scale = word(job, X_SCALE) + 4 * batch * size
    if size == 1:
        factor = splat(load_f32(x_scale))
        for i in range(0, count, LANES):
            store(scales + 4 * i, scale_block(load(scales + 4 * i, 1), factor))
        return
    for row in range(scales, scales + 4 * count, 4 * size):
        for i in range(0, size // LANES * 4 * LANES, _VECTOR):
            store(row + i, scale_block(load(row + i, 1), load(x_scale + i, 1)))
        for i in range(size // LANES * 4 * LANES, 4 * size, 4):
            store_f32(row + i, load_f32(row + i) * load_f32(x_scale + i))


def build(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of the matrix, such as "lookup4" (see `Codes.kind`).
    """
    fields, offset = _fields_of(kind), code_offset(kind)
    group = WIDTH * fields  # the codes of a vector of bytes
    LANE = 4 * fields  # the codes of a 32-bit lane
    multiply_1, multiply_2, multiply_4 = _build_products(kind)

    if kind in INTEGER_PLANES:
        # The second number of the table is the offset of the codes: see `planes.py`.
        table_of = native(lambda job: load_table(word(job, TABLE)))
        offset_of = native(lambda job: np.int32(load_f32(word(job, TABLE) + 4)))
    else:
        table_of = native(lambda job: load_byte_table(word(job, TABLE)))
        offset_of = native(lambda job: np.int32(offset))

    @native
    def count_groups(job):
        """Return the number of groups per row and per tile. A group is a vector of bytes of codes.

        The last group of a row may have fewer codes. If tiles are smaller than a group, the lanes
        of a group have several scales, and each group counts as one tile.
        """
        return (word(job, C) + group - 1) // group, (word(job, TC) + group - 1) // group

    @native
    def log2_lanes_per_scale(job):
        tile, shift = word(job, TC), 0
        while LANE << shift < tile and 1 << shift < LANES:
            shift += 1
        return shift

    def prepare(job):
        # SCRATCH has the reordered activations `[BATCH, M, groups * group]`, the first int32 sums,
        # a vector per tile of each row, and if there are minima, the sums over tiles.
        c = word(job, C)
        groups, per_tile = count_groups(job)
        rows = word(job, BATCH) * word(job, M)
        size = groups * group + groups // per_tile * WIDTH
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
            for _ in range(groups // per_tile):
                total = zero_ints()
                for _ in range(per_tile):
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
            scales = word(job, X_SCALES)
            next_scale = 4 if scales > 1 else 0
            for row in range(rows):
                scale = word(job, X_SCALE) + 4 * row * scales
                to = start + row * tile_sums_bytes(job)
                write_scaled_tile_sums(job, word(job, X) + row * c, scale, next_scale, to)

    def count(job):
        return word(job, BATCH) * max(1, word(job, R) // PART)

    def work(job, part):
        m, rows, row_bytes = word(job, M), word(job, R), word(job, ROW_BYTES)
        parts = max(1, rows // PART)
        batch, part = divmod(part, parts)
        part = contiguous_part(part, parts, word(job, THREADS))
        first = part * PART
        last = rows if part + 1 == parts else first + PART

        groups, per_tile = count_groups(job)
        tiles, next_x, shared = groups // per_tile, groups * group, word(job, TR)
        row_scales = word(job, C) // word(job, TC)
        tiling = tiles, per_tile, word(job, C) % group // LANE
        all_x = word(job, BATCH) * m
        x = (word(job, SCRATCH) + 63) // 64 * 64
        start = x + all_x * next_x + batch * m * tiles * WIDTH
        next_x_sums = tile_sums_bytes(job)
        x_sums = x + all_x * (next_x + tiles * WIDTH) + batch * m * next_x_sums
        x += batch * m * next_x

        # Read all scales of the part at once. A row of the matrix has few.
        first_scales = (batch * rows + first) // shared
        scale_count = ((batch * rows + last - 1) // shared + 1 - first_scales) * row_scales
        size = 4 * scale_count + WIDTH
        needed = 2 * size if has_minima(job) else size
        scales = stack(STACK_BYTES)
        if needed > STACK_BYTES:
            scales = malloc(needed)
        if scales == 0:
            set_word(job, FAILED, 1)
            return
        read_tile_values(job, SCALE, first_scales, 0, scale_count, scales)
        to_minimum = 0  # the bytes from a scale to the minimum of its tile, or 0
        if has_minima(job):
            to_minimum = size
            read_tile_values(job, MINIMUM, first_scales, 0, scale_count, scales + size)
        if m == 1:
            _scale_by_x(job, batch, scales, scale_count)

        ahead = (_AHEAD // row_bytes + ROWS) // ROWS * ROWS
        shift, stride = log2_lanes_per_scale(job), row_scales * 4 if shared == 1 else 0
        next_x_scale, x_shift, next_x_tile = 4 * word(job, X_SCALES), shift, 4 * (LANES >> shift)
        if word(job, X_SCALES) == 1:
            x_shift, next_x_tile = _ALL_LANES, 0
        table, stored = table_of(job), locate_tile_values(job)
        for next_row in range(first, last, ROWS):
            n = min(next_row, last - ROWS)  # compute rows before the last ROWS rows twice
            w_row = batch * rows + n
            w = word(job, W) + w_row * row_bytes, row_bytes, ahead * row_bytes
            prefetch_tile_values(stored, w_row + PART, ROWS)
            scale_row = (w_row if shared == 1 else w_row // shared) - first_scales
            scale = scales + scale_row * row_scales * 4
            minimum = scale + to_minimum if to_minimum else 0
            w_scales = scale, minimum, stride, shift, row_scales
            row = 0
            while row < m:
                few = 4 if m - row >= 4 else min(m, 2)
                row = min(row, m - few)  # compute the row before a single last row twice
                row_x, row_start = x + row * next_x, start + row * tiles * WIDTH
                x_place = row_x, next_x, row_start, x_sums + row * next_x_sums, next_x_sums
                x_row = batch * m + row
                x_scale = word(job, X_SCALE) + x_row * next_x_scale
                x_scales = x_scale, next_x_scale, x_shift, next_x_tile
                y, next_y = word(job, OUT) + 4 * (x_row * rows + n), 4 * rows
                if few == 4:
                    multiply_4(x_place, w, x_scales, w_scales, tiling, table, y, next_y)
                elif few == 2:
                    multiply_2(x_place, w, x_scales, w_scales, tiling, table, y, next_y)
                else:
                    multiply_1(x_place, w, x_scales, w_scales, tiling, table, y, next_y)
                row += few
        if needed > STACK_BYTES:
            free(scales)

    return JobFunctions(native(prepare), native(count), native(work), free_scratch)
