"""Columns contracted, for few rows of x: what counts is how fast the matrix is read and decoded.

Panels of a few rows of W are decoded in registers, and multiplied by a few rows of x at once
(`panels.py`). Sums are vectors, whose lanes are added up at the end. For x to meet them, it is
brought into the order that codes are decoded in (`columns_x.py`).
"""

import functools
from typing import Any

from ....native.functions import native
from ....native.isa import LANES, REGISTERS
from ....native.memory import prefetch_for_later, stack, store_f32, word
from ....native.simd.floats import load, store, store_sums, zeros
from ..operands import minima
from ..operands.codes import load_table
from ..operands.job import (
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
    row_of,
)
from ..operands.scales import are_f32, copy, fetch_tiles, has_minima, read_tiles, rows_of_tiles
from .columns_x import MOST, order, rows_of_block
from .panels import (
    AHEAD,
    BYTES,
    COLUMNS,
    FOLDED,
    ONE,
    PART,
    VECTORS,
    functions_of,
    lanes_by,
    load_block,
    multiply,
    panel_scales,
    scales_of,
    ways,
)

#: How many rows of W are multiplied by so many rows of x at once: as many as registers hold sums
#: of, next to what is decoded; and a divisor of a part.
_TOGETHER = {2: 4, 4: 4, 8: 3} if REGISTERS == 32 else {2: 3, 4: 2}
_BY_2, _BY_4, _BY_MOST = (_TOGETHER[min(rows, MOST)] for rows in (2, 4, 8))
#: Bytes of x that are multiplied by all rows of a part before the next are: the innermost cache
#: holds them, and some rows of W.
_X_BYTES = 32 * 1024
_VECTOR = 4 * LANES
#: Bytes of the scales of a row of W that meet so many columns of two rows of x: one for 4 of them.
_SCALES = _X_BYTES // 8 + _VECTOR
#: Bytes of sums, at most: those of a part, in groups, and the last rows one by one.
_SUMS_BYTES = _VECTOR * max(
    rows * (PART + together * (together - 1)) for rows, together in _TOGETHER.items()
)


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    x_order = order(kind)
    block_of_x, sums_of_x, fold = x_order.block, x_order.sums, x_order.fold
    add_products = _products(kind)
    PANEL, X_PANEL = COLUMNS[kind], 4 * COLUMNS[kind]
    FOLDED_BYTES = max(_X_BYTES, X_PANEL * MOST)

    @native
    def multiply_block(job, rows, batch, first, last, m, way):
        """Multiplies a block of rows of x by the rows of W from first to last."""
        sums, folded, neutral = stack(_SUMS_BYTES), stack(FOLDED_BYTES), stack(64)
        store_f32(neutral, 1)
        together = _together(rows)
        groups = (last - first) // together + (last - first) % together
        for i in range(rows * together * groups):
            store(sums + _VECTOR * i, zeros(1, 1))
        panels = (word(job, C) + PANEL - 1) // PANEL
        at_once = max(1, _X_BYTES // (X_PANEL * rows))
        number = (batch * word(job, R) + first) // word(job, TR)  # of the row of scales
        for begin in range(0, panels, at_once):
            end = min(begin + at_once, panels)
            x = block_of_x(job, batch, m) + X_PANEL * rows * begin
            if way == FOLDED:
                fold(job, folded, x, rows, number, begin, end)
                x = folded
            add_products(job, rows, sums, x, batch, first, last, begin, end, number, neutral, way)
        if has_minima(job):
            _add_minima(job, rows, sums, sums_of_x(job, batch, m), first, last, number)
        _write(job, rows, sums, batch, first, last, m)

    @native
    def multiply_rows(job, batch, first, last, way):
        """Multiplies x by the rows of W from first to last."""
        rows = word(job, M)
        for m in range(0, rows, MOST):
            multiply_block(job, rows_of_block(rows, m), batch, first, last, m, way)

    return functions_of(kind, order(kind).prepare, multiply_rows)


def _products(kind: str) -> Any:
    """What adds the products of a block of rows of x with panels of W to sums."""
    PANEL, W_BYTES, FIELDS = COLUMNS[kind], BYTES[kind], VECTORS[kind]
    TAIL, (_, MORE) = W_BYTES * max(_TOGETHER.values()), ways(kind)
    X_PANEL, SCALES_OF_ROW = 4 * PANEL, _SCALES
    SCALES = SCALES_OF_ROW * max(_TOGETHER.values())
    (one_2, one_4, one_most), (more_2, more_4, more_most) = (
        [_panels(kind, min(i, MOST), way) for i in (2, 4, 8)] for way in ways(kind)
    )

    @native
    def add_products(job, rows, sums, x, batch, first, last, begin, end, number, neutral, way):
        tail, numbers = stack(TAIL), stack(SCALES)
        row_bytes, stride = word(job, ROW_BYTES), word(job, NEXT_ROW)
        columns = word(job, C)
        tile, step = word(job, TC), 1 if word(job, TR) == 1 else 0  # from a row of scales to a next
        tiles = columns // tile
        first_tile = begin * PANEL // tile
        some = (min(end * PANEL, columns) + tile - 1) // tile - first_tile
        lanes, of_row = lanes_by(FIELDS, tile), scales_of(job, way)
        w, stored = row_of(job, batch, first), rows_of_tiles(job)
        while first < last:
            # The last rows are taken one by one: all that are taken together are the same one.
            count = _together(rows)
            next_row, scale, next_scale = stride, neutral, 0
            if first + count > last:
                count, next_row = 1, 0
            if way != FOLDED and are_f32(job, SCALE):
                scale, next_scale = word(job, SCALE) + 4 * tiles * number, 4 * tiles * step
            elif way != FOLDED:
                different = (count - 1) * step + 1
                scale, next_scale = numbers - 4 * first_tile, SCALES_OF_ROW * step
                if some == tiles:  # then those of a row follow those of the one before
                    next_scale = 4 * tiles * step
                    read_tiles(job, SCALE, number, 0, different * tiles, numbers)
                else:
                    for c in range(different):
                        to = numbers + c * SCALES_OF_ROW
                        read_tiles(job, SCALE, number + c, first_tile, some, to)
            if count == 1:
                next_scale = 0
            if begin == 0:
                fetch_tiles(stored, number + PART, count)
            whole = columns // PANEL
            at = begin
            while at < end:
                stop, panel = min(whole, end), w + W_BYTES * at
                if at >= whole:  # a copy, with zeros for columns that do not exist
                    stop, panel = at + 1, tail
                    for c in range(_together(rows)):
                        row, existing = w + c * next_row + W_BYTES * at, row_bytes - W_BYTES * at
                        copy(tail + c * W_BYTES, row, existing, W_BYTES)
                place = x + X_PANEL * rows * (at - begin)
                next_panel = W_BYTES if at >= whole else next_row
                of_w = (panel, next_panel, scale, next_scale, of_row, lanes)
                args = (job, sums, place, *of_w, at, stop)
                if way != MORE and rows == 2:
                    one_2(*args)
                elif way != MORE and rows < MOST:
                    one_4(*args)
                elif way != MORE:
                    one_most(*args)
                elif rows == 2:
                    more_2(*args)
                elif rows < MOST:
                    more_4(*args)
                else:
                    more_most(*args)
                at = stop
            first += count
            w += count * stride
            number += count * step
            sums += _VECTOR * rows * _together(rows)

    return add_products


@functools.cache
def _panels(kind: str, rows: int, way: int) -> Any:
    """What adds products of `rows` rows of x with panels of some rows of W to sums in memory."""
    PANEL, W_BYTES, X_PANEL = COLUMNS[kind], BYTES[kind], 4 * COLUMNS[kind]
    TOGETHER = _TOGETHER[rows]

    @native
    def panels(job, sums, x, w, next_row, scale, next_scale, of_row, lanes, begin, end):
        tile, together = word(job, TC), TOGETHER * next_row
        ahead = 0 if together == 0 else (AHEAD + together - 1) // together * together
        lasts = end + 1  # so many panels have ONE number
        if way != ONE:
            lasts = 1
        elif tile % PANEL == 0:
            lasts = tile // PANEL
        left = lasts - begin % lasts
        table = load_table(word(job, TABLE))
        total = load_block(sums, rows, TOGETHER)
        while begin < end:
            stop, column = min(end, begin + left), begin * PANEL
            scales = panel_scales(scale, next_scale, column, of_row, lanes, TOGETHER, kind, way)
            for _ in range(begin, stop):
                for c in range(TOGETHER):
                    prefetch_for_later(w + c * next_row + ahead)
                total = multiply(total, x, X_PANEL, table, scales, w, next_row, kind, way)
                x += rows * X_PANEL
                w += W_BYTES
            begin, left = stop, lasts
        store(sums, total)

    return panels


@native
def _together(rows):
    """How many rows of W are multiplied by so many rows of x at once."""
    if rows == 2:
        return _BY_2
    return _BY_4 if rows < MOST else _BY_MOST


_minima_2, _minima_4, _minima_most = (
    minima.reading_adder(min(i, MOST), _TOGETHER[min(i, MOST)]) for i in (2, 4, 8)
)


@native
def _add_minima(job, rows, sums, of_x, first, last, number):
    """Adds the products of the sums of a block of rows of x with the minima of some rows of W."""
    next = 1 if word(job, TR) == 1 else 0
    while first < last:
        count, step = _together(rows), next
        if first + count > last:
            count, step = 1, 0
        if rows == 2:
            _minima_2(job, sums, of_x, number, step)
        elif rows < MOST:
            _minima_4(job, sums, of_x, number, step)
        else:
            _minima_most(job, sums, of_x, number, step)
        first += count
        number += count * next
        sums += _VECTOR * rows * _together(rows)


@native
def _write(job, rows, sums, batch, first, last, m):
    """Adds up the lanes of sums, and writes them to the result."""
    existing, together = min(rows, word(job, M) - m), _together(rows)
    while first < last:
        count = together if first + together <= last else 1
        for r in range(existing):
            row = batch * word(job, M) + m + r
            y = word(job, OUT) + 4 * (row * word(job, R) + first)
            for c in range(count):
                store_sums(y + 4 * c, 0, load(sums + _VECTOR * (r * together + c), 1))
        first += count
        sums += _VECTOR * rows * together
