"""JAX's traces: which one is current, and what one knows of the arrays in it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import array, core
from jax._src.config import trace_context as trace_context
from jax._src.interpreters.batching import BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTracer

from .primitives import find_primitive

ConcreteArray = array.ArrayImpl
Trace = core.Trace
Tracer = core.Tracer
set_current_trace = core.set_current_trace


def current_trace() -> Trace:
    """The trace that a primitive bound here would be processed by."""
    return core.trace_ctx.trace


def swap_trace(trace: Any) -> Any:
    """Makes a trace current and returns the one that was: a faster `set_current_trace`."""
    context = core.trace_ctx
    previous = context.trace
    context.set_trace(trace)
    return previous


def is_zero(x: Any) -> bool:
    """Whether an array is known to be zero: a concrete one, or a traced one made of zeros."""
    entries = known_entries(x)
    return entries is not None and not entries.any()


def known_entries(x: Any) -> np.ndarray | None:
    """The values among the entries of an array, or None if they are not known.

    Those of a concrete array, or of the one of which a traced array is made by copies alone.
    """
    if isinstance(x, DynamicJaxprTracer):
        if isinstance(x.val, core.Literal):
            return known_entries(x.val.val)
        made: Any = x.parent
        if made is None:
            return None
        if made.primitive.name in _NEVER_READ:
            return np.zeros(())
        entries = known_entries(made.in_tracers[0]) if made.primitive.name in _COPIES else None
        return None if entries is None else entries.astype(x.dtype)
    if isinstance(x, Tracer) or jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.extended):
        return None
    return np.asarray(x)


_COPIES = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"}  # two copies
_NEVER_READ = {"empty", "empty2"}  # what a branch gives for a residual of another


def mapped_axis(x: Any) -> Any:
    """The axis that `jax.vmap` has just taken off an array, or None if it has taken none."""
    return x.batch_dim if isinstance(x, BatchTracer) else None


def is_eager() -> bool:
    """Whether a primitive bound here would be computed at once."""
    return type(core.trace_ctx.trace) is core.EvalTrace


_pvary_p = find_primitive("pvary")


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes along which an array inside a shard_map may differ, by its type."""
    return jax.typeof(x).mat.varying


def vary_together(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that vary along the same manual axes: those along which any of them does.

    As JAX has the operands of its own primitives, where a shard_map keeps account of that.
    """
    axes = [varying_axes(x) for x in arrays]
    union = frozenset[str]().union(*axes)
    return [
        _pvary_p.bind(x, axes=tuple(sorted(union - varying))) if varying != union else x
        for x, varying in zip(arrays, axes, strict=True)
    ]
