"""Panels: neighboring columns of a few rows of a stored matrix W, decoded in registers.

The kernels of `columns_few.py` decode panels, and multiply them by activations x.

A panel is `VECTORS[kind]` vectors of neighboring columns of one row of W. Codes of 1, 2 and 4 bits
are decoded from dwords, 32-bit words: vector j of a panel has code j of each dword, so lane d of
all vectors covers the columns of dword d. `build_panel_x` copies x into the same order beforehand.
Codes of other kinds are decoded in order. Sums are vectors, and their lanes are added up at the end
of a row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from ....native.functions import native
from ....native.memory import (
    I8,
    I32,
    I64,
    load_f32,
    malloc,
    pointer,
    set_word,
    stack,
    store_f32,
    word,
)
from ....native.simd import LANES, REGISTERS
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
)
from ....native.simd.floats import deinterleave, load, scale_block, store
from ...common.problem import BITS, LOOKUP_BITS, PLANE_BITS, byte_of_planes
from ..decoding import CONVERSIONS, look_up, unpack_planes
from ..job import (
    BATCH,
    FAILED,
    SCALE,
    SCRATCH,
    TC,
    THREADS,
    TR,
    C,
    JobFunctions,
    M,
    R,
    X,
    contiguous_part,
    free_scratch,
)
from ..scales import has_minima, read_tile_values, tile_sums_bytes, write_tile_sums

#: Strategies: how the scales of a row of W are applied to its panels.
#:
#: - ONE_PER_PANEL: all columns of a panel share a scale.
#: - PER_LANE: each lane of a panel has a scale. A panel is whole tiles, and a tile is whole dwords.
#: - PER_VECTOR: each vector of a panel has a scale. A tile is whole vectors.
#: - FOLDED_INTO_X: for all other tiles. x is multiplied by the scales beforehand, once for all rows
#:   of W that share them. The gradient of a product needs this if tiles lie along the other axis.
ONE_PER_PANEL, PER_LANE, PER_VECTOR, FOLDED_INTO_X = range(4)

#: Vectors of a panel: one per field of a dword, or as many as hold 64 columns.
VECTORS = dict.fromkeys(BITS, 64 // LANES) | {
    kind: 32 // bits for kind, bits in LOOKUP_BITS.items()
}
#: Columns of a panel.
COLUMNS = {kind: count * LANES for kind, count in VECTORS.items()}
#: Bytes of a panel.
BYTES = {kind: COLUMNS[kind] * bits // 8 for kind, bits in BITS.items()}
#: Rows of W in a part.
PART_ROWS = 48
#: 1 as a fixed-point number. Its fraction has enough bits for the reciprocals of tile sizes.
_FRACTION = 40
_ONE_FIXED = 1 << _FRACTION
#: The distance in bytes at which codes are prefetched: they are read about one memory latency
#: later.
PREFETCH_BYTES = 8192


def fine_strategy(kind: str) -> int:
    """Return the strategy for tiles that are smaller than a panel: PER_LANE or PER_VECTOR.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    """
    return PER_LANE if kind in LOOKUP_BITS else PER_VECTOR


def build_functions(kind: str, prepare: Any, multiply: Any) -> JobFunctions:
    """Return the native functions of a kernel whose parts have `PART_ROWS` rows of W each.

    **Arguments:**

    - `kind`: the encoding of the codes of W, such as "lookup4" (see `Codes.kind`).
    - `prepare(job)`: allocates memory that all parts share.
    - `multiply(job, batch, first, last, strategy)`: multiplies x by the rows of matrix `batch` from
      `first` to `last`, and applies scales by `strategy`, such as PER_LANE. These rows all share
      the same scales, or each of them has its own.
    """
    PANEL, FINE = COLUMNS[kind], fine_strategy(kind)
    UNIT = VECTORS[kind] if FINE == PER_LANE else LANES  # columns of a lane, or of a vector

    @native
    def choose_strategy(job):
        tile = word(job, TC)
        if tile % PANEL == 0 or tile == word(job, C):
            return ONE_PER_PANEL
        fits = tile % UNIT == 0 and (FINE == PER_VECTOR or PANEL % tile == 0)
        return FINE if fits else FOLDED_INTO_X

    @native
    def work(job, part):
        parts = (word(job, R) + PART_ROWS - 1) // PART_ROWS
        batch, part = divmod(part, parts)
        first = contiguous_part(part, parts, word(job, THREADS)) * PART_ROWS
        last, tile = min(first + PART_ROWS, word(job, R)), word(job, TR)
        strategy = choose_strategy(job)
        while first < last:
            end = last
            if tile > 1 or strategy == FOLDED_INTO_X:
                end = min(last, (first // tile + 1) * tile)
            multiply(job, batch, first, end, strategy)
            first = end

    @native
    def count(job):
        return word(job, BATCH) * ((word(job, R) + PART_ROWS - 1) // PART_ROWS)

    return JobFunctions(prepare, count, work, free_scratch)


@instruction
def load_block(address, rows, columns):
    """Return a block of `rows` rows of `columns` vectors of f32 that `store` wrote at `address`."""
    block = Block("f32", rows.literal_value, columns.literal_value)

    def emit(builder, address, *_):
        return make_block(
            builder,
            [load_vector(builder, advance(builder, address, i)) for i in range(block.count)],
        )

    return block, emit


@instruction
def multiply_panels(sums, x, stride, table, scales, w, row_bytes, kind, strategy):
    """Return `sums[r][c] + x[r] * W[c] * scales[c]`, lane by lane, for a panel of each row of W.

    `sums` has a vector for each row r of x and each row c of W. `x` and `w` are the addresses of
    the panel in the first row. Rows are `stride` bytes apart in x, and `row_bytes` in W. `kind` and
    `strategy` are constants: the encoding of codes and how scales are applied. `scales` are the
    vectors that `load_panel_scales` returns, and `table` has the lookup table of codes.
    """
    kind, strategy = kind.literal_value, strategy.literal_value

    def emit(builder, totals, x, stride, table, scales, w, row_bytes, *_):
        totals, table, scales = (get_vectors(builder, block) for block in (totals, table, scales))
        places = [advance(builder, w, 0, c, row_bytes) for c in range(sums.columns)]
        scale = lambda c, j: scales[c * VECTORS[kind] + j if strategy == PER_VECTOR else c]
        # For one row of x, to scale the sum of a panel's products is less work than to scale
        # values, and shortens the dependency between panels. For several rows, to scale the values
        # of W once is less work, and to scale the lookup table is even less.
        if sums.rows == 1:
            scaled = "product" if strategy == PER_VECTOR else "sum"
        else:
            has_scaled_table = kind in LOOKUP_BITS and strategy == ONE_PER_PANEL
            scaled = "table" if has_scaled_table else "values"
        tables = [table] * len(places)
        if scaled == "table":
            tables = [[builder.fmul(entries, by) for entries in table] for by in scales]
        decode = _panel_decoder(builder, kind, places, tables)
        products = [constant(FLOATS, 0.0)] * len(totals) if scaled == "sum" else totals
        for j in range(VECTORS[kind]):
            values = [decode(c, j) for c in range(len(places))]
            if scaled == "values":
                values = [builder.fmul(value, scale(c, j)) for c, value in enumerate(values)]
            for r in range(sums.rows):
                x_vector = load_vector(builder, advance(builder, x, j, r, stride))
                for c, value in enumerate(values):
                    i = r * sums.columns + c
                    factors = x_vector, value
                    if scaled == "product":
                        factors = builder.fmul(x_vector, value), scale(c, j)
                    products[i] = multiply_add(builder, *factors, products[i])
        if scaled != "sum":
            return make_block(builder, products)
        terms = zip(products, scales, totals, strict=True)
        return make_block(builder, [multiply_add(builder, *term) for term in terms])

    return sums, emit


def _panel_decoder(builder: Any, kind: str, places: Any, tables: Any) -> Callable[[int, int], Any]:
    """Return a function `decode(c, j)` that emits vector `j` of the panel of row `c` of W, as f32.

    For each row, `places` has the address of its panel, and `tables` has its lookup table of codes.
    """
    if kind in PLANE_BITS:
        units, bits = COLUMNS[kind] // 8, BITS[kind]
        codes = [unpack_planes(builder, [place], units, bits, tables[0]) for place in places]
        return lambda c, j: CONVERSIONS[byte_of_planes(kind)](builder, codes[c][j])

    if kind in LOOKUP_BITS:
        bits = LOOKUP_BITS[kind]
        dwords = [load_vector(builder, place, INTS) for place in places]

        def look_up_fields(c: int, j: int) -> Any:
            indices = builder.lshr(dwords[c], constant(INTS, bits * j)) if j else dwords[c]
            return look_up(builder, tables[c], indices)

        return look_up_fields

    def convert_bytes(c: int, j: int) -> Any:
        place = builder.add(places[c], I64(LANES * j))
        return CONVERSIONS[kind](builder, load_vector(builder, place, ir.VectorType(I8, LANES)))

    return convert_bytes


@native
def scale_layout(job, strategy):
    """Return 1 / TC as a fixed-point number, and the number of scales per row of W.

    TC is the number of columns that share a scale. `load_panel_scales` takes the pair as `layout`,
    to find scales. If x was multiplied by the scales, the first number is
    0, so that the scale at index 0 is read for all columns.
    """
    tile = word(job, TC)
    reciprocal = (_ONE_FIXED + tile - 1) // tile if strategy != FOLDED_INTO_X else 0
    return reciprocal, word(job, C) // tile


@instruction
def load_panel_scales(address, stride, column, layout, lane_tiles, rows, kind, strategy):
    """Return vectors of scales for the panels of `rows` rows of W that begin at `column`.

    The scales of the first row of W are at `address`, and the scales of each next row are `stride`
    bytes later. `scale_layout` returns `layout`, and `find_lane_tiles` returns `lane_tiles`. The
    strategy selects the vectors:

    - ONE_PER_PANEL: one vector per row, of the scale of the first column.
    - PER_LANE: one vector per row. Lane d has the scale of tile `lane_tiles[d]` of the panel, or 0
      past the end of the row.
    - PER_VECTOR: one vector per vector of the panel. Past the end of the row, it has the last
      scale.
    """
    rows, kind, strategy = rows.literal_value, kind.literal_value, strategy.literal_value
    vectors = VECTORS[kind] if strategy == PER_VECTOR else 1

    def emit(builder, address, stride, column, layout, lane_tiles, *_):
        reciprocal, count = (builder.extract_value(layout, i) for i in range(2))
        last, tiles = builder.sub(count, I64(1)), []
        for j in range(vectors):
            first_column = builder.add(column, I64(j * LANES))
            tile = builder.lshr(builder.mul(first_column, reciprocal), I64(_FRACTION))
            exists = builder.icmp_signed("<", tile, count)
            tiles.append(builder.select(exists, tile, last))
        places = [
            builder.add(advance(builder, address, 0, c, stride), builder.mul(tile, I64(4)))
            for c in range(rows)
            for tile in tiles
        ]
        if strategy == PER_LANE:
            left = builder.sub(count, tiles[0])
            return make_block(builder, _load_lane_scales(builder, places, lane_tiles, left))
        return make_block(builder, [load_broadcast(builder, place) for place in places])

    return Block("f32", 1, rows * vectors), emit


def _load_lane_scales(builder: Any, places: Any, lane_tiles: Any, count: Any) -> list[Any]:
    """Return a vector of scales for each address in `places`.

    Lane d of a vector has the scale of tile `lane_tiles[d]`, counted from the address. `count`
    scales are stored from the address on, and no memory after them is read.
    """
    count = broadcast(builder, builder.trunc(count, I32))
    exists = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
    (order,) = get_vectors(builder, lane_tiles)
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
def find_lane_tiles(columns, tile):
    """Return a vector of int32 with the index of the tile of each lane of a panel.

    A lane covers `columns` columns, and a tile `tile` columns. Tiles are counted from the start of
    the panel.
    """
    block = Block("i32", 1, 1)

    def emit(builder, columns, tile):
        columns, tile = (broadcast(builder, builder.trunc(n, I32)) for n in (columns, tile))
        first = builder.mul(ir.Constant(INTS, [*range(LANES)]), columns)
        return make_block(builder, [builder.udiv(first, tile)])

    return block, emit


# x in the order of decoded panels. The rows of x are stored in blocks of at most `MOST` rows. The
# last block has a power of two of rows, and one row only if x has one row. A block stores the first
# panel of all its rows, then the next panel of all its rows, and so on. Missing rows and columns
# are 0. If W has minima, the sums of x over tiles follow after the last block.

#: The most rows of x in a block.
MOST = 8 if REGISTERS == 32 else 4


class PanelX(NamedTuple):
    """The native functions that store and find x in the order of panels, for one kind of codes.

    - `prepare(job)`: allocates memory, writes x to it in panel order, and sets SCRATCH.
    - `block_address(job, batch, m)`: returns the address of the block that begins with row m of x.
    - `sums_address(job, batch, m)`: returns the address of the sums of row m of x over tiles.
    - `fold(job, to, x, rows, tile_row, first, last)`: writes the panels from `first` to `last` of a
      block of x with `rows` rows, multiplied by the scales in row `tile_row` of the array of
      scales.
    """

    prepare: Any
    block_address: Any
    sums_address: Any
    fold: Any


@functools.cache
def build_panel_x(kind: str) -> PanelX:
    """Return the functions that store and find x in the order of panels, for one kind of codes.

    `kind` names the encoding of the codes of W, such as "lookup4" (see `Codes.kind`). A block of x
    with 2 rows is stored as: panel 0 of row 0, panel 0 of row 1, panel 1 of row 0, ...
    """
    COUNT, PANEL, BYTES = VECTORS[kind], COLUMNS[kind], 4 * COLUMNS[kind]
    SCALE_BYTES = BYTES + 4 * LANES
    order = deinterleave if kind in LOOKUP_BITS else native(lambda block: block)

    @native
    def block_address(job, batch, m):
        """Return the address of the block that begins with row m of x, for matrix `batch`."""
        panels = (word(job, C) + PANEL - 1) // PANEL
        aligned = (word(job, SCRATCH) + 63) // 64 * 64
        return aligned + BYTES * panels * (batch * _count_padded_rows(word(job, M)) + m)

    @native
    def sums_address(job, batch, m):
        """Return the address of the sums of row m of x over tiles, which follow all blocks."""
        first = block_address(job, word(job, BATCH), 0)
        return first + tile_sums_bytes(job) * (batch * _count_padded_rows(word(job, M)) + m)

    @native
    def store_panel(to, x, count):
        # Write the `count` numbers at `x` as one panel in panel order, padded with zeros.
        padded = stack(BYTES)
        if count < PANEL:
            for i in range(PANEL):
                store_f32(padded + 4 * i, load_f32(x + 4 * i) if i < count else 0)
            x = padded
        store(to, order(load(x, COUNT)))

    @native
    def prepare(job):
        """Allocate memory at SCRATCH, and write x in panel order to it.

        If W has minima, also write the sums of x over tiles.
        """
        rows, columns = word(job, M), word(job, C)
        panels, padded = (columns + PANEL - 1) // PANEL, _count_padded_rows(rows)
        size = BYTES * panels + (tile_sums_bytes(job) if has_minima(job) else 0)
        memory = malloc(64 + size * padded * word(job, BATCH))
        if memory == 0:
            set_word(job, FAILED, 1)
            return
        set_word(job, SCRATCH, memory)
        for batch in range(word(job, BATCH)):
            for m in range(padded):
                first = m // MOST * MOST
                step = BYTES * count_block_rows(rows, first)
                to = block_address(job, batch, first) + BYTES * (m - first)
                x = word(job, X) + 4 * columns * (batch * rows + m)
                for panel in range(panels):
                    count = min(PANEL, columns - panel * PANEL) if m < rows else 0
                    store_panel(to + step * panel, x + BYTES * panel, count)
                if has_minima(job):
                    write_tile_sums(job, x, m < rows, sums_address(job, batch, m))

    @native
    def expand_scales(job, to, tile_row, panel):
        # Write the scale of each column of a panel, in panel order.
        numbers = stack(SCALE_BYTES)
        columns, tile = word(job, C), word(job, TC)
        begin = panel * PANEL
        count = min(PANEL, columns - begin)
        first = begin // tile
        tiles = (begin + count - 1) // tile + 1 - first
        read_tile_values(job, SCALE, tile_row, first, tiles, numbers)
        if tile > 1:
            repeated = stack(BYTES)
            for i in range(count):
                store_f32(repeated + 4 * i, load_f32(numbers + 4 * ((begin + i) // tile - first)))
            numbers = repeated
        store_panel(to, numbers, count)

    @native
    def fold(job, to, x, rows, tile_row, first, last):
        """Write panels `first` to `last` of a block of x with `rows` rows to `to`, times scales.

        Each column is multiplied by its scale, from row `tile_row` of the array of scales.
        """
        scales = stack(BYTES)
        for panel in range(first, last):
            expand_scales(job, scales, tile_row, panel)
            by = load(scales, COUNT)
            for _ in range(rows):
                store(to, scale_block(load(x, COUNT), by))
                x += BYTES
                to += BYTES

    return PanelX(prepare, block_address, sums_address, fold)


@native
def count_block_rows(rows, m):
    """Return the number of rows of the block that begins with row m of the `rows` rows of x.

    The number includes rows of zeros: it is a power of two, and 1 only if x has one row.
    """
    count = 1 if rows == 1 else 2
    while count < MOST and count < rows - m:
        count *= 2
    return count


@native
def _count_padded_rows(rows):
    last = (rows - 1) // MOST * MOST
    return last + count_block_rows(rows, last)
