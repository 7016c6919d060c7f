"""A panel of decoded codes, and the product of activations by it.

It has WIDTH columns: 4 vectors of lanes, each of which holds four codes of its column, as bytes
without a sign. Where these come from, `rows.py` and `columns.py` know.
"""

from typing import Any, NamedTuple

from ....native.functions import native
from ....native.isa import HAS_VNNI, REGISTERS
from ....native.memory import prefetch, store_f32
from ....native.simd.bytes import OFFSET, look_up_bytes, to_unsigned
from ....native.simd.floats import add_scaled, load, scale_rows, store_block
from ....native.simd.integers import WIDTH, add_outer_bytes, broadcast_ints, load_ints, to_floats
from ...common import kinds

#: Bytes of a row of a panel: of four codes or of one sum a column.
PANEL = 4 * WIDTH
#: How many codes of a column a panel may have. It fits the fastest cache.
BLOCK = 256
#: Rows x vectors of sums that registers hold, beside what they are sums of.
ROWS, COLUMNS = (6, 4) if HAS_VNNI else (4, 4) if REGISTERS == 32 else (2, 2)

BITS = {kind: kinds.BITS[kind] for kind in (*kinds.INTEGERS, *kinds.INTEGER_PLANES)}


class Orientation(NamedTuple):
    """How a matrix is cut into strips of panels; all but `panels` are functions for kernels."""

    panels: int  # of a strip
    step: Any  # (rows) -> how many codes of a column to decode at once
    sizes: Any  # (job) -> numbers that are contracted, columns of the result, numbers a tile
    span: Any  # (k, count) -> where numbers begin in a block that has these, and its length
    copy: Any  # (x, count, begin, to): brings activations into the order of the codes
    fetch: Any  # (job, matrix, strip, k, length, scratch) -> address and stride of a strip's codes
    decode: Any  # (address, stride, length, panel, table, to)
    part: Any  # (job, leaf, strips) -> bytes for the scales, or minima, of so many strips
    of_part: Any  # (job, leaf, batch, strip, strips, to) -> where these are, for `scales`
    scales: Any  # (job, leaf, of_part, strip, tile, scratch, to): brings them into that order
    write: Any  # (sums, stride, x_scale, scratch, to, count): writes a row of a strip
    ahead: Any  # (job, matrix, strip, k, length, panel): for `multiply`, of that strip


def offset(kind: str) -> int:
    """How much larger than what they are worth the codes are in a panel."""
    return 0 if kind == "uint8" else OFFSET


def reader(kind: str) -> Any:
    """Returns what makes bytes of a panel of those of a matrix: (table, block, shift) -> block."""
    if BITS[kind] < 8:
        return look_up_bytes
    if kind == "uint8":
        return native(lambda table, block, shift: block)
    return native(lambda table, block, shift: to_unsigned(block))


def _multiply(rows: int) -> Any:
    @native
    def multiply(x, stride, codes, steps, start, ints, sums, scale, of_x, first, last):
        for column in range(0, PANEL, COLUMNS * WIDTH):
            if first:
                total = broadcast_ints(start, rows, COLUMNS)
            else:
                total = load_ints(ints + column, PANEL, rows, COLUMNS)
            at_x, at_codes = x, codes + column
            for _ in range(steps):
                total = add_outer_bytes(total, at_x, stride, load_ints(at_codes, 0, 1, COLUMNS))
                at_x += 4
                at_codes += PANEL
            if last:
                by = load(scale + column, COLUMNS)
                values = scale_rows(to_floats(total), of_x[0], of_x[1])
                add_scaled(sums + column, PANEL, values, by)
            else:
                store_block(ints + column, PANEL, total)

    return multiply


_multiply_all, _multiply_4, _multiply_2, _multiply_1 = map(_multiply, (ROWS, 4, 2, 1))


@native
def multiply(count, x, stride, codes, steps, start, ints, sums, scale, x_scale, first, last, ahead):
    """Adds the product of `count` rows of activations, `stride` bytes apart, by a panel to sums.

    `start` has an i32 a row that int32 sums begin with, if this is the `first` block of a tile;
    they are kept in `ints` until the `last`, where they are scaled and added to the `sums`. That of
    activations is at an address, and so many bytes from row to row: `x_scale`.
    Meanwhile, what is `ahead` is fetched: its address, and how many rows of how many lines.
    """
    place, apart, rows, lines = ahead
    each = (rows * lines * ROWS + count - 1) // count
    done, row = 0, 0
    while row < count:
        upto = min(done + each, rows * lines)
        for i in range(done, upto):
            prefetch(place + i // lines * apart + i % lines * 64)
        done = upto
        left = count - row
        at_x, at_start = x + row * stride, start + 4 * row
        at_ints, at_sums = ints + row * PANEL, sums + row * PANEL
        of_x = (x_scale[0] + row * x_scale[1], x_scale[1])
        if left >= ROWS:
            _multiply_all(
                at_x, stride, codes, steps, at_start, at_ints, at_sums, scale, of_x, first, last
            )
            row += ROWS
        elif left >= 4:
            _multiply_4(
                at_x, stride, codes, steps, at_start, at_ints, at_sums, scale, of_x, first, last
            )
            row += 4
        elif left >= 2:
            _multiply_2(
                at_x, stride, codes, steps, at_start, at_ints, at_sums, scale, of_x, first, last
            )
            row += 2
        else:
            _multiply_1(
                at_x, stride, codes, steps, at_start, at_ints, at_sums, scale, of_x, first, last
            )
            row += 1


@native
def fill(address, number, count):
    """Writes so many f32."""
    for i in range(count):
        store_f32(address + 4 * i, number)
