"""Quantize f32 to codes with one scale per tile, computed from its largest magnitude.

A part reads its values twice: for the scales, and for the codes. It is small enough that the values
are still in a cache the second time.

- If tiles lie within rows, a part is some rows, and tiles are quantized one after the other.
- If tiles span rows, or are narrow, a part is some columns of one row of tiles. It computes the
  largest magnitude of each column, and then of each tile.
"""

from typing import Any

from ...native.functions import native
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
from ...native.simd import LANES
from ...native.simd.floats import load, store
from ...native.simd.integers import load_ints
from ..common.kinds import MOST_COLUMNS, QUANTIZED_BITS, WITHIN_ROWS
from .operands import job as words
from .quantize_simd import (
    broadcast_largest,
    compute_reciprocals,
    compute_scales,
    encode,
    store_codes,
    store_first,
    update_magnitudes,
    zero_magnitudes,
)

#: Columns of a part whose tiles span rows, unless a tile is wider.
_COLUMNS = 512
#: Values of a part whose tiles lie within rows.
_VALUES = 1 << 15

#: Byte offsets in the table of a job: 1 / the largest code, whether scales are rounded, and
#: the thresholds between codes.
_RECIPROCAL, _ROUNDS_SCALE, _THRESHOLDS = 0, 4, 8

#: Columns that are encoded at once: two vectors, so that codes of 4 bits fill a vector.
_STEP = 2 * LANES
_ROW_BYTES, _STEP_BYTES = 4 * MOST_COLUMNS, 4 * _STEP


@native
def _is_within_rows(job):
    return word(job, words.TR) == 1 and word(job, words.TC) % WITHIN_ROWS == 0


