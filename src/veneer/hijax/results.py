"""Typed results of jitted functions, which leave those as the trees of their leaves.

JAX's own `jit` calls a function with a high result from Python, and every call anew; and what is
compiled ahead of time cannot return one. So the outermost `jit` gives the leaves, in a tree that
has the value in the place of the typed leaf: C++ then calls what is compiled.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax

from .._core.primitives.sharding import leaf_destinations
from .._jax.hijax import Unspecified, core, pe, tracing_registry
from .types import HighType, TangentType, abstract
from .values import exposed, is_inexact, within_rule


def run_jit(run: Callable) -> Callable:
    """A call of a jitted function."""

    def run_with_leaves(call: Any, *args: Any) -> Any:
        closed = call.params["jaxpr"]
        if within_rule.value:  # C++ would lose the marks of derivatives
            outs, out_flat, out_tree, args_flat, jaxpr, _, *more = run(call, *args)
            return jax.tree.map(exposed, outs), out_flat, out_tree, args_flat, jaxpr, None, *more
        if not closed.is_high:  # within, or in what comes in and goes out; for any call, so briefly
            return run(call, *args)
        if core.trace_state_clean():
            lowered = _lowered(call.params, call.out_tree)
            if lowered is not None:
                params, out_tree = lowered
                return run(call._replace(params=params, out_tree=out_tree), *args)
        outs, *more = run(call, *args)
        if any(aval.is_high for aval in closed.out_avals):
            outs = jax.tree.map(exposed, outs)
        return outs, *more

    return run_with_leaves


def check_shardings(check: Callable) -> Callable:
    """The check that shardings fit, which JAX >= 0.12 has refuse those of high types."""

    def check_arrays(shardings: Any, avals: Any, names: Any, *args: Any, **kwargs: Any) -> Any:
        which = [not (aval.is_high and _is_all_leaves(aval)) for aval in avals]
        names = names and list(compress(names, which))
        shardings, avals = list(compress(shardings, which)), list(compress(avals, which))
        check(shardings, avals, names, *args, **kwargs)

    return check_arrays


def of_leaves(attribute: property) -> property:
    """A property of a traced function as of one whose results are leaves."""
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
    """The parameters of a `jit` and the tree of its results, lowered; None if they must be high."""
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
    """Whether a type is of an implicit array, or of a tangent with a part for each leaf."""
    if isinstance(aval, TangentType):
        return all(map(is_inexact, aval.of.leaves))
    return isinstance(aval, HighType)


def _for_leaves(closed: Any, for_results: Sequence[Any], of_leaves: Callable) -> tuple[Any, ...]:
    """What there is for each result, for each leaf."""
    for_leaves: list[Any] = []
    for aval, one in zip(closed.out_avals, for_results, strict=True):
        if aval.is_high and one is not None and not isinstance(one, Unspecified):
            for_leaves.extend(of_leaves(aval, one))
        else:
            for_leaves.extend([one] * len(aval.lo_ty()))
    return tuple(for_leaves)


def _leaf_shardings(aval: Any, sharding: Any) -> Sequence[Any]:
    """The shardings of the leaves of a value, for that of the dense array."""
    of = aval.of if isinstance(aval, TangentType) else aval
    shardings: list[Any] = []
    at_leaves = lambda *leaves: shardings.extend(leaf_destinations(of.of_arrays(leaves), sharding))
    jax.make_jaxpr(at_leaves)(*of.lo_ty())  # for what a type's `partition` asks of its leaves
    return shardings


def _refuse_layout(aval: Any, layout: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"out_shardings of a jitted function set the layout {layout} for a result of type {aval}. "
        "An implicit array has no layout. Pass a sharding without a layout."
    )


def _with_values(out_tree: Any, avals: Sequence[Any]) -> Any:
    """The tree of the results, with a value in the place of each typed leaf."""
    zeros = lambda t: jax.tree.unflatten(t, [0] * t.num_leaves)
    leaves = [zeros(_treedef_of(aval)) if aval.is_high else 0 for aval in avals]
    return tracing_registry.flatten(jax.tree.unflatten(out_tree, leaves))[1]


def _treedef_of(aval: Any) -> Any:
    if isinstance(aval, TangentType):
        return aval.of.treedef
    return jax.tree.structure(abstract(aval.treedef, aval.leaves))
