"""The rows of x, in the order in which the panels of W that they are multiplied by are decoded.

They are stored in blocks of rows, one after the other: of each a panel of all its rows, then the
next panel. Behind the last row and the last column, x is 0.
"""

import functools
from typing import Any, NamedTuple

from .job import BATCH, SCRATCH, C, M, X
from .memory import load_f32, malloc, set_word, stack, store_f32, word
from .native import native
from .panels import COLUMNS, VECTORS
from .simd import compiled, deinterleave, load, scaled, store


class Order(NamedTuple):
    """What of x depends on the kind of codes."""

    #: `prepare(job)` allocates x in order.
    prepare: Any
    #: `block(job, batch, m)` is the address of the block of x that begins with row m.
    block: Any
    #: `fold(to, x, rows, scale, columns, tile, first, last)` multiplies panels of a block of x,
    #: from the first to the last, by a row of scales.
    fold: Any


@functools.cache
def order(kind: str, most: int) -> Order:
    """Returns what orders x for codes of this kind, in blocks of at most so many rows."""
    COUNT, PANEL, BYTES = VECTORS[kind], COLUMNS[kind], 4 * COLUMNS[kind]
    ordered = deinterleave if kind.startswith("lookup") else _same

    @native
    def padded_rows(rows):
        rest = rows % most
        return rows - rest + (rows_in_block(rest, most) if rest else 0)

    @native
    def block(job, batch, m):
        panels = (word(job, C) + PANEL - 1) // PANEL
        aligned = (word(job, SCRATCH) + 63) // 64 * 64
        return aligned + BYTES * panels * (batch * padded_rows(word(job, M)) + m)

    @native
    def store_panel(to, x, count):
        """Stores a panel of x, of which only so many columns exist."""
        padded = stack(BYTES)
        if count < PANEL:
            for i in range(PANEL):
                store_f32(padded + 4 * i, load_f32(x + 4 * i) if i < count else 0)
            x = padded
        store(to, ordered(load(x, COUNT)))

    @compiled
    def prepare(job):
        rows, columns = word(job, M), word(job, C)
        panels, padded = (columns + PANEL - 1) // PANEL, padded_rows(rows)
        memory = malloc(64 + BYTES * panels * padded * word(job, BATCH))
        set_word(job, SCRATCH, memory if memory else -1)
        if memory == 0:
            return
        for batch in range(word(job, BATCH)):
            for m in range(padded):
                first = m // most * most
                step = BYTES * rows_in_block(rows - first, most)
                to = block(job, batch, first) + BYTES * (m - first)
                x = word(job, X) + 4 * columns * (batch * rows + m)
                for panel in range(panels):
                    count = min(PANEL, columns - panel * PANEL) if m < rows else 0
                    store_panel(to + step * panel, x + BYTES * panel, count)

    @native
    def fold(to, x, rows, scale, columns, tile, first, last):
        scales, repeated = stack(BYTES), stack(BYTES)
        for panel in range(first, last):
            count, numbers = min(PANEL, columns - panel * PANEL), scale + BYTES * panel
            if tile > 1:
                numbers = repeated
                for i in range(count):
                    number = load_f32(scale + 4 * ((panel * PANEL + i) // tile))
                    store_f32(repeated + 4 * i, number)
            store_panel(scales, numbers, count)
            by = load(scales, COUNT)
            for _ in range(rows):
                store(to, scaled(load(x, COUNT), by))
                x += BYTES
                to += BYTES

    return Order(prepare, block, fold)


@native
def rows_in_block(left, most):
    """Rows of x that are multiplied at once where so many are left: 1, 2, 4 and so on."""
    rows = 1
    while rows < most and rows < left:
        rows *= 2
    return rows


@native
def _same(block):
    return block
