"""Multiply many rows of activations x by a stored matrix W, and contract its rows: `x @ W`.

Arithmetic takes most of the time.

A part is a panel of `PANEL` columns of W, times some rows of x. The kernel loops over blocks of
`BLOCK` rows of W. A block is decoded to f32, scaled, and kept in the first cache for all rows of x.
Then it is multiplied like a dense matrix: the sums of a few rows of x times a few vectors of
columns stay in registers for the whole block. Scales are applied in decoding, so tiles have any
shape.

For bf16 activations, on a CPU that multiplies pairs of bf16, two neighboring rows of a decoded
block are rounded and packed into 32-bit lanes, like neighboring numbers of x. The rounded block
equals a dense bf16 array of the weights. Sums are f32.
"""

from typing import Any, NamedTuple

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.memory import load_f32, load_i8, prefetch, stack, store_f32, store_i8, word
from ....native.simd import LANES, REGISTERS
from ....native.simd.floats import (
    add_inner,
    add_outer,
    add_outer_pairs,
    add_scaled,
    fma,
    load,
    pair_as_bf16,
    splat,
    store,
    store_sums,
    zeros,
)
from ...common.problem import BITS
from ..decoding import build_decoder, load_table, row_bytes
from ..job import (
    BATCH,
    MINIMUM,
    NEXT_ROW,
    OUT,
    SCALE,
    TABLE,
    TC,
    TR,
    C,
    JobFunctions,
    M,
    R,
    X,
    do_nothing,
    row_address,
)
from ..scales import has_minima, read_tile_values

#: Columns of a panel, and rows of W that are decoded at once: 24 KB of f32.
PANEL, BLOCK = 128, 48
#: Rows of x, and vectors of columns, that are multiplied at once: registers hold their sums.
_ROWS, _VECTORS = 6, 4 if REGISTERS == 32 else 2
#: The most rows of x in a part. The second cache holds their results.
_PART_ROWS = 256

_BLOCK_BYTES, _ROW_BYTES, _SUMS_BYTES = (4 * rows * PANEL for rows in (BLOCK, 1, _ROWS))
_ZERO, _ONE = np.float32(0), np.float32(1)
#: Scales that are read at once to repeat them.
_CHUNK = 64
_CHUNK_BYTES = 4 * _CHUNK


class Arithmetic(NamedTuple):
    """How decoded blocks of W are multiplied by activations of a dtype.

    - `add_outer(total, x, stride, w)`: the instruction that adds products.
    - `pack_block(block, depth, columns, to, packed)`: packs `depth` decoded rows at `to`, in the
      memory that begins at `packed`. Returns the address of the block to multiply: `packed`, or
      `block` if a dtype needs no packing.
    - `size`: the bytes of an activation.
    - `per_lane`: the activations in a lane of 32 bits.
    """

    add_outer: Any
    pack_block: Any
    size: int
    per_lane: int


@native
def _keep_block(block, depth, columns, to, packed):
    # f32 need no packing.
    return block


@native
def _pack_pairs(block, depth, columns, to, packed):
    # Write each pair of rows as one row of bf16 pairs.
    prevent_inlining()
    row = 4 * columns
    for _ in range(0, depth, 2):
        for i in range(0, row, 4 * LANES):
            store(to + i, pair_as_bf16(load(block + i, 1), load(block + row + i, 1)))
        block, to = block + 2 * row, to + row
    return packed


#: By the dtype of activations.
ARITHMETIC = {
    "float32": Arithmetic(add_outer, _keep_block, 4, 1),
    "bfloat16": Arithmetic(add_outer_pairs, _pack_pairs, 2, 2),
}


class BlockFunctions(NamedTuple):
    """The native functions that multiply x by decoded blocks of W.

    - `count(job)`: returns the number of parts.
    - `work(job, part)`: computes one part.
    - `add_product(job, batch, row, rows, column, first, last, y)`: adds the product of rows `first`
      to `last` of x and `rows` rows of W, from row `row`, in the panel at `column`. The first row
      of the result is at `y`.
    """

    count: Any
    work: Any
    add_product: Any


