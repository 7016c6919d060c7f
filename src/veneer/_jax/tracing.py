"""Inspect the current trace and traced arrays, and set the manual axes along which arrays vary."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import jax
from jax._src import array, core, dtypes
from jax._src.config import trace_context as trace_context
from jax._src.interpreters import ad
from jax._src.interpreters.batching import BatchTracer
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.lax.parallel import insert_collective_pvary
from jax._src.mesh import empty_abstract_mesh

from .primitives import find_primitive
from .source_lines import frames_from

ConcreteArray = array.ArrayImpl
Trace = core.Trace
Tracer = core.Tracer
InvalidInputException = dtypes.InvalidInputException
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
    """Return whether a primitive bound now would be computed at once."""
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
    """Return whether an array or its type is neither a `jax.Ref` nor of dtype `float0`."""
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
    """Let JAX convert operands of a class by `convert`. A class can be set only once."""
    dtypes.register_canonicalize_value_handler(cls, convert)


def set_type_function(cls: type, type_of: Callable[[Any], Any]) -> None:
    """Set the function that `jax.typeof` calls for objects of a class."""
    core.pytype_aval_mappings[cls] = type_of


def is_read_by_operator() -> bool:
    """Return whether an operator of `jax.Array`, such as `+`, is reading the other operand.

    Then `__jax_array__` of the operand raises AttributeError, so that the operator returns
    NotImplemented, and Python calls the operator of the operand.
    """
    return jax_caller().startswith("_operator_")


def jax_caller() -> str:
    """Return the name of the innermost function of JAX that is running, or ""."""
    # The frames of an equinox.Module's __getattribute__ or an annotation checker may come first.
    frames = frames_from(sys._getframe(1))
    names = (f.f_code.co_name for f in frames if f.f_globals.get("__name__", "").startswith("jax."))
    return next(names, "")


def is_in_converted_function() -> bool:
    """Return whether a function that `jax.closure_convert` returned is evaluating an equation."""
    # JAX and our patches put at most six frames between.
    names = [frame.f_code.co_name for frame in islice(frames_from(sys._getframe(1)), 6)]
    return ("eval_jaxpr", "converted_fun") in pairwise(names)


def find_mesh(types: Sequence[Any]) -> Any:
    """Return the mesh of the first type that has one, or the empty mesh."""
    meshes = [aval.sharding.mesh for aval in types if isinstance(aval, core.ShapedArray)]
    return next((mesh for mesh in meshes if not mesh.empty), empty_abstract_mesh)


def abstract_array(aval: Any) -> Any:
    """Return a `ShapeDtypeStruct` with the sharding and the varying manual axes of a type."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat
    )


def slice_type(x: Any) -> Any:
    """Return the type of `x[0]`, with the sharding and the varying manual axes of `x`."""
    return abstract_array(core.mapped_aval(jax.typeof(x).shape[0], 0, jax.typeof(x)))


# In a `shard_map`, the type of an array lists the manual mesh axes along which its devices may hold
# different values. The array varies along these axes.


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Return the manual mesh axes along which any of the arrays varies."""
    return frozenset[str]().union(*(jax.typeof(x).mat.varying for x in arrays))


def vary_along(axes: Sequence[str], x: Any) -> Any:
    """Return `x`, typed as varying along manual axes. Collectives require such operands."""
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
