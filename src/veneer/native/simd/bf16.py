"""Pairs of bf16: a 32-bit lane holds two numbers that are adjacent along the contracted axis.

Some CPUs multiply both with one instruction. In blocks, the lanes have the type f32.
"""

from typing import Any

from llvmlite import ir

from ..isa import LANES
from ..memory import I16, I32
from .blocks import (
    FLOATS,
    Block,
    accumulate,
    advance,
    call_llvm,
    instruction,
    load_broadcast,
    map_blocks,
    shuffle,
)


class _BF16(ir.Type):
    """The type bfloat of LLVM, which llvmlite 0.50 does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BF16)

    def __hash__(self) -> int:
        return hash(_BF16)


_HALF, _PAIRS = ir.VectorType(_BF16(), LANES), ir.VectorType(_BF16(), 2 * LANES)


@instruction
def pair_as_bf16(first, second):
    """Return one vector of pairs `(bf16(first[i]), bf16(second[i]))`, for two vectors of f32."""

    def emit(builder, first, second):
        def pair(a, b):
            words = ir.VectorType(I16, LANES)
            a, b = (builder.bitcast(builder.fptrunc(x, _HALF), words) for x in (a, b))
            lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
            return builder.bitcast(shuffle(builder, a, b, lanes), FLOATS)

        return map_blocks(builder, pair, first, second)

    return Block("f32", 1, 1), emit


@instruction
def add_outer_pairs(total, x, stride, w):
    """Return `total[r][c] + x[r][0] * w[c][0] + x[r][1] * w[c][1]`, for pairs of bf16.

    `x[r]` is the pair at `x + r * stride` in memory. `w` is a row of vectors of pairs.
    """

    def emit(builder, totals, x, stride, ws):
        def row(r):
            pairs = load_broadcast(builder, advance(builder, x, 0, r, stride), I32)
            return builder.bitcast(pairs, _PAIRS)

        def add(builder: Any, total: Any, x: Any, w: Any) -> Any:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return call_llvm(builder, name, FLOATS, total, x, builder.bitcast(w, _PAIRS))

        return accumulate(builder, total, totals, ws, row, add)

    return total, emit
