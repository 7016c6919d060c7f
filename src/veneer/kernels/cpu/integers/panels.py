"""Panels of decoded codes: their product with int8 activations, and how they are decoded.

A panel has `WIDTH` columns of the result and up to `BLOCK` codes of each column. Its rows are four
vectors. A 32-bit lane holds four codes of one column, consecutive along K, as unsigned bytes: the
operand of `add_outer_bytes`. The two functions that return an `Orientation` decode panels from a
stored matrix, whose rows or columns are contracted.
"""

import functools
from typing import Any, NamedTuple

from ....native.functions import native
from ....native.memory import load_f32, load_i8, prefetch, stack, store_f32, store_i8, word
from ....native.simd import HAS_VNNI, LANES, REGISTERS
from ....native.simd.floats import (
    add_scaled,
    load,
    scale_block,
    scale_rows,
    splat,
    store,
    store_block,
)
from ....native.simd.integers import (
    OFFSET,
    WIDTH,
    add_byte_sums,
    add_outer_bytes,
    broadcast_ints,
    copy_by_fields,
    from_panels,
    load_floats,
    load_interleaved,
    load_ints,
    load_transposed,
    look_up_bytes,
    sum_lanes,
    to_floats,
    to_panels,
    to_unsigned,
    zero_ints,
)
from ...common.problem import BITS
from ..job import ROW_BYTES, TC, TR, C, R
from ..scales import is_f32, read_tile_values

#: Bytes of a panel row: four codes per column. A row of sums, one per column, has the same size.
PANEL_ROW = 4 * WIDTH
#: The most codes of a column in a panel, so that the panel fits the L1 cache.
BLOCK = 256
#: The rows of activations and the vectors of columns whose sums are in registers at once.
_ROWS, _COLUMNS = (6, 4) if HAS_VNNI else (4, 4) if REGISTERS == 32 else (2, 2)


def code_offset(kind: str) -> int:
    """Return the number that is added to codes to make them unsigned bytes.

    `kind` names the encoding of the codes, such as "lookup4" (see `Codes.kind`).
    """
    return 0 if kind == "uint8" else OFFSET


def build_reader(kind: str) -> Any:
    """Return a function `read(table, block, shift)` that decodes a vector of stored bytes.

    `kind` names the encoding of the codes, such as "lookup4" (see `Codes.kind`). The function
    returns an unsigned byte per stored byte: a code plus `code_offset(kind)`. Codes of fewer than 8
    bits begin at bit `shift` of each byte, and are looked up in the table.
    """
    if BITS[kind] < 8:
        return look_up_bytes
    if kind == "uint8":
        return native(lambda table, block, shift: block)
    return native(lambda table, block, shift: to_unsigned(block))


def build_sum(step: int) -> Any:
    """Return a function `sum_activations(x, count)` that sums the `count` int8 activations at `x`.

    `count` must be a multiple of `step`, which must be at most `WIDTH`.
    """

    @native
    def sum_activations(x, count):
        total = zero_ints()
        whole = count // WIDTH * WIDTH
        for i in range(0, whole, WIDTH):
            total = add_byte_sums(total, x + i, WIDTH)
        for i in range(whole, count, step):
            total = add_byte_sums(total, x + i, step)
        return sum_lanes(total)

    return sum_activations


def _build_multiply(rows: int) -> Any:
    """Return a function that multiplies `rows` rows of activations by a panel.

    Its arguments are the arguments `x`, `panel` and `places` of `multiply`.
    """

    @native
    def multiply(x, panel, places):
        first_x, stride, x_scale, next_x_scale = x
        codes, steps, scale, is_first, is_last = panel
        start, ints, sums = places
        for column in range(0, PANEL_ROW, _COLUMNS * WIDTH):
            if is_first:
                total = broadcast_ints(start, rows, _COLUMNS)
            else:
                total = load_ints(ints + column, PANEL_ROW, rows, _COLUMNS)
            step_x, step_codes = first_x, codes + column
            for _ in range(steps):
                step_w = load_ints(step_codes, 0, 1, _COLUMNS)
                total = add_outer_bytes(total, step_x, stride, step_w)
                step_x += 4
                step_codes += PANEL_ROW
            if is_last:
                values = scale_rows(to_floats(total), x_scale, next_x_scale)
                add_scaled(sums + column, PANEL_ROW, values, load(scale + column, _COLUMNS))
            else:
                store_block(ints + column, PANEL_ROW, total)

    return multiply


_multiply_all, _multiply_4, _multiply_2, _multiply_1 = map(_build_multiply, (_ROWS, 4, 2, 1))


