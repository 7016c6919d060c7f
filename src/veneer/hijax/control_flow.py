"""Where a value that is a tree meets one of a high type: in the carry of a loop, between branches.

A loop's carry must come out as it went in, and branches must agree. An argument is a tree, and what
a primitive made of it is of a high type: one of the two is brought into the form of the other.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from .._core.value import Value, is_value
from .mapping import is_stackable, stackable
from .types import HighType, canonical, is_typed, opened
from .values import flatten_value


def trace_loop(trace: Callable, function: Callable, in_avals: Any, *args: Any, **kw: Any) -> Any:
    """JAX traces the function of a loop, whose carry goes out in the form that it comes in with.

    What a scan stacks is made dense if it cannot be.
    """
    operands = in_avals.unflatten()
    if any(_is_typed_or_value(x) for x in _leaves(operands)):
        function = _kept_on(function, "_veneer_loop_body", _with_carry)
    jaxpr, out_avals = trace(function, in_avals, *args, **kw)
    out = out_avals.unflatten()
    if _is_of_scan(operands[0], out) and not is_stackable(out[1]):
        function = _kept_on(function, "_veneer_scan_body", _with_stackable)
        return trace(function, in_avals, *args, **kw)
    return jaxpr, out_avals


def trace_branch(trace: Callable, function: Callable, in_avals: Any, *args: Any, **kw: Any) -> Any:
    """JAX traces a branch, whose results are trees if of the class of an operand that is one."""
    if any(map(is_value, _leaves(in_avals.unflatten()))):
        function = _kept_on(function, "_veneer_branch", _with_trees)
    return trace(function, in_avals, *args, **kw)


def _is_of_scan(args: Any, out: Any) -> bool:
    return len(args) == 2 and isinstance(out, tuple) and len(out) == 2


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_value)


def _is_typed_or_value(x: Any) -> bool:
    return is_value(x) or type(x) is HighType


def _kept_on(function: Any, name: str, wrap: Callable[[Callable], Callable]) -> Callable:
    """A function made of another, and kept on it: JAX caches what it traces by the function."""
    made = getattr(function, name, None)
    # functools.wraps copies attributes, and a bound method has those of its function.
    if made is None or made.__wrapped__ is not function:
        made = wrap(function)
        made.__wrapped__ = function  # type: ignore[attr-defined]
        with suppress(AttributeError):  # of a bound method, say
            setattr(function, name, made)
    return made


def _with_carry(function: Callable) -> Callable:
    def body(*args: Any) -> Any:
        out = function(*args)
        if len(args) == 1:  # of while_loop
            return _as_before(args[0], out)
        if _is_of_scan(args, out):
            return _as_before(args[0], out[0]), out[1]
        return out

    return body


def _with_stackable(function: Callable) -> Callable:
    def body(*args: Any) -> Any:
        carry, results = function(*args)
        return carry, jax.tree.map(stackable, results, is_leaf=is_value)

    return body


def _as_before(before: Any, after: Any) -> Any:
    old, new = _leaves(before), jax.tree.leaves(after, is_leaf=is_value)
    if len(old) != len(new):
        return after  # as JAX will say
    treedef = jax.tree.structure(after, is_leaf=is_value)
    return jax.tree.unflatten(treedef, [_like(b, a) for b, a in zip(old, new, strict=True)])


def _like(before: Any, after: Any) -> Any:
    if is_value(before):
        after = opened(after)
        return _with_leaves_of(before, after) if is_value(after) else after
    if not is_typed(before):
        return after
    if hasattr(after, "dtype") and not is_typed(after) and not is_value(after):
        raise TypeError(
            f"the carry of a loop comes in as {before.aval} and goes out as a dense array, "
            f"{jax.typeof(after)}: make it dense before the loop, by vn.materialise"
        )
    return canonical(after) if isinstance(after, Value) else after


def _with_leaves_of(before: Any, after: Any) -> Any:
    """A value of which each part with a dense tangent has the form that it had."""
    (old, _), (new, treedef) = flatten_value(before), flatten_value(after)
    if len(old) != len(new):
        return after
    return jax.tree.unflatten(treedef, [_like(b, a) for b, a in zip(old, new, strict=True)])


def _with_trees(function: Callable) -> Callable:
    def branch(*args: Any) -> Any:
        values = [x for x in _leaves(args) if is_value(x)]
        examples = {type(x): x for x in values}

        def as_example(x: Any) -> Any:
            value = opened(x) if is_typed(x) and x.aval.cls in examples else x
            return _like(examples[type(value)], value) if type(value) in examples else value

        return jax.tree.map(as_example, function(*args), is_leaf=is_value)

    return branch
