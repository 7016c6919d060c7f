"""Rows contracted, many of them at once: a block of the matrix is decoded once for all rows of x.

It stays in the first cache as f32, times its scales. Then it is like any product of dense matrices:
a few rows of x times a few vectors of the block are summed up in registers. As scales are part of
what is decoded, tiles may have any shape.

Where x is bf16, and the CPU multiplies pairs of it, so is what is decoded, two rows in a lane
(`pairs.py`).
"""

from typing import Any, NamedTuple

import numpy as np

from ....native.functions import native, prevent_inlining
from ....native.isa import LANES, REGISTERS
from ....native.memory import load_f32, load_i8, prefetch, stack, store_f32, store_i8, word
from ....native.simd.floats import (
    add_inner,
    add_scaled,
    fma,
    load,
    splat,
    store,
    store_sums,
    zeros,
)
from ...common.kinds import BITS
from ..operands.codes import load_table
from ..operands.job import (
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
    row_of,
)
from ..operands.scales import has_minima, read_tiles
from .decode import reader, row_bytes
from .pairs import F32, NUMBERS, Numbers

#: Columns that are worked on together, and rows that are decoded at once: 24 KB of f32.
PANEL, BLOCK = 128, 48
#: Rows of x that are multiplied at once, and vectors: as many sums as registers hold.
_ROWS, _VECTORS = 6, 4 if REGISTERS == 32 else 2
#: Rows of x in a part, at most: their results stay in the second cache.
_PART = 256

_BLOCK_BYTES, _ROW_BYTES, _SUMS_BYTES = (4 * rows * PANEL for rows in (BLOCK, 1, _ROWS))
_ZERO, _ONE = np.float32(0), np.float32(1)
#: Scales that are read at once, where they are repeated.
_NUMBERS = 64
_NUMBERS_BYTES = 4 * _NUMBERS


class Multiplier(NamedTuple):
    """What multiplies with a panel of a matrix.

    - `count(job)`: how many parts there are.
    - `work(job, part)`: computes one.
    - `add_product(job, batch, row, rows, column, first, last, y)`: adds what these rows of the
      matrix and the panel at this column contribute to rows `first` to `last` of the result, the
      first of which is at `y`.
    """

    count: Any
    work: Any
    add_product: Any


