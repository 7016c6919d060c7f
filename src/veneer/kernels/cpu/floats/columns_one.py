"""Contract the columns of W with one row of x, as in decoding: `x @ W.T` for M = 1.

The kernel loops over 4 rows of W at a time, and for these over panels of columns. Each panel of x
is loaded once and multiplied by the 4 decoded panels. The 4 sums stay in registers until the rows
end. Then the lanes of the sums are added up, and the 4 results are written together. The scales and
minima of all rows of a part are converted to f32 before the loop, unless they are f32.

`benchmarks/cpu_variants.py` compares it with `columns_few.py`, which pads one row of x to two.
"""

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
from ....native.simd import LANES
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
    row_address,
)
from ..operands.minima import build_minimum_adder
from ..operands.scales import (
    STACK_BYTES,
    copy_padded,
    has_minima,
    is_f32,
    locate_tile_values,
    prefetch_tile_values,
    read_tile_values,
)
from .panel_x import build_panel_x
from .panels import (
    BYTES,
    COLUMNS,
    FOLDED_INTO_X,
    ONE_PER_PANEL,
    PART_ROWS,
    PER_VECTOR,
    PREFETCH_BYTES,
    VECTORS,
    build_functions,
    find_lane_tiles,
    fine_strategy,
    load_panel_scales,
    multiply_panels,
    scale_layout,
)

#: Rows of W that are multiplied at a time.
ROWS = 4
_VECTOR, _FOUR_BYTES = 4 * LANES, 16


def build(kind: str) -> JobFunctions:
    """Return the functions that compute a product in parts, for codes such as "lookup4"."""
    PANEL, W_BYTES, FIELDS = COLUMNS[kind], BYTES[kind], VECTORS[kind]
    X_PANEL, FINE = 4 * PANEL, fine_strategy(kind)
    prepare, x_address, x_sums_address, fold = build_panel_x(kind)
    # x is 0 after the end of a row of W. So the last panel may include codes of the next row,
    # unless a code can be NaN.
    has_nan = kind.startswith("float8")
    multiply_coarse = _build_row_product(kind, ONE_PER_PANEL)
    multiply_fine = _build_row_product(kind, FINE)
    add_minima = build_minimum_adder(1, ROWS)

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
        needed = 2 * size + folded + (ROWS * padded_bytes if row_bytes < padded_bytes else 0)
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
        x_sums, results = x_sums_address(job, batch, 0), stack(_FOUR_BYTES)
        lane_tiles, table = find_lane_tiles(FIELDS, tile), load_table(word(job, TABLE))
        w, located = row_address(job, batch, first), locate_tile_values(job)
        y = word(job, OUT) + 4 * (batch * r + first)
        ahead = (PREFETCH_BYTES // (ROWS * stride) + 1) * ROWS * stride
        row = 0
        while row < rows:
            count, next_row, next_scales, next_minima = ROWS, stride, next_scale, step
            if row + ROWS > rows:  # Take the last rows one by one: all 4 panels repeat one row.
                count, next_row, next_scales, next_minima = 1, 0, 0, 0
            prefetch_tile_values(located, batch * r + first + row + PART_ROWS, count)
            total, place = zeros(1, ROWS), w
            if has_minima(job):
                total = add_minima(total, x_sums, 0, minima, next_minima, tiles)
            is_last = first + row + count == r
            if row_bytes < padded_bytes and (has_nan or row_bytes < W_BYTES or is_last):
                for i in range(ROWS):
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
    """Return a function that adds the products of one row of x and `ROWS` rows of W to `total`.

    `total` has a vector of sums per row of W. `w_rows` has the address of the first row, the bytes
    between rows, the bytes to prefetch ahead, the address of the scales, and the bytes between the
    scales of rows. `layout` and `lane_tiles` are arguments of `load_panel_scales`.
    """
    PANEL, W_BYTES, X_PANEL = COLUMNS[kind], BYTES[kind], 4 * COLUMNS[kind]
    SCALE_VECTORS = ROWS * (VECTORS[kind] if strategy == PER_VECTOR else 1)

    @native
    def multiply(total, x, table, w_rows, layout, lane_tiles, panels, panels_per_scale):
        w, next_row, ahead, scale, next_scale = w_rows
        scales, left = zeros(1, SCALE_VECTORS), 0
        for panel in range(panels):
            if strategy != ONE_PER_PANEL or left == 0:
                column = panel * PANEL
                scales = load_panel_scales(
                    scale, next_scale, column, layout, lane_tiles, ROWS, kind, strategy
                )
                left = panels_per_scale
            left -= 1
            for i in range(ROWS):
                prefetch_for_later(w + i * next_row + ahead)
            total = multiply_panels(total, x, X_PANEL, table, scales, w, next_row, kind, strategy)
            x, w = x + X_PANEL, w + W_BYTES
        return total

    return multiply