@native
def multiply(rows, x, panel, places, ahead):
    """Multiply `rows` rows of int8 activations by a panel, or by its codes that are in one tile.

    The activations of a tile can be in several blocks. Their int32 sums are kept in memory between
    blocks. After the last block of the tile, they are multiplied by the scales of row and column,
    and added to the f32 sums.

    **Arguments:**

    - `x`: the address of the activations, the bytes between rows, the address of the first row's
      scale, and the bytes between the scales of rows.
    - `panel`: the address of the codes, their number along K divided by 4, the address of the f32
      scales, and whether this is the first and the last block of the tile.
    - `places`: the addresses of the numbers that the int32 sums begin with, i32 `[rows]`, of the
      int32 sums between blocks, and of the f32 sums. Both sums are `[rows, WIDTH]`.
    - `ahead`: the memory to prefetch meanwhile, as `Orientation.ahead` returns.
    """
    first_x, stride, x_scale, next_x_scale = x
    start, ints, sums = places
    address, ahead_stride, ahead_rows, lines = ahead
    share = (ahead_rows * lines * _ROWS + rows - 1) // rows
    done, row = 0, 0
    while row < rows:
        end = min(done + share, ahead_rows * lines)
        for i in range(done, end):
            prefetch(address + i // lines * ahead_stride + i % lines * 64)
        done = end
        left = rows - row
        group_x = first_x + row * stride, stride, x_scale + row * next_x_scale, next_x_scale
        group_places = start + 4 * row, ints + row * PANEL_ROW, sums + row * PANEL_ROW
        if left >= _ROWS:
            _multiply_all(group_x, panel, group_places)
            row += _ROWS
        elif left >= 4:
            _multiply_4(group_x, panel, group_places)
            row += 4
        elif left >= 2:
            _multiply_2(group_x, panel, group_places)
            row += 2
        else:
            _multiply_1(group_x, panel, group_places)
            row += 1


class Orientation(NamedTuple):
    """The functions that depend on whether a product contracts the matrix's rows or its columns.

    The kernel in `blocks.py` calls them. It divides the columns of the result into strips. An
    argument `leaf` is SCALE or MINIMUM, `strip` is the index of a strip, and `tile` is the index of
    a tile along K.

    **Arguments:**

    - `panels`: the number of panels per strip.
    - `decode_step(m)`: return how many codes along K to decode at once, for m rows of activations.
    - `sizes(job)`: return K, N, and the number of codes along K that share a scale.
    - `span(k, count)`: return two numbers of codes along K for a panel that must have the `count`
      codes from k on: the codes before code k in the panel, and all codes of the panel.
    - `reorder(x, count, position, to)`: copy `count` activations to the order of decoded codes, for
      a panel whose first `position` codes are skipped.
    - `fetch(job, matrix, strip, k, length, scratch)`: return the address and the stride of a
      strip's codes. They are copied to `scratch` if they cannot be read in place.
    - `decode(address, stride, length, panel, table, to)`: decode one panel of a fetched strip.
    - `scales_bytes(job, leaf, strips)`: return the scratch memory that `part_scales` needs.
    - `part_scales(job, leaf, batch, strip, strips, to)`: return the argument `scales` of
      `load_scales` for a part, and read the scales to `to` if that memory is needed.
    - `load_scales(job, leaf, scales, strip, tile, scratch, to)`: write a strip's f32 scales of one
      tile in the order of the panels' columns.
    - `write(sums, stride, x_scale, scratch, to, count)`: multiply a row of a strip's sums by
      `x_scale`, and write `count` of them in the order of the result.
    - `ahead(job, matrix, strip, k, length, panel)`: return the memory that `multiply` prefetches
      for a later strip: the address, the stride, the rows, and the cache lines per row. The panels
      of a strip share the rows.
    """

    panels: int
    decode_step: Any
    sizes: Any
    span: Any
    reorder: Any
    fetch: Any
    decode: Any
    scales_bytes: Any
    part_scales: Any
    load_scales: Any
    write: Any
    ahead: Any


@functools.cache
def build_rows_orientation(kind: str) -> Orientation:
    """Return the functions that decode panels if the rows of the stored matrix are contracted.

    `kind` names the encoding of the codes, such as "lookup4" (see `Codes.kind`). A strip is `WIDTH`
    bytes of each row of the matrix. It has one panel per field, the position of a code in a byte.
    Four rows at a time are interleaved, so that a 32-bit lane holds four codes of one column. This
    changes the order of columns: scales are brought into the same order, and sums back.
    """
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


@functools.cache
def build_columns_orientation(kind: str) -> Orientation:
    """Return the functions that decode panels if the columns of the stored matrix are contracted.

    `kind` names the encoding of the codes, such as "lookup4" (see `Codes.kind`). A strip is `WIDTH`
    rows of the matrix, and has one panel. For `LANES` rows at a time, 16 bytes of each row are
    transposed, so that a 32-bit lane holds four bytes of one row. If a byte has several codes, the
    first codes of 16 bytes come before their second codes. Activations are brought into the same
    order.
    """
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
