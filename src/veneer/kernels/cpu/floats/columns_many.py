"""Columns contracted, for many rows of x: what counts is how fast numbers are multiplied.

A part is a few vectors of rows of W, times some rows of x. As many columns of W as the innermost
cache holds are decoded, scaled and transposed, and multiplied by the rows of x where they lie; then
the next. Sums are in memory meanwhile. Where x is bf16, and the CPU multiplies pairs of it, so is
what is decoded, two columns in a lane (`pairs.py`).
"""

from typing import Any

import numpy as np

from ....native.functions import native
from ....native.isa import LANES, REGISTERS
from ....native.memory import load_f32, prefetch, stack, store_f32, word
from ....native.simd.floats import load, splat, store, store_block, zeros
from ...common.kinds import BITS, LOOKUP_BITS, PLANE_BITS, byte_of_planes
from ..operands.codes import load_table
from ..operands.job import (
    BATCH,
    MINIMUM,
    NEXT_ROW,
    OUT,
    ROW_BYTES,
    SCALE,
    TABLE,
    TC,
    TR,
    C,
    JobFunctions,
    M,
    R,
    X,
    do_nothing,
    row_of,
)
from ..operands.planes import store_codes_of_planes
from ..operands.scales import copy, has_minima, read_tiles
from .pairs import NUMBERS
from .panels import load_block, store_bytes, store_fields, transpose

#: Rows of x that are multiplied at once by so many vectors: as many sums as registers hold.
ROWS = 6
_ACROSS = 4 if REGISTERS == 32 else 2
#: Rows of W in a part, and groups of ROWS of x at most.
_PART, _GROUPS = _ACROSS * LANES, 64
_VECTOR, _ROW = 4 * LANES, 4 * _PART
_ZERO = np.float32(0)
_GROUP = ROWS * _ROW
#: Columns that are decoded at once, and those of bit planes that are unpacked at once.
_DEPTH, _PLANES = 128, 16
_DECODED, _SUMS = _DEPTH * _ROW, _GROUPS * _GROUP
#: Bytes of the scales of a row of W that meet these columns, at most.
_NUMBERS = 4 * (_DEPTH + LANES)
_ALL_NUMBERS = LANES * _NUMBERS


@native
def _cut(job):
    """Groups of rows of x, in how many blocks, and blocks of rows of W."""
    groups = (word(job, M) + ROWS - 1) // ROWS
    return groups, (groups + _GROUPS - 1) // _GROUPS, (word(job, R) + _PART - 1) // _PART


@native
def count(job):
    """How many parts there are."""
    _, blocks, parts = _cut(job)
    return word(job, BATCH) * blocks * parts


def build(kind: str, activations: str = "float32") -> JobFunctions:
    """Return the functions of the kernel for codes of a kind, and f32 or bf16 activations.

    There must be at least ROWS rows of activations.
    """
    numbers = NUMBERS[activations]
    decode, multiply, pair, SIZE, EACH = _decode(kind), _products(numbers.outer), *numbers[1:]

    @native
    def work(job, part):
        sums, decoded, paired = stack(_SUMS), stack(_DECODED), stack(_DECODED)
        groups, blocks, parts = _cut(job)
        first, rest = part % parts * _PART, part // parts
        last, block, batch = min(first + _PART, word(job, R)), rest % blocks, rest // blocks
        group, end = block * groups // blocks, (block + 1) * groups // blocks
        rows, columns = word(job, M), word(job, C)
        x, next_row = word(job, X) + SIZE * batch * rows * columns, SIZE * columns
        for k in range(0, columns, _DEPTH):
            depth = min(_DEPTH, columns - k)
            decode(job, decoded, batch, first, last, k, depth)
            w, steps = pair(decoded, depth, _PART, paired, paired), depth // EACH
            for g in range(group, end):
                # The last group has rows of the one before, if there are not enough.
                row, at = min(ROWS * g, rows - ROWS), sums + (g - group) * _GROUP
                at_x = x + row * next_row + SIZE * k
                _prefetch(at_x + ROWS * next_row, next_row, steps)
                total = zeros(ROWS, _ACROSS) if k == 0 else load_block(at, ROWS, _ACROSS)
                total = multiply(total, at_x, next_row, w, steps)
                if k + depth < columns:
                    store(at, total)
                else:
                    y = word(job, OUT) + 4 * ((batch * rows + row) * word(job, R) + first)
                    _write(y, 4 * word(job, R), total, last - first)

    return JobFunctions(do_nothing, count, work, do_nothing)


@native
def _prefetch(x, next_row, depth):
    for row in range(ROWS):
        for byte in range(0, 4 * depth, 64):
            prefetch(x + row * next_row + byte)


def _products(outer: Any) -> Any:
    @native
    def products(total, x, next_row, w, depth):
        """Adds the products of a group of rows of x by so many decoded columns, or pairs."""
        for k in range(depth):
            total = outer(total, x + 4 * k, next_row, load(w + _ROW * k, _ACROSS))
        return total

    return products


@native
def _write(y, next_y, total, columns):
    """Writes a group of rows of the result, of which so many columns exist."""
    if columns == _PART:
        store_block(y, next_y, total)
        return
    sums = stack(_GROUP)
    store(sums, total)
    for r in range(ROWS):
        for c in range(columns):
            store_f32(y + r * next_y + 4 * c, load_f32(sums + r * _ROW + 4 * c))


