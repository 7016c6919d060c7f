"""Numbers of 16 and 8 bits, as vectors of f32.

Floats are made by arithmetic where a CPU has no instruction for it. None becomes f32 without a
leading 1 on the way, as XLA has CPUs take that for 0.
"""

from typing import Any

from llvmlite import ir

from ....native.isa import CONVERTS_F16, LANES
from ....native.memory import I8, I16, I32
from ....native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    broadcast,
    constant,
    get_vectors,
    instruction,
    load_vector,
    make_block,
)

_HALVES = ir.VectorType(I16, LANES)

#: Bytes of a number of each dtype that a vector is read from.
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
    """Reads a vector of numbers of a dtype, of `SIZES`, as f32."""
    name = dtype.literal_value

    def emit(builder, address, _):
        if name == "float32":
            return make_block(builder, [load_vector(builder, address)])
        entry = {2: I16, 1: I8}[SIZES[name]]
        bits = load_vector(builder, address, ir.VectorType(entry, LANES))
        return make_block(builder, [_WIDENED[name](builder, bits)])

    return Block("f32", 1, 1), emit


@instruction
def first_lanes(vector, count):
    """The first lanes of a vector of f32, and 0 in the others, whatever is there."""

    def emit(builder, vector, count):
        count = broadcast(builder, builder.trunc(count, I32))
        is_first = builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), count)
        (value,) = get_vectors(builder, vector)
        return make_block(builder, [builder.select(is_first, value, constant(FLOATS, 0.0))])

    return vector, emit


def _from_f16(builder: Any, bits: Any) -> Any:
    if CONVERTS_F16:
        return _from_half(builder, bits)
    magnitude = builder.and_(builder.zext(bits, INTS), constant(INTS, 0x7FFF))
    finite = _from_small_float(builder, magnitude, 10, 15)
    special = builder.or_(builder.shl(magnitude, constant(INTS, 13)), constant(INTS, 0x7F800000))
    is_special = builder.icmp_signed(">=", magnitude, constant(INTS, 0x7C00))
    value = builder.select(is_special, builder.bitcast(special, FLOATS), finite)
    return _signed(builder, bits, value)


def _from_bf16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), constant(INTS, 16)), FLOATS)


def _from_e8m0(builder: Any, bits: Any) -> Any:
    """A power of two by its exponent. NaN is all ones; the least is half of f32's least normal."""
    exponent = builder.zext(bits, INTS)
    normal = builder.shl(exponent, constant(INTS, 23))
    least = builder.icmp_signed("==", exponent, constant(INTS, 0))
    is_nan = builder.icmp_signed("==", exponent, constant(INTS, 255))
    value = builder.select(least, constant(INTS, 1 << 22), normal)
    value = builder.select(is_nan, constant(INTS, 0x7FC00000), value)
    return builder.bitcast(value, FLOATS)


def from_int8(builder: Any, codes: Any) -> Any:
    """f32 of int8."""
    return builder.sitofp(builder.sext(codes, INTS), FLOATS)


def from_uint8(builder: Any, codes: Any) -> Any:
    """f32 of uint8."""
    return builder.sitofp(builder.zext(codes, INTS), FLOATS)


_WIDENED = {
    "float16": _from_f16,
    "bfloat16": _from_bf16,
    "float8_e8m0fnu": _from_e8m0,
    "int8": from_int8,
    "uint8": from_uint8,
}


def from_e4m3fn(builder: Any, codes: Any) -> Any:
    """f32 of float8_e4m3fn. It has no infinity, and NaN is all ones."""
    magnitude = builder.and_(builder.zext(codes, INTS), constant(INTS, 0x7F))
    is_nan = builder.icmp_signed("==", magnitude, constant(INTS, 0x7F))
    if CONVERTS_F16:
        bits = builder.shl(builder.sext(codes, _HALVES), constant(_HALVES, 7))
        bits = builder.and_(bits, constant(_HALVES, 0xBF80))
        value = builder.fmul(_from_half(builder, bits), constant(FLOATS, 2.0**8))
    else:
        value = _signed(builder, codes, _from_small_float(builder, magnitude, 3, 7))
    return builder.select(is_nan, constant(FLOATS, float("nan")), value)


def from_e5m2(builder: Any, codes: Any) -> Any:
    """f32 of float8_e5m2, the upper half of an f16."""
    if CONVERTS_F16:
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
