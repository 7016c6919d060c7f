"""Run functions with the rules in force. `vn.implicit` and the rules themselves use this module."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from .._jax.tracing import ConcreteArray, current_trace, is_eager
from .nesting import use_trace
from .trace import ImplicitTrace, ImplicitTracer
from .value import OpaqueNode, Value, has_all_leaves, is_opaque_leaf

Program = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function, its arguments and keywords


def call_program(program: Program) -> Any:
    fn, args, kwargs = program
    return fn(*args, **kwargs)


def redispatch(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` with the rules of the implicit arguments in force.

    Rules use this for functions of veneer. `function` must not capture implicit arrays. Functions
    of users may, so `vn.implicit` runs these functions.
    """
    return run(call_program, (function, args, kwargs))


def run_around(function: Callable, /, *args: Any) -> Any:
    """Call `function(*args)` like `redispatch`, but never leave primitives to an enclosing call.

    Operands that are implicit arrays of an enclosing call of `implicit` then count as dense.
    """
    return run(call_program, (function, args, {}), joins_outer=False)


def run(
    call: Callable[[Program], Any],
    program: Program,
    select: Callable[[Program], Sequence[bool]] | None = None,
    joins_outer: bool = True,
) -> Any:
    """Return `call(program)`, with implicit arrays replaced by tracers that run their rules.

    **Arguments:**

    - `call`: a function that calls a program, such as `call_program`.
    - `program`: a function, its arguments and its keywords.
    - `select`: a function that returns, for each leaf of `program`, whether the leaf is replaced.
      None replaces all implicit arrays.
    - `joins_outer`: whether a primitive with an operand of an enclosing call of `implicit` runs in
      the trace of that call. If not, such an operand counts as dense.
    """
    leaves, treedef = tree_flatten(program, is_opaque_leaf)
    if select is None:
        selected = [isinstance(x, Value) and has_all_leaves(x) for x in leaves]
    else:
        selected = list(select(program))
    if True not in selected:
        # Without a filter, a program that is traced may build implicit values from dense ones.
        is_dense = is_eager() and not any(isinstance(x, Value) for x in leaves)
        if select is not None or is_dense:
            return call(program)
    trace = ImplicitTrace(current_trace(), object(), no_filter=select is None)
    if not joins_outer:
        trace.outer = None
    wrapped = [ImplicitTracer(trace, x) if s else x for s, x in zip(selected, leaves, strict=True)]
    with use_trace(trace, trace):
        # Unflatten inside the trace: modules of flax.nnx remember the trace that they are made in.
        out = call(tree_unflatten(treedef, wrapped))
    if type(out) is not ConcreteArray:  # faster for most results
        out = jax.tree.map(trace.unwrap, out, is_leaf=lambda x: isinstance(x, OpaqueNode))
    trace.invalidate()
    return out
