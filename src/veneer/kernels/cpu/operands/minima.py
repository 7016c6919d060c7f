"""The term that minima add to a product.

A minimum is the dense value of a code that decodes to 0. With t the tile of k, the product

    sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])

is the sum over codes and scales, plus `sum_t (sum of x over tile t) * minimum[t, n]`. The second
sum is smaller than the first by the size of a tile. Kernels for few rows of x compute it
separately with the functions of this module. Kernels for many rows add minima as they decode.
"""

import functools
from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.memory import load_f32, load_i8, stack, store_f32, word
from ....native.simd import LANES
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
from .scales import read_tile_values

_VECTOR, _ONE = 4 * LANES, np.float32(1)
#: Number of tiles whose minima are read at once.
_TILES = 256
_ROW = 4 * _TILES


@native
def sum_floats(address, count):
    """Return the sum of the `count` f32 at `address`."""
    sum, vectors, total = zeros(1, 1), count // LANES, stack(4)
    for i in range(vectors):
        sum = add_inner(sum, address + _VECTOR * i, 0, splat(_ONE))
    store_sums(total, 0, sum)
    for i in range(vectors * LANES, count):
        store_f32(total, load_f32(total) + load_f32(address + 4 * i))
    return load_f32(total)


# For kernels that contract columns: the sums of x over tiles.


@native
def tile_sums_bytes(job):
    """Return the bytes of the f32 sums of one row of x over its tiles, padded to full vectors."""
    return (word(job, C) // word(job, TC) + LANES - 1) // LANES * _VECTOR


@native
def write_tile_sums(job, x, exists, to):
    """Write the f32 sums of a row of x over its tiles to `to`, zero-padded to `tile_sums_bytes`.

    If `exists` is false, the row only pads x, and its sums are 0.
    """
    tile = word(job, TC)
    count = word(job, C) // tile if exists else 0
    for t in range(count):
        store_f32(to + 4 * t, sum_floats(x + 4 * tile * t, tile))
    for t in range(count, tile_sums_bytes(job) // 4):
        store_f32(to + 4 * t, 0.0)


@native
def write_scaled_tile_sums(job, x, scale, next_scale, to):
    """Write the sums of a row of int8 activations over tiles, times scales, to `to` as f32.

    They are zero-padded to `tile_sums_bytes`. The row is at `x`. The f32 scale of its first tile is
    at `scale`, and the scale of each next tile is `next_scale` bytes later.
    """
    tile = word(job, TC)
    count = word(job, C) // tile
    aligned = tile // WIDTH * WIDTH
    for t in range(count):
        lanes = zero_ints()
        for i in range(0, aligned, WIDTH):
            lanes = add_byte_sums(lanes, x + i, WIDTH)
        total = sum_lanes(lanes)
        for i in range(aligned, tile):
            total += load_i8(x + i)
        store_f32(to + 4 * t, np.float32(total) * load_f32(scale))
        x, scale = x + tile, scale + next_scale
    for t in range(count, tile_sums_bytes(job) // 4):
        store_f32(to + 4 * t, 0.0)


@functools.cache
def build_minimum_adder(x_rows: int, w_rows: int) -> Any:
    """Return a function that adds minima times sums of x, for `x_rows` rows of x and `w_rows` of W.

    Each pair of rows has a vector of results, whose lanes are added up later.
    """

    @native
    def add_minima(total, x_sums, next_x, minima, stride, tiles):
        """Return `total` plus the products of f32 minima with sums of x over `tiles` tiles.

        Rows of `x_sums` are `next_x` bytes apart, and rows of minima `stride` bytes.
        """
        for t in range(0, tiles, LANES):
            values = load_first_floats(minima + 4 * t, stride, w_rows, tiles - t)
            total = add_inner(total, x_sums + 4 * t, next_x, values)
        return total

    return add_minima


@functools.cache
def build_stored_minimum_adder(x_rows: int, w_rows: int) -> Any:
    """Return a function that reads minima of any type, and adds minima times sums of x to memory.

    The results are a vector for each pair of `x_rows` rows of x and `w_rows` rows of W.
    """
    buffer_bytes, add_minima = w_rows * _ROW, build_minimum_adder(x_rows, w_rows)

    @native
    def add_stored_minima(job, sums, x_sums, row, step):
        """Add minima times the sums of x at `x_sums` to the vectors at `sums`.

        The minima of the first row of W are in row `row` of tiles, and the minima of each next row
        of W are `step` rows of tiles later: 1, or 0 if the rows of W share them.
        """
        prevent_inlining()
        minima, tiles = stack(buffer_bytes), word(job, C) // word(job, TC)
        total = load_floats(sums, w_rows * _VECTOR, x_rows, w_rows)
        next_x = tile_sums_bytes(job)
        for first in range(0, tiles, _TILES):
            count, stride = min(_TILES, tiles - first), _ROW
            if count == tiles:  # The minima of consecutive rows are contiguous.
                stride = 4 * tiles * step
                read_tile_values(job, MINIMUM, row, 0, ((w_rows - 1) * step + 1) * tiles, minima)
            else:
                for c in range(w_rows):
                    read_tile_values(job, MINIMUM, row + c * step, first, count, minima + c * _ROW)
            total = add_minima(total, x_sums + 4 * first, next_x, minima, stride, count)
        store(sums, total)

    return add_stored_minima