def _decode(kind: str) -> Any:
    """What writes some columns of the rows of a part: the numbers of a column are neighbours."""
    decode_square, SQUARE, SQUARE_BYTES, READ = _square(kind)
    UNIT = _PLANES if kind in PLANE_BITS else 32 // LOOKUP_BITS.get(kind, 32)
    SCALES, COPIED = _DEPTH * _VECTOR, LANES * READ

    @native
    def decode(job, to, batch, first, last, k, depth):
        scales, minima, copied = stack(SCALES), stack(SCALES), stack(COPIED)
        row_bytes, stride = word(job, ROW_BYTES), word(job, NEXT_ROW)
        table = load_table(word(job, TABLE))
        # One scale is for as many columns as are decoded together, or for a unit of them.
        tile, first_row = word(job, TC), batch * word(job, R) + first
        unit = UNIT if tile % UNIT == 0 else 1
        if tile % _DEPTH == 0 or tile == word(job, C):
            unit = _DEPTH
        last_row = first_row + last - first - 1
        alike = first_row // word(job, TR) == last_row // word(job, TR)
        if not has_minima(job):
            for i in range(0, SCALES, _VECTOR):
                store(minima + i, splat(_ZERO))
        for r in range(first, last, LANES):
            existing, row = min(LANES, last - r), batch * word(job, R) + r
            if r == first or not alike:
                _write_tiles(job, SCALE, scales, row, existing, k, depth, unit)
                if has_minima(job):
                    _write_tiles(job, MINIMUM, minima, row, existing, k, depth, unit)
            for column in range(0, depth, SQUARE):
                begin = (k + column) // SQUARE * SQUARE_BYTES
                w, next_row = row_of(job, batch, r) + begin, stride
                for i in range(existing):
                    prefetch(w + i * stride + READ)
                if existing < LANES or row_bytes - begin < READ:
                    for i in range(LANES):
                        size = min(READ, row_bytes - begin) if i < existing else 0
                        copy(copied + i * READ, w + i * stride, size, READ)
                    w, next_row = copied, READ
                place, scale, behind = to + _ROW * column + 4 * (r - first), scales, minima - scales
                if unit < _DEPTH:
                    scale += column // unit * _VECTOR
                decode_square(place, w, next_row, table, scale, behind, unit)

    return decode


@native
def _write_tiles(job, leaf, to, row, rows, k, depth, unit):
    """Writes the scales, or minima, of LANES rows of W, a lane each, for every so many columns."""
    numbers, tile = stack(_ALL_NUMBERS), word(job, TC)
    first, last = k // tile, (k + depth - 1) // tile
    for i in range(rows):
        of = (row + i) // word(job, TR)
        read_tiles(job, leaf, of, first, last + 1 - first, numbers + i * _NUMBERS)
    for column in range(0, depth, unit):
        place = numbers + 4 * ((k + column) // tile - first)
        for i in range(LANES):
            store_f32(to + 4 * i, load_f32(place + min(i, rows - 1) * _NUMBERS))
        to += _VECTOR


def _square(kind: str) -> tuple[Any, int, int, int]:
    """What decodes as many columns of LANES rows of W as are transposed together.

    And how many these are, how many bytes of a row, and how many bytes are read.
    """
    if BITS[kind] == 8:

        @native
        def decode_bytes(to, w, next_row, table, scale, behind, unit):
            next_scale = 0 if unit == _DEPTH else _VECTOR
            store_bytes(to, _ROW, w, next_row, scale, next_scale, behind, kind)

        return decode_bytes, LANES, LANES, LANES

    if kind in PLANE_BITS:
        bits, CODES, AS_BYTE = BITS[kind], LANES * _PLANES, byte_of_planes(kind)

        @native
        def decode_planes(to, w, next_row, table, scale, behind, unit):
            codes = stack(CODES)
            for i in range(LANES):
                store_codes_of_planes(codes + _PLANES * i, w + i * next_row, 2, bits, table)
            next_scale = _VECTOR if unit == 1 else 0
            for c in range(0, _PLANES, LANES):
                place = to + _ROW * c
                store_bytes(place, _ROW, codes + c, _PLANES, scale, next_scale, behind, AS_BYTE)
                scale += next_scale * LANES

        return decode_planes, _PLANES, 2 * bits, 2 * bits

    FIELDS = 32 // BITS[kind]
    DWORDS = min(LANES, _DEPTH // FIELDS)
    SQUARE = LANES * _VECTOR

    @native
    def decode_fields(to, w, next_row, table, scale, behind, unit):
        dwords = stack(SQUARE)
        transpose(dwords, next_row, w)
        next_scale = _VECTOR if unit == 1 else 0
        for d in range(DWORDS):
            dword = dwords + d * _VECTOR
            store_fields(to, _ROW, dword, table, scale, next_scale, behind, kind)
            to += FIELDS * _ROW
            if unit < _DEPTH:
                scale += FIELDS // unit * _VECTOR

    return decode_fields, DWORDS * FIELDS, DWORDS * 4, _VECTOR
