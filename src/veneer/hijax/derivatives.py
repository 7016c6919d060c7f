"""Where JAX's functions of derivatives meet values: their arguments, Jacobians, rules of users.

A value whose tangent is dense is one leaf. Any other is a tree, of which each floating leaf has a
tangent, wherever a user hands it to JAX or is handed it: a typed value is opened there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from .._core.value import Value, is_part, is_value
from .._jax.hijax import api
from .._jax.primitives import Primitive
from .mapping import by_leaves, made_dense
from .mode import is_enabled
from .types import HighType, TangentType, canonical, is_complete, is_typed, opened
from .values import exposed, flatten_value, is_inexact, leaves_of

#: Name what is made dense for a Jacobian, and as a cotangent; they are never bound.
JACOBIAN, COTANGENT = Primitive("jacobian"), Primitive("custom_vjp")

# Arguments.


def with_dense_tangents(tree: Any) -> Any:
    """The arguments of a derivative, of which a value with a dense tangent is one leaf."""
    return jax.tree.map(_as_one_leaf, tree, is_leaf=is_value) if is_enabled() else tree


def _as_one_leaf(x: Any) -> Any:
    if not isinstance(x, Value) or not is_complete(x):
        return x
    if x.dense_tangent:
        return canonical(x)
    leaves, treedef = flatten_value(x)
    return jax.tree.unflatten(treedef, list(map(_as_one_leaf, leaves)))


def typed_arguments(argnums_partial2: Callable) -> Callable:
    """JAX's function that takes apart by which arguments it differentiates."""

    def typed(*args: Any) -> Any:
        function, dynamic = argnums_partial2(*args)
        return function, with_dense_tangents(dynamic)

    return typed


class Flattening:
    """JAX's functions of flat trees, as `jax.vjp`, `jvp` and `linearize` use them."""

    def __init__(self, flat_trees: Any):
        self._flat_trees = flat_trees

    def flatten(self, tree: Any, *args: Any, **kwargs: Any) -> Any:
        """The leaves of a tree."""
        return self._flat_trees.flatten(with_dense_tangents(tree), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flat_trees, name)


# Jacobians.


def pull_to_leaves(vjp: Callable) -> Callable:
    """JAX's `vjp` as `jax.jacrev` uses it."""

    def vjp_of_leaves(function: Callable, *primals: Any, has_aux: bool = False, **kw: Any) -> Any:
        return vjp(_to_leaves(function, has_aux), *primals, has_aux=has_aux, **kw)

    return vjp_of_leaves


def map_by_leaves(vmap: Callable) -> Callable:
    """JAX's `vmap` as its Jacobians use it, with tangents for arguments and results."""

    def vmap_of_any(function: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(function, partial) and function.func is api._jvp:
            of, *primals = function.args
            of = _to_leaves(of, function.keywords["has_aux"])
            function = partial(function.func, of, *primals, **function.keywords)
        elif not isinstance(function, api.VJP):
            return vmap(function, *args, **kwargs)

        def one(*tangents: Any) -> Any:
            with by_leaves(False):
                return function(*tangents)

        mapped = vmap(one, *args, **kwargs)

        def of_leaves(*tangents: Any) -> Any:
            with by_leaves(True):
                return mapped(*tangents)

        return of_leaves

    return vmap_of_any


def _to_leaves(function: Callable, has_aux: bool) -> Callable:
    """A function whose Jacobian is taken: its results are arrays, each with an axis for itself."""

    def arrays_of(*args: Any) -> Any:
        out = function(*args)
        if not is_enabled():
            return out
        if has_aux:
            return jax.tree.map(_for_jacobian, out[0], is_leaf=is_value), *out[1:]
        return jax.tree.map(_for_jacobian, out, is_leaf=is_value)

    return arrays_of


def _for_jacobian(x: Any) -> Any:
    x = exposed(x)
    if not is_typed(x) and not (isinstance(x, Value) and is_complete(x)):
        return x
    if (x.aval.cls if is_typed(x) else x).dense_tangent:
        return made_dense(JACOBIAN, x)
    leaves, treedef = flatten_value(opened(x))
    return jax.tree.unflatten(treedef, list(map(_for_jacobian, leaves)))


# Rules of users.


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
