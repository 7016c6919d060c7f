"""Multiply few rows of activations x by a stored matrix W, and contract its columns: `x @ W.T`.

Reading and decoding W takes most of the time.

The kernel loops over blocks of up to `MOST` rows of x, over ranges of panels of x that fit into the
first cache, and over groups of rows of W. For a group, sums of all pairs of rows are vectors in
registers. Each panel of these rows of W is decoded in registers and multiplied by the same panel of
all rows of the block. Sums go to memory between ranges, and their lanes are added up at the end.

At the end of this module is another kernel, for one row of x, as in decoding. It needs neither
blocks nor sums in memory. `benchmarks/cpu_variants.py` compares the two kernels.
"""

import functools
from typing import Any

from ....native.functions import native
from ....native.memory import (
    free,
    load_f32,
    malloc,
    prefetch_for_later,
    set_word,
    stack,
    store_f32,
    word,
)
from ....native.simd import LANES, REGISTERS
from ....native.simd.floats import load, store, store_four_sums, store_sums, zeros
from ..decoding import load_table
from ..job import (
    FAILED,
    MINIMUM,
    NEXT_ROW,
    OUT,
    ROW_BYTES,
    SCALE,
    TABLE,
    TC,
    TR,
    C,
    JobFunctions,
    M,
    R,
    row_address,
)
from ..scales import (
    STACK_BYTES,
    build_minimum_adder,
    build_stored_minimum_adder,
    copy_padded,
    has_minima,
    is_f32,
    locate_tile_values,
    prefetch_tile_values,
    read_tile_values,
)
from .panels import (
    BYTES,
    COLUMNS,
    FOLDED_INTO_X,
    MOST,
    ONE_PER_PANEL,
    PART_ROWS,
    PER_VECTOR,
    PREFETCH_BYTES,
    VECTORS,
    build_functions,
    build_panel_x,
    count_block_rows,
    find_lane_tiles,
    fine_strategy,
    load_block,
    load_panel_scales,
    multiply_panels,
    scale_layout,
)

#: Rows of W in a group, by the rows of x in a block: as many as registers hold sums of. They divide
#: `PART_ROWS`.
_GROUP = {2: 4, 4: 4, 8: 3} if REGISTERS == 32 else {2: 3, 4: 2}
_GROUP_OF_2, _GROUP_OF_4, _GROUP_OF_MOST = (_GROUP[min(rows, MOST)] for rows in (2, 4, 8))
#: Bytes of x in a range of panels. The first cache holds them and some rows of W.
_X_BYTES = 32 * 1024
_VECTOR = 4 * LANES
#: Bytes of the scales of a row of W in a range, for two rows of x and one scale per 4 columns.
_SCALE_BYTES = _X_BYTES // 8 + _VECTOR
#: The most bytes of the sums of a part. Each of the last rows takes the space of a group.
_SUMS_BYTES = _VECTOR * max(
    rows * (PART_ROWS + group * (group - 1)) for rows, group in _GROUP.items()
)


