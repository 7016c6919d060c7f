"""Multiply many rows of activations x by a stored matrix W, and contract its columns: `x @ W.T`.

Arithmetic takes most of the time.

A part is a few vectors of rows of W, times some rows of x. The kernel loops over ranges of columns
that fit into the first cache. A range of the rows of W is decoded, scaled and transposed, so that
lanes are rows of W. Then it is multiplied by groups of `ROWS` rows of x, read in place, with the
sums of a group in registers. Sums go to memory between ranges. For bf16 activations, two
neighboring columns are packed into each lane, as `rows_many.py` explains.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ....native.functions import native
from ....native.memory import I8, load_f32, prefetch, stack, store_f32, word
from ....native.simd import LANES, REGISTERS
from ....native.simd.blocks import (
    INTS,
    advance,
    constant,
    get_vectors,
    instruction,
    load_vector,
    multiply_add,
    split_lanes,
    store_vector,
)
from ....native.simd.floats import load, splat, store, store_block, zeros
from ...common.problem import BITS, LOOKUP_BITS, PLANE_BITS, byte_of_planes
from ..decoding import CONVERSIONS, load_table, look_up, store_plane_codes
from ..job import (
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
    row_address,
)
from ..scales import copy_padded, has_minima, read_tile_values
from .panels import load_block
from .rows_many import ARITHMETIC

#: Rows of x, and vectors of rows of W, that are multiplied at once: registers hold their sums.
ROWS = 6
_COLUMNS = 4 if REGISTERS == 32 else 2
#: Rows of W in a part, and the most groups of ROWS rows of x.
_PART_ROWS, _GROUPS = _COLUMNS * LANES, 64
_VECTOR, _ROW = 4 * LANES, 4 * _PART_ROWS
_ZERO = np.float32(0)
_GROUP_BYTES = ROWS * _ROW
#: Columns that are decoded at once, and columns of bit planes that are unpacked at once.
_DEPTH, _PLANE_COLUMNS = 128, 16
_DECODED_BYTES, _SUMS_BYTES = _DEPTH * _ROW, _GROUPS * _GROUP_BYTES
#: The most bytes of the scales of a row of W for the decoded columns, and of LANES rows.
_ROW_SCALE_BYTES = 4 * (_DEPTH + LANES)
_ALL_SCALE_BYTES = LANES * _ROW_SCALE_BYTES


@native
def _count_units(job):
    """Return the numbers of groups of rows of x, of blocks of groups, and of parts per block.

    A group is ROWS rows of x, a block is up to `_GROUPS` groups, and a part, which one thread
    computes, multiplies a block by `_PART_ROWS` rows of W.
    """
    groups = (word(job, M) + ROWS - 1) // ROWS
    return groups, (groups + _GROUPS - 1) // _GROUPS, (word(job, R) + _PART_ROWS - 1) // _PART_ROWS


@native
def count(job):
    """Return the number of parts into which threads divide the product that `job` describes."""
    _, blocks, parts = _count_units(job)
    return word(job, BATCH) * blocks * parts


def build(kind: str, activations: str = "float32") -> JobFunctions:
    """Return the native functions of this kernel for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`). `activations`
    is the dtype of x: "float32" or "bfloat16". x must have at least ROWS rows.
    """
    add_outer, pack_block, SIZE, PER_LANE = ARITHMETIC[activations]
    decode = _build_decoder(kind)

    @native
    def multiply(total, x, next_row, w, depth):
        """Return `total` plus the product of ROWS rows of x and `depth` rows of lanes at `w`.

        A row of lanes is a decoded column of W, or a pair of columns for bf16.
        """
        for k in range(depth):
            total = add_outer(total, x + 4 * k, next_row, load(w + _ROW * k, _COLUMNS))
        return total

    @native
    def work(job, part):
        # Multiply a block of groups of rows of x by `_PART_ROWS` rows of W.
        sums, decoded, packed = stack(_SUMS_BYTES), stack(_DECODED_BYTES), stack(_DECODED_BYTES)
        groups, blocks, parts = _count_units(job)
        first, rest = part % parts * _PART_ROWS, part // parts
        last, block, batch = min(first + _PART_ROWS, word(job, R)), rest % blocks, rest // blocks
        group, end = block * groups // blocks, (block + 1) * groups // blocks
        rows, columns = word(job, M), word(job, C)
        x, next_row = word(job, X) + SIZE * batch * rows * columns, SIZE * columns
        for k in range(0, columns, _DEPTH):
            depth = min(_DEPTH, columns - k)
            decode(job, decoded, batch, first, last, k, depth)
            w, steps = pack_block(decoded, depth, _PART_ROWS, packed, packed), depth // PER_LANE
            for g in range(group, end):
                # If M is not a multiple of ROWS, the last group repeats rows of the group before.
                row, group_sums = min(ROWS * g, rows - ROWS), sums + (g - group) * _GROUP_BYTES
                x_rows = x + row * next_row + SIZE * k
                _prefetch_rows(x_rows + ROWS * next_row, next_row, steps)
                total = zeros(ROWS, _COLUMNS) if k == 0 else load_block(group_sums, ROWS, _COLUMNS)
                total = multiply(total, x_rows, next_row, w, steps)
                if k + depth < columns:
                    store(group_sums, total)
                else:
                    y = word(job, OUT) + 4 * ((batch * rows + row) * word(job, R) + first)
                    _write_group(y, 4 * word(job, R), total, last - first)

    return JobFunctions(do_nothing, count, work, do_nothing)


def build_bf16(kind: str) -> JobFunctions:
    """Return the native functions of this kernel for bf16 activations.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    return build(kind, "bfloat16")


@native
def _prefetch_rows(x, next_row, depth):
    for row in range(ROWS):
        for byte in range(0, 4 * depth, 64):
            prefetch(x + row * next_row + byte)


@native
def _write_group(y, next_y, total, columns):
    """Write the first `columns` columns of `total`, which has ROWS rows, to the result at `y`.

    Rows of the result are `next_y` bytes apart.
    """
    if columns == _PART_ROWS:
        store_block(y, next_y, total)
        return
    sums = stack(_GROUP_BYTES)
    store(sums, total)
    for r in range(ROWS):
        for c in range(columns):
            store_f32(y + r * next_y + 4 * c, load_f32(sums + r * _ROW + 4 * c))


def _build_decoder(kind: str) -> Any:
    """Return a function that decodes part of W and writes its dense values transposed.

    A written vector has one column of LANES rows of W.
    """
    decode_square, SQUARE, SQUARE_BYTES, READ_BYTES = _build_square_decoder(kind)
    UNIT = _PLANE_COLUMNS if kind in PLANE_BITS else 32 // LOOKUP_BITS.get(kind, 32)
    SCALE_BYTES, COPY_BYTES = _DEPTH * _VECTOR, LANES * READ_BYTES

    @native
    def decode(job, to, batch, first, last, k, depth):
        """Write the dense values of `depth` columns of rows `first` to `last` of matrix `batch`.

        The columns begin with column `k`. The values are transposed: a row at `to` is a column of
        W, and has `_PART_ROWS` f32.
        """
        scales, minima, copied = stack(SCALE_BYTES), stack(SCALE_BYTES), stack(COPY_BYTES)
        row_bytes, stride = word(job, ROW_BYTES), word(job, NEXT_ROW)
        table = load_table(word(job, TABLE))
        # `unit` columns share a vector of scales: all decoded columns, UNIT columns, or one.
        tile, first_row = word(job, TC), batch * word(job, R) + first
        unit = UNIT if tile % UNIT == 0 else 1
        if tile % _DEPTH == 0 or tile == word(job, C):
            unit = _DEPTH
        last_row = first_row + last - first - 1
        shares_scales = first_row // word(job, TR) == last_row // word(job, TR)
        if not has_minima(job):
            for i in range(0, SCALE_BYTES, _VECTOR):
                store(minima + i, splat(_ZERO))
        for r in range(first, last, LANES):
            existing, row = min(LANES, last - r), batch * word(job, R) + r
            if r == first or not shares_scales:
                _transpose_tile_values(job, SCALE, scales, row, existing, k, depth, unit)
                if has_minima(job):
                    _transpose_tile_values(job, MINIMUM, minima, row, existing, k, depth, unit)
            for column in range(0, depth, SQUARE):
                begin = (k + column) // SQUARE * SQUARE_BYTES
                w, next_row = row_address(job, batch, r) + begin, stride
                for i in range(existing):
                    prefetch(w + i * stride + READ_BYTES)
                if existing < LANES or row_bytes - begin < READ_BYTES:
                    for i in range(LANES):
                        size = min(READ_BYTES, row_bytes - begin) if i < existing else 0
                        copy_padded(copied + i * READ_BYTES, w + i * stride, size, READ_BYTES)
                    w, next_row = copied, READ_BYTES
                place, scale = to + _ROW * column + 4 * (r - first), scales
                to_minimum = minima - scales
                if unit < _DEPTH:
                    scale += column // unit * _VECTOR
                decode_square(place, w, next_row, table, scale, to_minimum, unit)

    return decode


@native
def _transpose_tile_values(job, leaf, to, row, rows, k, depth, unit):
    """Write the scales or minima of LANES rows of W to `to`, transposed: lanes are rows of W.

    One vector is written per `unit` columns, for the `depth` columns from column `k` on. `leaf` is
    SCALE or MINIMUM. `row` is the first row, counted over all matrices. If only `rows` < LANES rows
    exist, the values of the last row fill the other lanes.
    """
    numbers, tile = stack(_ALL_SCALE_BYTES), word(job, TC)
    first, last = k // tile, (k + depth - 1) // tile
    for i in range(rows):
        tile_row = (row + i) // word(job, TR)
        values = numbers + i * _ROW_SCALE_BYTES
        read_tile_values(job, leaf, tile_row, first, last + 1 - first, values)
    for column in range(0, depth, unit):
        place = numbers + 4 * ((k + column) // tile - first)
        for i in range(LANES):
            store_f32(to + 4 * i, load_f32(place + min(i, rows - 1) * _ROW_SCALE_BYTES))
        to += _VECTOR


def _build_square_decoder(kind: str) -> tuple[Any, int, int, int]:
    """Return a function that decodes a few columns of LANES rows of W, and three sizes.

    The function writes the dense values transposed. Its arguments are the address of the result,
    the address and the row stride of the codes, the lookup table, the address of the scales, the
    bytes from a scale to its minimum, and `unit`, the columns that share a vector of scales. The
    sizes are the columns that the function decodes, the bytes of their codes in a row, and the
    bytes that are read per row.
    """
    if BITS[kind] == 8:

        @native
        def decode_bytes(to, w, next_row, table, scale, to_minimum, unit):
            next_scale = 0 if unit == _DEPTH else _VECTOR
            _store_bytes(to, _ROW, w, next_row, scale, next_scale, to_minimum, kind)

        return decode_bytes, LANES, LANES, LANES

    if kind in PLANE_BITS:
        bits, CODE_BYTES, AS_BYTE = BITS[kind], LANES * _PLANE_COLUMNS, byte_of_planes(kind)

        @native
        def decode_planes(to, w, next_row, table, scale, to_minimum, unit):
            codes = stack(CODE_BYTES)
            for i in range(LANES):
                store_plane_codes(codes + _PLANE_COLUMNS * i, w + i * next_row, 2, bits, table)
            next_scale = _VECTOR if unit == 1 else 0
            for c in range(0, _PLANE_COLUMNS, LANES):
                _store_bytes(
                    to + _ROW * c,
                    _ROW,
                    codes + c,
                    _PLANE_COLUMNS,
                    scale,
                    next_scale,
                    to_minimum,
                    AS_BYTE,
                )
                scale += next_scale * LANES

        return decode_planes, _PLANE_COLUMNS, 2 * bits, 2 * bits

    FIELDS = 32 // BITS[kind]
    DWORDS = min(LANES, _DEPTH // FIELDS)
    SQUARE_BYTES = LANES * _VECTOR

    @native
    def decode_fields(to, w, next_row, table, scale, to_minimum, unit):
        dwords = stack(SQUARE_BYTES)
        _transpose_dwords(dwords, next_row, w)
        next_scale = _VECTOR if unit == 1 else 0
        for d in range(DWORDS):
            dword = dwords + d * _VECTOR
            _store_fields(to, _ROW, dword, table, scale, next_scale, to_minimum, kind)
            to += FIELDS * _ROW
            if unit < _DEPTH:
                scale += FIELDS // unit * _VECTOR

    return decode_fields, DWORDS * FIELDS, DWORDS * 4, _VECTOR


@instruction
def _transpose_dwords(to, stride, address):
    """Write LANES rows of LANES dwords, 32-bit words, transposed. Rows are `stride` bytes apart."""

    def emit(builder, to, stride, address):
        rows = [load_vector(builder, advance(builder, address, 0, i, stride)) for i in range(LANES)]
        for i, column in enumerate(split_lanes(builder, rows)):
            store_vector(builder, column, advance(builder, to, i))

    return types.void, emit


@instruction
def _store_fields(to, stride, dwords, table, scales, next_scale, to_minimum, kind):
    """Write the dense values of the codes in LANES dwords, one dword per row of W, to `to`.

    A dword is a 32-bit word. The codes at one position of all dwords are a column of W, written as
    a vector. The vectors are `stride` bytes apart, and their vectors of scales `next_scale` bytes.
    A minimum is `to_minimum` bytes after its scale.
    """
    bits = LOOKUP_BITS[kind.literal_value]

    def emit(builder, to, stride, dwords, table, scales, next_scale, to_minimum, _):
        table = get_vectors(builder, table)
        dwords = load_vector(builder, dwords, INTS)
        for j in range(32 // bits):
            # No mask: `look_up` ignores all but the lowest 4 bits. For shorter codes, the table
            # repeats its entries, so that the bits above a code do not matter.
            indices = builder.lshr(dwords, constant(INTS, bits * j)) if j else dwords
            column = look_up(builder, table, indices)
            scale = advance(builder, scales, 0, j, next_scale)
            column = _dequantize(builder, column, scale, to_minimum)
            store_vector(builder, column, advance(builder, to, 0, j, stride))

    return types.void, emit


@instruction
def _store_bytes(to, stride, codes, next_codes, scales, next_scale, to_minimum, kind):
    """Write dense values of LANES columns of LANES rows of W with 8-bit codes, transposed, to `to`.

    The rows of codes begin at `codes`, and are `next_codes` bytes apart. The written vectors, which
    are columns of W, are `stride` bytes apart, and their vectors of scales `next_scale` bytes. A
    minimum is `to_minimum` bytes after its scale.
    """
    convert = CONVERSIONS[kind.literal_value]

    def emit(builder, to, stride, codes, next_codes, scales, next_scale, to_minimum, _):
        places = [advance(builder, codes, 0, i, next_codes) for i in range(LANES)]
        rows = [load_vector(builder, place, ir.VectorType(I8, LANES)) for place in places]
        for j, column in enumerate(split_lanes(builder, [convert(builder, row) for row in rows])):
            scale = advance(builder, scales, 0, j, next_scale)
            column = _dequantize(builder, column, scale, to_minimum)
            store_vector(builder, column, advance(builder, to, 0, j, stride))

    return types.void, emit


def _dequantize(builder: Any, codes: Any, scale: Any, to_minimum: Any) -> Any:
    """Return the vector `codes * scale + minimum`.

    `scale` is the address of a vector of scales. The minima are `to_minimum` bytes later.
    """
    minimum = load_vector(builder, builder.add(scale, to_minimum))
    return multiply_add(builder, codes, load_vector(builder, scale), minimum)
