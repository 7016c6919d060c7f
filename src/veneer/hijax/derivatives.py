"""`jax.grad`, `vjp`, `jvp`, `linearize` and Jacobians of functions of implicit arrays.

An argument or result with a dense tangent is one leaf of these functions, of its high type. Any
other value is a pytree, whose derivatives JAX returns leaf by leaf. Such a result is marked, so
that no operation takes it for an implicit array.

For `jax.grad` and Jacobians, JAX needs results that are arrays: values with a dense tangent and
scalar values are materialized, and the leaves of other values are differentiated.
"""

import sys
from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper
from inspect import signature
from typing import Any

import jax

from .._core.primitives.leaves import is_label
from .._core.value import Value, is_value
from .._jax.hijax import api
from .._jax.primitives import Primitive
from .mapping import maps_leaves, materialise_traced
from .mode import is_enabled
from .types import is_complete, is_typed, unpack, with_dense_tangents
from .values import (
    expose,
    flatten_value,
    has_derivatives,
    is_derivative,
    keep_marks,
    mark_derivatives,
    values_of,
    within_rule,
)

#: Names the operation in reports of values that are materialized for a Jacobian. It is never bound.
_JACOBIAN = Primitive("jacobian")


class _Differentiated:
    """A wrapper of the function that `jax.grad` or a Jacobian differentiates. It returns arrays.

    `_leaves_for_jacobian` converts its implicit results. With `has_aux`, the function returns a
    pair, and only the first part is differentiated and converted.
    """

    def __init__(self, function: Callable, has_aux: bool = False):
        self._function, self._has_aux = function, has_aux
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        out = self._function(*args)
        if not self._has_aux:
            return jax.tree.map(_leaves_for_jacobian, out, is_leaf=is_value)
        return jax.tree.map(_leaves_for_jacobian, out[0], is_leaf=is_value), *out[1:]

    def with_aux(self, has_aux: bool) -> "_Differentiated":
        return _Differentiated(self._function, has_aux)


def _leaves_for_jacobian(x: Any) -> Any:
    """Return a result of a function that `jax.grad` or a Jacobian differentiates, as arrays.

    An implicit array is materialized if its tangent is one dense array, or if it is a scalar but
    not a label (one dense array with metadata). Otherwise it becomes a pytree of its leaves.
    """
    x = expose(x)
    if not is_typed(x) and not (isinstance(x, Value) and is_complete(x)):
        return x
    if (x.aval.cls if is_typed(x) else x).dense_tangent or not (x.shape or is_label(unpack(x))):
        return materialise_traced(_JACOBIAN, x)
    leaves, treedef = flatten_value(unpack(x))
    return jax.tree.unflatten(treedef, list(map(_leaves_for_jacobian, leaves)))


def split_arguments(argnums_partial: Callable) -> Callable:
    """Wrap JAX's function that splits off the arguments that `jax.grad` differentiates by.

    An implicit argument whose tangent is one dense array becomes one leaf. The function that is
    differentiated becomes a `_Differentiated`, whose results are arrays.
    """

    def split(*args: Any) -> Any:
        function, arguments = argnums_partial(*args)
        if not is_enabled():
            return function, arguments
        return _Differentiated(function), with_dense_tangents(arguments)

    return split


def pull_back(vjp: Callable) -> Callable:
    """Wrap `jax.vjp`, which `jax.grad` calls too, for implicit arguments and results.

    An argument whose tangent is one dense array becomes one leaf. The cotangents of other implicit
    arguments are marked as derivatives of leaves.
    """

    def vjp_of_values(function: Callable, *primals: Any, has_aux: bool = False, **kw: Any) -> Any:
        if not is_enabled():
            return vjp(function, *primals, has_aux=has_aux, **kw)
        is_grad = isinstance(function, _Differentiated)
        if isinstance(function, _Differentiated):
            function = function.with_aux(has_aux)
        primals = with_dense_tangents(primals)
        out, pull, *aux = vjp(function, *primals, has_aux=has_aux, **kw)
        expose_aux = (lambda x: unpack(expose(x))) if is_grad else expose
        aux = jax.tree.map(expose_aux, aux)
        return jax.tree.map(expose, out), _mark_cotangents(pull), *aux

    return vjp_of_values


@lru_cache(maxsize=16)
def _parameter_names(function: Callable) -> tuple[str, ...]:
    return tuple(signature(function).parameters)


def _mark_cotangents(pull: Any) -> Any:
    """Replace an attribute of `pull`, so that `pull` marks its results. Return `pull`.

    `pull` is the function of cotangents that `jax.vjp` returns. A mark says that an implicit array
    holds derivatives of leaves. JAX calls the attribute `fun`, a partial function, to get a
    function of the cotangents.
    """
    fun, names = pull.fun, _parameter_names(pull.fun.func)

    def marking_fun(*args: Any) -> Any:
        arguments = dict(zip(names, args, strict=False))
        has_logs = arguments.get("want_logs", False)  # JAX >= 0.12
        call = partial(_call_and_mark, arguments["in_tree"], has_logs)
        return jax.tree_util.Partial(call, fun.func(*args))

    pull.fun = partial(marking_fun, *fun.args)
    return pull


