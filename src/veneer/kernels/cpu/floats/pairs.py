"""What activations are, for many rows of them: f32, or bf16, of which a CPU multiplies pairs.

A block of the matrix is decoded as f32. For bf16, two neighbours along what is contracted are then
rounded, and put side by side in a lane of 32 bits, as they are in x. So a weight is what it is in a
dense array of bf16; sums are in f32.
"""

from typing import Any, NamedTuple

from ....native.functions import native, prevent_inlining
from ....native.isa import LANES
from ....native.simd.bf16 import add_outer_pairs, pair_as_bf16
from ....native.simd.floats import add_outer, load, store


class Numbers(NamedTuple):
    """Numbers that a matrix is multiplied with, and what it takes for that."""

    outer: Any  # the instruction
    pair: Any  # (block, depth, columns, to, first) -> where the block then is
    size: int  # bytes
    each: int  # of them in 32 bits


@native
def _as_it_is(block, depth, columns, to, first):
    return block


@native
def _pair(block, depth, columns, to, first):
    """Writes `depth` rows of f32 as half as many of pairs, and returns where the first ones are."""
    prevent_inlining()
    row = 4 * columns
    for _ in range(0, depth, 2):
        for i in range(0, row, 4 * LANES):
            store(to + i, pair_as_bf16(load(block + i, 1), load(block + row + i, 1)))
        block, to = block + 2 * row, to + row
    return first


F32 = Numbers(add_outer, _as_it_is, 4, 1)
BF16 = Numbers(add_outer_pairs, _pair, 2, 2)

#: By the dtype of activations.
NUMBERS = {"float32": F32, "bfloat16": BF16}
