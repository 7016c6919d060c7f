"""Products with panels: codes of a few rows of a stored matrix, decoded in registers.

A panel is `VECTORS[kind]` vectors of neighbouring columns. Codes of fewer than 8 bits come out of a
register in another order than they lie in memory (see `looked_up` of `simd.py`), and what they are
multiplied by is brought into it beforehand.
"""

from typing import Any

from llvmlite import ir
from numba import types

from .isa import ISA, LANES
from .memory import F32, I8, I32, I64, pointer
from .simd import (
    CONVERSIONS,
    FLOATS,
    INTS,
    Block,
    apart,
    at,
    block_of,
    call,
    constant,
    instruction,
    load_vector,
    look_up,
    multiply_add,
    repeated,
    store_vector,
    vectors,
)

#: How scales meet panels: ONE number for a panel; SOME, one for each lane; or FOLDED into x.
ONE, SOME, FOLDED = range(3)

_LOOKUPS = {"lookup1": 1, "lookup2": 2, "lookup4": 4}
_BYTES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")

#: Vectors of a panel. Fields of a dword each have one; of bytes, 32 columns are a panel.
VECTORS = {kind: 32 // bits for kind, bits in _LOOKUPS.items()} | dict.fromkeys(_BYTES, 32 // LANES)
#: Columns of a panel.
COLUMNS = {kind: count * LANES for kind, count in VECTORS.items()}
#: Bytes of a panel.
BYTES = dict.fromkeys(_LOOKUPS, 4 * LANES) | dict.fromkeys(_BYTES, 32)


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
def multiply(total, x, stride, table, scales, w, row_bytes, kind, way):
    """`total[r][c] + x[r] * W[c] * scales[c]`, lane by lane, for a panel.

    Rows of x are `stride` bytes apart, those of W `row_bytes`.
    """
    scale = _how_to_scale(total, kind.literal_value, way.literal_value)

    def emit(builder, totals, x, stride, table, scales, w, row_bytes, *_):
        totals, table, scales = (vectors(builder, block) for block in (totals, table, scales))
        tables, sums = [table] * len(scales), totals
        if scale == "tables":
            tables = [[builder.fmul(part, by) for part in table] for by in scales]
        elif scale == "products":
            sums = [constant(FLOATS, 0.0)] * len(totals)
        rows = [
            _Row(builder, kind.literal_value, at(builder, w, 0, c, row_bytes), table)
            for c, table in enumerate(tables)
        ]
        for j in range(VECTORS[kind.literal_value]):
            values = [row.vector(I64(j)) for row in rows]
            if scale == "vectors":
                values = [builder.fmul(*pair) for pair in zip(values, scales, strict=True)]
            for r in range(total.rows):
                number = load_vector(builder, at(builder, x, j, r, stride))
                for c, value in enumerate(values):
                    i = r * total.columns + c
                    sums[i] = multiply_add(builder, number, value, sums[i])
        if scale == "products":
            by = scales * total.rows
            sums = [multiply_add(builder, *terms) for terms in zip(sums, by, totals, strict=True)]
        return block_of(builder, sums)

    return total, emit


def _how_to_scale(total: Block, kind: str, way: int) -> str:
    """For one row of x, its products as a panel ends; for several, what they are multiplied by.

    That is least work for a table, which has one scale a panel.
    """
    if total.rows == 1:
        return "products"
    return "tables" if kind in _LOOKUPS and way == ONE else "vectors"


class _Row:
    """The panel at an address, of which vectors are asked for one by one."""

    def __init__(self, builder: Any, kind: str, address: Any, table: Any):
        self.builder, self.kind, self.address, self.table = builder, kind, address, table
        self.dwords = load_vector(builder, address, INTS) if kind in _LOOKUPS else None

    def vector(self, j: Any) -> Any:
        """Vector j, where j is an i64 of LLVM's."""
        builder = self.builder
        if self.dwords is None:
            place = builder.add(self.address, builder.mul(j, I64(LANES)))
            codes = load_vector(builder, place, ir.VectorType(I8, LANES))
            return CONVERSIONS[self.kind](builder, codes)
        shift = builder.trunc(builder.mul(j, I64(_LOOKUPS[self.kind])), I32)
        return look_up(builder, self.table, builder.lshr(self.dwords, repeated(builder, shift)))


@instruction
def store_transposed(address, stride, w, row_bytes, j, table, scales, next_scales, kind):
    """Writes vector j of the panels of LANES rows of W, so that each row becomes a lane.

    A row is multiplied by a vector at `scales`, `next_scales` bytes apart.
    """
    kind = kind.literal_value

    def emit(builder, address, stride, w, row_bytes, j, table, scales, next_scales, _):
        table, rows = vectors(builder, table), []
        for i in range(LANES):
            row = _Row(builder, kind, at(builder, w, 0, i, row_bytes), table)
            scale = load_vector(builder, at(builder, scales, 0, i, next_scales))
            rows.append(builder.fmul(row.vector(j), scale))
        for i, column in enumerate(apart(builder, rows)):
            store_vector(builder, column, at(builder, address, 0, i, stride))

    return types.void, emit


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
        _permuted(
            builder,
            call(builder, name, FLOATS, pointer(builder, place, FLOATS), align, exists, none),
            order,
        )
        for place in places
    ]


def _permuted(builder: Any, value: Any, order: Any) -> Any:
    if ISA.startswith("avx512"):
        return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, value, order)
    if ISA == "avx2":
        return call(builder, "llvm.x86.avx2.permps", FLOATS, value, order)
    result = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = builder.extract_element(order, I32(lane))
        entry = builder.extract_element(value, index)
        result = builder.insert_element(result, entry, I32(lane))
    return result


@instruction
def lanes_by(columns, tile):
    """Which of the tiles of a panel each lane is in, where a dword holds so many `columns`."""
    block = Block("i32", 1, 1)

    def emit(builder, columns, tile):
        columns, tile = (repeated(builder, builder.trunc(n, I32)) for n in (columns, tile))
        first = builder.mul(ir.Constant(INTS, [*range(LANES)]), columns)
        return block_of(builder, [builder.udiv(first, tile)])

    return block, emit
