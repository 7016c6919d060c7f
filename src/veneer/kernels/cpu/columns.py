"""The f32 kernel that contracts columns: `y[B, M, R] = x[B, M, C] @ W[B, R, C].T`.

A row of W lies in memory as it is contracted, so W is read from its first byte to its last. Panels
of a few rows of W are decoded in registers, and multiplied by a few rows of x at once
(`panels.py`), which have been brought into the same order (`columns_x.py`). The lanes of the sums
are added up at the end.

Scales meet panels in three ways, by where they change:

- ONE number scales a panel, where a tile is whole panels, or all columns.
- SOME do, one each lane, where a panel is tiles of whole lanes. Lanes are several neighbouring
  columns only where codes have fewer than 8 bits.
- FOLDED into x otherwise, for all rows of W that share scales: so it is where they change from
  column to column, in the gradient of a matrix whose tiles are along the other dimension.
"""

import functools
from typing import Any

from .columns_x import order, rows_in_block
from .isa import LANES
from .job import BATCH, OUT, ROW_BYTES, SCALE, SCRATCH, TABLE, TC, TR, C, M, R, W
from .memory import free, load_i8, prefetch, stack, store_f32, store_i8, store_i64, word
from .native import native
from .panels import (
    BYTES,
    COLUMNS,
    FOLDED,
    ONE,
    SOME,
    VECTORS,
    lanes_by,
    load_block,
    multiply,
    panel_scales,
)
from .simd import compiled, load, load_table, store, store_sums

#: How many rows of W are multiplied by so many rows of x at once: as many as registers hold sums
#: of, next to what is decoded.
_TOGETHER = {1: 4, 2: 4, 4: 4, 8: 3} if LANES == 16 else {1: 4, 2: 3, 4: 2}
_MOST = max(_TOGETHER)
_BY_1, _BY_2, _BY_4, _BY_MOST = (_TOGETHER[min(rows, _MOST)] for rows in (1, 2, 4, 8))
#: Rows of W in a part: a multiple of all of these.
_PART = 48
#: Bytes of x that are multiplied by all rows of a part before the next are: the innermost cache
#: holds them, and some rows of W.
_X_BYTES = 32 * 1024
_VECTOR = 4 * LANES
#: Bytes of sums, at most: those of a part, in groups, and the last rows one by one.
_SUMS_BYTES = _VECTOR * max(
    rows * (_PART + together * (together - 1)) for rows, together in _TOGETHER.items()
)


