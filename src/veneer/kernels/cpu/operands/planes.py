"""Unpack codes that are stored as bit planes.

A unit is 8 neighboring codes of b bits, stored as b bytes: byte p holds bit p of each code, with
the first code in the lowest bit. The b bits of a code are its field. Unpacking a unit is the
transposition of a matrix of 8 x 8 bits in a register, for many units at once: by one Galois-field
instruction where the CPU has it (GFNI), and otherwise by three steps that swap blocks of bits. A
code is then `(field ^ flipped) - offset`, where `flipped` and `offset` are the first two numbers of
the table of a job.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from ....native.memory import I8, I32, I64, pointer
from ....native.simd import HAS_GFNI, LANES
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

#: Steps of the transposition (Hacker's Delight, 7-3): a shift, and a mask of the bits to swap.
_STEPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def unpack_planes(
    builder: Any, addresses: Sequence[Any], units: int, bits: int, tables: Sequence[Any]
) -> list[Any]:
    """Return the codes of `units` units of bit planes at each address, as vectors of LANES int8.

    A unit is 8 codes of `bits` bits. The codes are in order. `tables` are the vectors of the lookup
    table of the job. Only the bytes of the units are read.
    """
    fields = _read_fields(builder, addresses, units, bits)
    count = fields.type.count
    flipped, offset = (_broadcast_entry(builder, tables, i, count) for i in range(2))
    codes = builder.sub(builder.xor(fields, flipped), offset)
    return [
        shuffle(builder, codes, codes, range(i, i + LANES)) if count > LANES else codes
        for i in range(0, count, LANES)
    ]


def _broadcast_entry(builder: Any, tables: Sequence[Any], i: int, count: int) -> Any:
    """Return entry `i` of a job's lookup table, 0 or 1, as a vector of `count` bytes."""
    number = builder.extract_element(tables[0], I32(i))
    return broadcast(builder, builder.fptosi(number, I8), count)


def _read_fields(builder: Any, addresses: Sequence[Any], units: int, bits: int) -> Any:
    """Return the fields, the bits of each code, of `units` units at each address, one per byte.

    They are in one vector, in order. A unit is `bits` bytes, with the bit planes of 8 codes.
    """
    type = ir.VectorType(I64, units * len(addresses))
    transpose = _transpose_by_gfni if HAS_GFNI and type.count in (2, 4, 8) else _transpose_by_steps
    value = transpose(builder, addresses, units, bits, type)
    return builder.bitcast(value, ir.VectorType(I8, 8 * type.count))


def _transpose_by_gfni(
    builder: Any, addresses: Sequence[Any], units: int, bits: int, type: Any
) -> Any:
    """Return bit planes at all addresses as one field of bits per code, by one instruction.

    The result is a vector of `type`, with a 64-bit lane per unit of 8 codes. The instruction
    multiplies the matrix of each unit by the 8 unit vectors. It expects the rows of a matrix from
    the last byte to the first.
    """
    parts = []
    for address in addresses:
        read = _read_bytes(builder, address, units * bits)
        zero = read.type.count  # an index of a zero byte
        planes = [range(unit * bits, (unit + 1) * bits) for unit in range(units)]
        rows = [row for unit in planes for row in [zero] * (8 - bits) + [*reversed(unit)]]
        parts.append(shuffle(builder, read, ir.Constant(read.type, [0] * zero), rows))
    while len(parts) > 1:
        order = range(2 * parts[0].type.count)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(builder, first, second, order) for first, second in pairs]
    (matrices,) = parts
    columns = ir.Constant(matrices.type, [1 << i for i in range(8)] * type.count)
    name = f"llvm.x86.vgf2p8affineqb.{64 * type.count}"
    return call_llvm(builder, name, matrices.type, columns, matrices, I8(0))


def _read_bytes(builder: Any, address: Any, size: int) -> Any:
    """Return the `size` bytes at an address as a vector, and read no others.

    LLVM splits loads of odd sizes. A masked load of a larger vector is one instruction instead. The
    vector then has zeros after the bytes.
    """
    if size != 2 * LANES and size != 4 * LANES and size > 2 * LANES and size % 4 == 0:
        mask = ir.Constant(
            ir.VectorType(ir.IntType(1), LANES), [i < size // 4 for i in range(LANES)]
        )
        zeros = ir.Constant(INTS, [0] * LANES)
        name, place = f"llvm.masked.load.v{LANES}i32.p0", pointer(builder, address, INTS)
        read = call_llvm(builder, name, INTS, place, I32(1), mask, zeros)
        return builder.bitcast(read, ir.VectorType(I8, 4 * LANES))
    read = builder.load(pointer(builder, address, ir.VectorType(I8, size)))
    read.align = 1
    return read


def _transpose_by_steps(
    builder: Any, addresses: Sequence[Any], units: int, bits: int, type: Any
) -> Any:
    """Return bit planes at all addresses as one field of bits per code, by swapping blocks of bits.

    The result is a vector of `type`, with a 64-bit lane per unit of 8 codes.
    """
    size = units * bits
    word = ir.IntType(min(64, 8 * size))
    value, shifts = ir.Constant(type, ir.Undefined), list[int]()
    for address in addresses:
        for unit in range(units):
            # Read a word that ends inside the units, and shift the bits of this unit down.
            first = min(unit * bits, size - word.width // 8)
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
def store_plane_codes(to, address, units, bits, table):
    """Write the codes of `units` units of bit planes at `address` to `to`, as int8.

    A unit is 8 codes of `bits` bits. `table` is the lookup table of the job.
    """
    units, bits = units.literal_value, bits.literal_value

    def emit(builder, to, address, _units, _bits, table):
        codes = unpack_planes(builder, [address], units, bits, get_vectors(builder, table))
        for i, vector in enumerate(codes):
            store_vector(builder, vector, builder.add(to, I64(LANES * i)))

    return types.void, emit


@instruction
def load_plane_fields(address, stride, rows, bits, table):
    """Return a vector of unsigned bytes for each of `rows` rows of bit planes: `LANES / 2` units.

    A unit is 8 codes of `bits` bits. A byte is a code plus `offset`, the second number of the
    lookup table. Rows are `stride` bytes apart from `address` on.
    """
    block, bits = Block("i32", rows.literal_value, 1), bits.literal_value

    def emit(builder, address, stride, _rows, _bits, table):
        flipped = _broadcast_entry(builder, get_vectors(builder, table), 0, 4 * LANES)
        places = [advance(builder, address, 0, row, stride) for row in range(block.rows)]
        fields = [_read_fields(builder, [place], LANES // 2, bits) for place in places]
        vectors = [builder.xor(vector, flipped) for vector in fields]
        return make_block(builder, [builder.bitcast(vector, INTS) for vector in vectors])

    return block, emit