@native
def expand_tile_row(job, leaf, batch, tile, column, columns, to):
    """Write the f32 scale or minimum of each of `columns` columns of W, from `column` on, to `to`.

    Read the values from row `tile` of the array of scales or minima of matrix `batch`. `leaf` is
    SCALE or MINIMUM. `to` must have space for full vectors. Return whether all values are finite.
    """
    prevent_inlining()
    numbers, tc = stack(_CHUNK_BYTES), word(job, TC)
    row = batch * (word(job, R) // word(job, TR)) + tile
    if tc == 1:
        read_tile_values(job, leaf, row, column, columns, to)
    else:
        c, number, end = 0, column // tc, (column + columns - 1) // tc + 1
        while number < end:
            chunk = min(_CHUNK, end - number)
            read_tile_values(job, leaf, row, number, chunk, numbers)
            for i in range(chunk):
                value = load_f32(numbers + 4 * i)
                last = min(columns, (number + i + 1) * tc - column)
                while c < last:
                    store_f32(to + 4 * c, value)
                    c += 1
            number += chunk
    return _is_all_finite(to, columns)


@native
def _is_all_finite(address, count):
    # Only if all numbers are finite, the sum of each number times 0 is 0.
    sum, i = zeros(1, 1), 0
    while i + LANES <= count:
        sum = add_inner(sum, address + 4 * i, 0, zeros(1, 1))
        i += LANES
    total = stack(4)
    store_sums(total, 0, sum)
    while i < count:
        store_f32(total, load_f32(total) + load_f32(address + 4 * i) * _ZERO)
        i += 1
    return load_f32(total) == _ZERO


@native
def copy_rows(w, stride, rows, size, to, to_stride):
    """Copy `size` bytes of each of `rows` rows from `w` to `to`.

    Rows are `stride` bytes apart at `w`, and `to_stride` bytes at `to`.
    """
    prevent_inlining()
    for row in range(rows):
        for byte in range(size):
            store_i8(to + row * to_stride + byte, load_i8(w + row * stride + byte))


@native
def add_scaled_floats(address, count, factor, y):
    """Add the `count` f32 at `address`, times `factor`, to the f32 at `y`."""
    i = 0
    while i + LANES <= count:
        add_scaled(y + 4 * i, 0, load(address + 4 * i, 1), splat(factor))
        i += LANES
    while i < count:
        store_f32(y + 4 * i, load_f32(y + 4 * i) + load_f32(address + 4 * i) * factor)
        i += 1


@native
def add_rows(address, stride, rows, columns, y, y_stride):
    """Add `rows` rows of `columns` f32 at `address` to the rows at `y`. Strides are in bytes."""
    prevent_inlining()
    for row in range(rows):
        add_scaled_floats(address + row * stride, columns, _ONE, y + row * y_stride)


@native
def clear_rows(address, stride, rows, columns):
    """Write zeros to `rows` rows of `columns` f32, which are `stride` bytes apart."""
    prevent_inlining()
    for row in range(rows):
        for column in range(columns):
            store_f32(address + row * stride + 4 * column, 0.0)


def _build_inner_product(rows: int, vectors: int, add_outer: Any) -> Any:
    """Return a function that adds the product of `rows` rows of x and a decoded block to y.

    It multiplies `vectors` vectors of the block's `PANEL` columns at a time, by the instruction
    `add_outer` of an `Arithmetic`. The block `w` has `depth` rows of 32-bit lanes, each an f32 or a
    pair of bf16.
    """

    @native
    def multiply(x, x_stride, w, depth, y, y_stride):
        prevent_inlining()
        for column in range(0, PANEL, vectors * LANES):
            total = zeros(rows, vectors)
            for k in range(depth):
                values = load(w + 4 * (k * PANEL + column), vectors)
                total = add_outer(total, x + 4 * k, x_stride, values)
            add_scaled(y + 4 * column, y_stride, total, splat(_ONE))

    return multiply


def _build_block_product(add_outer: Any) -> Any:
    """Return a function that multiplies any number of rows of x by a decoded block of W.

    It adds the first `columns` columns of the product to the result y.
    """
    multiply_many = _build_inner_product(_ROWS, _VECTORS, add_outer)
    multiply_2, multiply_1 = (
        _build_inner_product(rows, 2 * _VECTORS, add_outer) for rows in (2, 1)
    )

    @native
    def multiply(x, x_stride, rows, w, depth, y, y_stride, columns):
        prevent_inlining()
        sums = stack(_SUMS_BYTES)
        row = 0
        while row < rows:
            count = _ROWS if row + _ROWS <= rows else min(2, rows - row)
            x_rows, to, stride = x + row * x_stride, y + row * y_stride, y_stride
            if columns < PANEL:
                to, stride = sums, 4 * PANEL
                clear_rows(sums, stride, count, PANEL)
            if count == _ROWS:
                for next in range(_ROWS, 2 * _ROWS):
                    for byte in range(0, 4 * BLOCK, 64):
                        prefetch(x_rows + next * x_stride + byte)
                multiply_many(x_rows, x_stride, w, depth, to, stride)
            elif count == 2:
                multiply_2(x_rows, x_stride, w, depth, to, stride)
            else:
                multiply_1(x_rows, x_stride, w, depth, to, stride)
            if columns < PANEL:
                add_rows(sums, stride, count, columns, y + row * y_stride, y_stride)
            row += count

    return multiply


def build(kind: str, activations: str = "float32") -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`). `activations`
    is the dtype of x: "float32" or "bfloat16".
    """
    functions = build_block_functions(kind, activations)
    return JobFunctions(do_nothing, functions.count, functions.work, do_nothing)


def build_bf16(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for bf16 activations.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    return build(kind, "bfloat16")


def build_block_functions(kind: str, activations: str = "float32") -> BlockFunctions:
    """Return the functions that multiply x by decoded blocks of W, for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`). `activations`
    is the dtype of x: "float32" or "bfloat16".
    """
    add_outer, pack_block, SIZE, PER_LANE = ARITHMETIC[activations]
    multiply = _build_block_product(add_outer)
    DEPTH = PER_LANE * BLOCK  # rows of W that are multiplied at once
    bits = BITS[kind]
    decode_row, restore_order = build_decoder(kind)
    panel_bytes = PANEL * bits // 8
    tail_bytes = BLOCK * panel_bytes
    step = 4 if REGISTERS == 32 else 2  # vectors that are decoded at once

    @native
    def decode(job, batch, row, rows, column, to):
        """Write the dense values of a panel of matrix `batch` to `to`, f32 `[rows, PANEL]`.

        The panel is `rows` rows of the matrix from row `row` on, and PANEL columns from `column`.
        """
        prevent_inlining()
        stride, tr = word(job, NEXT_ROW), word(job, TR)
        w = row_address(job, batch, row) + column * bits // 8
        columns = min(PANEL, word(job, C) - column)
        if columns < PANEL:  # Memory after the last column may not be readable.
            tail = stack(tail_bytes)
            copy_rows(w, stride, rows, row_bytes(columns, bits), tail, panel_bytes)
            w, stride = tail, panel_bytes
        table = load_table(word(job, TABLE))
        scales, minima = stack(_ROW_BYTES), stack(_ROW_BYTES)
        for c in range(0, PANEL, LANES):
            store(minima + 4 * c, splat(_ZERO))
        start = 0
        while start < rows:
            tile = (row + start) // tr
            end = min(rows, (tile + 1) * tr - row)
            expand_tile_row(job, SCALE, batch, tile, column, columns, scales)
            if has_minima(job):
                expand_tile_row(job, MINIMUM, batch, tile, column, columns, minima)
            for c in range(0, PANEL, step * LANES):
                scale, minimum = load(scales + 4 * c, step), load(minima + 4 * c, step)
                for k in range(start, end):
                    prefetch(w + (k + BLOCK) * stride + c * bits // 8)
                    codes = restore_order(decode_row(table, w + k * stride + c * bits // 8, step))
                    store(to + 4 * (k * PANEL + c), fma(codes, scale, minimum))
            start = end

    @native
    def add_product(job, batch, row, rows, column, first, last, y):
        prevent_inlining()
        block, packed = stack(_BLOCK_BYTES), stack(_BLOCK_BYTES)
        x_stride, y_stride = SIZE * word(job, R), 4 * word(job, C)
        x = word(job, X) + (batch * word(job, M) + first) * x_stride
        columns = min(PANEL, word(job, C) - column)
        for k in range(row, row + rows, DEPTH):
            depth, w = min(DEPTH, row + rows - k), block
            for i in range(0, depth, BLOCK):
                count = min(BLOCK, depth - i)
                decode(job, batch, k + i, count, column, block)
                w = pack_block(block, count, PANEL, packed + 4 * PANEL * (i // PER_LANE), packed)
            steps = depth // PER_LANE
            multiply(x + SIZE * k, x_stride, last - first, w, steps, y, y_stride, columns)

    @native
    def count(job):
        panels = (word(job, C) + PANEL - 1) // PANEL
        return word(job, BATCH) * panels * ((word(job, M) + _PART_ROWS - 1) // _PART_ROWS)

    @native
    def work(job, part):
        panels = (word(job, C) + PANEL - 1) // PANEL
        parts = (word(job, M) + _PART_ROWS - 1) // _PART_ROWS
        column, rest = part % panels * PANEL, part // panels
        x_part, batch = rest % parts, rest // parts
        m = word(job, M)
        size = (m + parts - 1) // parts
        first, last = min(m, x_part * size), min(m, (x_part + 1) * size)
        y_stride = 4 * word(job, C)
        y = word(job, OUT) + (batch * m + first) * y_stride + 4 * column
        clear_rows(y, y_stride, last - first, min(PANEL, word(job, C) - column))
        add_product(job, batch, 0, word(job, R), column, first, last, y)

    return BlockFunctions(count, work, add_product)
