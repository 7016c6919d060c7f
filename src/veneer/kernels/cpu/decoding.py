"""Decode codes and numbers of small formats to vectors of f32 on CPU.

A conversion emits the instructions for one format. Where the CPU has no instruction for a format,
a float is converted with integer arithmetic. XLA runs CPU threads with denormals flushed to zero,
so no conversion produces a denormal f32 on the way.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from ...native.functions import native
from ...native.memory import I8, I16, I32, I64, pointer
from ...native.simd import CONVERTS_F16, HAS_GFNI, IS_NEON, ISA, LANES
from ...native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    advance,
    broadcast,
    call_llvm,
    constant,
    get_vectors,
    instruction,
    load_vector,
    look_up_floats,
    make_block,
    shuffle,
    store_vector,
)
from ..common import problem as codes
from ..common.problem import BITS, LOOKUP_BITS, PLANE_BITS, byte_of_planes

row_bytes = native(codes.row_bytes)
_HALVES = ir.VectorType(I16, LANES)

#: Bytes of a number of each dtype that `load_as_floats` reads.
SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
}


@instruction
def load_as_floats(address, dtype):
    """Return a vector of f32, converted from LANES numbers of `dtype` at `address`.

    `dtype` is a key of `SIZES`.
    """
    name = dtype.literal_value

    def emit(builder, address, _):
        if name == "float32":
            return make_block(builder, [load_vector(builder, address)])
        entry = {2: I16, 1: I8}[SIZES[name]]
        bits = load_vector(builder, address, ir.VectorType(entry, LANES))
        return make_block(builder, [CONVERSIONS[name](builder, bits)])

    return Block("f32", 1, 1), emit


@instruction
def keep_first_lanes(vector, count):
    """Return `vector`, of f32, with all lanes after the first `count` set to 0."""

    def emit(builder, vector, count):
        count = broadcast(builder, builder.trunc(count, I32))
        is_first = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
        (value,) = get_vectors(builder, vector)
        return make_block(builder, [builder.select(is_first, value, constant(FLOATS, 0.0))])

    return vector, emit


# Conversions. Each takes a vector of the bits of LANES numbers, and returns a vector of f32.


def _from_f16(builder: Any, bits: Any) -> Any:
    if CONVERTS_F16:
        return _extend_f16(builder, bits)
    magnitude = builder.and_(builder.zext(bits, INTS), constant(INTS, 0x7FFF))
    finite = _from_finite_float(builder, magnitude, 10, 15)
    special = builder.or_(builder.shl(magnitude, constant(INTS, 13)), constant(INTS, 0x7F800000))
    is_special = builder.icmp_signed(">=", magnitude, constant(INTS, 0x7C00))
    value = builder.select(is_special, builder.bitcast(special, FLOATS), finite)
    return _copy_sign(builder, bits, value)


def _from_e8m0(builder: Any, bits: Any) -> Any:
    """Convert a vector of float8_e8m0fnu, given as bytes, to a vector of f32.

    A byte is the biased exponent of a power of two. 0 is 2**-127, and 255 is NaN.
    """
    exponent = builder.zext(bits, INTS)
    normal = builder.shl(exponent, constant(INTS, 23))
    is_zero = builder.icmp_signed("==", exponent, constant(INTS, 0))
    is_nan = builder.icmp_signed("==", exponent, constant(INTS, 255))
    value = builder.select(is_zero, constant(INTS, 1 << 22), normal)
    value = builder.select(is_nan, constant(INTS, 0x7FC00000), value)
    return builder.bitcast(value, FLOATS)


def _from_e4m3fn(builder: Any, codes: Any) -> Any:
    """Convert a vector of float8_e4m3fn, given as bytes, to a vector of f32.

    The format has no infinity. A byte is NaN if all its bits except the sign are 1.
    """
    magnitude = builder.and_(builder.zext(codes, INTS), constant(INTS, 0x7F))
    is_nan = builder.icmp_signed("==", magnitude, constant(INTS, 0x7F))
    if CONVERTS_F16:
        bits = builder.shl(builder.sext(codes, _HALVES), constant(_HALVES, 7))
        bits = builder.and_(bits, constant(_HALVES, 0xBF80))
        value = builder.fmul(_extend_f16(builder, bits), constant(FLOATS, 2.0**8))
    else:
        value = _copy_sign(builder, codes, _from_finite_float(builder, magnitude, 3, 7))
    return builder.select(is_nan, constant(FLOATS, float("nan")), value)


def _from_e5m2(builder: Any, codes: Any) -> Any:
    """Convert a vector of float8_e5m2, given as bytes, to a vector of f32.

    A byte is the upper byte of an f16 with the same value.
    """
    if CONVERTS_F16:
        bits = builder.shl(builder.zext(codes, _HALVES), constant(_HALVES, 8))
        return _extend_f16(builder, bits)
    magnitude = builder.and_(builder.zext(codes, INTS), constant(INTS, 0x7F))
    finite = _from_finite_float(builder, magnitude, 2, 15)
    # Infinity and NaN have the largest exponent in both formats.
    special = builder.or_(builder.shl(magnitude, constant(INTS, 21)), constant(INTS, 0x7F800000))
    is_special = builder.icmp_signed(">=", magnitude, constant(INTS, 0x7C))
    value = builder.select(is_special, builder.bitcast(special, FLOATS), finite)
    return _copy_sign(builder, codes, value)


def _from_float6(
    builder: Any, codes: Any, *, convert: Callable[..., Any], exponent_shift: int
) -> Any:
    """Convert a vector of 6-bit floats, given as sign-extended bytes, to a vector of f32.

    `convert` is the conversion of the 8-bit float with as many mantissa bits. The exponents of the
    two formats have different biases, so its result is multiplied by `2**exponent_shift`. The sign
    is in the upper 3 bits of a byte, so two of these bits are cleared first.
    """
    value = convert(builder, builder.and_(codes, constant(codes.type, 0x9F)))
    return builder.fmul(value, constant(FLOATS, 2.0**exponent_shift))


#: The conversion of each dtype of numbers and codes.
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "float16": _from_f16,
    "bfloat16": lambda builder, bits: builder.bitcast(
        builder.shl(builder.zext(bits, INTS), constant(INTS, 16)), FLOATS
    ),
    "float8_e8m0fnu": _from_e8m0,
    "int8": lambda builder, codes: builder.sitofp(builder.sext(codes, INTS), FLOATS),
    "uint8": lambda builder, codes: builder.sitofp(builder.zext(codes, INTS), FLOATS),
    "float8_e4m3fn": _from_e4m3fn,
    "float8_e5m2": _from_e5m2,
    "float6_e2m3fn": functools.partial(_from_float6, convert=_from_e4m3fn, exponent_shift=6),
    "float6_e3m2fn": functools.partial(_from_float6, convert=_from_e5m2, exponent_shift=12),
}


def _extend_f16(builder: Any, bits: Any) -> Any:
    """Convert a vector of f16, given as 16-bit integers, to a vector of f32.

    Use an instruction of the CPU, which is exact for denormals too.
    """
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _from_finite_float(builder: Any, magnitude: Any, mantissa: int, bias: int) -> Any:
    """Convert a vector of finite floats of a small format to a vector of f32, without signs.

    `magnitude` has the bits of each float except the sign, as int32. `mantissa` is the number of
    mantissa bits of the format, and `bias` its exponent bias. The bits of a normal number move to
    their place in an f32. A denormal is an integer times a power of two.
    """
    moved = builder.shl(magnitude, constant(INTS, 23 - mantissa))
    normal = builder.add(moved, constant(INTS, (127 - bias) << 23))
    unit = constant(FLOATS, 2.0 ** (1 - bias - mantissa))
    denormal = builder.fmul(builder.sitofp(magnitude, FLOATS), unit)
    is_denormal = builder.icmp_signed("<", magnitude, constant(INTS, 1 << mantissa))
    return builder.select(is_denormal, denormal, builder.bitcast(normal, FLOATS))


def _copy_sign(builder: Any, codes: Any, value: Any) -> Any:
    """Return the vector of f32 `value` with the signs of `codes`: the highest bit of each code."""
    sign = builder.and_(builder.sext(codes, INTS), constant(INTS, -(2**31)))
    return builder.bitcast(builder.or_(builder.bitcast(value, INTS), sign), FLOATS)


# Codes of 1, 2 and 4 bits are looked up in a table.


@instruction
def load_table(address):
    """Return the lookup table of codes (`Codes.table`), the 16 f32 at `address`, as vectors."""
    block = Block("f32", 1, 16 // LANES)

    def emit(builder, address):
        reads = [load_vector(builder, advance(builder, address, c)) for c in range(block.columns)]
        return make_block(builder, reads)

    return block, emit


def look_up(builder: Any, tables: Sequence[Any], indices: Any) -> Any:
    """Return the table entry for each lane of `indices`, selected by the lowest 4 bits of the lane.

    `tables` are the vectors of a table of 16 f32.
    """
    if ISA.startswith("avx512"):  # One permutation reads 4 bits of an index.
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, tables[0], indices)
    if ISA == "avx2":  # A permutation reads 3 bits, and the fourth bit selects one of two.
        low, high = (
            call_llvm(builder, "llvm.x86.avx2.permps", FLOATS, table, indices) for table in tables
        )
        fourth = builder.and_(indices, constant(INTS, 8))
        return builder.select(builder.icmp_signed("!=", fourth, constant(INTS, 0)), high, low)
    indices = builder.and_(indices, constant(INTS, 15))
    if IS_NEON:
        return look_up_floats(builder, tables, indices)
    value = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = builder.extract_element(indices, I32(lane))
        entry = builder.extract_element(tables[0], builder.urem(index, I32(LANES)))
        for i, table in enumerate(tables[1:], 1):
            other = builder.extract_element(table, builder.urem(index, I32(LANES)))
            is_in_table = builder.icmp_signed(">=", index, I32(i * LANES))
            entry = builder.select(is_in_table, other, entry)
        value = builder.insert_element(value, entry, I32(lane))
    return value


# Codes in bit planes. A unit is 8 neighboring codes of b bits, stored as b bytes: byte p holds bit
# p of each code, with the first code in the lowest bit. The b bits of a code are its field.
# Unpacking a unit is the transposition of a matrix of 8 x 8 bits in a register, for many units at
# once: by one Galois-field instruction where the CPU has it (GFNI), and otherwise by three steps
# that swap blocks of bits. A code is then `(field ^ flipped) - offset`, where `flipped` and
# `offset` are the first two numbers of the lookup table of the job.

#: Steps of the transposition (Hacker's Delight, 7-3): a shift, and a mask of the bits to swap.
_STEPS = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))


def unpack_planes(
    builder: Any, addresses: Sequence[Any], units: int, bits: int, tables: Sequence[Any]
) -> list[Any]:
    """Unpack the bit planes of `units` units at each address to vectors of LANES int8 codes.

    A unit is 8 neighboring codes of `bits` bits, stored as `bits` bytes. The codes are in order.
    `tables` are the vectors that `load_table` returns. Only the bytes of the units are read.
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
    """Return a vector of `count` int8 that all equal entry `i` of the lookup table of codes.

    `tables` are the vectors that `load_table` returns. Fields in bit planes become codes by entries
    0 and 1: `(field ^ entry 0) - entry 1`.
    """
    number = builder.extract_element(tables[0], I32(i))
    return broadcast(builder, builder.fptosi(number, I8), count)


