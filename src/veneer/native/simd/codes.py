"""What codes are worth, as vectors of f32: looked up, or converted from numbers of 8 bits."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ..isa import ISA, LANES
from ..memory import I16, I32
from .blocks import FLOATS, INTS, Block, at, block_of, call_llvm, constant, instruction, load_vector

_HALVES = ir.VectorType(I16, LANES)


@instruction
def load_table(address):
    """Reads what 16 fields are worth."""
    block = Block("f32", 1, 16 // LANES)

    def emit(builder, address):
        reads = [load_vector(builder, at(builder, address, c)) for c in range(block.columns)]
        return block_of(builder, reads)

    return block, emit


def look_up(builder: Any, tables: Sequence[Any], indices: Any) -> Any:
    """The entries of a table of 16 at the low 4 bits of each lane."""
    if ISA.startswith("avx512"):  # one permutation, that looks at 4 bits alone
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, tables[0], indices)
    if ISA == "avx2":  # two, that look at 3 bits; and the fourth says which
        low, high = (
            call_llvm(builder, "llvm.x86.avx2.permps", FLOATS, table, indices) for table in tables
        )
        fourth = builder.and_(indices, constant(INTS, 8))
        return builder.select(builder.icmp_signed("!=", fourth, constant(INTS, 0)), high, low)
    indices = builder.and_(indices, constant(INTS, 15))
    value = ir.Constant(FLOATS, ir.Undefined)
    for lane in range(LANES):
        index = builder.extract_element(indices, I32(lane))
        part = builder.extract_element(tables[0], builder.urem(index, I32(LANES)))
        for i, table in enumerate(tables[1:], 1):
            other = builder.extract_element(table, builder.urem(index, I32(LANES)))
            here = builder.icmp_signed(">=", index, I32(i * LANES))
            part = builder.select(here, other, part)
        value = builder.insert_element(value, part, I32(lane))
    return value


def _from_int8(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.sext(codes, INTS), FLOATS)


def _from_uint8(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.zext(codes, INTS), FLOATS)


def _from_e4m3fn(builder: Any, codes: Any) -> Any:
    """It has no infinity, and NaN is all ones."""
    magnitude = builder.and_(builder.zext(codes, INTS), constant(INTS, 0x7F))
    is_nan = builder.icmp_signed("==", magnitude, constant(INTS, 0x7F))
    if ISA.startswith("avx512"):
        bits = builder.shl(builder.sext(codes, _HALVES), constant(_HALVES, 7))
        bits = builder.and_(bits, constant(_HALVES, 0xBF80))
        value = builder.fmul(_from_half(builder, bits), constant(FLOATS, 2.0**8))
    else:
        value = _signed(builder, codes, _from_small_float(builder, magnitude, 3, 7))
    return builder.select(is_nan, constant(FLOATS, float("nan")), value)


def _from_e5m2(builder: Any, codes: Any) -> Any:
    """The upper half of an f16."""
    if ISA.startswith("avx512"):
        bits = builder.shl(builder.zext(codes, _HALVES), constant(_HALVES, 8))
        return _from_half(builder, bits)
    magnitude = builder.and_(builder.zext(codes, INTS), constant(INTS, 0x7F))
    finite = _from_small_float(builder, magnitude, 2, 15)
    # Infinity and NaN have the largest exponent, here as there.
    special = builder.or_(builder.shl(magnitude, constant(INTS, 21)), constant(INTS, 0x7F800000))
    is_special = builder.icmp_signed(">=", magnitude, constant(INTS, 0x7C))
    value = builder.select(is_special, builder.bitcast(special, FLOATS), finite)
    return _signed(builder, codes, value)


def _from_half(builder: Any, bits: Any) -> Any:
    """f16, by its bits, whose smallest numbers are exact too, unlike those of f32 for XLA."""
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _from_small_float(builder: Any, magnitude: Any, mantissa: int, bias: int) -> Any:
    """A float without its sign: its bits are moved to where f32 has them.

    Those without a leading 1 are integers times a power of two. They are not made of f32 without a
    leading 1, as XLA has CPUs take that for 0.
    """
    moved = builder.shl(magnitude, constant(INTS, 23 - mantissa))
    normal = builder.add(moved, constant(INTS, (127 - bias) << 23))
    unit = constant(FLOATS, 2.0 ** (1 - bias - mantissa))
    small = builder.fmul(builder.sitofp(magnitude, FLOATS), unit)
    is_small = builder.icmp_signed("<", magnitude, constant(INTS, 1 << mantissa))
    return builder.select(is_small, small, builder.bitcast(normal, FLOATS))


def _signed(builder: Any, codes: Any, value: Any) -> Any:
    """A number with the sign that codes of 8 bits have in their highest."""
    sign = builder.and_(builder.sext(codes, INTS), constant(INTS, -(2**31)))
    return builder.bitcast(builder.or_(builder.bitcast(value, INTS), sign), FLOATS)


#: What makes f32 of a vector of codes of 8 bits, by their dtype.
CONVERSIONS = {
    "int8": _from_int8,
    "uint8": _from_uint8,
    "float8_e4m3fn": _from_e4m3fn,
    "float8_e5m2": _from_e5m2,
}
