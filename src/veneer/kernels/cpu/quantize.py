"""Quantising: f32 to codes with a scale for each tile, from its largest magnitude.

Values are read twice: for the scale, and for the codes. A part is small enough for what was read to
be in a cache still.

- Where tiles lie within a row, one is done after the other.
- Where they reach over rows, or are narrow, a part is a row of tiles, of so many columns. It has
  the largest magnitude of each column first, and then of each tile.
"""

from typing import Any

from ...native.functions import native
from ...native.isa import LANES
from ...native.memory import (
    load_f32,
    load_i8,
    load_i32,
    stack,
    store_f32,
    store_i8,
    store_i32,
    word,
)
from ...native.simd.floats import load, store
from ...native.simd.integers import load_ints
from ..common.kinds import MOST_COLUMNS, QUANTIZED_BITS, WITHIN_ROWS
from .operands import job as words
from .quantize_simd import (
    codes_of,
    larger_magnitudes,
    largest,
    no_magnitudes,
    reciprocals,
    scales_of,
    store_codes,
    store_first,
)

#: So many columns a part with tiles over rows has, where tiles do not ask for more.
_COLUMNS = 512
#: What a part of rows reads, in values.
_VALUES = 1 << 15

# Where a job's table has what a format needs.
_RECIPROCAL, _IS_SHORT, _THRESHOLDS = 0, 4, 8  # bytes

_STEP = 2 * LANES  # columns at a time, so that codes of 4 bits fill whole vectors
_ROW, _REST = 4 * MOST_COLUMNS, 4 * _STEP  # bytes


@native
def _is_within_rows(job):
    return word(job, words.TR) == 1 and word(job, words.TC) % WITHIN_ROWS == 0