def _read_fields(builder: Any, addresses: Sequence[Any], units: int, bits: int) -> Any:
    """Unpack the bit planes of `units` units at each address to a vector with a field per byte.

    A field is the bits of one code. Fields are in order. A unit is `bits` bytes, with the bit
    planes of 8 codes.
    """
    type = ir.VectorType(I64, units * len(addresses))
    transpose = _transpose_by_gfni if HAS_GFNI and type.count in (2, 4, 8) else _transpose_by_steps
    value = transpose(builder, addresses, units, bits, type)
    return builder.bitcast(value, ir.VectorType(I8, 8 * type.count))


def _transpose_by_gfni(
    builder: Any, addresses: Sequence[Any], units: int, bits: int, type: Any
) -> Any:
    """Transpose the bit planes of `units` units at each address to fields, one per byte.

    A unit is `bits` bytes, with the bit planes of 8 codes. A field is the bits of one code. The
    result is a vector of `type`, with a 64-bit lane per unit. One instruction multiplies the bit
    matrix of each unit by the 8 unit vectors. It expects the rows of a matrix from the last byte to
    the first.
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
    """Return a vector that begins with the `size` bytes at an address, and read no other bytes.

    LLVM would split a load of an odd size into several. Such a size is read by one masked load of a
    larger vector, which has zeros after the bytes.
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
    """Transpose the bit planes of `units` units at each address to fields, one per byte.

    A unit is `bits` bytes, with the bit planes of 8 codes. A field is the bits of one code. The
    result is a vector of `type`, with a 64-bit lane per unit. Three steps swap blocks of bits.
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
    """Unpack the bit planes of `units` units at `address`, and write the codes to `to` as int8.

    A unit is `bits` bytes, with the bit planes of 8 codes. `load_table` returns `table`.
    """
    units, bits = units.literal_value, bits.literal_value

    def emit(builder, to, address, _units, _bits, table):
        codes = unpack_planes(builder, [address], units, bits, get_vectors(builder, table))
        for i, vector in enumerate(codes):
            store_vector(builder, vector, builder.add(to, I64(LANES * i)))

    return types.void, emit


@instruction
def load_plane_fields(address, stride, rows, bits, table):
    """Unpack `LANES / 2` units of each of `rows` rows of bit planes to a vector of unsigned bytes.

    A unit is `bits` bytes, with the bit planes of 8 codes. A byte of a vector is a code plus the
    second number of `table`, which `load_table` returns. The units of the first row are at
    `address`, and the units of each next row are `stride` bytes later.
    """
    block, bits = Block("i32", rows.literal_value, 1), bits.literal_value

    def emit(builder, address, stride, _rows, _bits, table):
        flipped = _broadcast_entry(builder, get_vectors(builder, table), 0, 4 * LANES)
        places = [advance(builder, address, 0, row, stride) for row in range(block.rows)]
        fields = [_read_fields(builder, [place], LANES // 2, bits) for place in places]
        vectors = [builder.xor(vector, flipped) for vector in fields]
        return make_block(builder, [builder.bitcast(vector, INTS) for vector in vectors])

    return block, emit


# Rows of codes of any kind. Each vector is read separately, so a row may have any width.


def build_decoder(kind: str) -> tuple[Any, Any]:
    """Return two instructions that decode codes to f32: `decode_row` and `restore_order`.

    `kind` names the encoding of the codes, such as "lookup4" (see `Codes.kind`). `decode_row(table,
    address, columns)` reads `columns` vectors of codes and returns their values before scaling.
    `load_table` returns `table`. Lanes may be permuted. `restore_order(block)` undoes the
    permutation, also for sums of such vectors.
    """

    @instruction
    def decode_row(table, address, columns):
        def emit(builder, table, address, _):
            tables = get_vectors(builder, table)
            return make_block(builder, _decode(builder, kind, tables, address, block.columns))

        block = Block("f32", 1, columns.literal_value)
        return block, emit

    @instruction
    def restore_order(block):
        def emit(builder, values):
            if not _has_paired_lanes(kind):
                return values
            vectors = get_vectors(builder, values)
            return make_block(builder, [_unpair_lanes(builder, vector) for vector in vectors])

        return block, emit

    return decode_row, restore_order


def decode_in_order(builder: Any, kind: str, table: Any, address: Any, columns: int) -> list[Any]:
    """Decode `columns` vectors of codes at an address to vectors of f32, with lanes in order.

    `kind` names the encoding of the codes, such as "lookup4" (see `Codes.kind`). `table` has the
    vectors that `load_table` returns.
    """
    values = _decode(builder, kind, table, address, columns)
    if _has_paired_lanes(kind):
        return [_unpair_lanes(builder, value) for value in values]
    return values


def _has_paired_lanes(kind: str) -> bool:
    return kind in LOOKUP_BITS and BITS[kind] * LANES == 64  # see `_load_fields`


def _unpair_lanes(builder: Any, value: Any) -> Any:
    return shuffle(builder, value, value, [*range(0, LANES, 2), *range(1, LANES, 2)])


def _decode(builder: Any, kind: str, table: Any, address: Any, columns: int) -> list[Any]:
    bits = BITS[kind]
    if kind in PLANE_BITS:
        codes = unpack_planes(builder, [address], columns * LANES // 8, bits, table)
        return [CONVERSIONS[byte_of_planes(kind)](builder, vector) for vector in codes]
    if bits < 8:
        indices = [_load_fields(builder, address, bits, c) for c in range(columns)]
        return [look_up(builder, table, vector) for vector in indices]
    codes = []
    for c in range(columns):
        place = builder.add(address, I64(c * LANES))
        codes.append(load_vector(builder, place, ir.VectorType(I8, LANES)))
    return [CONVERSIONS[kind](builder, vector) for vector in codes]


def _load_fields(builder: Any, address: Any, bits: int, vector: int) -> Any:
    """Return LANES codes of fewer than 8 bits, in the low bits of lanes. Other bits are arbitrary.

    `vector` is the number of vectors of codes between `address` and these codes. Their bytes are
    copied to all lanes, and each lane is shifted by the position of its code. Only these bytes are
    read. If they are 8 bytes, a copy fills two lanes, so lanes are paired: lane 2q has code q of
    the lower 4 bytes, and lane 2q + 1 has code q of the upper 4 bytes.
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
