"""Scales and minima of a stored matrix, as f32, from whatever they are stored as.

Minima may be stored as zero points: the code that stands for 0, so that one worth 0 stands for
`-zero_point * scale`. Scales and minima may be codes that have scales of their own, as those of
GGUF's K-quants: an outer one for some neighbours.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.isa import LANES
from ....native.memory import (
    load_f32,
    load_i8,
    load_i64,
    prefetch,
    stack,
    store_f32,
    store_i8,
    store_i64,
    word,
)
from ....native.simd.floats import fma, load, scale_block, splat, store, zeros
from ....native.simd.integers import load_repeated
from ...common.kinds import FLOATS, PLANES, PLANES_TYPE, ZERO_POINTS
from .job import (
    BATCH,
    MINIMUM,
    MINIMUM_TYPE,
    OFFSET,
    OUTER_MINIMUM,
    OUTER_MINIMUM_TILES,
    OUTER_MINIMUM_TYPE,
    OUTER_SCALE,
    OUTER_SCALE_TILES,
    OUTER_SCALE_TYPE,
    SCALE,
    SCALE_TYPE,
    TC,
    TR,
    C,
    R,
)
from .planes import store_codes_of_planes
from .small_floats import SIZES, first_lanes, load_as_floats

#: Bytes of scales and minima of a part that are on the stack, at most: to allocate them takes as
#: long as to read a few rows.
ON_STACK = 1 << 15
_VECTOR = 4 * LANES
#: The first type of zero points.
_ZERO_POINT = len(FLOATS)
#: Scales that are read at once, to multiply as many zero points.
_SOME = 256
_BUFFER, _MINUS_ONE = 4 * _SOME, np.float32(-1)
#: Units of bit planes that a vector has; and vectors of a table, which says nothing of them.
_ONE_UNIT, _UNITS, _TABLE = 1, max(1, LANES // 8), 16 // LANES


@native
def copy(to, address, count, size):
    """Copies so many bytes, and zeros behind them: as many as `size` in all."""
    count = max(0, min(count, size))
    whole = count // 8 * 8
    for i in range(0, whole, 8):
        store_i64(to + i, load_i64(address + i))
    for i in range(whole, count):
        store_i8(to + i, load_i8(address + i))
    while count < size:
        if count % 8 == 0 and count + 8 <= size:
            store_i64(to + count, 0)
            count += 8
        else:
            store_i8(to + count, 0)
            count += 1


def _reader(dtype: str) -> Any:
    """Makes what reads numbers of a dtype, and writes whole vectors, with zeros behind them.

    So many numbers are `there` from the address on: no others are read.
    """
    size = SIZES[dtype]
    vector_bytes = size * LANES

    @native
    def read(address, count, there, to):
        prevent_inlining()
        for i in range(count // LANES):
            store(to + _VECTOR * i, load_as_floats(address + vector_bytes * i, dtype))
        whole = count // LANES * LANES
        if whole < count:
            last = address + size * whole
            if there - whole < LANES:
                rest = stack(_VECTOR)
                copy(rest, last, size * (count - whole), vector_bytes)
                last = rest
            store(to + 4 * whole, first_lanes(load_as_floats(last, dtype), count - whole))

    return read


_read_f32, _read_f16, _read_bf16, _read_e8m0 = map(_reader, FLOATS)
_read_int8, _read_uint8 = map(_reader, ZERO_POINTS)


@native
def read_tiles(job, leaf, row, first, count, to):
    """Writes what scales or minima are worth: f32, in whole vectors, with zeros behind the last.

    `leaf` is SCALE or MINIMUM; `row`, which row of tiles, of all matrices, and `first`, from which
    tile in it.
    """
    _read(job, leaf, row, first, count, to)
    is_zero_point = leaf == MINIMUM and word(job, MINIMUM_TYPE) >= _ZERO_POINT
    if is_zero_point and word(job, OUTER_MINIMUM) == 0:
        _make_minima(job, row, first, count, to)


@native
def rows_of_tiles(job):
    """For `fetch_tiles`: where scales and minima lie, and how many bytes each row of W has.

    Those that rows share, or that are scales of these, are few: they have 0.
    """
    tiles = word(job, C) // word(job, TC)
    scale, minimum = 0, 0
    if word(job, TR) == 1:
        scale = bytes_of(word(job, SCALE_TYPE), tiles)
        minimum = bytes_of(word(job, MINIMUM_TYPE), tiles) if has_minima(job) else 0
    return word(job, SCALE), scale, word(job, MINIMUM), minimum


@native
def fetch_tiles(stored, row, rows):
    """Has scales and minima fetched of so many rows of W, which may be behind its end."""
    scales, scale, minima, minimum = stored
    for i in range(0, rows * scale, 64):
        prefetch(scales + row * scale + i)
    for i in range(0, rows * minimum, 64):
        prefetch(minima + row * minimum + i)


@native
def _make_minima(job, row, first, count, to):
    """Makes minima of zero points."""
    scales, offset = stack(_BUFFER), splat(np.float32(word(job, OFFSET)))
    for i in range(0, count, _SOME):
        some = min(_SOME, count - i)
        _read(job, SCALE, row, first + i, some, scales)
        for j in range(0, some, LANES):
            at = to + 4 * (i + j)
            below = fma(load(at, 1), splat(_MINUS_ONE), offset)
            store(at, scale_block(below, load(scales + 4 * j, 1)))


@native
def _read(job, leaf, row, first, count, to):
    """Writes what is stored, as f32, as `read_tiles` does."""
    tiles = word(job, C) // word(job, TC)
    number = row * tiles + first
    there = word(job, BATCH) * (word(job, R) // word(job, TR)) * tiles - number
    if leaf == SCALE:
        _read_numbers(word(job, SCALE_TYPE), word(job, SCALE), number, count, there, to)
        if word(job, OUTER_SCALE) != 0:
            outer = word(job, OUTER_SCALE), word(job, OUTER_SCALE_TYPE)
            _scale_codes(outer, word(job, OUTER_SCALE_TILES), number, count, there, to)
    else:
        _read_numbers(word(job, MINIMUM_TYPE), word(job, MINIMUM), number, count, there, to)
        if word(job, OUTER_MINIMUM) != 0:
            outer = word(job, OUTER_MINIMUM), word(job, OUTER_MINIMUM_TYPE)
            _scale_codes(outer, word(job, OUTER_MINIMUM_TILES), number, count, there, to)


@native
def _scale_codes(outer, each, number, count, there, to):
    """Multiplies codes by what so many of them share."""
    prevent_inlining()
    scales, (address, type) = stack(_BUFFER), outer
    i, shift = 0, 0
    while 1 << shift < min(each, LANES):
        shift += 1
    while i < count:
        first, within = divmod(number + i, each)
        some = min(_SOME - LANES, (number + count - 1) // each + 1 - first)
        last, at = min(count, (first + some) * each - number), scales
        _read_numbers(type, address, first, some, (number + there) // each - first, scales)
        if within == 0 and each == 1 << shift:  # a vector has some, of each of as many
            while i + LANES <= last:
                store(
                    to + 4 * i,
                    scale_block(load(to + 4 * i, 1), load_repeated(at, 0, 1, shift, LANES)),
                )
                i, at = i + LANES, at + 4 * (LANES >> shift)
        while i < last:
            end, by = min(i + each - within, last), load_f32(at)
            while i + LANES <= end:
                store(to + 4 * i, scale_block(load(to + 4 * i, 1), splat(by)))
                i += LANES
            while i < end:
                store_f32(to + 4 * i, load_f32(to + 4 * i) * by)
                i += 1
            at, within = at + 4, 0


@native
def _read_planes(address, number, count, there, to):
    """Reads codes of bit planes, of which 8 neighbours are as many bytes as they have bits."""
    prevent_inlining()
    codes, table, i = stack(_VECTOR), zeros(1, _TABLE), 0
    while i < count:
        unit, within = divmod(number + i, 8)
        place = address + PLANES * unit
        if within == 0 and i + LANES <= count and LANES >= 8:
            store_codes_of_planes(codes, place, _UNITS, PLANES, table)
            store(to + 4 * i, load_as_floats(codes, "int8"))
            i += LANES
        else:
            store_codes_of_planes(codes, place, _ONE_UNIT, PLANES, table)
            for j in range(within, min(8, within + count - i)):
                store_f32(to + 4 * i, np.float32(load_i8(codes + j)))
                i += 1
    for j in range(count, (count + LANES - 1) // LANES * LANES):
        store_f32(to + 4 * j, 0.0)


@native
def _read_numbers(type, address, number, count, there, to):
    """Reads numbers of a type, from one on."""
    if type == PLANES_TYPE:
        _read_planes(address, number, count, there, to)
    elif type == 0:
        _read_f32(address + 4 * number, count, there, to)
    elif type == 1:
        _read_f16(address + 2 * number, count, there, to)
    elif type == 2:
        _read_bf16(address + 2 * number, count, there, to)
    elif type == 3:
        _read_e8m0(address + number, count, there, to)
    elif type == _ZERO_POINT:
        _read_int8(address + number, count, there, to)
    else:
        _read_uint8(address + number, count, there, to)


@native
def size_of(type):
    """The bytes of an entry of a type; several of bit planes share some."""
    return 4 if type == 0 else 1 if type >= 3 else 2


@native
def bytes_of(type, count):
    """The bytes of so many numbers of a type: of bit planes, a multiple of 8."""
    return count // 8 * PLANES if type == PLANES_TYPE else count * size_of(type)


@native
def has_minima(job):
    """Whether a code worth 0 stands for something else."""
    return word(job, MINIMUM) != 0


@native
def are_f32(job, leaf):
    """Whether scales, or minima, may be read from where they are."""
    return word(job, SCALE_TYPE if leaf == SCALE else MINIMUM_TYPE) == 0