@native
def _columns(job):
    """How many columns a part has, that tiles reach over rows in: whole tiles, and whole bytes."""
    tile = word(job, words.TC)
    unit = tile if tile % 2 == 0 else 2 * tile
    return max(1, _COLUMNS // unit) * unit


@native
def _rows(job):
    """How many rows a part has, that tiles lie within."""
    return max(1, _VALUES // word(job, words.C))


@native
def count(job):
    """How many parts there are."""
    batch, r, c = word(job, words.BATCH), word(job, words.R), word(job, words.C)
    if _is_within_rows(job):
        rows = _rows(job)
        return (batch * r + rows - 1) // rows
    columns = _columns(job)
    return batch * (r // word(job, words.TR)) * ((c + columns - 1) // columns)


def kernel(kind: str) -> tuple[Any, Any]:
    """Returns the functions `count(job)` and `work(job, part)` for a format of `QUANTIZED_BITS`."""
    bits = QUANTIZED_BITS[kind]
    row_of_tiles = _row_of_tiles(kind, bits)

    @native
    def row(job, index):
        c, tile = word(job, words.C), word(job, words.TC)
        table = word(job, words.TABLE)
        x = word(job, words.X) + 4 * c * index
        out = word(job, words.OUT) + word(job, words.ROW_BYTES) * index
        scale = word(job, words.SCALE) + 4 * (c // tile) * index
        for first in range(0, c, tile):
            magnitudes = no_magnitudes(2)
            for i in range(first, first + tile, _STEP):
                magnitudes = larger_magnitudes(magnitudes, x + 4 * i)
            reciprocal, is_short = load_f32(table + _RECIPROCAL), load_f32(table + _IS_SHORT)
            tile_scale = scales_of(largest(magnitudes), reciprocal, is_short, kind)
            store_first(scale, tile_scale)
            scale += 4
            by = reciprocals(tile_scale)
            for i in range(first, first + tile, _STEP):
                codes = codes_of(x + 4 * i, 2, by, table + _THRESHOLDS, kind)
                store_codes(out + i * bits // 8, codes, bits)

    @native
    def work(job, part):
        if not _is_within_rows(job):
            row_of_tiles(job, part)
            return
        rows = _rows(job)
        last = min((part + 1) * rows, word(job, words.BATCH) * word(job, words.R))
        for index in range(part * rows, last):
            row(job, index)

    return count, work


def _row_of_tiles(kind: str, bits: int) -> Any:
    @native
    def encode(x, columns, factors, table, out):
        whole = columns - columns % _STEP
        for i in range(0, whole, _STEP):
            codes = codes_of(x + 4 * i, 2, load(factors + 4 * i, 2), table, kind)
            store_codes(out + i * bits // 8, codes, bits)
        if whole < columns:
            padded, packed = stack(_REST), stack(_REST)
            _pad(padded, x + 4 * whole, columns - whole)
            codes = codes_of(padded, 2, load(factors + 4 * whole, 2), table, kind)
            store_codes(packed, codes, bits)
            last = out + columns * bits // 8
            for i in range((columns - whole) * bits // 8):
                store_i8(out + whole * bits // 8 + i, load_i8(packed + i))
            if columns * bits % 8:  # the last byte has one code
                store_i8(last, load_i8(packed + (columns - whole) * bits // 8) & 15)

    @native
    def find_scales(job, x, columns, scale, factors):
        """Writes scales, and the reciprocal of each column's."""
        c, tr, tc = word(job, words.C), word(job, words.TR), word(job, words.TC)
        table = word(job, words.TABLE)
        columnwise = stack(_ROW)  # magnitudes, and then scales
        for i in range(0, columns, _STEP):
            store(columnwise + 4 * i, no_magnitudes(2))
        for r in range(tr):
            _add_row(columnwise, x + 4 * c * r, columns)
        if tc > 1:
            _share(columnwise, columns, tc)
        reciprocal, is_short = load_f32(table + _RECIPROCAL), load_f32(table + _IS_SHORT)
        for i in range(0, columns, _STEP):
            magnitudes = load_ints(columnwise + 4 * i, 0, 1, 2)
            scales = scales_of(magnitudes, reciprocal, is_short, kind)
            store(columnwise + 4 * i, scales)
            store(factors + 4 * i, reciprocals(scales))
        for tile in range(columns // tc):
            store_f32(scale + 4 * tile, load_f32(columnwise + 4 * tile * tc))

    @native
    def row_of_tiles(job, part):
        c, row_bytes, tr = word(job, words.C), word(job, words.ROW_BYTES), word(job, words.TR)
        panel = _columns(job)
        panels = (c + panel - 1) // panel
        tile_row, first = part // panels, part % panels * panel
        columns = min(panel, c - first)
        x = word(job, words.X) + 4 * (tile_row * tr * c + first)
        out = word(job, words.OUT) + tile_row * tr * row_bytes + first * bits // 8
        scale = word(job, words.SCALE) + 4 * ((tile_row * c + first) // word(job, words.TC))
        factors = stack(_ROW)
        find_scales(job, x, columns, scale, factors)
        for r in range(tr):
            table = word(job, words.TABLE) + _THRESHOLDS
            encode(x + 4 * c * r, columns, factors, table, out + row_bytes * r)

    return row_of_tiles


@native
def _add_row(magnitudes, x, columns):
    """Makes magnitudes of columns as large as those of a row."""
    whole = columns - columns % _STEP
    for i in range(0, whole, _STEP):
        place = magnitudes + 4 * i
        store(place, larger_magnitudes(load_ints(place, 0, 1, 2), x + 4 * i))
    if whole < columns:
        padded, place = stack(_REST), magnitudes + 4 * whole
        _pad(padded, x + 4 * whole, columns - whole)
        store(place, larger_magnitudes(load_ints(place, 0, 1, 2), padded))


@native
def _pad(to, x, columns):
    """Copies what is left of a row, and zeros after it."""
    for i in range(_STEP):
        store_f32(to + 4 * i, load_f32(x + 4 * i) if i < columns else 0.0)


@native
def _share(magnitudes, columns, tile):
    """Makes the magnitudes of each tile's columns the largest of them."""
    for first in range(0, columns, tile):
        most = 0
        for i in range(first, first + tile):
            most = max(most, load_i32(magnitudes + 4 * i))
        for i in range(first, first + tile):
            store_i32(magnitudes + 4 * i, most)
