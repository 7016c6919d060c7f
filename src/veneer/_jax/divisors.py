"""What divides an integer of which only the program that computes it is known, as `8 * i` is."""

from collections.abc import Callable
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax._src.interpreters.partial_eval import DynamicJaxprTracer
from jax._src.shard_map import ShardMapTracer

from .tracing import known_entries, primal_of


def divisor_of(x: Any) -> int:
    """A number that divides each entry of an array of integers; 0 if all are known to be 0.

    That of the entries, where they are known. Of a traced array a power of two, by how it is
    computed, for that also divides what has overflowed; and 1 where nothing is known.
    """
    return _divisor(x, {})


def _divisor(x: Any, found: dict[int, int]) -> int:
    x = primal_of(x)
    x = x.val if isinstance(x, ShardMapTracer) else x  # what all devices have, one after the other
    if id(x) not in found:
        found[id(x)] = _of_entries(x, found)
    return found[id(x)]


def _of_entries(x: Any, found: dict[int, int]) -> int:
    if not jax.dtypes.issubdtype(jax.typeof(x).dtype, np.integer):
        return 1
    entries = known_entries(x)
    if entries is not None:
        return int(np.gcd.reduce(entries.astype(np.int64), axis=None)) if entries.size else 0
    made: Any = x.parent if isinstance(x, DynamicJaxprTracer) else None
    combine = None if made is None else _COMBINE.get(made.primitive.name)
    if combine is None:
        return 1
    divisor = combine([_divisor(operand, found) for operand in made.in_tracers])
    return divisor & -divisor


_first: Callable[[list[int]], int] = lambda divisors: divisors[0]

#: By a primitive: what divides its result, of what divides its operands.
_COMBINE: dict[str, Callable[[list[int]], int]] = {
    **dict.fromkeys(
        "broadcast_in_dim convert_element_type copy copy_p dynamic_slice expand_dims neg pvary "
        "reduce_max reduce_min reshape slice squeeze stop_gradient transpose".split(),
        _first,
    ),
    **dict.fromkeys("add clamp concatenate max min rem sub".split(), lambda ds: gcd(*ds)),
    "mul": prod,
    "select_n": lambda ds: gcd(*ds[1:]),
}
