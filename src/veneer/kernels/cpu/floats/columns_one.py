"""Columns contracted by one row of x, as in decoding: no sum leaves a register before it is done.

Four rows of W are read at a time; their scales and minima beforehand, those of a whole part at
once. The sums of their lanes are written together.
"""

from typing import Any

from ....native.functions import native
from ....native.isa import LANES
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
from ....native.simd.floats import store_four_sums, zeros
from ..operands.codes import load_table
from ..operands.job import (
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
    R,
    row_of,
)
from ..operands.minima import adder
from ..operands.scales import (
    ON_STACK,
    are_f32,
    copy,
    fetch_tiles,
    has_minima,
    read_tiles,
    rows_of_tiles,
)
from .columns_x import order
from .panels import (
    AHEAD,
    BYTES,
    COLUMNS,
    EACH,
    FOLDED,
    ONE,
    PART,
    VECTORS,
    functions_of,
    lanes_by,
    multiply,
    panel_scales,
    scales_of,
    ways,
)

#: Rows of W that are read at a time: each number of x is multiplied by as many.
ROWS = 4
_VECTOR, _SIXTEEN = 4 * LANES, 16


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    return functions_of(kind, order(kind).prepare, _multiplier(kind))


def _multiplier(kind: str) -> Any:
    """Makes what multiplies x by rows of W that have scales of their own, or share them."""
    PANEL, W_BYTES, FIELDS = COLUMNS[kind], BYTES[kind], VECTORS[kind]
    X_PANEL, (_, MORE) = 4 * PANEL, ways(kind)
    block_of_x, sums_of_x, fold = order(kind)[1:]
    # 0 times any code is 0, where none is NaN: then what lies behind a row may be read.
    has_nan = kind.startswith("float8")
    by_one, by_more = (_panels(kind, way) for way in ways(kind))
    add_minima = adder(1, ROWS)

    @native
    def multiply_rows(job, batch, first, last, way):
        """Multiplies x by the rows of W from first to last."""
        columns, r, row_bytes = word(job, C), word(job, R), word(job, ROW_BYTES)
        stride, tile, rows = word(job, NEXT_ROW), word(job, TC), last - first
        panels, tiles = (columns + PANEL - 1) // PANEL, columns // tile
        number = (batch * r + first) // word(job, TR)  # of the row of scales
        numbers, step = tiles, 0  # from a row of W to the scales of the next
        if word(job, TR) == 1:
            numbers, step = tiles * rows, 4 * tiles
        # What is made here: scales, minima, x with the scales in it, rows with zeros behind them.
        size, copied = 4 * numbers + _VECTOR, W_BYTES * panels
        folded = X_PANEL * panels if way == FOLDED else 0
        needed = 2 * size + folded + (ROWS * copied if row_bytes < copied else 0)
        memory = stack(ON_STACK)
        if needed > ON_STACK:
            memory = malloc(needed)
        if memory == 0:
            set_word(job, FAILED, 1)
            return
        scales, minima, next_scale = memory, memory + size, step
        x, copies = block_of_x(job, batch, 0), memory + 2 * size + folded
        if way == FOLDED:
            fold(job, memory + 2 * size, x, 1, number, 0, panels)
            x, next_scale = memory + 2 * size, 0
            store_f32(scales, 1)
        elif are_f32(job, SCALE):
            scales = word(job, SCALE) + 4 * tiles * number
        else:
            read_tiles(job, SCALE, number, 0, numbers, scales)
        if has_minima(job):
            read_tiles(job, MINIMUM, number, 0, numbers, minima)
        of_row = scales_of(job, way)
        lasts = tile // PANEL if tile % PANEL == 0 else panels  # so many panels have ONE number
        sums_x, fours = sums_of_x(job, batch, 0), stack(_SIXTEEN)
        lanes, table = lanes_by(FIELDS, tile), load_table(word(job, TABLE))
        w, stored = row_of(job, batch, first), rows_of_tiles(job)
        y = word(job, OUT) + 4 * (batch * r + first)
        ahead = (AHEAD // (ROWS * stride) + 1) * ROWS * stride
        at = 0
        while at < rows:
            # The last rows are taken one by one: all that are taken together are the same one.
            count, next_row, next_scales, next_minima = ROWS, stride, next_scale, step
            if at + ROWS > rows:
                count, next_row, next_scales, next_minima = 1, 0, 0, 0
            fetch_tiles(stored, batch * r + first + at + PART, count)
            total, place = zeros(1, ROWS), w
            if has_minima(job):
                total = add_minima(total, sums_x, 0, minima, next_minima, tiles)
            if row_bytes < copied and (has_nan or row_bytes < W_BYTES or first + at + count == r):
                for i in range(ROWS):
                    copy(copies + i * copied, w + i * next_row, row_bytes, copied)
                place, next_row = copies, copied
            rows_of_w = (place, next_row, ahead, scales, next_scales)
            if way == MORE:
                total = by_more(total, x, table, rows_of_w, of_row, lanes, panels, lasts)
            else:
                total = by_one(total, x, table, rows_of_w, of_row, lanes, panels, lasts)
            store_four_sums(fours, 0, total)
            for i in range(count):
                store_f32(y + 4 * i, load_f32(fours + 4 * i))
            at, w, y = at + count, w + count * stride, y + 4 * count
            minima += count * step
            if next_scale != 0:
                scales += count * next_scale
        if needed > ON_STACK:
            free(memory)

    return multiply_rows


def _panels(kind: str, way: int) -> Any:
    """Makes what adds the products of x with some rows of W to sums, which are lanes."""
    PANEL, W_BYTES, X_PANEL = COLUMNS[kind], BYTES[kind], 4 * COLUMNS[kind]
    WIDTH = ROWS * (VECTORS[kind] if way == EACH else 1)

    @native
    def panels(total, x, table, rows, of_row, lanes, count, lasts):
        w, next_row, ahead, scale, next_scale = rows
        scales, left = zeros(1, WIDTH), 0
        for panel in range(count):
            if way != ONE or left == 0:
                scales = panel_scales(
                    scale, next_scale, panel * PANEL, of_row, lanes, ROWS, kind, way
                )
                left = lasts
            left -= 1
            for i in range(ROWS):
                prefetch_for_later(w + i * next_row + ahead)
            total = multiply(total, x, X_PANEL, table, scales, w, next_row, kind, way)
            x, w = x + X_PANEL, w + W_BYTES
        return total

    return panels
