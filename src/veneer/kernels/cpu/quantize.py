"""Quantize f32 to codes with one scale per tile, computed from its largest magnitude.

A part reads its values twice: for the scales, and for the codes. It is small enough that the values
are still in a cache the second time.

- If tiles lie within rows, a part is some rows, and tiles are quantized one after the other.
- If tiles span rows, or are narrow, a part is some columns of one row of tiles. It computes the
  largest magnitude of each column, and then of each tile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ...native.functions import native
from ...native.memory import (
    F32,
    I8,
    I32,
    load_f32,
    load_i8,
    load_i32,
    pointer,
    stack,
    store_f32,
    store_i8,
    store_i32,
    word,
)
from ...native.simd import LANES
from ...native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    advance,
    broadcast,
    constant,
    get_vectors,
    instruction,
    load_vector,
    make_block,
    shuffle,
    store_vector,
)
from ...native.simd.floats import load, store
from ...native.simd.integers import load_ints
from ..common.table import MOST_COLUMNS, QUANTIZED_BITS, WITHIN_ROWS
from . import job as words

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
    """Return the number of parts into which threads divide the array that `job` describes."""
    batch, r, c = word(job, words.BATCH), word(job, words.R), word(job, words.C)
    if _is_within_rows(job):
        rows = _count_rows(job)
        return (batch * r + rows - 1) // rows
    columns = _count_columns(job)
    return batch * (r // word(job, words.TR)) * ((c + columns - 1) // columns)


def build(kind: str) -> tuple[Any, Any]:
    """Return the two functions, compiled by Numba, of the kernel that quantizes to a format.

    `count(job)` returns the number of parts of a job, and `work(job, part)` quantizes one part.
    Threads take the parts. `kind` is the format, a key of `QUANTIZED_BITS` such as "nf4".
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
    """Return a function `quantize(job, part)` for tiles that span rows, or are narrow.

    `kind` is the format, a key of `QUANTIZED_BITS`, and `bits` are the bits of its codes. A part is
    some columns of a row of tiles of the array that `job` describes.
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
        """Write the scales of a row of tiles to `scale`, and the reciprocals of them to `factors`.

        `factors` gets one reciprocal per column. The row of tiles is f32 at the address `x` and has
        `columns` columns.
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
    """Update the largest magnitude of each of `columns` columns with a row of values.

    `magnitudes` and `x` are the addresses of the magnitudes, as `update_magnitudes` returns them,
    and of the row.
    """
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
    """Set the largest magnitude of each column to the largest magnitude of its tile.

    A tile has `tile` columns. `magnitudes` is the address of the `columns` magnitudes.
    """
    for first in range(0, columns, tile):
        most = 0
        for i in range(first, first + tile):
            most = max(most, load_i32(magnitudes + 4 * i))
        for i in range(first, first + tile):
            store_i32(magnitudes + 4 * i, most)


# Instructions on vectors of f32: magnitudes, scales, codes and packed bytes.

#: The smallest normal f32. Neither a scale nor its reciprocal is smaller.
_TINY = 2.0**-126
#: The largest scale, by kind, at which the dense value of every code is finite. This matches
#: `limit_scale` of quant/conversion.
_LARGEST_SCALES = {
    kind: float(np.finfo(np.float32).max / np.float32(reach) * np.float32(1 - 2.0**-23))
    for kind, reach in {"int8": 128, "int4": 8}.items()
}
#: Adding this to a number of less than 23 bits rounds the number half to even. The lowest bits of
#: the sum are the integer.
_TO_INTEGER = 1.5 * 2.0**23


@instruction
def zero_magnitudes(columns):
    """Return a row of `columns` vectors of integer zeros, the smallest magnitudes."""
    block = Block("i32", 1, columns.literal_value)
    return block, lambda builder, _: ir.Constant(block.llvm, [constant(INTS, 0)] * block.count)


@instruction
def update_magnitudes(magnitudes, address):
    """Return the elementwise maximum of `magnitudes` and the magnitudes of the f32 at `address`.

    A magnitude is the bits of a positive f32, read as an integer: integers have the same order. NaN
    comes after infinity.
    """

    def emit(builder, magnitudes, address):
        larger = []
        for c, old in enumerate(get_vectors(builder, magnitudes)):
            bits = load_vector(builder, advance(builder, address, c), INTS)
            new = builder.and_(bits, constant(INTS, 0x7FFFFFFF))
            larger.append(_select_larger(builder, old, new))
        return make_block(builder, larger)

    return magnitudes, emit


def _select_larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@instruction
def broadcast_largest(magnitudes):
    """Return a vector whose lanes all have the largest of all magnitudes."""

    def emit(builder, magnitudes):
        first, *rest = get_vectors(builder, magnitudes)
        for other in rest:
            first = _select_larger(builder, first, other)
        step = 1
        while step < LANES:
            lanes = [lane ^ step for lane in range(LANES)]
            first = _select_larger(builder, first, shuffle(builder, first, first, lanes))
            step *= 2
        return make_block(builder, [first])

    return Block("i32", 1, 1), emit