@native
def _count_columns(job):
    # A part has full tiles and full bytes of codes.
    tile = word(job, words.TC)
    unit = tile if tile % 2 == 0 else 2 * tile
    return max(1, _COLUMNS // unit) * unit


@native
def _count_rows(job):
    return max(1, _VALUES // word(job, words.C))


@native
def count(job):
    """Return the number of parts of a job: see `JobFunctions`."""
    batch, r, c = word(job, words.BATCH), word(job, words.R), word(job, words.C)
    if _is_within_rows(job):
        rows = _count_rows(job)
        return (batch * r + rows - 1) // rows
    columns = _count_columns(job)
    return batch * (r // word(job, words.TR)) * ((c + columns - 1) // columns)


def kernel(kind: str) -> tuple[Any, Any]:
    """Return the functions that quantize to a format in `QUANTIZED_BITS`: see `JobFunctions`.

    They are `count(job)` and `work(job, part)`.
    """
    bits = QUANTIZED_BITS[kind]
    quantize_tile_row = _build_tile_row_quantizer(kind, bits)

    @native
    def quantize_row(job, index):
        c, tile = word(job, words.C), word(job, words.TC)
        table = word(job, words.TABLE)
        x = word(job, words.X) + 4 * c * index
        out = word(job, words.OUT) + word(job, words.ROW_BYTES) * index
        scale = word(job, words.SCALE) + 4 * (c // tile) * index
        for first in range(0, c, tile):
            magnitudes = zero_magnitudes(2)
            for i in range(first, first + tile, _STEP):
                magnitudes = update_magnitudes(magnitudes, x + 4 * i)
            reciprocal, rounds_scale = (
                load_f32(table + _RECIPROCAL),
                load_f32(table + _ROUNDS_SCALE),
            )
            tile_scale = compute_scales(
                broadcast_largest(magnitudes), reciprocal, rounds_scale, kind
            )
            store_first(scale, tile_scale)
            scale += 4
            factor = compute_reciprocals(tile_scale)
            for i in range(first, first + tile, _STEP):
                codes = encode(x + 4 * i, 2, factor, table + _THRESHOLDS, kind)
                store_codes(out + i * bits // 8, codes, bits)

    @native
    def work(job, part):
        if not _is_within_rows(job):
            quantize_tile_row(job, part)
            return
        rows = _count_rows(job)
        last = min((part + 1) * rows, word(job, words.BATCH) * word(job, words.R))
        for index in range(part * rows, last):
            quantize_row(job, index)

    return count, work


def _build_tile_row_quantizer(kind: str, bits: int) -> Any:
    """Return a function that quantizes columns of a row of tiles, if tiles span rows or are narrow.

    Its arguments are a job and the index of a part.
    """

    @native
    def encode_row(x, columns, factors, table, out):
        """Write the codes of a row of `columns` f32 at `x` to `out`.

        `factors` has the reciprocal of each column's scale. `table` is the address of the
        thresholds between codes.
        """
        aligned = columns - columns % _STEP
        for i in range(0, aligned, _STEP):
            codes = encode(x + 4 * i, 2, load(factors + 4 * i, 2), table, kind)
            store_codes(out + i * bits // 8, codes, bits)
        if aligned < columns:
            padded, packed = stack(_STEP_BYTES), stack(_STEP_BYTES)
            _copy_padded_row(padded, x + 4 * aligned, columns - aligned)
            codes = encode(padded, 2, load(factors + 4 * aligned, 2), table, kind)
            store_codes(packed, codes, bits)
            last = out + columns * bits // 8
            for i in range((columns - aligned) * bits // 8):
                store_i8(out + aligned * bits // 8 + i, load_i8(packed + i))
            if columns * bits % 8:  # The last byte has one code.
                store_i8(last, load_i8(packed + (columns - aligned) * bits // 8) & 15)

    @native
    def find_scales(job, x, columns, scale, factors):
        """Write a row of scales to `scale`, and the reciprocal of each column's scale to `factors`.

        The row of tiles begins at `x` and has `columns` columns.
        """
        c, tr, tc = word(job, words.C), word(job, words.TR), word(job, words.TC)
        table = word(job, words.TABLE)
        column_values = stack(_ROW_BYTES)  # magnitudes, and then scales
        for i in range(0, columns, _STEP):
            store(column_values + 4 * i, zero_magnitudes(2))
        for r in range(tr):
            _update_row_magnitudes(column_values, x + 4 * c * r, columns)
        if tc > 1:
            _share_magnitudes(column_values, columns, tc)
        reciprocal, rounds_scale = load_f32(table + _RECIPROCAL), load_f32(table + _ROUNDS_SCALE)
        for i in range(0, columns, _STEP):
            magnitudes = load_ints(column_values + 4 * i, 0, 1, 2)
            scales = compute_scales(magnitudes, reciprocal, rounds_scale, kind)
            store(column_values + 4 * i, scales)
            store(factors + 4 * i, compute_reciprocals(scales))
        for tile in range(columns // tc):
            store_f32(scale + 4 * tile, load_f32(column_values + 4 * tile * tc))

    @native
    def quantize_tile_row(job, part):
        c, row_bytes, tr = word(job, words.C), word(job, words.ROW_BYTES), word(job, words.TR)
        width = _count_columns(job)
        widths = (c + width - 1) // width
        tile_row, first = part // widths, part % widths * width
        columns = min(width, c - first)
        x = word(job, words.X) + 4 * (tile_row * tr * c + first)
        out = word(job, words.OUT) + tile_row * tr * row_bytes + first * bits // 8
        scale = word(job, words.SCALE) + 4 * ((tile_row * c + first) // word(job, words.TC))
        factors = stack(_ROW_BYTES)
        find_scales(job, x, columns, scale, factors)
        for r in range(tr):
            table = word(job, words.TABLE) + _THRESHOLDS
            encode_row(x + 4 * c * r, columns, factors, table, out + row_bytes * r)

    return quantize_tile_row


@native
def _update_row_magnitudes(magnitudes, x, columns):
    """Update the largest magnitude of each of `columns` columns with a row of values at `x`."""
    aligned = columns - columns % _STEP
    for i in range(0, aligned, _STEP):
        place = magnitudes + 4 * i
        store(place, update_magnitudes(load_ints(place, 0, 1, 2), x + 4 * i))
    if aligned < columns:
        padded, place = stack(_STEP_BYTES), magnitudes + 4 * aligned
        _copy_padded_row(padded, x + 4 * aligned, columns - aligned)
        store(place, update_magnitudes(load_ints(place, 0, 1, 2), padded))


@native
def _copy_padded_row(to, x, columns):
    # Fewer than `_STEP` columns are padded with zeros.
    for i in range(_STEP):
        store_f32(to + 4 * i, load_f32(x + 4 * i) if i < columns else 0.0)


@native
def _share_magnitudes(magnitudes, columns, tile):
    """Set the magnitude of each column to the largest of its tile of `tile` columns."""
    for first in range(0, columns, tile):
        most = 0
        for i in range(first, first + tile):
            most = max(most, load_i32(magnitudes + 4 * i))
        for i in range(first, first + tile):
            store_i32(magnitudes + 4 * i, most)