@functools.cache
def kernel(kind: str) -> tuple[Any, Any, Any, Any]:
    """Returns `prepare`, `count`, `work` and `finish` for codes of this kind: Numba functions.

    A job is as `job.py` says, with x f32[BATCH, M, C] and the result f32[BATCH, M, R].

    **Raises:** `KeyError` for an unknown kind.
    """
    PANEL, LANE = COLUMNS[kind], VECTORS[kind] if kind.startswith("lookup") else COLUMNS[kind]
    x_order = order(kind, _MOST)
    block_of_x, fold, add_products = x_order.block, x_order.fold, _products(kind)
    X_PANEL = 4 * PANEL
    FOLDED_BYTES = max(_X_BYTES, X_PANEL * _MOST)

    @compiled
    def count(job):
        return word(job, BATCH) * ((word(job, R) + _PART - 1) // _PART)

    @native
    def multiply_block(job, rows, batch, first, last, m, way):
        """Multiplies a block of rows of x by the rows of W from first to last."""
        sums, folded, neutral = stack(_SUMS_BYTES), stack(FOLDED_BYTES), stack(64)
        store_f32(neutral, 1)
        for i in range(_SUMS_BYTES // 8):
            store_i64(sums + 8 * i, 0)
        columns, tile = word(job, C), word(job, TC)
        panels = (columns + PANEL - 1) // PANEL
        at_once = max(1, _X_BYTES // (X_PANEL * rows))
        row_of_scales = (batch * word(job, R) + first) // word(job, TR)
        scale = word(job, SCALE) + 4 * row_of_scales * (columns // tile)
        for begin in range(0, panels, at_once):
            end = min(begin + at_once, panels)
            x = block_of_x(job, batch, m) + X_PANEL * rows * begin
            if way == FOLDED:
                fold(folded, x, rows, scale, columns, tile, begin, end)
                x = folded
            numbers = neutral if way == FOLDED else scale
            add_products(job, rows, sums, x, batch, first, last, begin, end, numbers, way)
        _write(job, rows, sums, batch, first, last, m)

    @compiled
    def work(job, part):
        parts = (word(job, R) + _PART - 1) // _PART
        batch, first = part // parts, part % parts * _PART
        last, rows = min(first + _PART, word(job, R)), word(job, M)
        tile, columns = word(job, TR), word(job, TC)
        way = FOLDED
        if columns % PANEL == 0 or columns == word(job, C):
            way = ONE
        elif PANEL % columns == 0 and columns % LANE == 0:
            way = SOME
        while first < last:
            # Up to here, scales are the same, or the next row of W has the next of them.
            end = last
            if tile > 1 or way == FOLDED:
                end = min(last, (first // tile + 1) * tile)
            for m in range(0, rows, _MOST):
                block = rows_in_block(rows - m, _MOST)
                multiply_block(job, block, batch, first, end, m, way)
            first = end

    return x_order.prepare, count, work, _finish


@compiled
def _finish(job):
    free(word(job, SCRATCH))


def _products(kind: str) -> Any:
    """What adds the products of a block of rows of x with panels of W to sums."""
    PANEL, W_BYTES = COLUMNS[kind], BYTES[kind]
    TAIL = W_BYTES * max(_TOGETHER.values())
    X_PANEL = 4 * PANEL
    one_1, one_2, one_4, one_most = (_panels(kind, min(i, _MOST), ONE) for i in (1, 2, 4, 8))
    some_1, some_2, some_4, some_most = (_panels(kind, min(i, _MOST), SOME) for i in (1, 2, 4, 8))

    @native
    def add_products(job, rows, sums, x, batch, first, last, begin, end, scale, way):
        tail = stack(TAIL)
        row_bytes, whole = word(job, ROW_BYTES), word(job, C) // PANEL
        scale_row = 0
        if word(job, TR) == 1 and way != FOLDED:
            scale_row = 4 * (word(job, C) // word(job, TC))
        w = word(job, W) + row_bytes * (batch * word(job, R) + first)
        while first < last:
            # The last rows are taken one by one: all that are taken together are the same one.
            count = _together(rows)
            next_row, next_scale = row_bytes, scale_row
            if first + count > last:
                count, next_row, next_scale = 1, 0, 0
            at = begin
            while at < end:
                stop, panel = min(whole, end), w + W_BYTES * at
                if at == whole:  # the last columns are few, and end with zeros
                    stop, panel = end, tail
                    for c in range(_together(rows)):
                        row = w + c * next_row + W_BYTES * at
                        _copy(tail + c * W_BYTES, row, row_bytes - W_BYTES * at, W_BYTES)
                    next_row = W_BYTES
                place = x + X_PANEL * rows * (at - begin)
                args = (job, sums, place, panel, next_row, scale, next_scale, at, stop)
                if way != SOME and rows == 1:
                    one_1(*args)
                elif way != SOME and rows == 2:
                    one_2(*args)
                elif way != SOME and rows < _MOST:
                    one_4(*args)
                elif way != SOME:
                    one_most(*args)
                elif rows == 1:
                    some_1(*args)
                elif rows == 2:
                    some_2(*args)
                elif rows < _MOST:
                    some_4(*args)
                else:
                    some_most(*args)
                at = stop
            first += count
            w += count * row_bytes
            scale += count * scale_row
            sums += _VECTOR * rows * _together(rows)

    return add_products


@functools.cache
def _panels(kind: str, rows: int, way: int) -> Any:
    """What adds products of `rows` rows of x with panels of some rows of W to sums in memory."""
    PANEL, W_BYTES, X_PANEL = COLUMNS[kind], BYTES[kind], 4 * COLUMNS[kind]
    TOGETHER, FIELDS = _TOGETHER[rows], VECTORS[kind]

    @native
    def panels(job, sums, x, w, next_row, scale, next_scale, begin, end):
        tile, ahead = word(job, TC), TOGETHER * next_row
        # So many numbers scale a panel, or one scales so many panels.
        count, lasts = 1, end + 1
        if way == SOME:
            count, lasts = PANEL // tile, 1
        elif tile % PANEL == 0:
            lasts = tile // PANEL
        scale += 4 * count * (begin // lasts)
        left = lasts - begin % lasts
        existing = min(count, word(job, C) // tile - begin * count)
        lanes, table = lanes_by(FIELDS, tile), load_table(word(job, TABLE))
        total = load_block(sums, rows, TOGETHER)
        for _ in range(begin, end):
            for c in range(TOGETHER):
                prefetch(w + c * next_row + ahead)
            scales = panel_scales(scale, next_scale, lanes, existing, TOGETHER, way)
            total = multiply(total, x, X_PANEL, table, scales, w, next_row, kind, way)
            x += rows * X_PANEL
            w += W_BYTES
            left -= 1
            if left == 0:
                scale += 4 * count
                left = lasts
        store(sums, total)

    return panels


@native
def _together(rows):
    """How many rows of W are multiplied by so many rows of x at once."""
    if rows == 1:
        return _BY_1
    if rows == 2:
        return _BY_2
    return _BY_4 if rows < _MOST else _BY_MOST


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


@native
def _copy(to, address, count, size):
    """Copies so many bytes, and zeros behind them."""
    for i in range(size):
        store_i8(to + i, load_i8(address + i) if i < count else 0)
