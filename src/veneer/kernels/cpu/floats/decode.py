"""From codes to numbers, kind by kind: vectors of neighbours in a row of a stored matrix.

Each vector is read by itself: some bytes are repeated, and each lane shifts them by as much as its
field needs. So blocks may be of any width, and columns stay where they are.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ....native.functions import native
from ....native.isa import LANES
from ....native.memory import I8, I32, I64, pointer
from ....native.simd.blocks import (
    INTS,
    Block,
    broadcast,
    get_vectors,
    instruction,
    load_vector,
    make_block,
    shuffle,
)
from ...common import kinds
from ...common.kinds import BITS, LOOKUP_BITS, PLANE_BITS
from ..operands.codes import CONVERSIONS, look_up
from ..operands.planes import unpacked

row_bytes = native(kinds.row_bytes)


def reader(kind: str) -> tuple[Any, Any]:
    """Returns two instructions for codes of a kind, `decoded` and `ordered`.

    `decoded(table, address, columns)` reads a row of vectors of codes at an address, as f32. Their
    lanes may not be in order: `ordered(block)` puts them right, in what is computed of them, too.
    """

    @instruction
    def decoded(table, address, columns):
        def emit(builder, table, address, _):
            tables = get_vectors(builder, table)
            return make_block(builder, _decoded(builder, kind, tables, address, block.columns))

        block = Block("f32", 1, columns.literal_value)
        return block, emit

    @instruction
    def ordered(block):
        return block, _each(_unpaired) if _is_paired(kind) else lambda builder, values: values

    return decoded, ordered


def in_order(builder: Any, kind: str, table: Any, address: Any, columns: int) -> list[Any]:
    """A row of vectors of codes at an address, as f32, whose lanes are in order."""
    values = _decoded(builder, kind, table, address, columns)
    return [_unpaired(builder, each) for each in values] if _is_paired(kind) else values


def _is_paired(kind: str) -> bool:
    return kind in LOOKUP_BITS and BITS[kind] * LANES == 64  # see `_fields`


def _decoded(builder: Any, kind: str, table: Any, address: Any, columns: int) -> list[Any]:
    bits = BITS[kind]
    if kind in PLANE_BITS:
        codes = unpacked(builder, [address], columns * LANES // 8, bits, table)
        return [CONVERSIONS[kinds.byte_of_planes(kind)](builder, each) for each in codes]
    if bits < 8:
        indices = [_fields(builder, address, bits, c) for c in range(columns)]
        return [look_up(builder, table, each) for each in indices]
    codes = [_bytes(builder, address, c) for c in range(columns)]
    return [CONVERSIONS[kind](builder, each) for each in codes]


def _bytes(builder: Any, address: Any, vector: int) -> Any:
    place = builder.add(address, I64(vector * LANES))
    return load_vector(builder, place, ir.VectorType(I8, LANES))


def _fields(builder: Any, address: Any, bits: int, vector: int) -> Any:
    """The fields of a vector, in the low bits of its lanes, with others above them.

    No byte is read but theirs. Where they are 64 bits, two lanes share a shift: the next field to
    that of lane 2q is in lane 2q + 2, and lane 2q + 1 has the q-th of the upper half.
    """
    byte, bit = divmod(vector * bits * LANES, 8)
    word = ir.IntType(max(bits * LANES, 8))
    value = builder.load(pointer(builder, builder.add(address, I64(byte)), word))
    value.align = 1
    if word.width < 32:
        value = builder.zext(value, I32)
    copies = broadcast(builder, value, LANES * 32 // value.type.width)
    shifts = [bit + lane * bits for lane in range(copies.type.count)]
    return builder.bitcast(builder.lshr(copies, ir.Constant(copies.type, shifts)), INTS)


def _each(emit: Callable[..., Any]) -> Callable[..., Any]:
    return lambda builder, block: make_block(
        builder, [emit(builder, value) for value in get_vectors(builder, block)]
    )


def _unpaired(builder: Any, value: Any) -> Any:
    return shuffle(builder, value, value, [*range(0, LANES, 2), *range(1, LANES, 2)])
