"""Run functions with the rules in force: the part of `vn.implicit` that the rules use, too."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_unflatten

from .._jax.tracing import ConcreteArray, current_trace, is_eager
from .nesting import enter, leave
from .trace import ImplicitTrace, ImplicitTracer
from .value import OpaqueNode, Value, has_all_leaves, is_opaque_leaf

Program = tuple[Any, tuple[Any, ...], dict[str, Any]]  # a function, its arguments and keywords


def call_program(program: Program) -> Any:
    fn, args, kwargs = program
    return fn(*args, **kwargs)


def redispatch(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call `function` with the rules in force. It must not capture implicit arrays.

    Rules call it for functions of veneer. `vn.implicit` is for functions of users.
    """
    return run(call_program, (function, args, kwargs))


def run_around(function: Callable, /, *args: Any) -> Any:
    """Call `redispatch`, but treat the implicit arrays of an enclosing call as dense operands."""
    return run(call_program, (function, args, {}), joins_outer=False)


def run(
    call: Callable[[Program], Any],
    program: Program,
    select: Callable[[Program], Sequence[bool]] | None = None,
    joins_outer: bool = True,
) -> Any:
    """Call `call(program)` with implicit arrays replaced by tracers that run their rules.

    **Arguments:**

    - `program`: a pytree. Its implicit arrays are the operands.
    - `select`: a function that selects among the leaves of `program`. None selects all.
    - `joins_outer`: whether a primitive with operands of an enclosing `implicit` runs there.
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
    trace.outer = trace.outer if joins_outer else None
    wrapped = [ImplicitTracer(trace, x) if s else x for s, x in zip(selected, leaves, strict=True)]
    state = enter(trace, trace)
    try:
        # Unflatten inside the trace: modules of flax.nnx remember the trace that they are made in.
        out = call(tree_unflatten(treedef, wrapped))
    finally:
        leave(state)
    if type(out) is not ConcreteArray:  # a fast path for most results
        out = jax.tree.map(trace.unwrap, out, is_leaf=lambda x: isinstance(x, OpaqueNode))
    trace.invalidate()
    return out
