"""A panel of decoded codes, and the product of int8 activations with a panel.

A panel has `WIDTH` columns of the result and up to `BLOCK` codes of each column. Its rows are four
vectors. A 32-bit lane holds four codes of one column, consecutive along K, as unsigned bytes: the
operand of `add_outer_bytes`. An `Orientation` says how panels are made from the stored matrix.
"""

from typing import Any, NamedTuple

from ....native.functions import native
from ....native.memory import prefetch
from ....native.simd import HAS_VNNI, REGISTERS
from ....native.simd.floats import add_scaled, load, scale_rows, store_block
from ....native.simd.integers import (
    OFFSET,
    WIDTH,
    add_byte_sums,
    add_outer_bytes,
    broadcast_ints,
    load_ints,
    look_up_bytes,
    sum_lanes,
    to_floats,
    to_unsigned,
    zero_ints,
)
from ...common.kinds import BITS

#: Bytes of a panel row: four codes per column. A row of sums, one per column, has the same size.
PANEL_ROW = 4 * WIDTH
#: The most codes of a column in a panel, so that the panel fits the L1 cache.
BLOCK = 256
#: The rows of activations and the vectors of columns whose sums are in registers at once.
_ROWS, _COLUMNS = (6, 4) if HAS_VNNI else (4, 4) if REGISTERS == 32 else (2, 2)


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


def code_offset(kind: str) -> int:
    """Return the number that is added to codes of a kind to make them unsigned bytes."""
    return 0 if kind == "uint8" else OFFSET


def build_reader(kind: str) -> Any:
    """Return a function `read(table, block, shift)` that decodes a vector of stored bytes.

    It returns an unsigned byte for each: a code plus `code_offset(kind)`. Codes of fewer than 8
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
    """Return `multiply` below for a fixed number of rows of activations, without prefetching."""

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
    """Multiply `rows` rows of int8 activations by a panel, or by the part of it in one tile.

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