def build(kind: str) -> JobFunctions:
    """Return the native functions of the kernel for a few rows of x, for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`). A single row
    of x is padded to two rows.
    """
    prepare, x_address, x_sums_address, fold = build_panel_x(kind)
    add_products = _build_range_product(kind)
    PANEL, X_PANEL = COLUMNS[kind], 4 * COLUMNS[kind]
    FOLDED_BYTES = max(_X_BYTES, X_PANEL * MOST)

    @native
    def multiply_block(job, rows, batch, first, last, m, strategy):
        """Multiply `rows` rows of x, from row `m`, by rows `first` to `last` of matrix `batch`.

        `strategy` is how scales are applied, such as ONE_PER_PANEL (see `panels.py`). The products
        are written to the result of the job.
        """
        sums, folded, unit_scale = stack(_SUMS_BYTES), stack(FOLDED_BYTES), stack(64)
        store_f32(unit_scale, 1)
        group = _count_group_rows(rows)
        groups = (last - first) // group + (last - first) % group
        for i in range(rows * group * groups):
            store(sums + _VECTOR * i, zeros(1, 1))
        panels = (word(job, C) + PANEL - 1) // PANEL
        range_panels = max(1, _X_BYTES // (X_PANEL * rows))
        tile_row = (batch * word(job, R) + first) // word(job, TR)
        for begin in range(0, panels, range_panels):
            end = min(begin + range_panels, panels)
            x = x_address(job, batch, m) + X_PANEL * rows * begin
            if strategy == FOLDED_INTO_X:
                fold(job, folded, x, rows, tile_row, begin, end)
                x = folded
            add_products(
                job, rows, sums, x, batch, first, last, begin, end, tile_row, unit_scale, strategy
            )
        if has_minima(job):
            _add_minima(job, rows, sums, x_sums_address(job, batch, m), first, last, tile_row)
        _write_results(job, rows, sums, batch, first, last, m)

    @native
    def multiply_rows(job, batch, first, last, strategy):
        rows = word(job, M)
        for m in range(0, rows, MOST):
            multiply_block(job, count_block_rows(rows, m), batch, first, last, m, strategy)

    return build_functions(kind, prepare, multiply_rows)


def _build_range_product(kind: str) -> Any:
    """Return a function that multiplies rows of x by rows of W, in a range of their columns.

    The range consists of panels, which are a few vectors of neighboring columns: see `panels.py`.
    """
    PANEL, W_BYTES, FIELDS = COLUMNS[kind], BYTES[kind], VECTORS[kind]
    TAIL, FINE = W_BYTES * max(_GROUP.values()), fine_strategy(kind)
    X_PANEL, ROW_SCALE_BYTES = 4 * PANEL, _SCALE_BYTES
    ALL_SCALE_BYTES = ROW_SCALE_BYTES * max(_GROUP.values())
    (coarse_2, coarse_4, coarse_most), (fine_2, fine_4, fine_most) = (
        [_build_group_product(kind, min(rows, MOST), strategy) for rows in (2, 4, 8)]
        for strategy in (ONE_PER_PANEL, FINE)
    )

    @native
    def add_products(
        job, rows, sums, x, batch, first, last, begin, end, tile_row, unit_scale, strategy
    ):
        """Add the products of a block of x and rows `first` to `last` of W to vectors of sums.

        Only panels `begin` to `end` of the columns are multiplied. `sums` is the address of the
        vectors: W is divided into groups of rows, and each group has a vector per pair of a row of
        x and a row of W. The scales of row `first` are in row `tile_row` of the array of scales. If
        x was multiplied by scales, the scale at `unit_scale`, 1.0, is used instead.
        """
        tail, numbers = stack(TAIL), stack(ALL_SCALE_BYTES)
        row_bytes, stride = word(job, ROW_BYTES), word(job, NEXT_ROW)
        columns = word(job, C)
        tile, step = word(job, TC), 1 if word(job, TR) == 1 else 0  # rows of tiles per row of W
        tiles = columns // tile
        first_tile = begin * PANEL // tile
        range_tiles = (min(end * PANEL, columns) + tile - 1) // tile - first_tile
        lane_tiles, layout = find_lane_tiles(FIELDS, tile), scale_layout(job, strategy)
        w, located = row_address(job, batch, first), locate_tile_values(job)
        while first < last:
            count = _count_group_rows(rows)
            next_row, scale, next_scale = stride, unit_scale, 0
            if first + count > last:  # Take the last rows one by one: a group repeats one row.
                count, next_row = 1, 0
            if strategy != FOLDED_INTO_X and is_f32(job, SCALE):
                scale, next_scale = word(job, SCALE) + 4 * tiles * tile_row, 4 * tiles * step
            elif strategy != FOLDED_INTO_X:
                # `load_panel_scales` counts tiles from the start of a row, and must find tile
                # `first_tile` at `numbers`.
                tile_rows = (count - 1) * step + 1
                scale, next_scale = numbers - 4 * first_tile, ROW_SCALE_BYTES * step
                if range_tiles == tiles:  # The scales of consecutive rows are contiguous.
                    next_scale = 4 * tiles * step
                    read_tile_values(job, SCALE, tile_row, 0, tile_rows * tiles, numbers)
                else:
                    for c in range(tile_rows):
                        to = numbers + c * ROW_SCALE_BYTES
                        read_tile_values(job, SCALE, tile_row + c, first_tile, range_tiles, to)
            if count == 1:
                next_scale = 0
            if begin == 0:
                prefetch_tile_values(located, tile_row + PART_ROWS, count)
            full_panels = columns // PANEL
            panel = begin
            while panel < end:
                stop, w_panel = min(full_panels, end), w + W_BYTES * panel
                if panel >= full_panels:  # Copy the last panel and pad it with zeros.
                    stop, w_panel = panel + 1, tail
                    for c in range(_count_group_rows(rows)):
                        row, left = w + c * next_row + W_BYTES * panel, row_bytes - W_BYTES * panel
                        copy_padded(tail + c * W_BYTES, row, left, W_BYTES)
                x_panel = x + X_PANEL * rows * (panel - begin)
                next_w_panel = W_BYTES if panel >= full_panels else next_row
                w_rows = (w_panel, next_w_panel, scale, next_scale, layout, lane_tiles)
                args = (job, sums, x_panel, *w_rows, panel, stop)
                if strategy != FINE and rows == 2:
                    coarse_2(*args)
                elif strategy != FINE and rows < MOST:
                    coarse_4(*args)
                elif strategy != FINE:
                    coarse_most(*args)
                elif rows == 2:
                    fine_2(*args)
                elif rows < MOST:
                    fine_4(*args)
                else:
                    fine_most(*args)
                panel = stop
            first += count
            w += count * stride
            tile_row += count * step
            sums += _VECTOR * rows * _count_group_rows(rows)

    return add_products


@functools.cache
def _build_group_product(kind: str, rows: int, strategy: int) -> Any:
    """Return a function that multiplies `rows` rows of x by a group of `_GROUP[rows]` rows of W.

    It adds the products of panels `begin` to `end` of the columns to the vectors at `sums`, one for
    each pair of a row of x and a row of W. `x` and `w` are the addresses of panel `begin`. Rows of
    W are `next_row` bytes apart, and their scales, from `scale` on, `next_scale` bytes. `layout`
    and `lane_tiles` are arguments of `load_panel_scales`.
    """
    PANEL, W_BYTES, X_PANEL = COLUMNS[kind], BYTES[kind], 4 * COLUMNS[kind]
    GROUP = _GROUP[rows]

    @native
    def multiply(job, sums, x, w, next_row, scale, next_scale, layout, lane_tiles, begin, end):
        tile, group_bytes = word(job, TC), GROUP * next_row
        ahead = 0
        if group_bytes != 0:
            ahead = (PREFETCH_BYTES + group_bytes - 1) // group_bytes * group_bytes
        panels_per_scale = end + 1
        if strategy != ONE_PER_PANEL:
            panels_per_scale = 1
        elif tile % PANEL == 0:
            panels_per_scale = tile // PANEL
        left = panels_per_scale - begin % panels_per_scale
        table = load_table(word(job, TABLE))
        total = load_block(sums, rows, GROUP)
        while begin < end:
            stop, column = min(end, begin + left), begin * PANEL
            scales = load_panel_scales(
                scale, next_scale, column, layout, lane_tiles, GROUP, kind, strategy
            )
            for _ in range(begin, stop):
                for c in range(GROUP):
                    prefetch_for_later(w + c * next_row + ahead)
                total = multiply_panels(
                    total, x, X_PANEL, table, scales, w, next_row, kind, strategy
                )
                x += rows * X_PANEL
                w += W_BYTES
            begin, left = stop, panels_per_scale
        store(sums, total)

    return multiply


@native
def _count_group_rows(rows):
    # `rows` are the rows of x in a block.
    if rows == 2:
        return _GROUP_OF_2
    return _GROUP_OF_4 if rows < MOST else _GROUP_OF_MOST


_add_minima_2, _add_minima_4, _add_minima_most = (
    build_stored_minimum_adder(min(rows, MOST), _GROUP[min(rows, MOST)]) for rows in (2, 4, 8)
)


@native
def _add_minima(job, rows, sums, x_sums, first, last, tile_row):
    """Add products of minima with sums of x over tiles to the vectors at `sums`.

    The minima belong to rows `first` to `last` of W. The minima of row `first` are in row
    `tile_row` of the array of minima. `x_sums` is the address of the sums of a block of `rows` rows
    of x.
    """
    next = 1 if word(job, TR) == 1 else 0  # rows of tiles per row of W
    while first < last:
        count, step = _count_group_rows(rows), next
        if first + count > last:  # A group repeats one row, as in `_build_range_product`.
            count, step = 1, 0
        if rows == 2:
            _add_minima_2(job, sums, x_sums, tile_row, step)
        elif rows < MOST:
            _add_minima_4(job, sums, x_sums, tile_row, step)
        else:
            _add_minima_most(job, sums, x_sums, tile_row, step)
        first += count
        tile_row += count * next
        sums += _VECTOR * rows * _count_group_rows(rows)


@native
def _write_results(job, rows, sums, batch, first, last, m):
    """Add up the lanes of each vector at `sums`, and write the totals to the result of the job.

    Each vector belongs to a row of x and a row of W: one of `rows` rows of x from row `m` on, and
    one of rows `first` to `last` of W, group by group. Rows that only pad x are not written.
    """
    existing, group = min(rows, word(job, M) - m), _count_group_rows(rows)
    while first < last:
        count = group if first + group <= last else 1
        for r in range(existing):
            row = batch * word(job, M) + m + r
            y = word(job, OUT) + 4 * (row * word(job, R) + first)
            for c in range(count):
                store_sums(y + 4 * c, 0, load(sums + _VECTOR * (r * group + c), 1))
        first += count
        sums += _VECTOR * rows * group


# One row of x. Four rows of W at a time are multiplied, panel by panel. Each panel of x is loaded
# once and multiplied by the four decoded panels. The four sums stay in registers until the rows
# end. Then their lanes are added up, and the four results are written together. The scales and
# minima of all rows of a part are converted to f32 before the loop, unless they are f32.

#: Rows of W that are multiplied at a time, and the bytes of their results.
_ROWS, _RESULT_BYTES = 4, 16


def build_one_row(kind: str) -> JobFunctions:
    """Return the native functions of the kernel for one row of x, for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    PANEL, W_BYTES, FIELDS = COLUMNS[kind], BYTES[kind], VECTORS[kind]
    X_PANEL, FINE = 4 * PANEL, fine_strategy(kind)
    prepare, x_address, x_sums_address, fold = build_panel_x(kind)
    # x is 0 after the end of a row of W. So the last panel may include codes of the next row,
    # unless a code can be NaN.
    has_nan = kind.startswith("float8")
    multiply_coarse = _build_row_product(kind, ONE_PER_PANEL)
    multiply_fine = _build_row_product(kind, FINE)
    add_minima = build_minimum_adder(1, _ROWS)

    @native
    def multiply_rows(job, batch, first, last, strategy):
        columns, r, row_bytes = word(job, C), word(job, R), word(job, ROW_BYTES)
        stride, tile, rows = word(job, NEXT_ROW), word(job, TC), last - first
        panels, tiles = (columns + PANEL - 1) // PANEL, columns // tile
        tile_row = (batch * r + first) // word(job, TR)
        numbers, step = tiles, 0  # scales to read, and bytes from the scales of a row to the next
        if word(job, TR) == 1:
            numbers, step = tiles * rows, 4 * tiles
        # The memory holds scales, minima, x times its scales, and zero-padded copies of rows of W.
        size, padded_bytes = 4 * numbers + _VECTOR, W_BYTES * panels
        folded = X_PANEL * panels if strategy == FOLDED_INTO_X else 0
        needed = 2 * size + folded + (_ROWS * padded_bytes if row_bytes < padded_bytes else 0)
        memory = stack(STACK_BYTES)
        if needed > STACK_BYTES:
            memory = malloc(needed)
        if memory == 0:
            set_word(job, FAILED, 1)
            return
        scales, minima, next_scale = memory, memory + size, step
        x, copies = x_address(job, batch, 0), memory + 2 * size + folded
        if strategy == FOLDED_INTO_X:
            fold(job, memory + 2 * size, x, 1, tile_row, 0, panels)
            x, next_scale = memory + 2 * size, 0
            store_f32(scales, 1)
        elif is_f32(job, SCALE):
            scales = word(job, SCALE) + 4 * tiles * tile_row
        else:
            read_tile_values(job, SCALE, tile_row, 0, numbers, scales)
        if has_minima(job):
            read_tile_values(job, MINIMUM, tile_row, 0, numbers, minima)
        layout = scale_layout(job, strategy)
        panels_per_scale = tile // PANEL if tile % PANEL == 0 else panels
        x_sums, results = x_sums_address(job, batch, 0), stack(_RESULT_BYTES)
        lane_tiles, table = find_lane_tiles(FIELDS, tile), load_table(word(job, TABLE))
        w, located = row_address(job, batch, first), locate_tile_values(job)
        y = word(job, OUT) + 4 * (batch * r + first)
        ahead = (PREFETCH_BYTES // (_ROWS * stride) + 1) * _ROWS * stride
        row = 0
        while row < rows:
            count, next_row, next_scales, next_minima = _ROWS, stride, next_scale, step
            if row + _ROWS > rows:  # Take the last rows one by one: all 4 panels repeat one row.
                count, next_row, next_scales, next_minima = 1, 0, 0, 0
            prefetch_tile_values(located, batch * r + first + row + PART_ROWS, count)
            total, place = zeros(1, _ROWS), w
            if has_minima(job):
                total = add_minima(total, x_sums, 0, minima, next_minima, tiles)
            is_last = first + row + count == r
            if row_bytes < padded_bytes and (has_nan or row_bytes < W_BYTES or is_last):
                for i in range(_ROWS):
                    copy_padded(
                        copies + i * padded_bytes, w + i * next_row, row_bytes, padded_bytes
                    )
                place, next_row = copies, padded_bytes
            w_rows = (place, next_row, ahead, scales, next_scales)
            args = (total, x, table, w_rows, layout, lane_tiles, panels, panels_per_scale)
            total = multiply_fine(*args) if strategy == FINE else multiply_coarse(*args)
            store_four_sums(results, 0, total)
            for i in range(count):
                store_f32(y + 4 * i, load_f32(results + 4 * i))
            row, w, y = row + count, w + count * stride, y + 4 * count
            minima += count * step
            if next_scale != 0:
                scales += count * next_scale
        if needed > STACK_BYTES:
            free(memory)

    return build_functions(kind, prepare, multiply_rows)


def _build_row_product(kind: str, strategy: int) -> Any:
    """Return a function that adds the products of one row of x and `_ROWS` rows of W to `total`.

    `total` has a vector of sums per row of W. The argument `w_rows` has the address of the first
    row of W, the bytes between rows, the bytes to prefetch ahead, the address of the scales, and
    the bytes between the scales of rows. `layout` and `lane_tiles` are arguments of
    `load_panel_scales`.
    """
    PANEL, W_BYTES, X_PANEL = COLUMNS[kind], BYTES[kind], 4 * COLUMNS[kind]
    SCALE_VECTORS = _ROWS * (VECTORS[kind] if strategy == PER_VECTOR else 1)

    @native
    def multiply(total, x, table, w_rows, layout, lane_tiles, panels, panels_per_scale):
        w, next_row, ahead, scale, next_scale = w_rows
        scales, left = zeros(1, SCALE_VECTORS), 0
        for panel in range(panels):
            if strategy != ONE_PER_PANEL or left == 0:
                column = panel * PANEL
                scales = load_panel_scales(
                    scale, next_scale, column, layout, lane_tiles, _ROWS, kind, strategy
                )
                left = panels_per_scale
            left -= 1
            for i in range(_ROWS):
                prefetch_for_later(w + i * next_row + ahead)
            total = multiply_panels(total, x, X_PANEL, table, scales, w, next_row, kind, strategy)
            x, w = x + X_PANEL, w + W_BYTES
        return total

    return multiply
