"""Find facts about traced arrays at trace time: known entries, zeros and common divisors."""

from collections.abc import Callable
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.interpreters.partial_eval import DynamicJaxprTracer
from jax._src.shard_map import ShardMapTracer

from .tracing import Tracer, primal_of

_COPY_PRIMITIVES = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}
# Primitives that return an uninitialized array. A branch of `cond` returns such an array in place
# of a residual of another branch, and no program reads it. So it may be taken for zeros.
_EMPTY_PRIMITIVES = {"empty", "empty2"}


def is_zero(x: Any) -> bool:
    """Return whether all entries of an array are known to be zero."""
    entries = known_entries(x)
    return entries is not None and not entries.any()


def known_entries(x: Any) -> np.ndarray | None:
    """Return an array with the same distinct values as `x`, or None if they are not known.

    They are known if `x` is concrete, or traced and copied from a concrete array by reshapes,
    broadcasts and conversions. The result has the shape of that concrete array.
    """
    if isinstance(x, DynamicJaxprTracer):
        if isinstance(x.val, core.Literal):
            return known_entries(x.val.val)
        equation: Any = x.parent
        if equation is None:
            return None
        if equation.primitive.name in _EMPTY_PRIMITIVES:
            return np.zeros(())  # uninitialized, so zero is as good as any value
        is_copy = equation.primitive.name in _COPY_PRIMITIVES
        entries = known_entries(equation.in_tracers[0]) if is_copy else None
        return None if entries is None else entries.astype(x.dtype)
    if isinstance(x, Tracer) or jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.extended):
        return None
    return np.asarray(x)


# Functions from the divisors of the operands of a primitive to a divisor of its result.
_COMBINE_DIVISORS: dict[str, Callable[[list[int]], int]] = {
    **dict.fromkeys(
        "broadcast_in_dim convert_element_type copy copy_p dynamic_slice expand_dims neg pvary "
        "reduce_max reduce_min reshape slice squeeze stop_gradient transpose".split(),
        lambda divisors: divisors[0],
    ),
    **dict.fromkeys("add clamp concatenate max min rem sub".split(), lambda ds: gcd(*ds)),
    "mul": prod,
    "select_n": lambda ds: gcd(*ds[1:]),  # the first operand is the predicate
}


def find_divisor(x: Any, cache: dict[int, int] | None = None) -> int:
    """Return an integer that divides every entry of an array, such as 8 for a traced `8 * i`.

    If the entries are known, the result is their greatest common divisor, or 0 if all are 0. If `x`
    is traced, the result is the largest power of two that the equations for `x` imply. It is a
    power of two because an integer that overflows keeps only these divisors. If nothing is known,
    the result is 1. Recursive calls pass `cache`, a dict from the id of an array to its divisor.
    """
    cache = {} if cache is None else cache
    x = primal_of(x)
    if isinstance(x, ShardMapTracer):
        x = x.val  # the entries of all devices, concatenated
    if id(x) in cache:
        return cache[id(x)]
    divisor = 1
    if jax.dtypes.issubdtype(jax.typeof(x).dtype, np.integer):
        entries = known_entries(x)
        equation: Any = x.parent if isinstance(x, DynamicJaxprTracer) else None
        if entries is not None:
            divisor = int(np.gcd.reduce(entries.astype(np.int64), axis=None)) if entries.size else 0
        elif equation is not None and equation.primitive.name in _COMBINE_DIVISORS:
            operand_divisors = [find_divisor(operand, cache) for operand in equation.in_tracers]
            divisor = _COMBINE_DIVISORS[equation.primitive.name](operand_divisors)
            divisor &= -divisor  # the largest power of two that divides it
    cache[id(x)] = divisor
    return divisor
