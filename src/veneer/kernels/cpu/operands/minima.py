"""Minima: what a code worth 0 stands for. With few rows of x, they are a sum apart from the codes'.

`sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])`, where t is the tile of k, is the sum of
codes times scales, and `sum_t (sum of x over t) * minimum[t, n]`: a product that is smaller by the
size of a tile. With many rows, minima are part of what is decoded.
"""

import functools
from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.isa import LANES
from ....native.memory import load_f32, load_i8, stack, store_f32, word
from ....native.simd.floats import add_inner, splat, store, store_sums, zeros
from ....native.simd.integers import (
    WIDTH,
    add_byte_sums,
    load_first_floats,
    load_floats,
    sum_lanes,
    zero_ints,
)
from .job import MINIMUM, TC, C
from .scales import read_tiles

_VECTOR, _ONE = 4 * LANES, np.float32(1)
#: Tiles whose minima are read at once.
_TILES = 256
_ROW = 4 * _TILES


@native
def sum_of(address, count):
    """The sum of numbers of f32."""
    sum, whole, total = zeros(1, 1), count // LANES, stack(4)
    for i in range(whole):
        sum = add_inner(sum, address + _VECTOR * i, 0, splat(_ONE))
    store_sums(total, 0, sum)
    for i in range(whole * LANES, count):
        store_f32(total, load_f32(total) + load_f32(address + 4 * i))
    return load_f32(total)


# Columns contracted.


@native
def sums_size(job):
    """Bytes of the sums of x over tiles, of a row of x: whole vectors."""
    return (word(job, C) // word(job, TC) + LANES - 1) // LANES * _VECTOR


@native
def write_sums(job, x, exists, to):
    """Writes the sums of a row of x over tiles, and zeros behind them: all, of none that exists."""
    tile = word(job, TC)
    count = word(job, C) // tile if exists else 0
    for t in range(count):
        store_f32(to + 4 * t, sum_of(x + 4 * tile * t, tile))
    for t in range(count, sums_size(job) // 4):
        store_f32(to + 4 * t, 0.0)


@native
def write_sums_of_codes(job, x, scale, next_scale, to):
    """Writes the sums of a row of int8 activations over tiles, as f32, and zeros behind them.

    Each is multiplied by a scale, `next_scale` bytes from the one before it.
    """
    tile = word(job, TC)
    count = word(job, C) // tile
    whole = tile // WIDTH * WIDTH
    for t in range(count):
        lanes = zero_ints()
        for i in range(0, whole, WIDTH):
            lanes = add_byte_sums(lanes, x + i, WIDTH)
        total = sum_lanes(lanes)
        for i in range(whole, tile):
            total += load_i8(x + i)
        store_f32(to + 4 * t, np.float32(total) * load_f32(scale))
        x, scale = x + tile, scale + next_scale
    for t in range(count, sums_size(job) // 4):
        store_f32(to + 4 * t, 0.0)


@functools.cache
def adder(rows: int, together: int) -> Any:
    """Makes what adds minima to the sums of `rows` rows of x by `together` rows of W."""

    @native
    def add_minima(total, of_x, next_x, minima, stride, count):
        """Minima are f32, `stride` bytes from row to row, and so many are of a row."""
        for t in range(0, count, LANES):
            values = load_first_floats(minima + 4 * t, stride, together, count - t)
            total = add_inner(total, of_x + 4 * t, next_x, values)
        return total

    return add_minima


@functools.cache
def reading_adder(rows: int, together: int) -> Any:
    """Makes what reads minima, and adds them to sums in memory."""
    buffer_bytes, add_minima = together * _ROW, adder(rows, together)

    @native
    def read_and_add(job, sums, of_x, number, step):
        """Row `number` of minima is the first row's, and the next one's is `step` rows on."""
        prevent_inlining()
        minima, tiles = stack(buffer_bytes), word(job, C) // word(job, TC)
        total = load_floats(sums, together * _VECTOR, rows, together)
        next_x = sums_size(job)
        for first in range(0, tiles, _TILES):
            count, stride = min(_TILES, tiles - first), _ROW
            if count == tiles:  # then those of a row follow those of the one before
                stride = 4 * tiles * step
                read_tiles(job, MINIMUM, number, 0, ((together - 1) * step + 1) * tiles, minima)
            else:
                for c in range(together):
                    read_tiles(job, MINIMUM, number + c * step, first, count, minima + c * _ROW)
            total = add_minima(total, of_x + 4 * first, next_x, minima, stride, count)
        store(sums, total)

    return read_and_add
