"""Multiply few rows of activations x by a matrix W whose rows have a scale per tile of columns.

The rows of W are contracted: `x @ W`. This is the product of attention weights with the values of a
cache that is quantized per token. Scales change from row to row, so sums cannot be scaled at the
end of a block as in `rows_few.py`. The kernel converts the scales of a block of rows of W to f32,
and loops over ranges of vectors of columns. For each row of the block, it decodes and scales these
vectors in registers, and adds their products with a few rows of x to sums in registers. Parts are
the same as in `rows_few.py`. `benchmarks/cpu_variants.py` compares the two kernels.
"""

from typing import Any

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.memory import I64, prefetch_for_later, stack, word
from ....native.simd import LANES
from ....native.simd.blocks import (
    get_vectors,
    instruction,
    load_broadcast,
    make_block,
    multiply_add,
)
from ....native.simd.floats import add_outer, add_scaled, splat, zeros
from ...common.problem import BITS
from ...common.table import MOST_TILES
from ..decoding import build_decoder, load_table
from ..job import MINIMUM, NEXT_ROW, SCALE, TABLE, TC, C, JobFunctions, M, R, X, row_address
from ..scales import has_minima, read_tile_values
from .rows_few import build_functions, start_part

#: Rows of W in a block, and the bytes of their scales.
_BLOCK = 16
_SCALE_BYTES = 4 * (_BLOCK * MOST_TILES + LANES)
#: The distance in bytes at which codes are prefetched.
_PREFETCH_BYTES = 4096
_ONE = np.float32(1)


def build(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    bits = BITS[kind]
    scaled_1, scaled_2, scaled_4, scaled_8 = (
        _build_product(kind, rows, adds_minima=False) for rows in (1, 2, 4, 8)
    )
    affine_1, affine_2, affine_4, affine_8 = (
        _build_product(kind, rows, adds_minima=True) for rows in (1, 2, 4, 8)
    )

    @native
    def multiply_block(job, batch, row, depth, first, last, y, tiles):
        """Add the product of x and a block of matrix `batch` to the result at `y`.

        The block is columns `first` to `last` of `depth` rows of W, from row `row` on. `tiles` is
        the tuple that `_build_product` describes.
        """
        m, x_stride, y_stride = word(job, M), 4 * word(job, R), 4 * word(job, C)
        w = row_address(job, batch, row) + first * bits // 8, word(job, NEXT_ROW)
        size, table, done = (depth, last - first), word(job, TABLE), 0
        while done < m:
            x = word(job, X) + (batch * m + done) * x_stride + 4 * row
            args = ((x, x_stride), w, size, (y + done * y_stride, y_stride), tiles, table)
            left = m - done
            if left >= 8:
                affine_8(*args) if has_minima(job) else scaled_8(*args)
                done += 8
            elif left >= 4:
                affine_4(*args) if has_minima(job) else scaled_4(*args)
                done += 4
            elif left >= 2:
                affine_2(*args) if has_minima(job) else scaled_2(*args)
                done += 2
            else:
                affine_1(*args) if has_minima(job) else scaled_1(*args)
                done += 1

    @native
    def multiply(job, part):
        c, r, tile, shift = word(job, C), word(job, R), word(job, TC), 0
        batch, matrices, row, end, first, last, y = start_part(job, part)
        scales, minima = stack(_SCALE_BYTES), stack(_SCALE_BYTES)
        while LANES << shift < tile:
            shift += 1
        first_tile = first // tile
        count = (last + tile - 1) // tile - first_tile
        tiles = (scales, minima, 4 * count, first // LANES - (first_tile << shift), shift)
        while row < end:
            depth = min(_BLOCK, end - row)
            for i in range(matrices):
                w_row = (batch + i) * r + row
                _read_block_values(job, SCALE, w_row, first_tile, depth, count, scales)
                if has_minima(job):
                    _read_block_values(job, MINIMUM, w_row, first_tile, depth, count, minima)
                to = y + 4 * word(job, M) * c * i
                multiply_block(job, batch + i, row, depth, first, last, to, tiles)
            row += depth

    return build_functions(multiply)


@native
def _read_block_values(job, leaf, row, first, rows, tiles, to):
    """Write the f32 scales or minima of `tiles` tiles of each of `rows` rows of W to `to`.

    `leaf` is SCALE or MINIMUM. The first row is row `row` of W, counted over all matrices. The
    first tile of each row is tile `first`.
    """
    if tiles == word(job, C) // word(job, TC):  # The values of consecutive rows are contiguous.
        read_tile_values(job, leaf, row, 0, rows * tiles, to)
    else:
        for i in range(rows):
            read_tile_values(job, leaf, row + i, first, tiles, to + 4 * tiles * i)


def _build_product(kind: str, rows: int, *, adds_minima: bool) -> Any:
    """Return a function that adds the product of `rows` rows of x and a block of W to the result y.

    Its arguments `x`, `w` and `y` are pairs of an address and a row stride, and `size` is a pair of
    the rows and the columns of the block. `tiles` is a tuple:

    - the address of the f32 scales of the block,
    - the address of the minima of the block,
    - the bytes between the values of neighboring rows of W,
    - the number of vectors between the start of the first tile and the first column of the block,
    - the binary logarithm of the number of vectors per tile.
    """
    decode_row, restore_order = build_decoder(kind)
    bits, vectors = BITS[kind], 2 if rows == 8 else 4

    @native
    def multiply(x, w, size, y, tiles, table):
        prevent_inlining()
        values = load_table(table)
        depth, columns = size
        scales, minima, next_row, begin, shift = tiles
        # Prefetch whole rows ahead: the same columns of a later row.
        ahead = (_PREFETCH_BYTES // w[1] + 1) * w[1]
        for column in range(0, columns, vectors * LANES):
            total, scale, minimum = zeros(rows, vectors), scales, minima
            # `first` is the number of vectors from the start of the first tile to `column`.
            place, first = w[0] + column * bits // 8, begin + column // LANES
            for k in range(depth):
                prefetch_for_later(place + ahead)
                row = decode_row(values, place, vectors)
                row = _dequantize(row, scale, minimum, first, shift, adds_minima)
                total = add_outer(total, x[0] + 4 * k, x[1], row)
                place, scale, minimum = place + w[1], scale + next_row, minimum + next_row
            add_scaled(y[0] + 4 * column, y[1], restore_order(total), splat(_ONE))

    return multiply


@instruction
def _dequantize(codes, scales, minima, first, shift, adds_minima):
    """Return decoded vectors of a row of W times the scales of their tiles.

    If `adds_minima`, add the minima of the tiles. `first` is the number of vectors between the
    start of the first tile and the first vector. A tile has `1 << shift` vectors.
    """
    has_minimum = adds_minima.literal_value

    def emit(builder, values, scales, minima, first, shift, _):
        results = []
        for j, value in enumerate(get_vectors(builder, values)):
            tile = builder.lshr(builder.add(first, I64(j)), shift)
            offset = builder.shl(tile, I64(2))
            scale = load_broadcast(builder, builder.add(scales, offset))
            if has_minimum:
                minimum = load_broadcast(builder, builder.add(minima, offset))
                results.append(multiply_add(builder, value, scale, minimum))
            else:
                results.append(builder.fmul(value, scale))
        return make_block(builder, results)

    return codes, emit
