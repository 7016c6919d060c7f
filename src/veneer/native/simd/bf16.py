"""Pairs of bf16, of which a CPU multiplies two at once: a lane of 32 bits holds two neighbours.

They are neighbours along what is contracted, and are taken for f32 as they are moved about.
"""

from typing import Any

from llvmlite import ir

from ..isa import LANES
from ..memory import I16, I32, pointer
from .blocks import (
    FLOATS,
    Block,
    accumulate,
    advance,
    broadcast,
    call_llvm,
    get_vectors,
    instruction,
    make_block,
    shuffle,
)


class _BF16(ir.Type):
    """LLVM's type, which llvmlite 0.50 has not."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BF16)

    def __hash__(self) -> int:
        return hash(_BF16)


_HALF, _PAIRS = ir.VectorType(_BF16(), LANES), ir.VectorType(_BF16(), 2 * LANES)


@instruction
def pair_as_bf16(first, second):
    """Two vectors of f32, rounded to bf16, as the pairs of their lanes."""

    def emit(builder, first, second):
        ((a,), (b,)) = (get_vectors(builder, block) for block in (first, second))
        words = ir.VectorType(I16, LANES)
        a, b = (builder.bitcast(builder.fptrunc(value, _HALF), words) for value in (a, b))
        lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
        return make_block(builder, [builder.bitcast(shuffle(builder, a, b, lanes), FLOATS)])

    return Block("f32", 1, 1), emit


@instruction
def add_outer_pairs(total, x, stride, w):
    """`total[r][c] + x[r] * w[c]`: a pair at `x`, `stride` bytes apart, times vectors of pairs."""

    def emit(builder, totals, x, stride, ws):
        def row(r):
            pair = builder.load(pointer(builder, advance(builder, x, 0, r, stride), I32))
            pair.align = 1
            return builder.bitcast(broadcast(builder, pair), _PAIRS)

        return accumulate(builder, total, totals, ws, row, _add_products)

    return total, emit


def _add_products(builder: Any, total: Any, x: Any, w: Any) -> Any:
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return call_llvm(builder, name, FLOATS, total, x, builder.bitcast(w, _PAIRS))
