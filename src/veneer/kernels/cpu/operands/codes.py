"""What codes are worth, as vectors of f32: looked up, or converted from numbers of 8 bits."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ....native.isa import IS_NEON, ISA, LANES
from ....native.memory import I32
from ....native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    advance,
    call_llvm,
    constant,
    instruction,
    load_vector,
    look_up_floats,
    make_block,
)
from .small_floats import from_e4m3fn, from_e5m2, from_int8, from_uint8


@instruction
def load_table(address):
    """Reads what 16 fields are worth."""
    block = Block("f32", 1, 16 // LANES)

    def emit(builder, address):
        reads = [load_vector(builder, advance(builder, address, c)) for c in range(block.columns)]
        return make_block(builder, reads)

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
    if IS_NEON:
        return look_up_floats(builder, tables, indices)
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


def _from_e2m3(builder: Any, codes: Any) -> Any:
    """float6_e2m3fn, of 6 bits and the sign repeated above them: e4m3 of another exponent."""
    value = from_e4m3fn(builder, builder.and_(codes, constant(codes.type, 0x9F)))
    return builder.fmul(value, constant(FLOATS, 2.0**6))


def _from_e3m2(builder: Any, codes: Any) -> Any:
    """float6_e3m2fn, likewise: e5m2 of another exponent."""
    value = from_e5m2(builder, builder.and_(codes, constant(codes.type, 0x9F)))
    return builder.fmul(value, constant(FLOATS, 2.0**12))


#: What makes f32 of a vector of codes of a byte each, by their dtype.
CONVERSIONS = {
    "int8": from_int8,
    "uint8": from_uint8,
    "float8_e4m3fn": from_e4m3fn,
    "float8_e5m2": from_e5m2,
    "float6_e2m3fn": _from_e2m3,
    "float6_e3m2fn": _from_e3m2,
}
