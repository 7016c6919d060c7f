"""Multiply many rows of int8 activations by integer codes, with rows contracted.

A strip is `WIDTH` bytes of each row of the matrix. It has one panel per field, the position of a
code in a byte. Four rows at a time are interleaved, so that a 32-bit lane holds four codes of one
column. This changes the order of columns: scales are brought into the same order, and sums back.
"""

import functools

from ....native.functions import native
from ....native.memory import load_f32, load_i8, stack, store_f32, store_i8, word
from ....native.simd.floats import load, scale_block, splat, store, store_block
from ....native.simd.integers import (
    copy_by_fields,
    from_panels,
    load_floats,
    load_interleaved,
    to_panels,
)
from ...common.kinds import BITS
from ..operands.job import ROW_BYTES, TC, TR, C, JobFunctions, R
from ..operands.scales import is_f32, read_tile_values
from . import blocks
from .panel import BLOCK, PANEL_ROW, WIDTH, Orientation, build_reader, code_offset


def build(kind: str) -> JobFunctions:
    """Return the functions that compute a product in parts, for codes such as "lookup4"."""
    return blocks.build_functions(orientation(kind), code_offset(kind))


@functools.cache
def orientation(kind: str) -> Orientation:
    """Return the functions that depend on the contracted side, for rows and a kind of codes."""
    bits, read = BITS[kind], build_reader(kind)
    fields = 8 // bits
    vectors = 4 * fields
    SCALES = PANEL_ROW * fields + WIDTH  # the most bytes of a strip's scales

    @native
    def decode_step(m):
        # Rows of the matrix are far apart in memory. With fewer rows at once, more of a row is read
        # before the next row, but the sums are loaded and stored more often.
        if m <= 12:
            return 16
        return 64 if m <= 96 else BLOCK

    @native
    def sizes(job):
        return word(job, R), word(job, C), word(job, TR)

    @native
    def span(k, count):
        # A lane has 4 codes.
        return 0, (count + 3) // 4 * 4

    @native
    def reorder(x, count, position, to):
        # Panels keep the order along K.
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
        # Scratch memory that is not written is multiplied by activations of 0, or belongs to
        # columns that are not in the result.
        for row in range(min(rows, length)):
            for i in range(min(columns, WIDTH)):
                store_i8(scratch + row * WIDTH + i, load_i8(address + row * row_bytes + i))
        return scratch, WIDTH

    @native
    def ahead(job, matrix, strip, k, length, panel):
        # The panels of a strip divide its rows.
        row_bytes = word(job, ROW_BYTES)
        rows = (length + fields - 1) // fields
        return matrix + (k + panel * rows) * row_bytes + strip * WIDTH, row_bytes, rows, 1

    @native
    def decode(address, stride, length, panel, table, to):
        # Interleave 4 rows at a time, and decode one field of each byte.
        shift = panel * bits
        for _ in range(length // 4):
            store_block(to, 0, read(table, load_interleaved(address, stride), shift))
            address += 4 * stride
            to += PANEL_ROW

    @native
    def scales_bytes(job, leaf, strips):
        return 0

    @native
    def part_scales(job, leaf, batch, strip, strips, to):
        # `load_scales` reads the scales itself, from this row of tiles on.
        return batch * (word(job, R) // word(job, TR))

    @native
    def load_scales(job, leaf, row, strip, tile, scratch, to):
        columns, shared = word(job, C), word(job, TC)
        first = strip * WIDTH * fields
        count = min(columns - first, WIDTH * fields)
        address, row = scratch, row + tile
        if shared == 1 and count == WIDTH * fields and is_f32(job, leaf):
            address = word(job, leaf) + 4 * (row * columns + first)
        elif shared == 1:
            read_tile_values(job, leaf, row, first, count, scratch)
        else:
            i, scales = 0, stack(SCALES)
            first_scale = first // shared
            scale_count = (first + count - 1) // shared + 1 - first_scale
            read_tile_values(job, leaf, row, first_scale, scale_count, scales)
            while i < count:
                index, within = divmod(first + i, shared)
                scale = load_f32(scales + 4 * (index - first_scale))
                end = min(i + shared - within, count)
                for column in range(i, end):
                    store_f32(scratch + 4 * column, scale)
                i = end
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
        panels=fields,
        decode_step=decode_step,
        sizes=sizes,
        span=span,
        reorder=reorder,
        fetch=fetch,
        decode=decode,
        scales_bytes=scales_bytes,
        part_scales=part_scales,
        load_scales=load_scales,
        write=write,
        ahead=ahead,
    )
