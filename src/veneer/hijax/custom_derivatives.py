"""The rules of `jax.custom_vjp` and `jax.custom_jvp`, for functions of implicit arrays.

JAX has one derivative for each flat argument or result, and the rule of a user has one for each
implicit array. An implicit array whose tangent is dense is one flat argument. Any other is a pytree
of its leaves, or one typed value whose tangent is a `Tangent`. The functions here convert the
arguments and results of rules between the two forms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from .._core.errors import holds_derivatives
from .._core.primitives.custom_derivatives import (
    cast_cotangent,
    combine_tangents,
    instantiate,
    leaf_cotangents,
)
from .._core.value import Value, describe, is_part, is_value
from .._jax.hijax import StoreException
from .._jax.primitives import Primitive
from .high import apply
from .mapping import made_dense
from .mode import is_enabled
from .operations import Materialise, Vjp
from .types import (
    HighType,
    TangentType,
    as_high_array,
    canonical,
    is_typed,
    opened,
    opened_derivatives,
    with_dense_tangents,
)
from .values import (
    carried,
    exposed,
    has_derivatives,
    is_inexact,
    leaves_of,
    mark_derivatives,
    within_rule,
)

#: Primitives that reports name when a cotangent or a tangent is materialized. They are never bound.
_COTANGENT, _TANGENT = Primitive("custom_vjp"), Primitive("custom_jvp")


def _patch_flatten(select: Callable[..., tuple] = lambda *args: ()) -> Callable:
    """Make a patch of a function of JAX that takes a user's rule and flattens its arguments.

    The decorated function is called instead of the rule, with the rule, the arguments of JAX's
    function that `select` returns, and the arguments of the rule.
    """

    def decorate(wrapper: Callable) -> Callable:
        def patch(flatten: Callable) -> Callable:
            return lambda rule, *args: flatten(rule.wrap(wrapper, select(*args), None), *args)

        return patch

    return decorate


@_patch_flatten()
def conform_results(function: Callable, *args: Any) -> Any:
    """Return the results of a function, in which a value with a dense tangent is one leaf."""
    return with_dense_tangents(function(*args))


# custom_vjp.


@jax.tree_util.register_dataclass
@dataclass
class _Residuals:
    """The residuals of a forward rule, and the implicit arguments, with None for the others.

    JAX forwards residuals that are arguments, so the arguments add nothing to a program.
    """

    residuals: Any
    operands: Any


@_patch_flatten()
def keep_operands(fwd: Callable, *args: Any) -> Any:
    """Call a forward rule, and keep the implicit arguments with the residuals."""
    if not is_enabled():
        return fwd(*args)
    if any(isinstance(leaf, CustomVJPPrimal) for leaf in jax.tree.leaves(args)):
        # With `symbolic_zeros`, each leaf has a flag. Give the rule one flag for each value.
        is_varied = lambda x: any(leaf.perturbed for leaf in jax.tree.leaves(x))
        unflag = lambda x: jax.tree.map(lambda leaf: exposed(leaf.value), x)
        merge = lambda x: CustomVJPPrimal(unflag(x), is_varied(x))
        args = jax.tree.map(merge, args, is_leaf=is_value)
    pair = fwd(*args)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return pair  # JAX raises an error
    out, residuals = pair
    if not isinstance(residuals, _Residuals):  # with `optimize_remat`, a call has an inner call
        value = lambda x: x.value if isinstance(x, CustomVJPPrimal) else x
        keep = lambda x: value(x) if _is_implicit(value(x)) else None
        residuals = _Residuals(residuals, jax.tree.map(keep, args, is_leaf=is_value))
    return with_dense_tangents(out), residuals


def leave_out_operands(flat_bwd: Callable) -> Callable:
    """Patch JAX's class of backward rules that add to accumulators, one for each leaf."""
    return lambda bwd, *args: flat_bwd(lambda kept, *rest: bwd(_split(kept)[0], *rest), *args)


def _split(kept: Any) -> tuple[Any, Any]:
    """Return the residuals and the operands. These are None if high types were off."""
    return (kept.residuals, kept.operands) if isinstance(kept, _Residuals) else (kept, None)


def _select_types(in_tree: Any, in_avals: Any, *args: Any) -> tuple:
    return in_tree, tuple(in_avals), len(args) > 1 and args[-1]  # `with_logs`, in JAX >= 0.12


