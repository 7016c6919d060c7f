"""Typed results of jitted functions, converted to pytrees of leaves.

JAX calls a jitted function with typed results from Python, and cannot compile it ahead of time. So
the outermost `jit` is compiled to return the leaves of each typed result. The tree structure of the
results has an implicit array in that place, so JAX rebuilds it from the leaves. Then JAX's C++ code
calls the compiled function.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax

from .._core.primitives.sharding import leaf_destinations
from .._jax.hijax import Unspecified, core, pe, tracing_registry
from .types import HighType, TangentType, abstract
from .values import expose, is_inexact, within_rule


def run_lowered(run: Callable) -> Callable:
    """Wrap JAX's function that runs a jitted function, for results that are implicit arrays.

    Such a result is one typed value in the jaxpr. Outside of traces, the compiled function returns
    its leaves, and JAX builds the implicit array from these. Inside a trace, the result stays
    typed.
    """

    def run_with_leaves(call: Any, *args: Any) -> Any:
        closed = call.params["jaxpr"]
        if within_rule.value:
            # Return None as the compiled function, so that JAX does not call it from C++, which
            # would lose the marks of derivatives.
            outs, out_flat, out_tree, args_flat, jaxpr, _, *more = run(call, *args)
            return jax.tree.map(expose, outs), out_flat, out_tree, args_flat, jaxpr, None, *more
        if not closed.is_high:
            return run(call, *args)
        if core.trace_state_clean():
            lowered = _lowered(call.params, call.out_tree)
            if lowered is not None:
                params, out_tree = lowered
                return run(call._replace(params=params, out_tree=out_tree), *args)
        outs, *more = run(call, *args)
        if any(aval.is_high for aval in closed.out_avals):
            outs = jax.tree.map(expose, outs)
        return outs, *more

    return run_with_leaves


def check_shardings(check: Callable) -> Callable:
    """Wrap JAX's check of shardings, to skip high types, for which JAX >= 0.12 raises an error."""

    def check_arrays(shardings: Any, avals: Any, names: Any, *args: Any, **kwargs: Any) -> Any:
        is_checked = [not (aval.is_high and _has_array_per_leaf(aval)) for aval in avals]
        names = names and list(compress(names, is_checked))
        shardings = list(compress(shardings, is_checked))
        avals = list(compress(avals, is_checked))
        check(shardings, avals, names, *args, **kwargs)

    return check_arrays


def lower_results(attribute: property) -> property:
    """Wrap a property of `jax.stages.Traced`, the result of `jax.jit(f).trace(...)`.

    The property then describes a function that returns the leaves of each result that is an
    implicit array.
    """
    get: Any = attribute.fget

    def get_of_leaves(traced: Any) -> Any:
        if not traced.jaxpr.is_high:
            return get(traced)
        lowered = _lowered(traced._params, traced.out_tree)
        if lowered is None:
            return get(traced)
        params, out_tree = lowered
        more = [traced._fun_sourceinfo] if hasattr(traced, "_fun_sourceinfo") else []  # JAX >= 0.12
        args = traced._meta_tys_flat, params, traced._in_tree, out_tree, traced._consts
        return get(type(traced)(*args, *more))

    return property(get_of_leaves)


def _lowered(params: dict[str, Any], out_tree: Any) -> Any:
    """Convert a jitted function to return the leaves of each result that is an implicit array.

    `params` are the parameters of the primitive `jit`, and `out_tree` is the tree structure of the
    results. Return both for the new function. Return None if an operand has a high type, or if the
    arrays of a typed result are not all its leaves.
    """
    closed = params["jaxpr"]
    high = [aval for aval in closed.out_avals if aval.is_high]
    if any(aval.is_high for aval in closed.in_avals) or not all(map(_has_array_per_leaf, high)):
        return None
    params = {**params, "jaxpr": pe.lower_jaxpr2(closed)}
    if high:
        params["out_shardings"] = _per_leaf(closed, params["out_shardings"], _leaf_shardings)
        params["out_layouts"] = _per_leaf(closed, params["out_layouts"], _reject_layout)
        values = [abstract(t.treedef, t.leaves) if t.is_high else 0 for t in closed.out_avals]
        out_tree = tracing_registry.flatten(jax.tree.unflatten(out_tree, values))[1]
    return params, out_tree


def _has_array_per_leaf(aval: Any) -> bool:
    """Return whether `aval` is a high type with one array for each leaf of the implicit array.

    The type of a tangent has no array for a leaf of an integer dtype.
    """
    if isinstance(aval, TangentType):
        return all(map(is_inexact, aval.of.leaves))
    return isinstance(aval, HighType)


def _per_leaf(closed: Any, per_result: Sequence[Any], split: Callable) -> tuple[Any, ...]:
    """Return shardings or layouts, one for each result of a jaxpr, as one for each leaf.

    `split(aval, x)` returns the sharding or layout of each leaf of a result of type `aval`, given
    `x`, the one that the user set for the result.
    """
    per_leaf: list[Any] = []
    for aval, x in zip(closed.out_avals, per_result, strict=True):
        if aval.is_high and x is not None and not isinstance(x, Unspecified):
            per_leaf.extend(split(aval, x))
        else:
            per_leaf.extend([x] * len(aval.lo_ty()))
    return tuple(per_leaf)


def _leaf_shardings(aval: Any, sharding: Any) -> Sequence[Any]:
    """Return the sharding of each leaf of an implicit array of type `aval`.

    `sharding` is the sharding that the user set for the dense array.
    """
    high_type = aval.of if isinstance(aval, TangentType) else aval
    shardings: list[Any] = []

    def find_shardings(*leaves: Any) -> None:
        shardings.extend(leaf_destinations(high_type.of_arrays(leaves), sharding))

    jax.make_jaxpr(find_shardings)(*high_type.lo_ty())  # traced: `partition` may look at the leaves
    return shardings


def _reject_layout(aval: Any, layout: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"out_shardings of a jitted function set the layout {layout} for a result of type {aval}. "
        "An implicit array has no layout. Pass a sharding without a layout."
    )
