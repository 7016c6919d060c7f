"""Scales and minima of a stored matrix, as f32, from whatever they are stored as.

Minima may be stored as zero points: the code that stands for 0, so that one worth 0 stands for
`-zero_point * scale`.
"""

from typing import Any

import numpy as np

from ...native.functions import native, not_inlined
from ...native.isa import LANES
from ...native.memory import (
    free,
    load_i8,
    load_i64,
    malloc,
    set_word,
    stack,
    store_i8,
    store_i64,
    word,
)
from ...native.simd.floats import load, moved, scaled, splat, store
from ...native.simd.small_floats import SIZES, first_lanes, load_as_floats
from .job import (
    BATCH,
    FAILED,
    MINIMUM,
    MINIMUM_TYPE,
    OFFSET,
    SCALE,
    SCALE_TYPE,
    TC,
    TR,
    WIDE_MINIMUM,
    WIDE_SCALE,
    C,
    R,
)
from .kinds import FLOATS, ZERO_POINTS

_VECTOR = 4 * LANES
#: The first type of zero points.
_ZERO_POINT = len(FLOATS)
#: Scales that are read at once, to multiply as many zero points.
_SOME = 256
_BUFFER, _MINUS_ONE = 4 * _SOME, np.float32(-1)


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
        not_inlined()
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
    if leaf == MINIMUM and word(job, MINIMUM_TYPE) >= _ZERO_POINT:
        _make_minima(job, row, first, count, to)


@native
def _make_minima(job, row, first, count, to):
    """Makes minima of zero points."""
    scales, offset = stack(_BUFFER), splat(np.float32(word(job, OFFSET)))
    for i in range(0, count, _SOME):
        some = min(_SOME, count - i)
        _read(job, SCALE, row, first + i, some, scales)
        for j in range(0, some, LANES):
            at = to + 4 * (i + j)
            below = moved(load(at, 1), splat(_MINUS_ONE), offset)
            store(at, scaled(below, load(scales + 4 * j, 1)))


@native
def _read(job, leaf, row, first, count, to):
    """Writes what is stored, as f32, as `read_tiles` does."""
    type = word(job, SCALE_TYPE if leaf == SCALE else MINIMUM_TYPE)
    tiles, address = word(job, C) // word(job, TC), word(job, leaf)
    number = row * tiles + first
    there = word(job, BATCH) * (word(job, R) // word(job, TR)) * tiles - number
    if type == 0:
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
    """The bytes of a number of a type of `FLOATS`, or of `ZERO_POINTS`."""
    return 4 if type == 0 else 1 if type >= 3 else 2


@native
def has_minima(job):
    """Whether a code worth 0 stands for something else."""
    return word(job, MINIMUM) != 0


@native
def are_f32(job):
    """Whether scales may be read from where they are."""
    return word(job, SCALE_TYPE) == 0


@native
def widen(job):
    """Has scales and minima be f32 where they are not, for kernels that read no others."""
    _widen(job, SCALE, SCALE_TYPE, WIDE_SCALE)
    if has_minima(job):
        _widen(job, MINIMUM, MINIMUM_TYPE, WIDE_MINIMUM)


@native
def _widen(job, leaf, type, wide):
    if word(job, type) == 0:
        return
    tiles = word(job, BATCH) * (word(job, R) // word(job, TR)) * (word(job, C) // word(job, TC))
    memory = malloc(4 * tiles + _VECTOR)
    if memory == 0:
        set_word(job, FAILED, 1)
        return
    read_tiles(job, leaf, 0, 0, tiles, memory)
    set_word(job, wide, memory)
    set_word(job, leaf, memory)
    set_word(job, type, 0)


@native
def forget_wide(job):
    """Frees what `widen` allocated."""
    free(word(job, WIDE_SCALE))
    free(word(job, WIDE_MINIMUM))
