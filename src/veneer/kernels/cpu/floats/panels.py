"""Products with panels: codes of a few rows of a stored matrix, decoded in registers.

A panel is `VECTORS[kind]` vectors of neighbouring columns. Codes of fewer than 8 bits come out of a
register in another order than they lie in memory: a vector has the j-th of each dword. What they
are multiplied by is brought into it beforehand.
"""

from typing import Any

from llvmlite import ir
from numba import types

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import I8, I32, I64, pointer, word
from ....native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    advance,
    broadcast,
    call_llvm,
    constant,
    get_vectors,
    instruction,
    load_broadcast,
    load_vector,
    make_block,
    multiply_add,
    permute,
    split_lanes,
    store_vector,
)
from ...common.kinds import BITS, LOOKUP_BITS, PLANE_BITS, byte_of_planes
from ..operands.codes import CONVERSIONS, look_up
from ..operands.job import BATCH, TC, THREADS, TR, C, JobFunctions, R, free_scratch, in_stretches
from ..operands.planes import unpacked

#: How scales meet panels, by where they change: ONE number scales a panel, where a tile is whole
#: panels, or all columns. SOME do, one each lane, where a panel is tiles of whole lanes, as fields
#: of dwords are; or EACH vector has one, where a tile is whole vectors, as of other codes. Else
#: they are FOLDED into x, for all rows of W that share them: so it is where they change from column
#: to column, in the gradient of a matrix whose tiles are along the other dimension.
ONE, SOME, EACH, FOLDED = range(4)

