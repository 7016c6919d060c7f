"""Typed results of jitted functions, which leave those as the trees of their leaves.

JAX's own `jit` calls a function with a high result from Python, and every call anew; and what is
compiled ahead of time cannot return one. So the outermost `jit` gives the leaves, in a tree that
has the value in the place of the typed leaf: C++ then calls what is compiled.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax

from .._jax.hijax import Unspecified, core, pe, pjit, stages, tracing_registry


class Results(NamedTuple):
    """What there is to know of types whose values come out of a jitted function.

    - `is_ours`: whether a type is one of an implicit array, or of its tangent, all of whose leaves
      are results.
    - `tree`: the structure of such a value.
    - `placed`: the shardings of its leaves, for that of the dense array.
    - `exposed`: what a user is given for any other leaf.
    """

    is_ours: Callable[[Any], bool]
    tree: Callable[[Any], Any]
    placed: Callable[[Any, Any], Sequence[Any]]
    exposed: Callable[[Any], Any]


def open_results(found: Any, results: Results) -> None:
    """Has jitted functions give leaves, called or compiled ahead of time."""
    found.attribute(pjit, "_run_python_pjit", lambda own: _run_jit(own, results))
    found.attribute(pjit, "pjit_check_aval_sharding", lambda own: _check(own, results))
    for name in ("lojax", "out_info"):
        found.attribute(stages.Traced, name, lambda own: _of_opened(own, results))


def _run_jit(own: Callable, results: Results) -> Callable:
    def run(call: Any, *args: Any) -> Any:
        closed = call.params["jaxpr"]
        if not closed.is_high:  # within, or in what comes in and goes out; for any call, so briefly
            return own(call, *args)
        if core.trace_state_clean():
            opened = _opened(call.params, call.out_tree, results)
            if opened is not None:
                params, out_tree = opened
                return own(call._replace(params=params, out_tree=out_tree), *args)
        outs, *more = own(call, *args)
        if any(aval.is_high for aval in closed.out_avals):
            outs = jax.tree.map(results.exposed, outs)
        return outs, *more

    return run


def _check(own: Callable, results: Results) -> Callable:
    """The check that shardings fit, which JAX >= 0.12 has refuse those of high types."""

    def check(shardings: Any, avals: Any, names: Any, *args: Any, **kwargs: Any) -> Any:
        which = [not (aval.is_high and results.is_ours(aval)) for aval in avals]
        names = names and list(compress(names, which))
        own(list(compress(shardings, which)), list(compress(avals, which)), names, *args, **kwargs)

    return check


def _of_opened(own: property, results: Results) -> property:
    """A property of a traced function as of one whose results are leaves."""
    get: Any = own.fget

    def found(traced: Any) -> Any:
        if not traced.jaxpr.is_high:
            return get(traced)
        opened = _opened(traced._params, traced.out_tree, results)
        if opened is None:
            return get(traced)
        params, out_tree = opened
        more = [traced._fun_sourceinfo] if hasattr(traced, "_fun_sourceinfo") else []  # JAX >= 0.12
        own_args = traced._meta_tys_flat, params, traced._in_tree, out_tree, traced._consts
        return get(type(traced)(*own_args, *more))

    return property(found)


def _opened(params: dict[str, Any], out_tree: Any, results: Results) -> Any:
    """The parameters of a `jit` and the tree of its results, lowered; None if they must be high."""
    closed = params["jaxpr"]
    high = [aval for aval in closed.out_avals if aval.is_high]
    if any(aval.is_high for aval in closed.in_avals) or not all(map(results.is_ours, high)):
        return None
    params = {**params, "jaxpr": pe.lower_jaxpr2(closed)}
    if high:
        params["out_shardings"] = _each(closed, params["out_shardings"], results.placed)
        params["out_layouts"] = _each(closed, params["out_layouts"], _no_layout)
        out_tree = _opened_tree(out_tree, closed.out_avals, results.tree)
    return params, out_tree


def _each(closed: Any, given: Sequence[Any], of_leaves: Callable) -> tuple[Any, ...]:
    """What is given for each result, as for each leaf."""
    found: list[Any] = []
    for aval, one in zip(closed.out_avals, given, strict=True):
        if aval.is_high and one is not None and not isinstance(one, Unspecified):
            found.extend(of_leaves(aval, one))
        else:
            found.extend([one] * len(aval.lo_ty()))
    return tuple(found)


def _no_layout(aval: Any, layout: Any) -> Sequence[Any]:
    raise NotImplementedError(
        f"out_shardings of a jitted function give the layout {layout} for a result of the type "
        f"{aval}: an implicit array has no layout of its own. Give a sharding without a layout."
    )


def _opened_tree(out_tree: Any, avals: Sequence[Any], tree: Callable[[Any], Any]) -> Any:
    whole = lambda t: jax.tree.unflatten(t, [0] * t.num_leaves)
    leaves = [whole(tree(aval)) if aval.is_high else 0 for aval in avals]
    return tracing_registry.flatten(jax.tree.unflatten(out_tree, leaves))[1]
