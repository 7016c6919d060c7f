"""SIMD values for quantising: magnitudes, scales, and codes as they are stored."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from ...native.isa import LANES
from ...native.memory import F32, I8, I32, pointer
from ...native.simd.blocks import (
    FLOATS,
    INTS,
    Block,
    advance,
    broadcast,
    constant,
    get_vectors,
    instruction,
    load_vector,
    make_block,
    shuffle,
    store_vector,
)

#: The least normal f32. Neither a scale nor its reciprocal is smaller.
_TINY = 2.0**-126
#: The largest scale under which no code is infinite, by kind, as `limit_scale` of quant/conversion.
_LARGEST_SCALES = {
    kind: float(np.finfo(np.float32).max / np.float32(reach) * np.float32(1 - 2.0**-23))
    for kind, reach in {"int8": 128, "int4": 8}.items()
}
#: Added to a number of less than 23 bits, it leaves no bits behind the point: f32 rounds half to
#: even. And the integer is what the lowest bits of the sum are.
_TO_INTEGER = 1.5 * 2.0**23


@instruction
def no_magnitudes(columns):
    """A row of vectors of zeros, as integers."""
    block = Block("i32", 1, columns.literal_value)
    return block, lambda builder, _: ir.Constant(block.llvm, [constant(INTS, 0)] * block.count)


@instruction
def larger_magnitudes(magnitudes, address):
    """The larger of magnitudes and those of f32 at an address, all by their bits.

    Positive f32 are in the order of their bits; NaN comes after infinity.
    """

    def emit(builder, magnitudes, address):
        larger = []
        for c, old in enumerate(get_vectors(builder, magnitudes)):
            bits = load_vector(builder, advance(builder, address, c), INTS)
            new = builder.and_(bits, constant(INTS, 0x7FFFFFFF))
            larger.append(_larger(builder, old, new))
        return make_block(builder, larger)

    return magnitudes, emit


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@instruction
def largest(magnitudes):
    """A vector with the largest of all in every lane."""

    def emit(builder, magnitudes):
        first, *rest = get_vectors(builder, magnitudes)
        for other in rest:
            first = _larger(builder, first, other)
        step = 1
        while step < LANES:
            lanes = [lane ^ step for lane in range(LANES)]
            first = _larger(builder, first, shuffle(builder, first, first, lanes))
            step *= 2
        return make_block(builder, [first])

    return Block("i32", 1, 1), emit


@instruction
def scales_of(magnitudes, reciprocal, is_short, kind):
    """Return the scales of tiles with these magnitudes: times a reciprocal, and made usable.

    As in `as_divisor` of quant/conversion, a scale is 1 if it is too small to divide by, and NaN if
    it is too large, or NaN. If `is_short` is not 0, it is rounded to 16 bits, half to even. A scale
    under which a code would be infinite is reduced.
    """
    block = Block("f32", 1, magnitudes.columns)
    limit = _LARGEST_SCALES.get(kind.literal_value)

    def emit(builder, magnitudes, reciprocal, is_short, _):
        by = broadcast(builder, reciprocal)
        is_short = builder.fcmp_ordered("!=", broadcast(builder, is_short), constant(FLOATS, 0.0))
        scales = []
        for bits in get_vectors(builder, magnitudes):
            scale = builder.fmul(builder.bitcast(bits, FLOATS), by)
            fits = builder.fcmp_ordered("<=", scale, constant(FLOATS, 1 / _TINY))
            usable = builder.select(fits, scale, constant(FLOATS, float("nan")))
            small = builder.fcmp_ordered("<", scale, constant(FLOATS, _TINY))
            scale = builder.select(small, constant(FLOATS, 1.0), usable)
            scale = builder.select(is_short, _without_8_bits(builder, scale), scale)
            if limit is not None:
                exceeds = builder.fcmp_ordered(">", scale, constant(FLOATS, limit))
                scale = builder.select(exceeds, constant(FLOATS, limit), scale)
            scales.append(scale)
        return make_block(builder, scales)

    return block, emit


def _without_8_bits(builder: Any, x: Any) -> Any:
    """Return positive numbers rounded to 8 bits less, half to even; a quiet NaN is kept."""
    bits = builder.bitcast(x, INTS)
    is_odd = builder.and_(builder.lshr(bits, constant(INTS, 8)), constant(INTS, 1))
    raised = builder.add(bits, builder.add(is_odd, constant(INTS, 0x7F)))
    return builder.bitcast(builder.and_(raised, constant(INTS, 0xFFFFFF00)), FLOATS)


@instruction
def reciprocals(block):
    """One over each number."""

    def emit(builder, block):
        one = constant(FLOATS, 1.0)
        return make_block(
            builder, [builder.fdiv(one, value) for value in get_vectors(builder, block)]
        )

    return block, emit


@instruction
def store_first(address, block):
    """Writes the first number of a vector."""

    def emit(builder, address, block):
        (value,) = get_vectors(builder, block)
        first = builder.extract_element(value, I32(0))
        builder.store(first, pointer(builder, address, F32)).align = 1

    return types.void, emit


@instruction
def codes_of(address, columns, factors, table, kind):
    """Reads vectors of f32, multiplies them, and returns the codes that are nearest, as int32.

    `factors` is a row of as many vectors, or of one. The code of NaN is that of 0.
    """
    block = Block("i32", 1, columns.literal_value)
    encode = _ENCODERS[kind.literal_value]

    def emit(builder, address, _, factors, table, *__):
        by = get_vectors(builder, factors)
        codes = []
        for c in range(block.columns):
            x = load_vector(builder, advance(builder, address, c))
            scaled = builder.fmul(x, by[c % len(by)])
            is_number = builder.fcmp_ordered("ord", scaled, scaled)
            codes.append(
                encode(builder, builder.select(is_number, scaled, constant(FLOATS, 0.0)), table)
            )
        return make_block(builder, codes)

    return block, emit


def _rounded(low: int, high: int) -> Callable[..., Any]:
    """Codes that are whole numbers: rounded half to even, and clipped."""

    def encode(builder: Any, x: Any, _: Any) -> Any:
        low_vector, high_vector = (constant(FLOATS, float(end)) for end in (low, high))
        x = builder.select(builder.fcmp_ordered(">", x, low_vector), x, low_vector)
        x = builder.select(builder.fcmp_ordered("<", x, high_vector), x, high_vector)
        return builder.bitcast(builder.fadd(x, constant(FLOATS, _TO_INTEGER)), INTS)

    return encode


def _counted(builder: Any, x: Any, table: Any) -> Any:
    """Codes that count how many of 15 thresholds are reached."""
    code = constant(INTS, 0)
    for i in range(15):
        address = builder.add(table, ir.Constant(table.type, 4 * i))
        threshold = builder.load(pointer(builder, address, F32))
        threshold.align = 1
        reached = builder.fcmp_ordered(">=", x, broadcast(builder, threshold))
        code = builder.sub(code, builder.sext(reached, INTS))
    return code


_ENCODERS = {"int8": _rounded(-128, 127), "int4": _rounded(-8, 7), "nf4": _counted}


@instruction
def store_codes(address, codes, bits):
    """Writes the lowest bits of int32, 8 or 4 of them; of 4, two neighbours share a byte."""
    store = {8: _store_bytes, 4: _store_nibbles}[bits.literal_value]

    def emit(builder, address, codes, _):
        store(builder, address, get_vectors(builder, codes))

    return types.void, emit


_CODES = ir.VectorType(I8, LANES)


def _store_bytes(builder: Any, address: Any, codes: Sequence[Any]) -> None:
    for c, code in enumerate(codes):
        place = builder.add(address, ir.Constant(address.type, LANES * c))
        store_vector(builder, builder.trunc(code, _CODES), place)


def _store_nibbles(builder: Any, address: Any, codes: Sequence[Any]) -> None:
    """The first neighbour of two has the low nibble."""
    together = []
    for a, b in zip(codes[::2], codes[1::2], strict=True):
        even, odd = (
            builder.and_(shuffle(builder, a, b, range(i, 2 * LANES, 2)), constant(INTS, 15))
            for i in (0, 1)
        )
        together.append(builder.or_(even, builder.shl(odd, constant(INTS, 4))))
    _store_bytes(builder, address, together)
