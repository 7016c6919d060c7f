"""The order of lanes: neighbours parted among vectors, and brought together again."""

from collections.abc import Sequence
from typing import Any

from ..isa import LANES
from .blocks import block_of, instruction, shuffled, vectors


@instruction
def deinterleave(block):
    """A row of n vectors of neighbours, as n vectors of every n-th."""
    return block, lambda builder, values: block_of(
        builder, apart(builder, vectors(builder, values))
    )


def apart(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """n vectors of neighbours, as n of every n-th `unit` lanes; n is a power of two."""
    if len(values) == 1:
        return [*values]
    pairs = [*zip(values[::2], values[1::2], strict=True)]
    lanes = [i for start in range(0, 2 * LANES, 2 * unit) for i in range(start, start + unit)]
    even = [shuffled(builder, a, b, lanes) for a, b in pairs]
    odd = [shuffled(builder, a, b, [i + unit for i in lanes]) for a, b in pairs]
    columns = zip(apart(builder, even, unit), apart(builder, odd, unit), strict=True)
    return [value for pair in columns for value in pair]


def together(builder: Any, values: Sequence[Any], unit: int = 1) -> list[Any]:
    """Undoes `apart`."""
    if len(values) == 1:
        return [*values]
    evens, odds = (together(builder, values[i::2], unit) for i in (0, 1))
    lanes = [
        i
        for start in range(0, LANES, unit)
        for vector in (0, LANES)
        for i in range(vector + start, vector + start + unit)
    ]
    return [
        shuffled(builder, a, b, half)
        for a, b in zip(evens, odds, strict=True)
        for half in (lanes[:LANES], lanes[LANES:])
    ]
