"""Where a panel of integer codes comes from if the rows of the matrix are contracted.

A strip is WIDTH bytes of each row, and has a panel a field of a byte. Four rows at a time are
interleaved, so that a lane has four codes of one column: the scales are brought into the order of
columns that this gives, and the sums back out of it.
"""

import functools

from ....native.functions import native
from ....native.memory import load_f32, load_i8, stack, store_f32, store_i8, word
from ....native.simd.bytes import copy_by_fields, from_panels, load_interleaved, to_panels
from ....native.simd.floats import load, scale_block, splat, store, store_block
from ....native.simd.integers import load_floats
from ..operands.job import ROW_BYTES, TC, TR, C, JobFunctions, R
from ..operands.scales import is_f32, read_tile_values
from . import blocks
from .panel import BITS, BLOCK, PANEL, WIDTH, Orientation, fill, offset, reader


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    return blocks.functions_of(orientation(kind), offset(kind))


@functools.cache
def orientation(kind: str) -> Orientation:
    """Returns the functions for a kind of codes."""
    bits, read = BITS[kind], reader(kind)
    fields = 8 // bits
    vectors = 4 * fields
    NUMBERS = PANEL * fields + WIDTH  # bytes of the scales of a strip, at most

    @native
    def step(m):
        # Each row of the matrix is in memory of its own. The fewer of them are read at once, the
        # more of a row is read before the next, and the more often are sums gone through.
        if m <= 12:
            return 16
        return 64 if m <= 96 else BLOCK

    @native
    def sizes(job):
        return word(job, R), word(job, C), word(job, TR)

    @native
    def span(k, count):
        return 0, (count + 3) // 4 * 4

    @native
    def copy(x, count, begin, to):
        whole = count // 16 * 16
        for i in range(0, whole, 16):
            copy_by_fields(x + i, to + i, 1, 16)
        for i in range(whole, count):
            store_i8(to + i, load_i8(x + i))

    @native
    def fetch(job, matrix, strip, k, length, scratch):
        rows, row_bytes = word(job, R) - k, word(job, ROW_BYTES)
        address = matrix + k * row_bytes + strip * WIDTH
        columns = row_bytes - strip * WIDTH
        if rows >= length and columns >= WIDTH:
            return address, row_bytes
        # Nothing beyond the matrix is read. What is in scratch instead is multiplied by zeros, or
        # is of columns that are not written.
        for row in range(min(rows, length)):
            for i in range(min(columns, WIDTH)):
                store_i8(scratch + row * WIDTH + i, load_i8(address + row * row_bytes + i))
        return scratch, WIDTH

    @native
    def ahead(job, matrix, strip, k, length, panel):
        row_bytes = word(job, ROW_BYTES)
        part = (length + fields - 1) // fields
        return matrix + (k + panel * part) * row_bytes + strip * WIDTH, row_bytes, part, 1

    @native
    def decode(address, stride, length, panel, table, to):
        shift = panel * bits
        for _ in range(length // 4):
            store_block(to, 0, read(table, load_interleaved(address, stride), shift))
            address += 4 * stride
            to += PANEL

    @native
    def part(job, leaf, strips):
        return 0

    @native
    def of_part(job, leaf, batch, strip, strips, to):
        return batch * (word(job, R) // word(job, TR))  # the first row of them

    @native
    def scales(job, leaf, row, strip, tile, scratch, to):
        columns, shared = word(job, C), word(job, TC)
        first = strip * WIDTH * fields
        count = min(columns - first, WIDTH * fields)
        address, row = scratch, row + tile
        if shared == 1 and count == WIDTH * fields and is_f32(job, leaf):
            address = word(job, leaf) + 4 * (row * columns + first)
        elif shared == 1:
            read_tile_values(job, leaf, row, first, count, scratch)
        else:
            i, numbers = 0, stack(NUMBERS)
            of = first // shared
            read_tile_values(job, leaf, row, of, (first + count - 1) // shared + 1 - of, numbers)
            while i < count:
                number, within = divmod(first + i, shared)
                run = min(shared - within, count - i)
                fill(scratch + 4 * i, load_f32(numbers + 4 * (number - of)), run)
                i += run
        store(to, to_panels(load(address, vectors), fields))

    @native
    def write(sums, stride, x_scale, scratch, to, count):
        values = from_panels(load_floats(sums, stride, fields, 4), fields)
        values = scale_block(values, splat(x_scale))
        if count == WIDTH * fields:
            store(to, values)
        else:
            store(scratch, values)
            for i in range(count):
                store_f32(to + 4 * i, load_f32(scratch + 4 * i))

    return Orientation(
        fields, step, sizes, span, copy, fetch, decode, part, of_part, scales, write, ahead
    )
