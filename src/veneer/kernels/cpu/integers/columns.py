"""Multiply many rows of int8 activations by integer codes, with columns contracted.

A strip is `WIDTH` rows of the matrix, and has one panel. Of `LANES` rows at a time, 16 bytes each
are transposed, so that a 32-bit lane holds four bytes of one row. If a byte has several codes, the
first codes of 16 bytes come before their second codes. Activations are brought into the same order.
"""

import functools

from ....native.functions import native
from ....native.memory import load_f32, load_i8, store_f32, store_i8, word
from ....native.simd import LANES
from ....native.simd.floats import load, scale_block, splat, store, store_block
from ....native.simd.integers import copy_by_fields, load_ints, load_transposed
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
    """Return the functions that depend on the contracted side, for columns and a kind of codes."""
    bits, read = BITS[kind], build_reader(kind)
    fields = 8 // bits
    chunk = 16 * fields  # the codes that are reordered together

    @native
    def decode_step(m):
        # Rows are contiguous along K.
        return BLOCK

    @native
    def sizes(job):
        return word(job, C), word(job, R), word(job, TC)

    @native
    def span(k, count):
        # Begin the panel at the byte with code k.
        position = k % fields
        return position, (position + count + chunk - 1) // chunk * chunk

    @native
    def reorder(x, count, position, to):
        # Copy activations in chunks: first those for field 0 of 16 bytes, then for field 1, ...
        # `position` is the number of fields of the first byte before the first activation.
        i = 0
        while position == 0 and i + chunk <= count:
            copy_by_fields(x + i, to + i, fields, 16)
            i += chunk
        while i < count:
            index, within = divmod(position + i, chunk)
            byte, field = divmod(within, fields)
            store_i8(to + index * chunk + field * 16 + byte, load_i8(x + i))
            i += 1

    @native
    def fetch(job, matrix, strip, k, length, scratch):
        # Copy the codes of each row closer together. Rows are often a power of two apart, and would
        # compete for the same cache lines.
        rows, row_bytes = word(job, R) - strip * WIDTH, word(job, ROW_BYTES)
        first, count = k // fields, length // fields
        address = matrix + strip * WIDTH * row_bytes + first
        # Read nothing beyond the matrix: scratch memory that is not written is multiplied by
        # activations of 0, or belongs to rows whose sums are not in the result.
        stride = count + WIDTH
        available = min(row_bytes - first, count)
        for row in range(min(rows, WIDTH)):
            place, to = address + row * row_bytes, scratch + row * stride
            i = 0
            while i + WIDTH <= available:
                store_block(to + i, 0, load_ints(place + i, 0, 1, 1))
                i += WIDTH
            while i < available:
                store_i8(to + i, load_i8(place + i))
                i += 1
        return scratch, stride

    @native
    def ahead(job, matrix, strip, k, length, panel):
        # A strip has only one panel.
        row_bytes = word(job, ROW_BYTES)
        address = matrix + strip * WIDTH * row_bytes + k // fields
        return address, row_bytes, WIDTH, max(1, length // fields // 64)

    @native
    def decode(address, stride, length, panel, table, to):
        # Transpose and decode 16 bytes of `WIDTH` rows at a time, LANES rows after the other.
        for _ in range(length // chunk):
            for group in range(4):
                rows = load_transposed(address + group * LANES * stride, stride)
                for field in range(fields):
                    place = to + field * 4 * PANEL_ROW + group * WIDTH
                    store_block(place, PANEL_ROW, read(table, rows, field * bits))
            address += 16
            to += chunk // 4 * PANEL_ROW

    @native
    def scales_bytes(job, leaf, strips):
        # Scales are read in place if they are f32.
        if is_f32(job, leaf):
            return 0
        return 4 * strips * WIDTH * (word(job, C) // word(job, TC)) + WIDTH

    @native
    def part_scales(job, leaf, batch, strip, strips, to):
        # Return the address where the scales of the matrix's first row are, or would be.
        shared, tiles = word(job, TR), word(job, C) // word(job, TC)
        row = batch * (word(job, R) // shared)
        if is_f32(job, leaf):
            return word(job, leaf) + 4 * row * tiles
        first = strip * WIDTH // shared
        last = (min(word(job, R), (strip + strips) * WIDTH) - 1) // shared
        read_tile_values(job, leaf, row + first, 0, (last + 1 - first) * tiles, to)
        return to - 4 * first * tiles

    @native
    def load_scales(job, leaf, address, strip, tile, scratch, to):
        first, shared = strip * WIDTH, word(job, TR)
        stride = word(job, C) // word(job, TC) * 4
        address += tile * 4
        for i in range(min(word(job, R) - first, WIDTH)):
            store_f32(to + 4 * i, load_f32(address + (first + i) // shared * stride))

    @native
    def write(sums, stride, x_scale, scratch, to, count):
        # A panel row has the order of the result.
        if count == WIDTH:
            store(to, scale_block(load(sums, 4), splat(x_scale)))
        else:
            for i in range(count):
                store_f32(to + 4 * i, load_f32(sums + 4 * i) * x_scale)

    return Orientation(
        panels=1,
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
