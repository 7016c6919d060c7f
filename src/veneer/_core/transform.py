"""Run functions with the rules in force. `vn.implicit` and the rules themselves use this module."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from .._jax.tracing import ConcreteArray, current_trace, is_eager
from .nesting import use_trace
from .trace import ImplicitTrace, ImplicitTracer
from .value import OpaqueNode, has_all_leaves, is_opaque_leaf, is_value

Program = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function, its arguments and keywords


def call_program(program: Program) -> Any:
    fn, args, kwargs = program
    return fn(*args, **kwargs)


def redispatch(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` with the rules of the implicit arguments in force.

    `function` must not capture implicit arrays. A function of a user may capture some, so call it
    with `vn.implicit`.
    """
    return run(call_program, (function, args, kwargs))


def redispatch_isolated(function: Callable, /, *args: Any) -> Any:
    """Call `function(*args)` like `redispatch`, but treat implicit arrays of outer calls as dense.

    `redispatch` instead leaves a primitive with such an operand to the outer call of `implicit`.
    """
    return run(call_program, (function, args, {}), defers_to_outer=False)


def run(
    call: Callable[[Program], Any],
    program: Program,
    select: Callable[[Program], Sequence[bool]] | None = None,
    defers_to_outer: bool = True,
) -> Any:
    """Return `call(program)`, with implicit arrays replaced by tracers that run their rules.

    **Arguments:**

    - `call`: a function that calls a program, such as `call_program`.
    - `program`: a function, its arguments and its keywords.
    - `select`: a function that returns, for each leaf of `program`, whether the leaf is replaced.
      None replaces all implicit arrays.
    - `defers_to_outer`: whether a primitive with an implicit array of an outer call of `implicit`
      runs in the trace of that call. If False, the array counts as dense.
    """
    leaves, treedef = tree_flatten(program, is_opaque_leaf)
    selected = select(program) if select else [is_value(x) and has_all_leaves(x) for x in leaves]
    if True not in selected:
        # Without a filter, a program that is traced may build implicit values from dense ones.
        is_dense = is_eager() and not any(map(is_value, leaves))
        if select is not None or is_dense:
            return call(program)
    trace = ImplicitTrace(current_trace(), object(), no_filter=select is None)
    if not defers_to_outer:
        trace.outer = None
    wrapped = [ImplicitTracer(trace, x) if s else x for s, x in zip(selected, leaves, strict=True)]
    with use_trace(trace, trace):
        # Unflatten inside the trace: modules of flax.nnx remember the trace that they are made in.
        out = call(tree_unflatten(treedef, wrapped))
    if type(out) is not ConcreteArray:  # faster for most results
        out = jax.tree.map(trace.unwrap, out, is_leaf=lambda x: isinstance(x, OpaqueNode))
    trace.invalidate()
    return out