#: Vectors of a panel: fields of a dword have one each, and of others 64 columns are a panel.
VECTORS = dict.fromkeys(BITS, 64 // LANES) | {
    kind: 32 // bits for kind, bits in LOOKUP_BITS.items()
}
#: Columns of a panel.
COLUMNS = {kind: count * LANES for kind, count in VECTORS.items()}
#: Bytes of a panel.
BYTES = {kind: COLUMNS[kind] * bits // 8 for kind, bits in BITS.items()}
#: Rows of W in a part.
PART = 48
#: 1 as a number of so many bits behind the point, enough for the reciprocals of tiles.
FRACTION = 40
ONE_FIXED = 1 << FRACTION
#: Bytes on, or a few more, is what is fetched: so much is read in the time that memory takes.
AHEAD = 8192


def ways(kind: str) -> tuple[int, int]:
    """The ways in which scales meet panels of a kind, where they are not folded into x."""
    return (ONE, SOME) if kind in LOOKUP_BITS else (ONE, EACH)


def functions_of(kind: str, prepare: Any, multiply: Any) -> JobFunctions:
    """Return the functions of a kernel that computes `PART` rows of W in a part.

    `multiply(job, batch, first, last, way)` is for rows that share scales, or have some each.
    """
    way_of = _way(kind)

    @native
    def work(job, part):
        parts = (word(job, R) + PART - 1) // PART
        batch, part = divmod(part, parts)
        first = in_stretches(part, parts, word(job, THREADS)) * PART
        last, tile, way = min(first + PART, word(job, R)), word(job, TR), way_of(job)
        while first < last:
            end = last
            if tile > 1 or way == FOLDED:
                end = min(last, (first // tile + 1) * tile)
            multiply(job, batch, first, end, way)
            first = end

    @native
    def count(job):
        return word(job, BATCH) * ((word(job, R) + PART - 1) // PART)

    return JobFunctions(prepare, count, work, free_scratch)


def _way(kind: str) -> Any:
    """Makes what says how the scales of a job meet panels."""
    PANEL, (_, MORE) = COLUMNS[kind], ways(kind)
    LANE = VECTORS[kind] if MORE == SOME else LANES

    @native
    def way(job):
        tile = word(job, TC)
        if tile % PANEL == 0 or tile == word(job, C):
            return ONE
        is_whole = tile % LANE == 0 and (MORE == EACH or PANEL % tile == 0)
        return MORE if is_whole else FOLDED

    return way


@native
def scales_of(job, way):
    """For `panel_scales`: 1 / the columns that share a scale, and how many scales a row has."""
    tile = word(job, TC)
    reciprocal = (ONE_FIXED + tile - 1) // tile if way != FOLDED else 0
    return reciprocal, word(job, C) // tile


@instruction
def load_block(address, rows, columns):
    """Reads what `store` wrote of a block of rows x columns vectors."""
    block = Block("f32", rows.literal_value, columns.literal_value)

    def emit(builder, address, *_):
        return make_block(
            builder,
            [load_vector(builder, advance(builder, address, i)) for i in range(block.count)],
        )

    return block, emit


@instruction
def multiply(sums, x, stride, table, scales, w, row_bytes, kind, way):
    """`sums[r][c] + x[r] * W[c] * scales[c]`, lane by lane, for a panel.

    Rows of x are `stride` bytes apart, those of W `row_bytes`. For one row of x, products are added
    up and then scaled: less work, and no sum has to wait for the panel before. For several, it is
    less work to scale what they are multiplied by.
    """
    kind, way = kind.literal_value, way.literal_value

    def emit(builder, totals, x, stride, table, scales, w, row_bytes, *_):
        totals, table, scales = (get_vectors(builder, block) for block in (totals, table, scales))
        places = [advance(builder, w, 0, c, row_bytes) for c in range(sums.columns)]
        scale = lambda c, j: scales[c * VECTORS[kind] + j if way == EACH else c]
        are_scaled = sums.rows > 1
        if kind in PLANE_BITS:
            vector = _planes(builder, kind, places, table)
        elif (
            kind in LOOKUP_BITS and are_scaled and way == ONE
        ):  # a table, for a panel has one scale
            tables = [[builder.fmul(part, by) for part in table] for by in scales]
            vector, are_scaled = _fields(builder, kind, places, tables), False
        elif kind in LOOKUP_BITS:
            vector = _fields(builder, kind, places, [table] * len(places))
        else:
            vector = _bytes(builder, kind, places)
        is_late = sums.rows == 1 and way != EACH  # a scale is for the products of a panel
        products = [constant(FLOATS, 0.0)] * len(totals) if is_late else totals
        for j in range(VECTORS[kind]):
            values = [vector(c, j) for c in range(len(places))]
            if are_scaled:
                values = [builder.fmul(value, scale(c, j)) for c, value in enumerate(values)]
            for r in range(sums.rows):
                number = load_vector(builder, advance(builder, x, j, r, stride))
                for c, value in enumerate(values):
                    i = r * sums.columns + c
                    factors = number, value
                    if sums.rows == 1 and way == EACH:
                        factors = builder.fmul(number, value), scale(c, j)
                    products[i] = multiply_add(builder, *factors, products[i])
        if not is_late:
            return make_block(builder, products)
        terms = zip(products, scales, totals, strict=True)
        return make_block(builder, [multiply_add(builder, *each) for each in terms])

    return sums, emit


# What gives vector j of row c of a panel, as f32.


def _planes(builder: Any, kind: str, places: Any, table: Any) -> Any:
    units, bits = COLUMNS[kind] // 8, BITS[kind]
    codes = [unpacked(builder, [place], units, bits, table) for place in places]
    return lambda c, j: CONVERSIONS[byte_of_planes(kind)](builder, codes[c][j])


def _fields(builder: Any, kind: str, places: Any, tables: Any) -> Any:
    bits = LOOKUP_BITS[kind]
    dwords = [load_vector(builder, place, INTS) for place in places]

    def vector(c: int, j: int) -> Any:
        indices = builder.lshr(dwords[c], constant(INTS, bits * j)) if j else dwords[c]
        return look_up(builder, tables[c], indices)

    return vector


def _bytes(builder: Any, kind: str, places: Any) -> Any:
    def vector(c: int, j: int) -> Any:
        place = builder.add(places[c], I64(LANES * j))
        return CONVERSIONS[kind](builder, load_vector(builder, place, ir.VectorType(I8, LANES)))

    return vector


# For many rows of x: panels of LANES rows of W, of which each becomes a lane.


@instruction
def transpose(to, stride, address):
    """Writes LANES rows of LANES numbers of 32 bits as columns; rows are `stride` bytes apart."""

    def emit(builder, to, stride, address):
        rows = [load_vector(builder, advance(builder, address, 0, i, stride)) for i in range(LANES)]
        for i, column in enumerate(split_lanes(builder, rows)):
            store_vector(builder, column, advance(builder, to, i))

    return types.void, emit


@instruction
def store_fields(to, stride, dwords, table, scales, next_scale, behind, kind):
    """Writes the columns that a vector of dwords holds: a vector of LANES rows each.

    Those are `stride` bytes apart, and the scales of them `next_scale` bytes. What is added to
    each is `behind` bytes behind its scale.
    """
    bits = LOOKUP_BITS[kind.literal_value]

    def emit(builder, to, stride, dwords, table, scales, next_scale, behind, _):
        table = get_vectors(builder, table)
        dwords = load_vector(builder, dwords, INTS)
        for j in range(32 // bits):
            indices = builder.lshr(dwords, constant(INTS, bits * j)) if j else dwords
            column = look_up(builder, table, indices)
            column = _worth(builder, column, advance(builder, scales, 0, j, next_scale), behind)
            store_vector(builder, column, advance(builder, to, 0, j, stride))

    return types.void, emit


@instruction
def store_bytes(to, stride, codes, next_codes, scales, next_scale, behind, kind):
    """The same of LANES bytes of each of LANES rows, which are `next_codes` bytes apart."""
    convert = CONVERSIONS[kind.literal_value]

    def emit(builder, to, stride, codes, next_codes, scales, next_scale, behind, _):
        places = [advance(builder, codes, 0, i, next_codes) for i in range(LANES)]
        rows = [load_vector(builder, place, ir.VectorType(I8, LANES)) for place in places]
        for j, column in enumerate(split_lanes(builder, [convert(builder, row) for row in rows])):
            column = _worth(builder, column, advance(builder, scales, 0, j, next_scale), behind)
            store_vector(builder, column, advance(builder, to, 0, j, stride))

    return types.void, emit


def _worth(builder: Any, codes: Any, scale: Any, behind: Any) -> Any:
    """Codes times the scales at an address, and what is so many bytes behind them."""
    minimum = load_vector(builder, builder.add(scale, behind))
    return multiply_add(builder, codes, load_vector(builder, scale), minimum)


@instruction
def panel_scales(address, stride, column, of_row, lanes, rows, kind, way):
    """Vectors of scales for each of some rows of W, whose scales are `stride` bytes apart.

    The panel begins with a column, and `of_row` is what `scales_of` says. With the way ONE, it has
    one number; with SOME, lane d has the number that is `lanes[d]` behind the first of the panel,
    and 0 where a row has no more; with EACH, there is a vector for each of the panel, and what is
    behind a row has its last number.
    """
    rows, kind, way = rows.literal_value, kind.literal_value, way.literal_value
    each = VECTORS[kind] if way == EACH else 1

    def emit(builder, address, stride, column, of_row, lanes, *_):
        reciprocal, count = (builder.extract_value(of_row, i) for i in range(2))
        last, numbers = builder.sub(count, I64(1)), []
        for j in range(each):
            at_vector = builder.add(column, I64(j * LANES))
            number = builder.lshr(builder.mul(at_vector, reciprocal), I64(FRACTION))
            is_there = builder.icmp_signed("<", number, count)
            numbers.append(builder.select(is_there, number, last))
        places = [
            builder.add(advance(builder, address, 0, c, stride), builder.mul(number, I64(4)))
            for c in range(rows)
            for number in numbers
        ]
        if way == SOME:
            left = builder.sub(count, numbers[0])
            return make_block(builder, _some_scales(builder, places, lanes, left))
        return make_block(builder, [load_broadcast(builder, place) for place in places])

    return Block("f32", 1, rows * each), emit


def _some_scales(builder: Any, places: Any, lanes: Any, count: Any) -> list[Any]:
    count = broadcast(builder, builder.trunc(count, I32))
    exists = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
    (order,) = get_vectors(builder, lanes)
    none, name = constant(FLOATS, 0.0), f"llvm.masked.load.v{LANES}f32.p0"
    align = I32(4)
    return [
        permute(
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
        columns, tile = (broadcast(builder, builder.trunc(n, I32)) for n in (columns, tile))
        first = builder.mul(ir.Constant(INTS, [*range(LANES)]), columns)
        return make_block(builder, [builder.udiv(first, tile)])

    return block, emit
