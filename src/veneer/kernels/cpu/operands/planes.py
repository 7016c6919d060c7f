"""Bit planes as bytes: codes of b bits, of which 8 neighbours are b bytes, made int8 each.

Byte p of such a unit has bit p of each code, that of the first in the lowest place. In a register
it is a matrix of 8 x 8 bits, and codes are its columns: it is transposed, many units at once.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from ....native.isa import HAS_GFNI, LANES
from ....native.memory import I8, I32, I64, pointer
from ....native.simd.blocks import (
    INTS,
    Block,
    advance,
    broadcast,
    call_llvm,
    constant,
    get_vectors,
    instruction,
    make_block,
    shuffle,
    store_vector,
)

#: Steps of the transposition (Hacker's Delight, 7-3): how far bits are moved, and which.
_STEPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def unpacked(
    builder: Any, addresses: Sequence[Any], units: int, bits: int, tables: Sequence[Any]
) -> list[Any]:
    """The codes of so many units at each address: vectors of LANES bytes, int8, in order.

    What a field stands for is `(field ^ flipped) - less`, by the first two numbers of a table. No
    byte is read but those of the units.
    """
    fields = _fields(builder, addresses, units, bits)
    count = fields.type.count
    flipped, less = (_number(builder, tables, i, count) for i in range(2))
    codes = builder.sub(builder.xor(fields, flipped), less)
    return [
        shuffle(builder, codes, codes, range(i, i + LANES)) if count > LANES else codes
        for i in range(0, count, LANES)
    ]


def _number(builder: Any, tables: Sequence[Any], i: int, count: int) -> Any:
    """One of the first two numbers of a table, as so many bytes."""
    number = builder.extract_element(tables[0], I32(i))
    return broadcast(builder, builder.fptosi(number, I8), count)


def _fields(builder: Any, addresses: Sequence[Any], units: int, bits: int) -> Any:
    """The fields of so many units at each address, a byte each, in order."""
    type = ir.VectorType(I64, units * len(addresses))
    in_order = _by_product if HAS_GFNI and type.count in (2, 4, 8) else _by_steps
    value = in_order(builder, addresses, units, bits, type)
    return builder.bitcast(value, ir.VectorType(I8, 8 * type.count))


def _by_product(builder: Any, addresses: Sequence[Any], units: int, bits: int, type: Any) -> Any:
    """The fields of units at each address: matrices of bits, times each of 8 unit vectors.

    The instruction has the rows of a matrix from the last byte to the first.
    """
    parts = []
    for address in addresses:
        read = _read_units(builder, address, units * bits)
        count = read.type.count  # from where on there are zeros
        planes = [range(unit * bits, (unit + 1) * bits) for unit in range(units)]
        rows = [row for some in planes for row in [count] * (8 - bits) + [*reversed(some)]]
        parts.append(shuffle(builder, read, ir.Constant(read.type, [0] * count), rows))
    while len(parts) > 1:
        order = range(2 * parts[0].type.count)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(builder, first, second, order) for first, second in pairs]
    (matrices,) = parts
    columns = ir.Constant(matrices.type, [1 << i for i in range(8)] * type.count)
    name = f"llvm.x86.vgf2p8affineqb.{64 * type.count}"
    return call_llvm(builder, name, matrices.type, columns, matrices, I8(0))


def _read_units(builder: Any, address: Any, size: int) -> Any:
    """So many bytes, and no others: in a vector of as many or, for LLVM parts odd ones, of more."""
    if size != 2 * LANES and size != 4 * LANES and size > 2 * LANES and size % 4 == 0:
        there = ir.Constant(
            ir.VectorType(ir.IntType(1), LANES), [i < size // 4 for i in range(LANES)]
        )
        zeros = ir.Constant(INTS, [0] * LANES)
        name, place = f"llvm.masked.load.v{LANES}i32.p0", pointer(builder, address, INTS)
        read = call_llvm(builder, name, INTS, place, I32(1), there, zeros)
        return builder.bitcast(read, ir.VectorType(I8, 4 * LANES))
    read = builder.load(pointer(builder, address, ir.VectorType(I8, size)))
    read.align = 1
    return read


def _by_steps(builder: Any, addresses: Sequence[Any], units: int, bits: int, type: Any) -> Any:
    """The fields of units at each address."""
    size = units * bits
    word = ir.IntType(min(64, 8 * size))
    value, shifts = ir.Constant(type, ir.Undefined), list[int]()
    for address in addresses:
        for unit in range(units):
            first = min(unit * bits, size - word.width // 8)  # of a word that ends within
            place = builder.add(address, I64(first))
            read = builder.load(pointer(builder, place, word))
            read.align = 1
            read = builder.zext(read, I64) if word.width < 64 else read
            value = builder.insert_element(value, read, I32(len(shifts)))
            shifts.append(8 * (unit * bits - first))
    if any(shifts):
        value = builder.lshr(value, ir.Constant(type, shifts))
    value = builder.and_(value, constant(type, 2 ** (8 * bits) - 1))
    for shift, mask in _STEPS:
        far = builder.lshr(value, constant(type, shift))
        differ = builder.and_(builder.xor(value, far), constant(type, mask))
        back = builder.shl(differ, constant(type, shift))
        value = builder.xor(builder.xor(value, differ), back)
    return value


@instruction
def store_codes_of_planes(to, address, units, bits, table):
    """Writes the codes of so many units as bytes."""
    units, bits = units.literal_value, bits.literal_value

    def emit(builder, to, address, _units, _bits, table):
        codes = unpacked(builder, [address], units, bits, get_vectors(builder, table))
        for i, some in enumerate(codes):
            store_vector(builder, some, builder.add(to, I64(LANES * i)))

    return types.void, emit


@instruction
def load_fields(address, stride, rows, bits, table):
    """Fields of bit planes, flipped as a table says: a vector of bytes of each of some rows.

    They are bytes without a sign, larger than what codes are worth by the table's second number.
    """
    block, bits = Block("i32", rows.literal_value, 1), bits.literal_value

    def emit(builder, address, stride, _rows, _bits, table):
        flipped = _number(builder, get_vectors(builder, table), 0, 4 * LANES)
        places = [advance(builder, address, 0, row, stride) for row in range(block.rows)]
        fields = [_fields(builder, [place], LANES // 2, bits) for place in places]
        bytes = [builder.xor(some, flipped) for some in fields]
        return make_block(builder, [builder.bitcast(some, INTS) for some in bytes])

    return block, emit
