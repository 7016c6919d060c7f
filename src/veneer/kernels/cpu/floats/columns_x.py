"""Few rows of x, in the order in which the panels of W that they are multiplied by are decoded.

They are stored in blocks of at most `MOST` rows, one after the other, with a power of two in the
last, which is 1 only if x has one row: of each a panel of all its rows, then the next panel. Behind
the last row and the last column, x is 0. Where there are minima, the sums of x over tiles follow.
"""

import functools
from typing import Any, NamedTuple

from ....native.functions import native
from ....native.isa import LANES, REGISTERS
from ....native.memory import load_f32, malloc, set_word, stack, store_f32, word
from ....native.simd.floats import deinterleave, load, scale_block, store
from ..operands.job import BATCH, FAILED, SCALE, SCRATCH, TC, C, M, X
from ..operands.minima import sums_size, write_sums
from ..operands.scales import has_minima, read_tiles
from .panels import COLUMNS, VECTORS

MOST = 8 if REGISTERS == 32 else 4


class Order(NamedTuple):
    """What of x depends on the kind of codes."""

    #: `prepare(job)` allocates x in order.
    prepare: Any
    #: `block(job, batch, m)` is the address of the block of x that begins with row m.
    block: Any
    #: `sums(job, batch, m)` is the address of the sums of row m of x over tiles.
    sums: Any
    #: `fold(job, to, x, rows, number, first, last)` multiplies panels of a block of x, from the
    #: first to the last, by the row of scales of this number.
    fold: Any


@functools.cache
def order(kind: str) -> Order:
    """Returns what orders x for codes of this kind."""
    COUNT, PANEL, BYTES = VECTORS[kind], COLUMNS[kind], 4 * COLUMNS[kind]
    NUMBERS = BYTES + 4 * LANES
    in_order = deinterleave if kind.startswith("lookup") else _same

    @native
    def block(job, batch, m):
        panels = (word(job, C) + PANEL - 1) // PANEL
        aligned = (word(job, SCRATCH) + 63) // 64 * 64
        return aligned + BYTES * panels * (batch * padded_rows(word(job, M)) + m)

    @native
    def store_panel(to, x, count):
        """Stores a panel of numbers, of which only so many columns exist."""
        padded = stack(BYTES)
        if count < PANEL:
            for i in range(PANEL):
                store_f32(padded + 4 * i, load_f32(x + 4 * i) if i < count else 0)
            x = padded
        store(to, in_order(load(x, COUNT)))

    @native
    def sums(job, batch, m):
        behind = block(job, word(job, BATCH), 0)
        return behind + sums_size(job) * (batch * padded_rows(word(job, M)) + m)

    @native
    def prepare(job):
        rows, columns = word(job, M), word(job, C)
        panels, padded = (columns + PANEL - 1) // PANEL, padded_rows(rows)
        size = BYTES * panels + (sums_size(job) if has_minima(job) else 0)
        memory = malloc(64 + size * padded * word(job, BATCH))
        if memory == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, memory)
        for batch in range(word(job, BATCH)):
            for m in range(padded):
                first = m // MOST * MOST
                step = BYTES * rows_of_block(rows, first)
                to = block(job, batch, first) + BYTES * (m - first)
                x = word(job, X) + 4 * columns * (batch * rows + m)
                for panel in range(panels):
                    count = min(PANEL, columns - panel * PANEL) if m < rows else 0
                    store_panel(to + step * panel, x + BYTES * panel, count)
                if has_minima(job):
                    write_sums(job, x, m < rows, sums(job, batch, m))

    @native
    def expand(job, to, number, panel):
        """Writes what scales the columns of a panel, in order."""
        numbers = stack(NUMBERS)
        columns, tile = word(job, C), word(job, TC)
        begin = panel * PANEL
        count = min(PANEL, columns - begin)
        first = begin // tile
        read_tiles(job, SCALE, number, first, (begin + count - 1) // tile + 1 - first, numbers)
        if tile > 1:
            each = stack(BYTES)
            for i in range(count):
                store_f32(each + 4 * i, load_f32(numbers + 4 * ((begin + i) // tile - first)))
            numbers = each
        store_panel(to, numbers, count)

    @native
    def fold(job, to, x, rows, number, first, last):
        scales = stack(BYTES)
        for panel in range(first, last):
            expand(job, scales, number, panel)
            by = load(scales, COUNT)
            for _ in range(rows):
                store(to, scale_block(load(x, COUNT), by))
                x += BYTES
                to += BYTES

    return Order(prepare, block, sums, fold)


@native
def rows_of_block(rows, m):
    """How many of so many rows of x are in the block that begins with row m, with those added."""
    count = 1 if rows == 1 else 2
    while count < MOST and count < rows - m:
        count *= 2
    return count


@native
def padded_rows(rows):
    """How many rows the blocks have."""
    last = (rows - 1) // MOST * MOST
    return last + rows_of_block(rows, last)


@native
def _same(block):
    return block
