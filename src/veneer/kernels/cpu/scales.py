"""Read the scales and minima of a stored matrix as f32, and add the term of minima to products.

- Scales and minima may be floats of 32, 16 or 8 bits.
- Minima may be stored as zero points instead: `minimum = (OFFSET - zero_point) * scale`.
- Scales and minima may be codes with outer scales, as in the K-quants of GGUF. One outer scale is
  shared by OUTER_SCALE_TILES codes.

In this module `leaf` is SCALE or MINIMUM, and a type is the number of a dtype: first the dtypes of
FLOATS, then the dtypes of ZERO_POINTS, and PLANES_TYPE for 6-bit codes in bit planes.
"""

import functools
from typing import Any

import numpy as np

from ...native.functions import native, prevent_inlining
from ...native.memory import (
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
from ...native.simd import LANES
from ...native.simd.floats import add_inner, fma, load, scale_block, splat, store, store_sums, zeros
from ...native.simd.integers import (
    WIDTH,
    add_byte_sums,
    load_first_floats,
    load_floats,
    load_repeated,
    sum_lanes,
    zero_ints,
)
from ..common.problem import FLOATS, PLANES, PLANES_TYPE, ZERO_POINTS
from .decoding import SIZES, keep_first_lanes, load_as_floats, store_plane_codes
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

_VECTOR = 4 * LANES
#: The most bytes of scales and minima that a part keeps on the stack. A heap allocation takes as
#: long as reading a few rows of W.
STACK_BYTES = 1 << 15
#: The type of int8 zero points. The next number is the type of uint8 zero points.
ZERO_POINT_TYPE = len(FLOATS)
#: The number of scales that are read at once to combine them with zero points or codes.
_CHUNK = 256
_BUFFER, _MINUS_ONE = 4 * _CHUNK, np.float32(-1)
#: Units of bit planes in a vector, and vectors of a lookup table, which these planes do not use.
_ONE_UNIT, _UNITS, _TABLE = 1, max(1, LANES // 8), 16 // LANES


@native
def copy_padded(to, address, count, size):
    """Copy `count` bytes from `address` to `to`, and write zeros after them up to `size` bytes.

    A `count` below 0 or above `size` is clipped.
    """
    count = max(0, min(count, size))
    aligned = count // 8 * 8
    for i in range(0, aligned, 8):
        store_i64(to + i, load_i64(address + i))
    for i in range(aligned, count):
        store_i8(to + i, load_i8(address + i))
    while count < size:
        if count % 8 == 0 and count + 8 <= size:
            store_i64(to + count, 0)
            count += 8
        else:
            store_i8(to + count, 0)
            count += 1


def _build_reader(dtype: str) -> Any:
    """Return a function `read(address, count, available, to)` that converts a dtype to f32.

    It writes `count` f32 to `to`, zero-padded to full vectors. `available`, at least `count`, is
    how many numbers are stored at the address. Memory after them is not read.
    """
    size = SIZES[dtype]
    vector_bytes = size * LANES

    @native
    def read(address, count, available, to):
        prevent_inlining()
        for i in range(count // LANES):
            store(to + _VECTOR * i, load_as_floats(address + vector_bytes * i, dtype))
        aligned = count // LANES * LANES
        if aligned < count:
            last = address + size * aligned
            if available - aligned < LANES:
                rest = stack(_VECTOR)
                copy_padded(rest, last, size * (count - aligned), vector_bytes)
                last = rest
            store(to + 4 * aligned, keep_first_lanes(load_as_floats(last, dtype), count - aligned))

    return read


_read_f32, _read_f16, _read_bf16, _read_e8m0 = map(_build_reader, FLOATS)
_read_int8, _read_uint8 = map(_build_reader, ZERO_POINTS)


@native
def read_tile_values(job, leaf, row, first, count, to):
    """Write the scales (`leaf` SCALE) or minima (`leaf` MINIMUM) of `count` tiles to `to` as f32.

    A row of tiles is a row of the array of scales or minima, `[R / TR, C / TC]`. Begin with tile
    `first` of row `row` of tiles, and continue with the next rows of tiles. Rows of tiles are
    counted over all matrices of the job. The f32 are zero-padded to full vectors. Zero
    points are converted to minima.
    """
    _read_stored(job, leaf, row, first, count, to)
    # Integers with outer scales are codes of minima. Integers without them are zero points.
    is_zero_point = leaf == MINIMUM and word(job, MINIMUM_TYPE) >= ZERO_POINT_TYPE
    if is_zero_point and word(job, OUTER_MINIMUM) == 0:
        _convert_zero_points(job, row, first, count, to)


@native
def locate_tile_values(job):
    """Return where the scales and minima of a job are, for `prefetch_tile_values`.

    **Returns:** the address of the scales, their bytes per row of W, the address of the minima, and
    their bytes per row of W. The bytes are 0 if rows share scales: these are few, and need no
    prefetch.
    """
    tiles = word(job, C) // word(job, TC)
    scale, minimum = 0, 0
    if word(job, TR) == 1:
        scale = stored_bytes(word(job, SCALE_TYPE), tiles)
        minimum = stored_bytes(word(job, MINIMUM_TYPE), tiles) if has_minima(job) else 0
    return word(job, SCALE), scale, word(job, MINIMUM), minimum


@native
def prefetch_tile_values(located, row, rows):
    """Prefetch the scales and minima of `rows` rows of W, from row `row` on.

    `located` is the result of `locate_tile_values`. Rows are counted over all matrices. They may be
    beyond the last row.
    """
    scales, scale, minima, minimum = located
    for i in range(0, rows * scale, 64):
        prefetch(scales + row * scale + i)
    for i in range(0, rows * minimum, 64):
        prefetch(minima + row * minimum + i)


@native
def _convert_zero_points(job, row, first, count, to):
    """Replace the `count` zero points at `to`, f32, by minima: `(OFFSET - zero_point) * scale`.

    The zero points belong to consecutive tiles, from tile `first` of row `row` of tiles on.
    """
    scales, offset = stack(_BUFFER), splat(np.float32(word(job, OFFSET)))
    for i in range(0, count, _CHUNK):
        chunk = min(_CHUNK, count - i)
        _read_stored(job, SCALE, row, first + i, chunk, scales)
        for j in range(0, chunk, LANES):
            place = to + 4 * (i + j)
            difference = fma(load(place, 1), splat(_MINUS_ONE), offset)
            store(place, scale_block(difference, load(scales + 4 * j, 1)))


@native
def _read_stored(job, leaf, row, first, count, to):
    """Write stored scales, minima or zero points as f32, multiplied by outer scales if they exist.

    The arguments are the same as for `read_tile_values`. Zero points stay zero points.
    """
    tiles = word(job, C) // word(job, TC)
    index = row * tiles + first
    available = word(job, BATCH) * (word(job, R) // word(job, TR)) * tiles - index
    if leaf == SCALE:
        _read_numbers(word(job, SCALE_TYPE), word(job, SCALE), index, count, available, to)
        if word(job, OUTER_SCALE) != 0:
            outer = word(job, OUTER_SCALE), word(job, OUTER_SCALE_TYPE)
            _apply_outer_scales(outer, word(job, OUTER_SCALE_TILES), index, count, available, to)
    else:
        _read_numbers(word(job, MINIMUM_TYPE), word(job, MINIMUM), index, count, available, to)
        if word(job, OUTER_MINIMUM) != 0:
            outer = word(job, OUTER_MINIMUM), word(job, OUTER_MINIMUM_TYPE)
            _apply_outer_scales(outer, word(job, OUTER_MINIMUM_TILES), index, count, available, to)


@native
def _apply_outer_scales(outer, share, index, count, available, to):
    """Multiply `count` scales that were codes, f32 at `to`, by their outer scales.

    `outer` has the address of the outer scales and the number of their dtype. `share` codes share
    an outer scale. The codes are entries `index` to `index + count` of an array, which has
    `available` entries from `index` on.
    """
    prevent_inlining()
    scales, (address, type) = stack(_BUFFER), outer
    i, shift = 0, 0
    while 1 << shift < min(share, LANES):
        shift += 1
    while i < count:
        first, within = divmod(index + i, share)
        chunk = min(_CHUNK - LANES, (index + count - 1) // share + 1 - first)
        last, scale = min(count, (first + chunk) * share - index), scales
        _read_numbers(type, address, first, chunk, (index + available) // share - first, scales)
        if within == 0 and share == 1 << shift:  # a vector has equal shares of several scales
            while i + LANES <= last:
                store(
                    to + 4 * i,
                    scale_block(load(to + 4 * i, 1), load_repeated(scale, 0, 1, shift, LANES)),
                )
                i, scale = i + LANES, scale + 4 * (LANES >> shift)
        while i < last:
            end, factor = min(i + share - within, last), load_f32(scale)
            while i + LANES <= end:
                store(to + 4 * i, scale_block(load(to + 4 * i, 1), splat(factor)))
                i += LANES
            while i < end:
                store_f32(to + 4 * i, load_f32(to + 4 * i) * factor)
                i += 1
            scale, within = scale + 4, 0


@native
def _read_planes(address, index, count, to):
    """Write codes `index` to `index + count` of an array of bit planes at `address` to `to` as f32.

    The array has codes of PLANES bits: 8 codes take PLANES bytes. The f32 are zero-padded to full
    vectors.
    """
    prevent_inlining()
    codes, table, i = stack(_VECTOR), zeros(1, _TABLE), 0
    while i < count:
        unit, within = divmod(index + i, 8)
        place = address + PLANES * unit
        if within == 0 and i + LANES <= count and LANES >= 8:
            store_plane_codes(codes, place, _UNITS, PLANES, table)
            store(to + 4 * i, load_as_floats(codes, "int8"))
            i += LANES
        else:
            store_plane_codes(codes, place, _ONE_UNIT, PLANES, table)
            for j in range(within, min(8, within + count - i)):
                store_f32(to + 4 * i, np.float32(load_i8(codes + j)))
                i += 1
    for j in range(count, (count + LANES - 1) // LANES * LANES):
        store_f32(to + 4 * j, 0.0)


@native
def _read_numbers(type, address, index, count, available, to):
    """Write entries `index` to `index + count` of the array at `address` to `to` as f32.

    `type` is the number of the dtype of the array, which has `available` entries from `index` on.
    The f32 are zero-padded to full vectors.
    """
    if type == PLANES_TYPE:
        _read_planes(address, index, count, to)
    elif type == 0:
        _read_f32(address + 4 * index, count, available, to)
    elif type == 1:
        _read_f16(address + 2 * index, count, available, to)
    elif type == 2:
        _read_bf16(address + 2 * index, count, available, to)
    elif type == 3:
        _read_e8m0(address + index, count, available, to)
    elif type == ZERO_POINT_TYPE:
        _read_int8(address + index, count, available, to)
    else:
        _read_uint8(address + index, count, available, to)


@native
def entry_bytes(type):
    """Return the size in bytes of an entry of the dtype with number `type`, or 1 for bit planes."""
    return 4 if type == 0 else 1 if type >= 3 else 2


@native
def stored_bytes(type, count):
    """Return the size in bytes of `count` stored scales or minima.

    `type` is the index of their dtype, as in a job. For bit planes, `count` is a multiple of 8.
    """
    return count // 8 * PLANES if type == PLANES_TYPE else count * entry_bytes(type)


@native
def has_minima(job):
    """Return whether the stored matrices of a job have minima or zero points."""
    return word(job, MINIMUM) != 0


@native
def is_f32(job, leaf):
    """Return whether the scales (`leaf` SCALE) or minima (`leaf` MINIMUM) of a job are f32."""
    return word(job, SCALE_TYPE if leaf == SCALE else MINIMUM_TYPE) == 0


# The term that minima add to a product. A minimum is the dense value of a code that decodes to 0.
# With t the tile of k, the product
#
#     sum_k x[k] * (codes[k, n] * scale[t, n] + minimum[t, n])
#
# is the sum over codes and scales, plus `sum_t (sum of x over tile t) * minimum[t, n]`. The second
# sum is smaller than the first by the size of a tile. Kernels for few rows of x compute it
# separately by the following functions. Kernels for many rows add minima as they decode.

_ONE = np.float32(1)
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


@native
def tile_sums_bytes(job):
    """Return the size in bytes of the sums of a row of x over tiles, f32 padded to full vectors."""
    return (word(job, C) // word(job, TC) + LANES - 1) // LANES * _VECTOR


@native
def write_tile_sums(job, x, exists, to):
    """Write the f32 sums of the row of activations at `x` over its tiles to `to`.

    They are zero-padded to `tile_sums_bytes`. If `exists` is false, x has no such row, and the sums
    are 0.
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

    The row is at `x`. The sums are zero-padded to `tile_sums_bytes`. The f32 scale of the first
    tile is at `scale`, and the scale of each next tile is `next_scale` bytes later.
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
    """Return a function that adds products of minima with sums of x over tiles to vectors of sums.

    There is a vector for each pair of one of `x_rows` rows of activations x and one of `w_rows`
    rows of the matrix W. The lanes of a vector are added up later.
    """

    @native
    def add_minima(total, x_sums, next_x, minima, stride, tiles):
        """Return `total` plus the products of f32 minima with sums of x over `tiles` tiles.

        `total` is a block of vectors in registers. Rows of `x_sums` are `next_x` bytes apart, and
        rows of minima `stride` bytes.
        """
        for t in range(0, tiles, LANES):
            values = load_first_floats(minima + 4 * t, stride, w_rows, tiles - t)
            total = add_inner(total, x_sums + 4 * t, next_x, values)
        return total

    return add_minima


@functools.cache
def build_stored_minimum_adder(x_rows: int, w_rows: int) -> Any:
    """Return a function that reads the minima of a job, and adds their products with sums of x.

    It adds the products to vectors in memory, one for each pair of one of `x_rows` rows of
    activations x and one of `w_rows` rows of the matrix W.
    """
    buffer_bytes, add_minima = w_rows * _ROW, build_minimum_adder(x_rows, w_rows)

    @native
    def add_stored_minima(job, sums, x_sums, row, step):
        """Add minima times the sums of x at `x_sums` to the vectors at `sums`.

        The minima of the first row of W are in row `row` of the array of minima. The minima of
        each next row of W are `step` rows later: 1, or 0 if the rows of W share minima.
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