def _call_and_mark(in_tree: Any, has_logs: bool, pull: Callable, cotangents: Any) -> Any:
    """Return `pull(cotangents)`, with derivatives of leaves marked as such.

    `in_tree` is the tree structure of the arguments of the differentiated function. With
    `has_logs`, the result has another structure and is not marked.
    """
    out = jax.tree.map(expose, pull(cotangents))
    return out if has_logs or not is_enabled() else _mark_like(in_tree, out)


def push_forward(jvp: Callable) -> Callable:
    """Wrap the function of JAX that computes `jax.jvp`, and the columns of `jax.jacfwd`.

    An implicit argument whose tangent is one dense array becomes one leaf. The tangents of other
    implicit results are marked as derivatives of leaves.
    """

    def jvp_of_values(function: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
        if not is_enabled():
            return jvp(function, primals, tangents, has_aux=has_aux)
        if isinstance(function, _Differentiated):
            function = function.with_aux(has_aux)
        primals, tangents = with_dense_tangents(primals), with_dense_tangents(tangents)
        results = jvp(function, primals, tangents, has_aux=has_aux)
        out, tangents, *aux = jax.tree.map(expose, results)
        return out, _mark_like(jax.tree.structure(out), tangents), *aux

    return jvp_of_values


def linearize(jax_linearize: Callable) -> Callable:
    """Wrap `jax.linearize`, for implicit arguments and results.

    An argument whose tangent is one dense array becomes one leaf. The returned function marks the
    tangents of other implicit results as derivatives of leaves.
    """

    def linearize_values(function: Callable, *primals: Any, **kwargs: Any) -> Any:
        if not is_enabled():
            return jax_linearize(function, *primals, **kwargs)
        results = jax_linearize(function, *with_dense_tangents(primals), **kwargs)
        _, push, *_ = results
        out, _, *aux = jax.tree.map(expose, results)
        tree, count = jax.tree.structure(out), len(push.args)

        def push_marked(*args: Any) -> Any:
            tangents = push.func(*args[:count], *with_dense_tangents(args[count:]))
            return _mark_like(tree, jax.tree.map(expose, tangents))

        marked = jax.tree_util.Partial(push_marked, *push.args)
        vars(marked).update(vars(push))
        return out, marked, *aux

    return linearize_values


def _mark_like(tree: Any, derivatives: Any) -> Any:
    """Mark each item of `derivatives` that has a derivative of each leaf. Return `derivatives`.

    `tree` is the structure of the primals. If the tangent of a primal is one dense array, its
    derivative represents an array, even if it is implicit, and is not marked.
    """
    primals = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    if values_of(primals):
        mark = lambda p, d: mark_derivatives(d) if is_value(p) and not p.dense_tangent else d
        jax.tree.map(mark, primals, derivatives, is_leaf=is_value)
    return derivatives


def map_derivatives(vmap: Callable) -> Callable:
    """Wrap `jax.vmap`, to map over leaves when a Jacobian maps a derivative over basis vectors.

    Each leaf of such derivatives has one more axis than in the primals. It is not an axis of the
    represented array.
    """

    def vmap_by_leaves(function: Any, *args: Any, **kwargs: Any) -> Any:
        is_push = isinstance(function, partial) and function.func is api._jvp
        if not is_push and not isinstance(function, api.VJP):
            return vmap(function, *args, **kwargs)

        def derive(*derivatives: Any) -> Any:
            with maps_leaves(False):
                return function(*derivatives)

        mapped = vmap(derive, *args, **kwargs)

        def derive_each(*derivatives: Any) -> Any:
            with maps_leaves(True):
                return mapped(*derivatives)

        return derive_each

    return vmap_by_leaves


# Marks within the rules of `jax.custom_jvp` and `jax.custom_vjp`. The caches of JAX do not
# distinguish pytrees with a mark from pytrees without one.


def keep_marks_in_jit(infer_params: Callable) -> Callable:
    """Wrap the function of JAX that flattens the arguments of a jitted function, to keep marks.

    A mark says that an implicit array holds derivatives of leaves. Without the wrapper, a jitted
    function that a derivative rule calls would lose it.
    """
    return lambda function, info, *args: infer_params(function, info, *map(keep_marks, args))


def keep_marks_in_tree_map(tree_flatten: Callable) -> Callable:
    """Wrap the `tree_flatten` that `jax.tree.map` calls, so that its result keeps marks.

    A mark says that an implicit array holds derivatives of leaves. The wrapper applies only inside
    a user's derivative rule.
    """
    tree_map = jax.tree_util.tree_map.__code__

    def flatten(tree: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = tree_flatten(tree, *args, **kwargs)
        if within_rule.value and sys._getframe(1).f_code is tree_map and has_derivatives(tree):
            return leaves, _MarkedTree(treedef, tree)
        return leaves, treedef

    return flatten


class _MarkedTree:
    """The structure of a tree with marked derivatives, as `jax.tree.map` uses it.

    `unflatten` marks the same derivatives again, unless `jax.tree.map` was given further trees.
    """

    def __init__(self, treedef: Any, tree: Any):
        self._treedef, self._tree, self._is_alone = treedef, tree, True

    def flatten_up_to(self, tree: Any) -> list[Any]:
        self._is_alone = False
        return self._treedef.flatten_up_to(tree)

    def unflatten(self, leaves: Any) -> Any:
        out = self._treedef.unflatten(leaves)
        pairs = zip(values_of(self._tree), values_of(out), strict=False)
        for old, new in pairs if self._is_alone else ():
            if is_derivative(old) and type(new) is type(old):
                mark_derivatives(new)
        return out