@_patch_flatten(_select_types)
def conform_cotangents(
    bwd: Callable, in_tree: Any, in_avals: Any, with_logs: bool, kept: Any, cotangents: Any
) -> Any:
    """Call a backward rule, and convert the cotangents to the types of the flat arguments."""
    residuals, operands = _split(kept)
    if not is_enabled():
        return bwd(residuals, cotangents)
    cotangents = jax.tree.map(_merge_zeros, cotangents, is_leaf=is_value)
    unpack = lambda x: opened(x) if is_typed(x) and not x.aval.dense_tangent else x
    residuals = jax.tree.map(unpack, residuals, is_leaf=is_value)
    out = _call_rule(bwd, residuals, cotangents)
    types = jax.tree.unflatten(in_tree, in_avals)
    operands = (None,) * len(types) if operands is None else operands
    if with_logs:
        return _convert_cotangents(out[0], types, operands), *out[1:]
    return _convert_cotangents(out, types, operands)


def _convert_cotangents(cotangents: Any, types: Any, operands: Any) -> Any:
    """Convert the cotangents of arguments to the types of the flat arguments."""
    if not isinstance(cotangents, tuple | list):
        return cotangents
    is_leaf = lambda ct: ct is None or is_value(ct)
    try:
        return jax.tree.map(_convert_cotangent, tuple(cotangents), types, operands, is_leaf=is_leaf)
    except ValueError:  # different tree structures, for which JAX raises an error
        return cotangents


def _convert_cotangent(ct: Any, t: Any, operand: Any = None) -> Any:
    if ct is None:
        return None
    if is_value(t) or (type(t) is HighType and not t.dense_tangent):
        return _convert_leaf_cotangents(ct, t, operand)
    if any(map(is_value, jax.tree.leaves(t, is_leaf=is_value))):
        raise _cotangent_error(ct, t)
    return made_dense(_COTANGENT, ct) if _is_implicit(ct) else ct


def _convert_leaf_cotangents(ct: Any, t: Any, operand: Any) -> Any:
    """Convert a cotangent of an implicit array that has one for each of its leaves.

    `t` is an implicit array of types, or a high type.
    """
    if isinstance(ct, SymbolicZero):
        return None
    value = opened(exposed(ct))
    if isinstance(getattr(value, "aval", None), TangentType):
        return value
    has_tangent = lambda leaf: jnp.result_type(leaf) != jax.dtypes.float0
    is_dense = lambda v: v.dense_tangent and all(map(has_tangent, jax.tree.leaves(v)))
    if type(value) is not (t.cls if type(t) is HighType else type(t)) or is_dense(value):
        return _pull_back(ct, t, operand)
    if is_value(t):
        is_leaf = lambda x: x is None or is_part(value)(x)
        return jax.tree.map(_convert_cotangent, value, t, is_leaf=is_leaf)
    return _pack_tangent(value, t)


def _pull_back(ct: Any, t: Any, operand: Any) -> Any:
    """Return the cotangents of the leaves of an operand, given the cotangent of its dense array."""
    ct = made_dense(_COTANGENT, ct) if _is_implicit(ct) else ct
    if operand is None or not hasattr(ct, "dtype"):
        raise _cotangent_error(ct, t)
    value = opened(exposed(operand))
    ct = cast_cotangent(value, ct)
    if type(t) is HighType:
        return apply(Vjp(Materialise(t), (True,), (True,)), canonical(value), ct)[0]
    types, structure = jax.tree.flatten(t)
    treedef: Any = structure
    value = jax.tree.unflatten(treedef, map(as_high_array, treedef.flatten_up_to(value)))
    pairs = zip(leaf_cotangents(_COTANGENT, value, ct), types, strict=True)
    return jax.tree.unflatten(treedef, [_convert_cotangent(x, a) for x, a in pairs])


def _pack_tangent(derivatives: Any, t: HighType) -> Any:
    """Return the derivatives of the leaves of a typed value as one tangent."""
    pairs = zip(leaves_of(derivatives), t.leaves, strict=True)
    return TangentType(t).raise_val(*(_convert_cotangent(x, a) for x, a in pairs if is_inexact(a)))


def _cotangent_error(ct: Any, t: Any) -> TypeError:
    (shown,) = describe([exposed(ct)])
    return TypeError(
        f"The backward rule of a custom_vjp returns {shown} for the argument {t}. Return the "
        "cotangent of the dense array, an instance of its class with a cotangent for each leaf, "
        "or None."
    )


