"""The rules of `jax.custom_vjp` and `jax.custom_jvp`, as functions of values and their tangents.

What a rule gives is brought into the form that JAX asks for: a tree, where each floating leaf has a
tangent, or one leaf, where a value is traced with its type; and dense where the tangent is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from .._core.value import Value, is_part, is_value
from .._jax.primitives import Primitive
from .mapping import made_dense
from .mode import is_enabled
from .types import HighType, TangentType, canonical, is_typed, opened
from .values import exposed, is_inexact, leaves_of

#: Names what is made dense as a cotangent; it is never bound.
COTANGENT = Primitive("custom_vjp")


def conform_cotangents(flatten_bwd: Callable) -> Callable:
    """JAX's function that has the backward rule of a `custom_vjp` be one of leaves."""

    def flatten(bwd: Any, in_tree: Any, in_avals: Any, *args: Any) -> Any:
        with_logs = len(args) > 1 and args[-1]  # JAX >= 0.12
        return flatten_bwd(
            bwd.wrap(_in_form, (in_tree, tuple(in_avals), with_logs), None),
            in_tree,
            in_avals,
            *args,
        )

    return flatten


def _in_form(bwd: Callable, in_tree: Any, in_avals: Any, with_logs: bool, *args: Any) -> Any:
    out = bwd(*args)
    if with_logs:
        return _conformed(out[0], in_tree, in_avals), *out[1:]
    return _conformed(out, in_tree, in_avals)


def _conformed(cotangents: Any, in_tree: Any, in_avals: Any) -> Any:
    """The cotangents of arguments, in the form that the types of their leaves ask for."""
    of = jax.tree.unflatten(in_tree, in_avals)
    if not is_enabled() or not isinstance(cotangents, tuple | list):
        return cotangents
    is_leaf = lambda ct: ct is None or is_value(ct)
    try:
        return jax.tree.map(_cotangent, tuple(cotangents), of, is_leaf=is_leaf)
    except ValueError:  # as JAX will say
        return cotangents


def _cotangent(ct: Any, of: Any) -> Any:
    if ct is None:
        return None
    if is_value(of) or (type(of) is HighType and not of.dense_tangent):
        return _by_leaves(ct, of)
    if any(map(is_value, jax.tree.leaves(of, is_leaf=is_value))):
        raise _misfit(ct, of)
    return made_dense(COTANGENT, ct) if is_typed(ct) or is_value(exposed(ct)) else ct


def _by_leaves(ct: Any, of: Any) -> Any:
    """The cotangent of a value that has one for each of its leaves: in the form of that."""
    value = opened(exposed(ct))
    if isinstance(getattr(value, "aval", None), TangentType):
        return value
    if type(value) is not (of.cls if type(of) is HighType else type(of)):
        raise _misfit(ct, of)
    if is_value(of):
        is_leaf = lambda x: x is None or is_part(value)(x)
        return jax.tree.map(_cotangent, value, of, is_leaf=is_leaf)
    each = zip(leaves_of(value), of.leaves, strict=True)
    tangents = [_cotangent(leaf, t) for leaf, t in each if is_inexact(t)]
    return TangentType(of).raise_val(*tangents)


def _misfit(ct: Any, of: Any) -> TypeError:
    return TypeError(
        f"the backward rule of a custom_vjp gives {jax.typeof(ct)} for the argument {of}, which "
        "has a cotangent for each leaf: give one of its class with those in their places, or None"
    )


def pair_tangents(flatten_jvp: Callable) -> Callable:
    """JAX's function that has the rule of a `custom_jvp` be one of leaves."""
    return lambda rule, *args: flatten_jvp(rule.wrap(_in_pairs, (), None), *args)


def _in_pairs(rule: Callable, primals: Any, tangents: Any) -> Any:
    """A rule at values, each of which is a tree if its tangent is, and else one leaf."""
    is_high = lambda t: isinstance(getattr(t, "aval", None), TangentType)
    out = rule(jax.tree.map(partial(_paired, is_high), tangents, primals), tangents)
    if not is_enabled() or not isinstance(out, tuple | list) or len(out) != 2:
        return out
    try:
        return jax.tree.map(partial(_paired, lambda t: not is_value(t)), *out[::-1]), out[1]
    except ValueError:  # as JAX will say
        return out


def _paired(is_one_leaf: Callable[[Any], bool], tangent: Any, primal: Any) -> Any:
    return canonical(primal) if isinstance(primal, Value) and is_one_leaf(tangent) else primal
