"""Copy x into the order in which the panels of W are decoded, for a few rows of x.

The rows of x are stored in blocks of at most `MOST` rows. The last block has a power of two of
rows, and one row only if x has one row. A block stores the first panel of all its rows, then the
next panel of all its rows, and so on. Missing rows and columns are 0. If W has minima, the sums of
x over tiles follow after the last block.
"""

import functools
from typing import Any, NamedTuple

from ....native.functions import native
from ....native.memory import load_f32, malloc, set_word, stack, store_f32, word
from ....native.simd import LANES, REGISTERS
from ....native.simd.floats import deinterleave, load, scale_block, store
from ...common.kinds import LOOKUP_BITS
from ..operands.job import BATCH, FAILED, SCALE, SCRATCH, TC, C, M, X
from ..operands.minima import tile_sums_bytes, write_tile_sums
from ..operands.scales import has_minima, read_tile_values
from .panels import COLUMNS, VECTORS

#: The most rows of x in a block.
MOST = 8 if REGISTERS == 32 else 4


class PanelX(NamedTuple):
    """The native functions that store and find x in panel order, for one kind of codes.

    - `prepare(job)`: allocates SCRATCH and writes x in panel order.
    - `block_address(job, batch, m)`: returns the address of the block that begins with row m of x.
    - `sums_address(job, batch, m)`: returns the address of the sums of row m of x over tiles.
    - `fold(job, to, x, rows, tile_row, first, last)`: writes the panels from `first` to `last` of a
      block of x with `rows` rows, multiplied by the scales of row `tile_row` of tiles.
    """

    prepare: Any
    block_address: Any
    sums_address: Any
    fold: Any


@functools.cache
def build_panel_x(kind: str) -> PanelX:
    """Return the functions that store and find x in the panel order of codes of a kind.

    A block of 2 rows is stored as: panel 0 of row 0, panel 0 of row 1, panel 1 of row 0, ...
    """
    COUNT, PANEL, BYTES = VECTORS[kind], COLUMNS[kind], 4 * COLUMNS[kind]
    SCALE_BYTES = BYTES + 4 * LANES
    order = deinterleave if kind in LOOKUP_BITS else native(lambda block: block)

    @native
    def block_address(job, batch, m):
        """Return the address of the block that begins with row m of x."""
        panels = (word(job, C) + PANEL - 1) // PANEL
        aligned = (word(job, SCRATCH) + 63) // 64 * 64
        return aligned + BYTES * panels * (batch * _count_padded_rows(word(job, M)) + m)

    @native
    def sums_address(job, batch, m):
        """Return the address of the sums of row m over tiles, after the blocks of all batches."""
        first = block_address(job, word(job, BATCH), 0)
        return first + tile_sums_bytes(job) * (batch * _count_padded_rows(word(job, M)) + m)

    @native
    def store_panel(to, x, count):
        # Write the `count` numbers at `x` as one panel in panel order, padded with zeros.
        padded = stack(BYTES)
        if count < PANEL:
            for i in range(PANEL):
                store_f32(padded + 4 * i, load_f32(x + 4 * i) if i < count else 0)
            x = padded
        store(to, order(load(x, COUNT)))

    @native
    def prepare(job):
        """Allocate SCRATCH, and write x in panel order, and its sums over tiles if W has minima."""
        rows, columns = word(job, M), word(job, C)
        panels, padded = (columns + PANEL - 1) // PANEL, _count_padded_rows(rows)
        size = BYTES * panels + (tile_sums_bytes(job) if has_minima(job) else 0)
        memory = malloc(64 + size * padded * word(job, BATCH))
        if memory == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, memory)
        for batch in range(word(job, BATCH)):
            for m in range(padded):
                first = m // MOST * MOST
                step = BYTES * count_block_rows(rows, first)
                to = block_address(job, batch, first) + BYTES * (m - first)
                x = word(job, X) + 4 * columns * (batch * rows + m)
                for panel in range(panels):
                    count = min(PANEL, columns - panel * PANEL) if m < rows else 0
                    store_panel(to + step * panel, x + BYTES * panel, count)
                if has_minima(job):
                    write_tile_sums(job, x, m < rows, sums_address(job, batch, m))

    @native
    def expand_scales(job, to, tile_row, panel):
        # Write the scale of each column of a panel, in panel order.
        numbers = stack(SCALE_BYTES)
        columns, tile = word(job, C), word(job, TC)
        begin = panel * PANEL
        count = min(PANEL, columns - begin)
        first = begin // tile
        tiles = (begin + count - 1) // tile + 1 - first
        read_tile_values(job, SCALE, tile_row, first, tiles, numbers)
        if tile > 1:
            repeated = stack(BYTES)
            for i in range(count):
                store_f32(repeated + 4 * i, load_f32(numbers + 4 * ((begin + i) // tile - first)))
            numbers = repeated
        store_panel(to, numbers, count)

    @native
    def fold(job, to, x, rows, tile_row, first, last):
        """Write panels `first` to `last` of a block of x, multiplied by their scales."""
        scales = stack(BYTES)
        for panel in range(first, last):
            expand_scales(job, scales, tile_row, panel)
            by = load(scales, COUNT)
            for _ in range(rows):
                store(to, scale_block(load(x, COUNT), by))
                x += BYTES
                to += BYTES

    return PanelX(prepare, block_address, sums_address, fold)


@native
def count_block_rows(rows, m):
    """Return the number of rows of the block that begins with row m of the `rows` rows of x.

    The number includes rows of zeros: it is a power of two, and 1 only if x has one row.
    """
    count = 1 if rows == 1 else 2
    while count < MOST and count < rows - m:
        count *= 2
    return count


@native
def _count_padded_rows(rows):
    last = (rows - 1) // MOST * MOST
    return last + count_block_rows(rows, last)