# custom_jvp.


@_patch_flatten(lambda *args: args[-1:])
def conform_tangents(rule: Callable, result_types: Callable, primals: Any, tangents: Any) -> Any:
    """Call the rule of a `custom_jvp`, and convert its results to the types of the function's.

    `result_types` returns these types once the function itself has run.
    """
    if not is_enabled():
        return rule(primals, tangents)
    tangents = jax.tree.map(_merge_zeros, tangents, primals, is_leaf=is_value)
    has_tree = lambda t: type(getattr(t, "aval", None)) is TangentType
    unpack = lambda t, primal: opened(primal) if has_tree(t) else primal
    out = _call_rule(rule, jax.tree.map(unpack, tangents, primals), tangents)
    if not isinstance(out, tuple | list) or len(out) != 2:
        return out
    try:
        tree, avals, *_ = result_types()
        types = jax.tree.unflatten(tree, avals)
    except StoreException:  # the function has not run, so JAX takes the types of the rule
        types = out[1]
    try:
        primal = jax.tree.map(_convert_primal, types, out[0], is_leaf=is_value)
        return primal, jax.tree.map(_convert_tangent, types, out[1], primal, is_leaf=is_value)
    except ValueError:  # different tree structures, for which JAX raises an error
        return out


def _convert_primal(t: Any, primal: Any) -> Any:
    if is_value(t):
        return with_dense_tangents(opened(primal))
    return canonical(primal) if isinstance(primal, Value) else primal


def _convert_tangent(t: Any, tangent: Any, primal: Any) -> Any:
    if is_value(t):
        leaves, structure = jax.tree.flatten(primal)
        treedef: Any = structure
        tangents = treedef.flatten_up_to(opened_derivatives(tangent))
        return jax.tree.unflatten(treedef, map(_convert_leaf_tangent, leaves, tangents))
    if type(t) is not HighType or t.dense_tangent or type(tangent) is not t.cls:
        return tangent
    return _pack_tangent(tangent, t)


def _convert_leaf_tangent(leaf: Any, tangent: Any) -> Any:
    """Return the tangent of a leaf. It is dense if the leaf is an implicit array itself."""
    if not is_value(tangent):
        return tangent
    if not holds_derivatives(tangent):
        return made_dense(_TANGENT, tangent)
    return combine_tangents(opened(exposed(leaf)), jax.tree.leaves(tangent), False)


# Both.


def _is_implicit(x: Any) -> bool:
    return is_typed(x) or is_value(exposed(x))


def _merge_zeros(derivative: Any, primal: Any = None) -> Any:
    """Return a derivative in which either the whole value is a `SymbolicZero`, or no leaf is."""
    if isinstance(derivative, SymbolicZero) and isinstance(derivative.aval, TangentType):
        t = derivative.aval.of
        return SymbolicZero(jax.core.ShapedArray(t.shape, t.dtype).to_tangent_aval())
    leaves, treedef = jax.tree.flatten(derivative)
    is_zero = [isinstance(leaf, SymbolicZero) for leaf in leaves]
    if not is_value(derivative) or not any(is_zero):
        return derivative
    if is_value(primal) and all(is_zero):
        return SymbolicZero(primal.aval().to_tangent_aval())
    return jax.tree.unflatten(treedef, map(instantiate, leaves))


def _call_rule(rule: Callable, primals: Any, derivatives: Any) -> Any:
    """Call a user's rule with marked derivatives, so that their use as arrays raises."""
    mark = lambda x: mark_derivatives(opened_derivatives(x))
    derivatives = jax.tree.map(mark, derivatives, is_leaf=is_value)
    with within_rule(within_rule.value or has_derivatives(derivatives)):
        return rule(primals, derivatives)


# Calls inside a rule: JAX flattens the arguments, and derivatives keep their mark.


def carry_to_call(call: Callable) -> Callable:
    """Patch the method `__call__` of `jax.custom_vjp` and `jax.custom_jvp`."""
    return wraps(call)(lambda self, *args, **kwargs: call(self, *carried(args), **carried(kwargs)))


class CarryToCheckpoint:
    """A patch of JAX's registry of pytrees, as `jax.checkpoint` uses it."""

    def __init__(self, registry: Any):
        self._registry = registry

    def flatten(self, tree: Any, *args: Any) -> Any:
        return self._registry.flatten(carried(tree), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)
