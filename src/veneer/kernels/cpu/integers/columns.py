"""Where a panel of integer codes comes from if the columns of the matrix are contracted.

A strip is WIDTH rows of the matrix, and is one panel. Of LANES rows at a time, 16 bytes each are
transposed, so that a lane has four bytes of one row. Their first fields are followed by their
second: activations are brought into the order that this gives.
"""

import functools

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import load_f32, load_i8, store_f32, store_i8, word
from ....native.simd.bytes import copy_by_fields, load_transposed
from ....native.simd.floats import load, scale_block, splat, store, store_block
from ....native.simd.integers import load_ints
from ..operands.job import ROW_BYTES, TC, TR, C, JobFunctions, R
from ..operands.scales import is_f32, read_tile_values
from . import blocks
from .panel import BITS, BLOCK, PANEL, WIDTH, Orientation, offset, reader


def build(kind: str) -> JobFunctions:
    """Return the functions of the kernel for codes of a kind."""
    return blocks.functions_of(orientation(kind), offset(kind))


@functools.cache
def orientation(kind: str) -> Orientation:
    """Returns the functions for a kind of codes."""
    bits, read = BITS[kind], reader(kind)
    fields = 8 // bits
    chunk = 16 * fields

    @native
    def step(m):
        return BLOCK

    @native
    def sizes(job):
        return word(job, C), word(job, R), word(job, TC)

    @native
    def span(k, count):
        begin = k % fields
        return begin, (begin + count + chunk - 1) // chunk * chunk

    @native
    def copy(x, count, begin, to):
        i = 0
        while begin == 0 and i + chunk <= count:
            copy_by_fields(x + i, to + i, fields, 16)
            i += chunk
        while i < count:
            of, within = divmod(begin + i, chunk)
            byte, field = divmod(within, fields)
            store_i8(to + of * chunk + field * 16 + byte, load_i8(x + i))
            i += 1

    @native
    def fetch(job, matrix, strip, k, length, scratch):
        rows, row_bytes = word(job, R) - strip * WIDTH, word(job, ROW_BYTES)
        first, count = k // fields, length // fields
        address = matrix + strip * WIDTH * row_bytes + first
        # Rows are brought closer together: often, they are as far apart as makes them compete for
        # the same lines of a cache. And nothing beyond the matrix is read: what is in scratch
        # instead is multiplied by zeros, or is of rows whose sums are not written.
        apart = count + WIDTH
        there = min(row_bytes - first, count)
        for row in range(min(rows, WIDTH)):
            place, to = address + row * row_bytes, scratch + row * apart
            i = 0
            while i + WIDTH <= there:
                store_block(to + i, 0, load_ints(place + i, 0, 1, 1))
                i += WIDTH
            while i < there:
                store_i8(to + i, load_i8(place + i))
                i += 1
        return scratch, apart

    @native
    def ahead(job, matrix, strip, k, length, panel):
        row_bytes = word(job, ROW_BYTES)
        return (
            matrix + strip * WIDTH * row_bytes + k // fields,
            row_bytes,
            WIDTH,
            max(1, length // fields // 64),
        )

    @native
    def decode(address, stride, length, panel, table, to):
        for _ in range(length // chunk):
            for group in range(4):
                rows = load_transposed(address + group * LANES * stride, stride)
                for field in range(fields):
                    place = to + field * 4 * PANEL + group * WIDTH
                    store_block(place, PANEL, read(table, rows, field * bits))
            address += 16
            to += chunk // 4 * PANEL

    @native
    def part(job, leaf, strips):
        if is_f32(job, leaf):
            return 0
        return 4 * strips * WIDTH * (word(job, C) // word(job, TC)) + WIDTH

    @native
    def of_part(job, leaf, batch, strip, strips, to):
        shared, tiles = word(job, TR), word(job, C) // word(job, TC)
        row = batch * (word(job, R) // shared)
        if is_f32(job, leaf):
            return word(job, leaf) + 4 * row * tiles
        first = strip * WIDTH // shared
        last = (min(word(job, R), (strip + strips) * WIDTH) - 1) // shared
        read_tile_values(job, leaf, row + first, 0, (last + 1 - first) * tiles, to)
        return to - 4 * first * tiles

    @native
    def scales(job, leaf, address, strip, tile, scratch, to):
        first, shared = strip * WIDTH, word(job, TR)
        stride = word(job, C) // word(job, TC) * 4
        address += tile * 4
        for i in range(min(word(job, R) - first, WIDTH)):
            store_f32(to + 4 * i, load_f32(address + (first + i) // shared * stride))

    @native
    def write(sums, stride, x_scale, scratch, to, count):
        if count == WIDTH:
            store(to, scale_block(load(sums, 4), splat(x_scale)))
        else:
            for i in range(count):
                store_f32(to + 4 * i, load_f32(sums + 4 * i) * x_scale)

    return Orientation(
        1, step, sizes, span, copy, fetch, decode, part, of_part, scales, write, ahead
    )
