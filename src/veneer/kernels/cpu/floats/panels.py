"""Products with panels: codes of a few rows of a stored matrix, decoded in registers.

A panel is `VECTORS[kind]` vectors of neighbouring columns. Codes of fewer than 8 bits come out of a
register in another order than they lie in memory: a vector has the j-th of each dword. What they
are multiplied by is brought into it beforehand.
"""

from typing import Any

from llvmlite import ir
from numba import types

from ....native.isa import LANES
from ....native.memory import F32, I8, I32, I64, pointer
from ....native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    at,
    block_of,
    call_llvm,
    constant,
    instruction,
    load_vector,
    multiply_add,
    permuted,
    repeated,
    store_vector,
    vectors,
)
from ....native.simd.codes import CONVERSIONS, look_up
from ....native.simd.order import apart
from ....native.simd.planes import unpacked
from ..kinds import BITS, LOOKUP_BITS, PLANE_BITS, byte_of_planes

#: How scales meet panels: ONE number for a panel; SOME, one for each lane; or FOLDED into x.
ONE, SOME, FOLDED = range(3)

#: Vectors of a panel. Fields of a dword each have one; of others, 16 columns are a panel, as few as
#: share a scale in GGUF's K-quants.
VECTORS = dict.fromkeys(BITS, 16 // LANES) | {
    kind: 32 // bits for kind, bits in LOOKUP_BITS.items()
}
#: Columns of a panel.
COLUMNS = {kind: count * LANES for kind, count in VECTORS.items()}
#: Bytes of a panel.
BYTES = (
    dict.fromkeys(BITS, 16)
    | dict.fromkeys(LOOKUP_BITS, 4 * LANES)
    | {kind: 16 * bits // 8 for kind, bits in PLANE_BITS.items()}
)


@instruction
def load_block(address, rows, columns):
    """Reads what `store` wrote of a block of rows x columns vectors."""
    block = Block("f32", rows.literal_value, columns.literal_value)

    def emit(builder, address, *_):
        return block_of(
            builder, [load_vector(builder, at(builder, address, i)) for i in range(block.count)]
        )

    return block, emit


@instruction
def begun(total):
    """The sums of what one scale is for: for one row of x, they start at 0, and are scaled at last.

    For several rows, it is less work to scale what they are multiplied by.
    """
    zeros = ir.Constant(total.llvm, [constant(FLOATS, 0.0)] * total.count)
    return total, lambda builder, sums: zeros if total.rows == 1 else sums


@instruction
def ended(total, sums, scales):
    """The total with the sums that `begun` began."""

    def emit(builder, totals, sums, scales):
        if total.rows > 1:
            return sums
        rows = zip(*(vectors(builder, block) for block in (sums, scales, totals)), strict=True)
        return block_of(builder, [multiply_add(builder, *terms) for terms in rows])

    return total, emit


@instruction
def multiply(sums, x, stride, table, scales, w, row_bytes, kind, way):
    """`sums[r][c] + x[r] * W[c] * scales[c]`, lane by lane, for a panel; with one row, unscaled.

    Rows of x are `stride` bytes apart, those of W `row_bytes`. With one row, 3 bytes behind a panel
    may be read, too.
    """
    kind, is_table = (
        kind.literal_value,
        kind.literal_value in LOOKUP_BITS and way.literal_value == ONE,
    )

    def emit(builder, totals, x, stride, table, scales, w, row_bytes, *_):
        totals, table, scales = (vectors(builder, block) for block in (totals, table, scales))
        tables = [table] * len(scales)
        if sums.rows > 1 and is_table:  # which has one scale a panel
            tables = [[builder.fmul(part, by) for part in table] for by in scales]
        places = [at(builder, w, 0, c, row_bytes) for c in range(len(tables))]
        if kind in PLANE_BITS:
            vector = _planes(builder, kind, places, table)
        else:
            rows = [
                # For one row, it is less work to read dwords again, a byte on, than to shift them.
                _PanelRow(builder, kind, place, table, rereads=sums.rows == 1)
                for place, table in zip(places, tables, strict=True)
            ]
            vector = lambda c, j: rows[c].vector(j)
        for j in range(VECTORS[kind]):
            values = [vector(c, j) for c in range(len(places))]
            if sums.rows > 1 and not is_table:
                values = [builder.fmul(*pair) for pair in zip(values, scales, strict=True)]
            for r in range(sums.rows):
                number = load_vector(builder, at(builder, x, j, r, stride))
                for c, value in enumerate(values):
                    i = r * sums.columns + c
                    totals[i] = multiply_add(builder, number, value, totals[i])
        return block_of(builder, totals)

    return sums, emit


def _planes(builder: Any, kind: str, places: Any, table: Any) -> Any:
    """What gives vector j of row c of a panel: those of all rows are unpacked together."""
    count = VECTORS[kind]
    codes = unpacked(builder, places, COLUMNS[kind] // 8, BITS[kind], table)
    return lambda c, j: CONVERSIONS[byte_of_planes(kind)](builder, codes[c * count + j])


class _PanelRow:
    """The panel at an address, of which vectors are asked for from the first to the last."""

    def __init__(self, builder: Any, kind: str, address: Any, table: Any, rereads: bool):
        self.builder, self.kind, self.address, self.table = builder, kind, address, table
        self.rereads = rereads
        self.dwords = None

    def vector(self, j: int) -> Any:
        """Vector j."""
        builder = self.builder
        if self.kind not in LOOKUP_BITS:
            place = builder.add(self.address, I64(LANES * j))
            codes = load_vector(builder, place, ir.VectorType(I8, LANES))
            return CONVERSIONS[self.kind](builder, codes)
        byte, bit = divmod(j * LOOKUP_BITS[self.kind], 8)
        if not self.rereads:
            byte, bit = 0, 8 * byte + bit
        if bit == 0:
            self.dwords = load_vector(builder, builder.add(self.address, I64(byte)), INTS)
        indices = builder.lshr(self.dwords, constant(INTS, bit)) if bit else self.dwords
        return look_up(builder, self.table, indices)


# For many rows of x: panels of LANES rows of W, of which each becomes a lane.


@instruction
def transpose(to, stride, address):
    """Writes LANES rows of LANES numbers of 32 bits as columns; rows are `stride` bytes apart."""

    def emit(builder, to, stride, address):
        rows = [load_vector(builder, at(builder, address, 0, i, stride)) for i in range(LANES)]
        for i, column in enumerate(apart(builder, rows)):
            store_vector(builder, column, at(builder, to, i))

    return types.void, emit


@instruction
def store_fields(to, stride, dwords, table, scales, next_scale, behind, kind):
    """Writes the columns that a vector of dwords holds: a vector of LANES rows each.

    Those are `stride` bytes apart, and the scales of them `next_scale` bytes. What is added to
    each is `behind` bytes behind its scale.
    """
    bits = LOOKUP_BITS[kind.literal_value]

    def emit(builder, to, stride, dwords, table, scales, next_scale, behind, _):
        table = vectors(builder, table)
        dwords = load_vector(builder, dwords, INTS)
        for j in range(32 // bits):
            indices = builder.lshr(dwords, constant(INTS, bits * j)) if j else dwords
            column = look_up(builder, table, indices)
            column = _worth(builder, column, at(builder, scales, 0, j, next_scale), behind)
            store_vector(builder, column, at(builder, to, 0, j, stride))

    return types.void, emit


@instruction
def store_bytes(to, stride, codes, next_codes, scales, next_scale, behind, kind):
    """The same of LANES bytes of each of LANES rows, which are `next_codes` bytes apart."""
    convert = CONVERSIONS[kind.literal_value]

    def emit(builder, to, stride, codes, next_codes, scales, next_scale, behind, _):
        places = [at(builder, codes, 0, i, next_codes) for i in range(LANES)]
        rows = [load_vector(builder, place, ir.VectorType(I8, LANES)) for place in places]
        for j, column in enumerate(apart(builder, [convert(builder, row) for row in rows])):
            column = _worth(builder, column, at(builder, scales, 0, j, next_scale), behind)
            store_vector(builder, column, at(builder, to, 0, j, stride))

    return types.void, emit


def _worth(builder: Any, codes: Any, scale: Any, behind: Any) -> Any:
    """Codes times the scales at an address, and what is so many bytes behind them."""
    minimum = load_vector(builder, builder.add(scale, behind))
    return multiply_add(builder, codes, load_vector(builder, scale), minimum)


@instruction
def panel_scales(address, stride, lanes, count, rows, way):
    """A vector of scales for each of some rows of W, whose scales are `stride` bytes apart.

    With the way ONE, it has one number for the panel. With SOME, lane d has the number that
    `lanes[d]` says of `count`; and 0 where there is none.
    """
    read = _one_scale if way.literal_value == ONE else _some_scales

    def emit(builder, address, stride, lanes, count, *_):
        places = [at(builder, address, 0, c, stride) for c in range(rows.literal_value)]
        return block_of(builder, read(builder, places, lanes, count))

    return Block("f32", 1, rows.literal_value), emit


def _one_scale(builder: Any, places: Any, lanes: Any, count: Any) -> list[Any]:
    numbers = [builder.load(pointer(builder, place, F32)) for place in places]
    for number in numbers:
        number.align = 1
    return [repeated(builder, number) for number in numbers]


def _some_scales(builder: Any, places: Any, lanes: Any, count: Any) -> list[Any]:
    count = repeated(builder, builder.trunc(count, I32))
    exists = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
    (order,) = vectors(builder, lanes)
    none, name = constant(FLOATS, 0.0), f"llvm.masked.load.v{LANES}f32.p0"
    align = I32(4)
    return [
        permuted(
            builder,
            call_llvm(builder, name, FLOATS, pointer(builder, place, FLOATS), align, exists, none),
            order,
        )
        for place in places
    ]


@instruction
def lanes_by(columns, tile):
    """Which of the tiles of a panel each lane is in, where a dword holds so many `columns`."""
    block = Block("i32", 1, 1)

    def emit(builder, columns, tile):
        columns, tile = (repeated(builder, builder.trunc(n, I32)) for n in (columns, tile))
        first = builder.mul(ir.Constant(INTS, [*range(LANES)]), columns)
        return block_of(builder, [builder.udiv(first, tile)])

    return block, emit
