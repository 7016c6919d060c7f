"""JAX's traces: which one is current, and what one knows of the arrays in it."""

import sys
from collections.abc import Callable, Iterator, Sequence
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

from .primitives import find_primitive

ConcreteArray = array.ArrayImpl
Trace = core.Trace
Tracer = core.Tracer
InvalidInputException = dtypes.InvalidInputException
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


def is_of_numbers(x: Any) -> bool:
    """Whether an array, or its type, is of numbers: no reference, and no derivative by integers."""
    is_reference = isinstance(x, jax.Ref | jax.ref.AbstractRef)
    return not is_reference and getattr(x, "dtype", None) != jax.dtypes.float0


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


def primal_of(x: Any) -> Any:
    """The array that is mapped, or by which a derivative is taken, where `x` is one such."""
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer | BatchTracer):
        x = x.val if isinstance(x, BatchTracer) else x.primal
    return x


def mapped_axis(x: Any) -> Any:
    """The axis that `jax.vmap` has just taken off an array, or None if it has taken none."""
    return x.batch_dim if isinstance(x, BatchTracer) else None


def traces_around(trace: Any) -> Iterator[Any]:
    """A trace, and those within which it runs, from the innermost on."""
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def set_operand_of(cls: type, operand: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
    """Has primitives take an object of a class for what `operand` makes of it.

    JAX keeps such functions in C++ and forgets none, so one stays, which asks here for another.

    **Returns:** the function that was in its place.
    """
    before = _operand_of.get(cls)
    _operand_of[cls] = operand
    if before is None:
        dtypes.register_canonicalize_value_handler(cls, lambda x: _operand_of[cls](x))
    return before


_operand_of: dict[type, Callable[[Any], Any]] = {}


def set_type_of(cls: type, type_of: Callable[[Any], Any]) -> None:
    """Has `jax.typeof` ask a function for the type of an object of a class."""
    core.pytype_aval_mappings[cls] = type_of


def an_operator_asks() -> bool:
    """Whether the property that calls this is read by an operator of `jax.Array`.

    Those ask for `__jax_array__` too, and leave what has none to the operators of its class.
    """
    return jax_caller().startswith("_operator_")


def jax_caller() -> str:
    """Return the name of the innermost of JAX's functions that is running."""
    frame: Any = sys._getframe(1)
    # Between may be an equinox.Module's __getattribute__, and what checks annotations.
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("jax."):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_name


def is_in_derivative(trace: Any) -> bool:
    """Whether a derivative is taken in a trace, or in one around it."""
    while trace is not None:
        if type(trace) in _DERIVATIVES:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def is_differentiated(x: Any) -> bool:
    """Whether a derivative is taken by an array, or by one that it depends on."""
    return isinstance(x, Tracer) and type(x._trace) in _DERIVATIVES


_DERIVATIVES = {ad.JVPTrace, ad.LinearizeTrace}


def is_staged() -> bool:
    """Whether a primitive bound here becomes an equation of a program, whatever trace it meets."""
    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent", None) or getattr(trace, "parent_trace", None)
    return trace is not None


def is_eager() -> bool:
    """Whether a primitive bound here would be computed at once."""
    return type(core.trace_ctx.trace) is core.EvalTrace


_pvary_p = find_primitive("pvary")


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes along which one of the arrays in a shard_map may differ, by its type."""
    return frozenset[str]().union(*(jax.typeof(x).mat.varying for x in arrays))


def mesh_of(types: Sequence[Any]) -> Any:
    """Return the mesh of the first type that has one, or the empty mesh."""
    meshes = [type.sharding.mesh for type in types if isinstance(type, core.ShapedArray)]
    return next((mesh for mesh in meshes if not mesh.empty), empty_abstract_mesh)


def abstract_array(aval: Any) -> Any:
    """Return an abstract array of a type, with its sharding and the axes along which it varies."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat
    )


def slice_type(x: Any) -> Any:
    """Return the type of a slice along the first axis, with the sharding and varying axes kept."""
    return abstract_array(core.mapped_aval(jax.typeof(x).shape[0], 0, jax.typeof(x)))


def vary_along(axes: Sequence[str], x: Any) -> Any:
    """An array that may differ along some manual axes, as JAX has the operand of a collective."""
    return insert_collective_pvary(tuple(axes), x) if axes else x


def vary_as(leaves: Sequence[Any], x: Any) -> Any:
    """An array that stands for leaves, and may differ where one does, though made without that."""
    return vary_along(tuple(varying_axes(*leaves)), x)


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