@native
def expand(job, leaf, batch, tile, column, columns, to):
    """Writes the scale, or minimum, of each of some columns, of a row of tiles.

    There has to be space for whole vectors. It returns whether all numbers are finite.
    """
    prevent_inlining()
    numbers, tc = stack(_NUMBERS_BYTES), word(job, TC)
    row = batch * (word(job, R) // word(job, TR)) + tile
    if tc == 1:
        read_tiles(job, leaf, row, column, columns, to)
    else:
        c, number, end = 0, column // tc, (column + columns - 1) // tc + 1
        while number < end:
            some = min(_NUMBERS, end - number)
            read_tiles(job, leaf, row, number, some, numbers)
            for i in range(some):
                value = load_f32(numbers + 4 * i)
                last = min(columns, (number + i + 1) * tc - column)
                while c < last:
                    store_f32(to + 4 * c, value)
                    c += 1
            number += some
    return _all_finite(to, columns)


@native
def _all_finite(address, count):
    """Whether no number of f32 is infinite or NaN: the sum of all of them times 0 is 0."""
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
    """Copies so many bytes of each row."""
    prevent_inlining()
    for row in range(rows):
        for byte in range(size):
            store_i8(to + row * to_stride + byte, load_i8(w + row * stride + byte))


@native
def add(address, count, by, y):
    """Adds numbers of f32, times one, to others."""
    i = 0
    while i + LANES <= count:
        add_scaled(y + 4 * i, 0, load(address + 4 * i, 1), splat(by))
        i += LANES
    while i < count:
        store_f32(y + 4 * i, load_f32(y + 4 * i) + load_f32(address + 4 * i) * by)
        i += 1


@native
def add_rows(address, stride, rows, columns, y, y_stride):
    """Adds rows of f32 to others."""
    prevent_inlining()
    for row in range(rows):
        add(address + row * stride, columns, _ONE, y + row * y_stride)


@native
def clear(address, stride, rows, columns):
    """Writes zeros to rows of f32."""
    prevent_inlining()
    for row in range(rows):
        for column in range(columns):
            store_f32(address + row * stride + 4 * column, 0.0)


def _product(rows: int, columns: int, outer: Any) -> Any:
    """Makes the innermost loop: some rows of x times a block, that many vectors at a time.

    A row of the block, and a step in x, is of 32 bits a number: f32, or a pair.
    """

    @native
    def product(x, x_stride, w, depth, y, y_stride):
        prevent_inlining()
        for column in range(0, PANEL, columns * LANES):
            total = zeros(rows, columns)
            for k in range(depth):
                values = load(w + 4 * (k * PANEL + column), columns)
                total = outer(total, x + 4 * k, x_stride, values)
            add_scaled(y + 4 * column, y_stride, total, splat(_ONE))

    return product


def _multiplication(outer: Any) -> Any:
    """Makes what multiplies rows of x with a block, by an instruction for what they are of."""
    product_of_many = _product(_ROWS, _VECTORS, outer)
    product_of_2, product_of_1 = (_product(rows, 2 * _VECTORS, outer) for rows in (2, 1))

    @native
    def multiply(x, x_stride, rows, w, depth, y, y_stride, columns):
        """Multiplies with a block, of which so many columns are to be added to y."""
        prevent_inlining()
        sums = stack(_SUMS_BYTES)
        row = 0
        while row < rows:
            count = _ROWS if row + _ROWS <= rows else min(2, rows - row)
            top, to, stride = x + row * x_stride, y + row * y_stride, y_stride
            if columns < PANEL:
                to, stride = sums, 4 * PANEL
                clear(sums, stride, count, PANEL)
            if count == _ROWS:
                for next in range(_ROWS, 2 * _ROWS):
                    for byte in range(0, 4 * BLOCK, 64):
                        prefetch(top + next * x_stride + byte)
                product_of_many(top, x_stride, w, depth, to, stride)
            elif count == 2:
                product_of_2(top, x_stride, w, depth, to, stride)
            else:
                product_of_1(top, x_stride, w, depth, to, stride)
            if columns < PANEL:
                add_rows(sums, stride, count, columns, y + row * y_stride, y_stride)
            row += count

    return multiply


def build(kind: str, activations: str = "float32") -> JobFunctions:
    """Return the functions of the kernel for codes of a kind, and f32 or bf16 activations."""
    multiply = multiplier(kind, NUMBERS[activations])
    return JobFunctions(do_nothing, multiply.count, multiply.work, do_nothing)


def multiplier(kind: str, numbers: Numbers = F32) -> Multiplier:
    """Makes a kernel for codes of a kind, and activations that are such numbers."""
    multiply, pair, SIZE, EACH = _multiplication(numbers.outer), numbers.pair, *numbers[2:]
    DEPTH = EACH * BLOCK  # rows that are multiplied at once
    bits = BITS[kind]
    decoded, ordered = reader(kind)
    panel_bytes = PANEL * bits // 8
    tail_bytes = BLOCK * panel_bytes
    step = 4 if REGISTERS == 32 else 2  # vectors that are decoded at once

    @native
    def decode(job, batch, row, rows, column, to):
        prevent_inlining()
        stride, tr = word(job, NEXT_ROW), word(job, TR)
        w = row_of(job, batch, row) + column * bits // 8
        columns = min(PANEL, word(job, C) - column)
        if columns < PANEL:  # what is behind the last column may be no memory at all
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
            expand(job, SCALE, batch, tile, column, columns, scales)
            if has_minima(job):
                expand(job, MINIMUM, batch, tile, column, columns, minima)
            for c in range(0, PANEL, step * LANES):
                scale, minimum = load(scales + 4 * c, step), load(minima + 4 * c, step)
                for k in range(start, end):
                    prefetch(w + (k + BLOCK) * stride + c * bits // 8)
                    codes = ordered(decoded(table, w + k * stride + c * bits // 8, step))
                    store(to + 4 * (k * PANEL + c), fma(codes, scale, minimum))
            start = end

    @native
    def add_product(job, batch, row, rows, column, first, last, y):
        prevent_inlining()
        block, paired = stack(_BLOCK_BYTES), stack(_BLOCK_BYTES)
        x_stride, y_stride = SIZE * word(job, R), 4 * word(job, C)
        x = word(job, X) + (batch * word(job, M) + first) * x_stride
        columns = min(PANEL, word(job, C) - column)
        for k in range(row, row + rows, DEPTH):
            depth, w = min(DEPTH, row + rows - k), block
            for i in range(0, depth, BLOCK):
                some = min(BLOCK, depth - i)
                decode(job, batch, k + i, some, column, block)
                w = pair(block, some, PANEL, paired + 4 * PANEL * (i // EACH), paired)
            at_x = x + SIZE * k
            multiply(at_x, x_stride, last - first, w, depth // EACH, y, y_stride, columns)

    @native
    def count(job):
        panels = (word(job, C) + PANEL - 1) // PANEL
        return word(job, BATCH) * panels * ((word(job, M) + _PART - 1) // _PART)

    @native
    def work(job, part):
        panels = (word(job, C) + PANEL - 1) // PANEL
        parts = (word(job, M) + _PART - 1) // _PART
        column, rest = part % panels * PANEL, part // panels
        number, batch = rest % parts, rest // parts
        m = word(job, M)
        size = (m + parts - 1) // parts
        first, last = min(m, number * size), min(m, (number + 1) * size)
        y_stride = 4 * word(job, C)
        y = word(job, OUT) + (batch * m + first) * y_stride + 4 * column
        clear(y, y_stride, last - first, min(PANEL, word(job, C) - column))
        add_product(job, batch, 0, word(job, R), column, first, last, y)

    return Multiplier(count, work, add_product)
