"""Typed results of jitted functions, converted to pytrees of leaves.

JAX calls a jitted function with typed results from Python, and cannot compile it ahead of time. So
the outermost `jit` returns the leaves, in a tree with the implicit array in place of the typed
result. Then C++ code calls the compiled function.
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
    """Wrap JAX's function that runs a jitted function, to run it with leaves as results."""

    def run_with_leaves(call: Any, *args: Any) -> Any:
        closed = call.params["jaxpr"]
        if within_rule.value:  # C++ would lose the marks of derivatives
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
    """Wrap JAX's check of shardings, to skip high types, which JAX >= 0.12 rejects."""

    def check_arrays(shardings: Any, avals: Any, names: Any, *args: Any, **kwargs: Any) -> Any:
        which = [not (aval.is_high and _is_all_leaves(aval)) for aval in avals]
        names = names and list(compress(names, which))
        shardings, avals = list(compress(shardings, which)), list(compress(avals, which))
        check(shardings, avals, names, *args, **kwargs)

    return check_arrays


def lower_results(attribute: property) -> property:
    """Wrap a property of a traced function, to compute it for leaves as results."""
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
    """Return the lowered parameters and result tree of a `jit`, or None if types must stay high."""
    closed = params["jaxpr"]
    high = [aval for aval in closed.out_avals if aval.is_high]
    if any(aval.is_high for aval in closed.in_avals) or not all(map(_is_all_leaves, high)):
        return None
    params = {**params, "jaxpr": pe.lower_jaxpr2(closed)}
    if high:
        params["out_shardings"] = _for_leaves(closed, params["out_shardings"], _leaf_shardings)
        params["out_layouts"] = _for_leaves(closed, params["out_layouts"], _refuse_layout)
        out_tree = _with_values(out_tree, closed.out_avals)
    return params, out_tree


def _is_all_leaves(aval: Any) -> bool:
    """Return whether a value of a high type has one array for each leaf of the implicit array."""
    if isinstance(aval, TangentType):
        return all(map(is_inexact, aval.of.leaves))
    return isinstance(aval, HighType)


def _for_leaves(closed: Any, for_results: Sequence[Any], of_leaves: Callable) -> tuple[Any, ...]:
    """Repeat a parameter of each result for each of its leaves."""
    for_leaves: list[Any] = []
    for aval, one in zip(closed.out_avals, for_results, strict=True):
        if aval.is_high and one is not None and not isinstance(one, Unspecified):
            for_leaves.extend(of_leaves(aval, one))
        else:
            for_leaves.extend([one] * len(aval.lo_ty()))
    return tuple(for_leaves)


def _leaf_shardings(aval: Any, sharding: Any) -> Sequence[Any]:
    """Return the shardings of the leaves, given the sharding of the dense array."""
    of = aval.of if isinstance(aval, TangentType) else aval
    shardings: list[Any] = []
    at_leaves = lambda *leaves: shardings.extend(leaf_destinations(of.of_arrays(leaves), sharding))
    jax.make_jaxpr(at_leaves)(*of.lo_ty())  # `partition` may look at the leaves
    return shardings


def _refuse_layout(aval: Any, layout: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"out_shardings of a jitted function set the layout {layout} for a result of type {aval}. "
        "An implicit array has no layout. Pass a sharding without a layout."
    )


def _with_values(out_tree: Any, avals: Sequence[Any]) -> Any:
    """Return the tree of the results, with an implicit array for each typed leaf."""
    zeros = lambda t: jax.tree.unflatten(t, [0] * t.num_leaves)
    leaves = [zeros(_treedef_of(aval)) if aval.is_high else 0 for aval in avals]
    return tracing_registry.flatten(jax.tree.unflatten(out_tree, leaves))[1]


def _treedef_of(aval: Any) -> Any:
    if isinstance(aval, TangentType):
        return aval.of.treedef
    return jax.tree.structure(abstract(aval.treedef, aval.leaves))