@instruction
def compute_scales(magnitudes, reciprocal, rounds_scale, kind):
    """Return the scale of the tile of each magnitude: the magnitude times `reciprocal`.

    `kind` is the format, a key of `QUANTIZED_BITS`, and `reciprocal` is 1 / its largest code. As in
    `as_divisor` of quant/conversion, a scale below `_TINY` becomes 1, and a scale above `1 / _TINY`
    becomes NaN. If `rounds_scale` is not 0, the significand of a scale is rounded to 16 bits. Then
    a scale above the limit of its kind in `_LARGEST_SCALES` is reduced to the limit.
    """
    block = Block("f32", 1, magnitudes.columns)
    limit = _LARGEST_SCALES.get(kind.literal_value)

    def emit(builder, magnitudes, reciprocal, rounds_scale, _):
        by = broadcast(builder, reciprocal)
        rounds_scale = builder.fcmp_ordered(
            "!=", broadcast(builder, rounds_scale), constant(FLOATS, 0.0)
        )
        scales = []
        for bits in get_vectors(builder, magnitudes):
            scale = builder.fmul(builder.bitcast(bits, FLOATS), by)
            fits = builder.fcmp_ordered("<=", scale, constant(FLOATS, 1 / _TINY))
            usable = builder.select(fits, scale, constant(FLOATS, float("nan")))
            small = builder.fcmp_ordered("<", scale, constant(FLOATS, _TINY))
            scale = builder.select(small, constant(FLOATS, 1.0), usable)
            scale = builder.select(rounds_scale, _round_significand(builder, scale), scale)
            if limit is not None:
                exceeds = builder.fcmp_ordered(">", scale, constant(FLOATS, limit))
                scale = builder.select(exceeds, constant(FLOATS, limit), scale)
            scales.append(scale)
        return make_block(builder, scales)

    return block, emit


def _round_significand(builder: Any, x: Any) -> Any:
    """Round the significands of positive numbers to 16 bits, half to even. Quiet NaN stays NaN."""
    bits = builder.bitcast(x, INTS)
    is_odd = builder.and_(builder.lshr(bits, constant(INTS, 8)), constant(INTS, 1))
    raised = builder.add(bits, builder.add(is_odd, constant(INTS, 0x7F)))
    return builder.bitcast(builder.and_(raised, constant(INTS, 0xFFFFFF00)), FLOATS)


@instruction
def compute_reciprocals(block):
    """Return a block of the reciprocals of the f32 of a block."""

    def emit(builder, block):
        one = constant(FLOATS, 1.0)
        return make_block(
            builder, [builder.fdiv(one, value) for value in get_vectors(builder, block)]
        )

    return block, emit


@instruction
def store_first(address, block):
    """Write the first number of a vector to `address`."""

    def emit(builder, address, block):
        (value,) = get_vectors(builder, block)
        first = builder.extract_element(value, I32(0))
        builder.store(first, pointer(builder, address, F32)).align = 1

    return types.void, emit


@instruction
def encode(address, columns, factors, table, kind):
    """Multiply f32 by factors, and return the nearest codes of the products as int32.

    `columns` vectors of f32 are read at `address`. `factors` is a row of as many vectors, or one
    vector. `table` is the address of the 15 thresholds between codes, which only nf4 uses. NaN gets
    the code of 0.
    """
    block = Block("i32", 1, columns.literal_value)
    encode = _ENCODERS[kind.literal_value]

    def emit(builder, address, _, factors, table, *__):
        by = get_vectors(builder, factors)
        codes = []
        for c in range(block.columns):
            x = load_vector(builder, advance(builder, address, c))
            scaled = builder.fmul(x, by[c % len(by)])
            is_number = builder.fcmp_ordered("ord", scaled, scaled)
            codes.append(
                encode(builder, builder.select(is_number, scaled, constant(FLOATS, 0.0)), table)
            )
        return make_block(builder, codes)

    return block, emit


def _build_rounding_encoder(low: int, high: int) -> Callable[..., Any]:
    """Return a function that rounds f32 to codes from `low` to `high`, half to even."""

    def encode(builder: Any, x: Any, _: Any) -> Any:
        low_vector, high_vector = (constant(FLOATS, float(end)) for end in (low, high))
        x = builder.select(builder.fcmp_ordered(">", x, low_vector), x, low_vector)
        x = builder.select(builder.fcmp_ordered("<", x, high_vector), x, high_vector)
        return builder.bitcast(builder.fadd(x, constant(FLOATS, _TO_INTEGER)), INTS)

    return encode


def _count_thresholds(builder: Any, x: Any, table: Any) -> Any:
    """Return the code of each f32: how many of the 15 thresholds at `table` it reaches."""
    code = constant(INTS, 0)
    for i in range(15):
        address = builder.add(table, ir.Constant(table.type, 4 * i))
        threshold = builder.load(pointer(builder, address, F32))
        threshold.align = 1
        reached = builder.fcmp_ordered(">=", x, broadcast(builder, threshold))
        code = builder.sub(code, builder.sext(reached, INTS))
    return code


_ENCODERS = {
    "int8": _build_rounding_encoder(-128, 127),
    "int4": _build_rounding_encoder(-8, 7),
    "nf4": _count_thresholds,
}


@instruction
def store_codes(address, codes, bits):
    """Write the lowest `bits` bits of int32 codes to `address`.

    `bits` is 8, or 4 to write two neighboring codes per byte.
    """
    store = {8: _store_bytes, 4: _store_nibbles}[bits.literal_value]

    def emit(builder, address, codes, _):
        store(builder, address, get_vectors(builder, codes))

    return types.void, emit


def _store_bytes(builder: Any, address: Any, codes: Sequence[Any]) -> None:
    for c, code in enumerate(codes):
        place = builder.add(address, ir.Constant(address.type, LANES * c))
        store_vector(builder, builder.trunc(code, ir.VectorType(I8, LANES)), place)


def _store_nibbles(builder: Any, address: Any, codes: Sequence[Any]) -> None:
    # The first of two neighboring codes is in the lower 4 bits of a byte.
    packed = []
    for a, b in zip(codes[::2], codes[1::2], strict=True):
        even, odd = (
            builder.and_(shuffle(builder, a, b, range(i, 2 * LANES, 2)), constant(INTS, 15))
            for i in (0, 1)
        )
        packed.append(builder.or_(even, builder.shl(odd, constant(INTS, 4))))
    _store_bytes(builder, address, packed)
