"""Scales and minima of a stored matrix, as f32, from whatever floats they are stored as."""

from typing import Any

from ....native.functions import native, not_inlined
from ....native.isa import LANES
from ....native.memory import stack, word
from ....native.simd.floats import store
from ....native.simd.small_floats import SIZES, first_lanes, load_as_floats
from ..job import BATCH, MINIMUM, MINIMUM_TYPE, SCALE, SCALE_TYPE, TC, TR, C, R
from ..kinds import FLOATS
from .panels import copy

_VECTOR = 4 * LANES


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


@native
def read_tiles(job, leaf, row, first, count, to):
    """Writes what scales or minima are worth: f32, in whole vectors, with zeros behind the last.

    `leaf` is SCALE or MINIMUM; `row`, which row of tiles, of all matrices, and `first`, from which
    tile in it.
    """
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
    else:
        _read_e8m0(address + number, count, there, to)


@native
def has_minima(job):
    """Whether a code worth 0 stands for something else."""
    return word(job, MINIMUM) != 0


@native
def are_f32(job):
    """Whether scales may be read from where they are."""
    return word(job, SCALE_TYPE) == 0
