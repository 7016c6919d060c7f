"""Columns contracted, for many rows of x: what counts is how fast numbers are multiplied.

A part has a few vectors of rows of W. About as many columns of them as the innermost cache holds
are decoded, scaled and transposed, and multiplied by all rows of x; then the next.
"""

from typing import Any

from .columns_x import ROWS, copy, order, padded_rows
from .isa import LANES
from .job import OUT, ROW_BYTES, SCALE, TABLE, TC, TR, C, M, R, W
from .memory import load_f32, prefetch, stack, store_f32, store_i64, word
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
    panel_scales,
    store_decoded,
    transpose,
)
from .simd import load, outer, store
from .simd_codes import load_table

#: Vectors of rows of W in a part: with `ROWS` rows of x, as many sums as registers hold.
_ACROSS = 4 if LANES == 16 else 2
PART = _ACROSS * LANES
_VECTOR = 4 * LANES
_ROW = 4 * PART
#: Rows of x whose sums are kept at once, at most.
_SUMS = 64 * ROWS
_SUMS_BYTES = _ROW * _SUMS
#: Columns that are decoded at once, at least.
_DEPTH = 128


def worker(kind: str) -> Any:
    """Makes what computes a part, for codes of a kind."""
    block_of_x, decode = order(kind).block, _decode(kind)
    # A unit is what is decoded together: a panel, or some vectors of one.
    VECTORS_, PANEL, X_PANEL = min(8, VECTORS[kind]), COLUMNS[kind], 4 * COLUMNS[kind]
    UNIT, UNITS_OF_PANEL = VECTORS_ * LANES, VECTORS[kind] // VECTORS_
    AT_ONCE = max(1, _DEPTH // UNIT) if UNITS_OF_PANEL == 1 else 1
    DECODED = AT_ONCE * UNIT * _ROW

    @native
    def add_products(sums, x, next_x, w, units):
        total = load_block(sums, ROWS, _ACROSS)
        for _ in range(units):
            for k in range(UNIT):
                total = outer(total, x + 4 * k, X_PANEL, load(w + _ROW * k, _ACROSS))
            x += next_x
            w += _ROW * UNIT
        store(sums, total)

    @native
    def work(job, part, way):
        sums, decoded = stack(_SUMS_BYTES), stack(DECODED)
        parts = (word(job, R) + PART - 1) // PART
        batch, first = part // parts, part % parts * PART
        last, rows = min(first + PART, word(job, R)), word(job, M)
        units = (word(job, C) + PANEL - 1) // PANEL * UNITS_OF_PANEL
        all_rows = padded_rows(rows)
        next_panel = X_PANEL * all_rows
        blocks = (all_rows + _SUMS - 1) // _SUMS
        most = (all_rows // ROWS + blocks - 1) // blocks * ROWS
        for m in range(0, all_rows, most):
            count = min(most, all_rows - m)
            for i in range(count * _ROW // 8):
                store_i64(sums + 8 * i, 0)
            for unit in range(0, units, AT_ONCE):
                some = min(AT_ONCE, units - unit)
                for i in range(some):
                    decode(job, decoded + i * UNIT * _ROW, batch, first, last, unit + i, way)
                x = block_of_x(job, batch, 0) + unit // UNITS_OF_PANEL * next_panel
                x += X_PANEL * m + unit % UNITS_OF_PANEL * 4 * UNIT
                for row in range(0, count, ROWS):
                    add_products(sums + _ROW * row, x + X_PANEL * row, next_panel, decoded, some)
            y = word(job, OUT) + 4 * ((batch * rows + m) * word(job, R) + first)
            _write(sums, y, 4 * word(job, R), min(count, rows - m), last - first)

    return work


def _decode(kind: str) -> Any:
    """What writes a unit of all rows of a part: the numbers of a column are neighbours."""
    write_scales = _scales(kind)
    W_BYTES, COUNT, IS_LOOKUP = BYTES[kind], VECTORS[kind], kind.startswith("lookup")
    VECTORS_ = min(8, COUNT)
    UNITS_OF_PANEL, SQUARE = COUNT // VECTORS_, LANES * _VECTOR
    SCALES, COPIED = VECTORS_ * SQUARE, LANES * W_BYTES

    @native
    def decode(job, to, batch, first, last, unit, way):
        scales, copied, dwords = stack(SCALES), stack(COPIED), stack(SQUARE)
        panel, begin = unit // UNITS_OF_PANEL, unit % UNITS_OF_PANEL * VECTORS_
        row_bytes, table = word(job, ROW_BYTES), load_table(word(job, TABLE))
        next_scales = SQUARE if way == FOLDED else 0
        next_scale = 0 if way == ONE else _VECTOR
        row = batch * word(job, R) + first
        alike = row // word(job, TR) == (row + last - first - 1) // word(job, TR)
        for r in range(first, last, LANES):
            existing, row = min(LANES, last - r), batch * word(job, R) + r
            w, next_row = word(job, W) + row_bytes * row + W_BYTES * panel, row_bytes
            count = min(W_BYTES, row_bytes - W_BYTES * panel)
            for i in range(existing):
                prefetch(w + i * row_bytes + W_BYTES)
            if existing < LANES or count < W_BYTES:
                for i in range(LANES):
                    size = count if i < existing else 0
                    copy(copied + i * W_BYTES, w + i * row_bytes, size, W_BYTES)
                w, next_row = copied, W_BYTES
            if IS_LOOKUP:
                transpose(dwords, next_row, w)
                w, next_row = dwords, _VECTOR
            if r == first or not alike:
                write_scales(job, scales, row, existing, panel, begin, way)
            place = to + 4 * (r - first)
            for j in range(VECTORS_):
                scale = scales + next_scales * j
                store_decoded(place, _ROW, w, next_row, begin + j, table, scale, next_scale, kind)
                place += _ROW * LANES

    return decode


def _scales(kind: str) -> Any:
    """What writes the scales of LANES rows of W, a lane each: of a panel, its lanes, or columns."""
    expand = order(kind).expand
    PANEL, X_PANEL, COUNT = COLUMNS[kind], 4 * COLUMNS[kind], VECTORS[kind]
    VECTORS_ = min(8, COUNT)
    ROWS_BYTES = LANES * X_PANEL

    @native
    def scales(job, to, row, rows, panel, begin, way):
        by_row = stack(ROWS_BYTES)
        columns, tile, tile_rows = word(job, C), word(job, TC), word(job, TR)
        tiles, count = columns // tile, PANEL // tile
        lanes = lanes_by(COUNT, tile)
        for i in range(LANES):
            scale = word(job, SCALE) + 4 * tiles * ((row + min(i, rows - 1)) // tile_rows)
            at = by_row + i * X_PANEL
            if way == ONE:
                store_f32(to + 4 * i, load_f32(scale + 4 * (panel * PANEL // tile)))
            elif way == SOME:
                existing, scale = min(count, tiles - panel * count), scale + 4 * panel * count
                store(at, panel_scales(scale, 0, lanes, existing, 1, SOME))
            else:
                expand(at, scale, columns, tile, panel)
        if way == SOME:
            transpose(to, X_PANEL, by_row)
        elif way == FOLDED:
            for j in range(VECTORS_):
                transpose(to + j * LANES * _VECTOR, X_PANEL, by_row + (begin + j) * _VECTOR)

    return scales


@native
def _write(sums, y, next_y, rows, columns):
    for _ in range(rows):
        if columns == PART:
            store(y, load(sums, _ACROSS))
        else:
            for c in range(columns):
                store_f32(y + 4 * c, load_f32(sums + 4 * c))
        sums += _ROW
        y += next_y
