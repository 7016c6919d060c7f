"""Inspect the current trace, the types of traced arrays, and their known entries."""

from collections.abc import Callable, Iterator, Sequence
from math import gcd, prod
from typing import Any

import jax
import numpy as np
from jax._src import array, core, dtypes
from jax._src.config import trace_context as trace_context
from jax._src.interpreters import ad
from jax._src.interpreters.batching import BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTrace, DynamicJaxprTracer
from jax._src.lax.parallel import insert_collective_pvary
from jax._src.mesh import empty_abstract_mesh
from jax._src.shard_map import ShardMapTracer

from .primitives import find_primitive

ConcreteArray = array.ArrayImpl
Trace = core.Trace
Tracer = core.Tracer
set_current_trace = core.set_current_trace

_DERIVATIVE_TRACES = {ad.JVPTrace, ad.LinearizeTrace}


def current_trace() -> Trace:
    """Return the trace that processes the next primitive that is bound."""
    return core.trace_ctx.trace


def swap_trace(trace: Any) -> Any:
    """Make a trace the current trace, and return the trace that was current before.

    This is faster than `set_current_trace`.
    """
    previous = core.trace_ctx.trace
    core.trace_ctx.set_trace(trace)
    return previous


def traces_around(trace: Any) -> Iterator[Any]:
    """Yield a trace and the traces around it, innermost first."""
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def is_eager() -> bool:
    """Return whether a primitive that is bound now is computed at once, not traced."""
    return type(core.trace_ctx.trace) is core.EvalTrace


def is_staged() -> bool:
    """Return whether a primitive bound now becomes an equation of a jaxpr.

    Between the primitive and the jaxpr, there may be traces of transformations such as `jax.vmap`.
    """
    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent", None) or getattr(trace, "parent_trace", None)
    return trace is not None


def is_in_derivative(trace: Any) -> bool:
    """Return whether a trace, or a trace around it, computes derivatives."""
    return any(type(trace) in _DERIVATIVE_TRACES for trace in traces_around(trace))


def is_differentiated(x: Any) -> bool:
    """Return whether an array is a tracer of `jax.jvp`, `jax.linearize` or `jax.grad`."""
    return isinstance(x, Tracer) and type(x._trace) in _DERIVATIVE_TRACES


def has_numeric_dtype(x: Any) -> bool:
    """Return whether `x`, an array or its type, is neither a `jax.Ref` nor of dtype `float0`."""
    is_reference = isinstance(x, jax.Ref | jax.ref.AbstractRef)
    return not is_reference and getattr(x, "dtype", None) != jax.dtypes.float0


def primal_of(x: Any) -> Any:
    """Return the array inside tracers of derivatives and of `jax.vmap`.

    The array inside a tracer of `jax.vmap` also has the mapped axis.
    """
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer | BatchTracer):
        x = x.val if isinstance(x, BatchTracer) else x.primal
    return x


def mapped_axis(x: Any) -> Any:
    """Return the axis of an array that the innermost `jax.vmap` maps, or None."""
    return x.batch_dim if isinstance(x, BatchTracer) else None


def set_operand_conversion(cls: type, convert: Callable[[Any], Any]) -> None:
    """Let JAX functions convert operands of the class `cls` to arrays by `convert`.

    Call this only once for each class.
    """
    dtypes.register_canonicalize_value_handler(cls, convert)


def set_type_function(cls: type, type_of: Callable[[Any], Any]) -> None:
    """Set the function that `jax.typeof` calls for objects of a class."""
    core.pytype_aval_mappings[cls] = type_of


def find_mesh(types: Sequence[Any]) -> Any:
    """Return the mesh of the first array type in `types` that has a mesh, or the empty mesh."""
    meshes = [aval.sharding.mesh for aval in types if isinstance(aval, core.ShapedArray)]
    return next((mesh for mesh in meshes if not mesh.empty), empty_abstract_mesh)


def abstract_array(aval: Any) -> Any:
    """Return an array type, such as `jax.typeof(x)`, as a `ShapeDtypeStruct`.

    It has the same sharding and the same varying manual axes (see `varying_axes`).
    """
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat
    )


def slice_type(x: Any) -> Any:
    """Return the type of `x[0]`, with the sharding and the varying manual axes of `x`."""
    return abstract_array(core.mapped_aval(jax.typeof(x).shape[0], 0, jax.typeof(x)))


# In a `shard_map`, the type of an array lists the manual mesh axes along which its devices may hold
# different values. The array varies along these axes.


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Return the manual mesh axes along which any of the arrays varies.

    In a `shard_map`, an array varies along a mesh axis if its devices may hold different values.
    """
    return frozenset[str]().union(*(jax.typeof(x).mat.varying for x in arrays))


def vary_along(axes: Sequence[str], x: Any) -> Any:
    """Return `x`, typed as varying along manual mesh axes, as collectives require.

    In a `shard_map`, an array varies along a mesh axis if its devices may hold different values.
    """
    return insert_collective_pvary(tuple(axes), x) if axes else x


def vary_like(leaves: Sequence[Any], x: Any) -> Any:
    """Return `x`, typed as varying along each manual axis that any of the leaves varies along."""
    return vary_along(tuple(varying_axes(*leaves)), x)


_pvary_p = find_primitive("pvary")


def vary_together(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, typed as varying along each manual axis that any of them varies along.

    JAX does the same to the operands of a primitive.
    """
    axes = [varying_axes(x) for x in arrays]
    union = frozenset[str]().union(*axes)
    return [
        _pvary_p.bind(x, axes=tuple(sorted(union - varying))) if varying != union else x
        for x, varying in zip(arrays, axes, strict=True)
    ]


# Known entries, zeros and divisors of traced arrays.

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
