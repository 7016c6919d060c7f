"""Matrix products of float32 in vector instructions: an object file that programs call.

This module is imported only to compile the file, once per machine. Addresses and sizes are int64.
"""

from typing import Any

import numpy as np

from ...native.functions import ObjectFile, native, prevent_inlining
from ...native.memory import load_f32, store_f32
from ...native.simd import ISA, LANES, REGISTERS
from ...native.simd import blocks as simd
from ...native.simd.floats import add_outer, load, zeros

#: The rows and vectors per row of a tile of the result that fits into registers.
ROWS, VECTORS = (6, 4) if REGISTERS == 32 else (4, 2) if ISA == "avx2" else (2, 4)
WIDTH = LANES * VECTORS


def object_code() -> bytes:
    """Return the object file with the compiled function `veneer_matrix_product`."""
    file = ObjectFile()
    file.export("veneer_matrix_product", matrix_product)
    return file.code()


@simd.instruction
def store_rows(address, stride, block):
    """Write the rows of `block` to float32 memory, where rows are `stride` bytes apart."""

    def emit(builder, address, stride, values):
        for i, value in enumerate(simd.get_vectors(builder, values)):
            row, column = divmod(i, block.columns)
            simd.store_vector(builder, value, simd.advance(builder, address, column, row, stride))

    return simd.types.void, emit


def _tile(rows: int, vectors: int) -> Any:
    """Return a function that computes a tile of the product `x @ y`.

    The tile has `rows` rows of `vectors` vector registers each. The function takes strides in
    bytes.
    """

    @native
    def tile(out, x, y, n, k, x_row, x_step, y_row):
        prevent_inlining()
        total = zeros(rows, vectors)
        for _ in range(k):
            total = add_outer(total, x, x_row, load(y, vectors))
            x += x_step
            y += y_row
        store_rows(out, 4 * n, total)

    return tile


_tiles = [_tile(rows, vectors) for vectors in (VECTORS, 1) for rows in (ROWS, 1)]
_wide_tile, _wide_row, _narrow_tile, _narrow_row = _tiles


@native
def _entry(out, x, y, k, x_step, y_row):
    """Compute one entry of a product, in one of the last columns, which do not fill a vector."""
    total = np.float32(0)
    for _ in range(k):
        total += load_f32(x) * load_f32(y)
        x += x_step
        y += y_row
    store_f32(out, total)


@native
def matrix_product(out, x, y, m, n, k, x_row, x_step, y_row):
    """Compute `out = x @ y` for float32 matrices, with `m * k` and `k * n` entries.

    `x_row` and `x_step` are the strides of the rows and the columns of `x`, and `y_row` is the
    stride of the rows of `y`, all in entries. Rows of `y` and `out` are contiguous.
    """
    x_row, x_step, y_row = 4 * x_row, 4 * x_step, 4 * y_row
    wide, narrow, rows = n - n % WIDTH, n - n % LANES, m - m % ROWS
    for j in range(0, wide, WIDTH):
        for i in range(0, rows, ROWS):
            to, left = out + 4 * (i * n + j), x + i * x_row
            _wide_tile(to, left, y + 4 * j, n, k, x_row, x_step, y_row)
        for i in range(rows, m):
            to, left = out + 4 * (i * n + j), x + i * x_row
            _wide_row(to, left, y + 4 * j, n, k, x_row, x_step, y_row)
    for j in range(wide, narrow, LANES):
        for i in range(0, rows, ROWS):
            to, left = out + 4 * (i * n + j), x + i * x_row
            _narrow_tile(to, left, y + 4 * j, n, k, x_row, x_step, y_row)
        for i in range(rows, m):
            to, left = out + 4 * (i * n + j), x + i * x_row
            _narrow_row(to, left, y + 4 * j, n, k, x_row, x_step, y_row)
    for i in range(m):
        for j in range(narrow, n):
            _entry(out + 4 * (i * n + j), x + i * x_row, y + 4 * j, k, x_step, y_row)
