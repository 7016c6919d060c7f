"""The rules of `jax.custom_vjp` and `jax.custom_jvp`, as functions of values and their tangents.

What a rule gives is brought into the form that JAX asks for: a tree, where each floating leaf has a
tangent, or one leaf, where a value is traced with its type; and dense where the tangent is.
"""

from collections.abc import Callable
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

#: Name what is made dense as a cotangent or a tangent; they are never bound.
COTANGENT, TANGENT = Primitive("custom_vjp"), Primitive("custom_jvp")


def conform_results(flatten_fun: Callable) -> Callable:
    """JAX's function that has a function with derivatives of its own be one of leaves."""

    def flatten(fun: Any, in_tree: Any) -> Any:
        return flatten_fun(fun.wrap(_results, (), None), in_tree)

    return flatten


def _results(fun: Callable, *args: Any) -> Any:
    """Call a function, with one leaf for each result whose tangent is dense."""
    return with_dense_tangents(fun(*args))


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """The residuals of a forward rule, with the implicit arguments and None for the others.

    JAX forwards residuals that are arguments, so that the latter add nothing to a program.
    """

    def __init__(self, residuals: Any, operands: Any):
        self.residuals, self.operands = residuals, operands

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.residuals, self.operands), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> "_Residuals":
        return cls(*children)


def keep_operands(flatten_fwd: Callable) -> Callable:
    """JAX's function that has the forward rule of a `custom_vjp` be one of leaves."""

    def flatten(fwd: Any, *args: Any) -> Any:
        return flatten_fwd(fwd.wrap(_with_operands, (), None), *args)

    return flatten


def _with_operands(fwd: Callable, *args: Any) -> Any:
    if not is_enabled():
        return fwd(*args)
    # JAX may tell of each leaf whether it moves. A rule is told of each operand.
    if any(isinstance(leaf, CustomVJPPrimal) for leaf in jax.tree.leaves(args)):
        args = jax.tree.map(_one_primal, args, is_leaf=is_value)
    pair = fwd(*args)
    if not isinstance(pair, tuple | list) or len(pair) != 2:  # as JAX will say
        return pair
    out, residuals = pair
    if not isinstance(residuals, _Residuals):  # as those of `optimize_remat` already are
        residuals = _Residuals(residuals, jax.tree.map(_operand, args, is_leaf=is_value))
    return with_dense_tangents(out), residuals


def _operand(x: Any) -> Any:
    x = x.value if isinstance(x, CustomVJPPrimal) else x
    return x if is_value(exposed(x)) or is_typed(x) else None


def _one_primal(x: Any) -> Any:
    leaves, treedef = jax.tree.flatten(x)
    value = jax.tree.unflatten(treedef, [exposed(leaf.value) for leaf in leaves])
    return CustomVJPPrimal(value, any(leaf.perturbed for leaf in leaves))


def leave_out_operands(flat_bwd: Callable) -> Callable:
    """JAX's class of backward rules that add to accumulators, which are by leaves."""

    def flatten(bwd: Callable, *args: Any) -> Any:
        return flat_bwd(lambda kept, *rest: bwd(_opened(kept)[0], *rest), *args)

    return flatten


def _opened(kept: Any) -> tuple[Any, Any]:
    """The residuals, and the implicit arguments, or None where the mode was off."""
    return (kept.residuals, kept.operands) if isinstance(kept, _Residuals) else (kept, None)


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


def _in_form(
    bwd: Callable, in_tree: Any, in_avals: Any, with_logs: bool, kept: Any, cotangents: Any
) -> Any:
    residuals, operands = _opened(kept)
    if not is_enabled():
        return bwd(residuals, cotangents)
    cotangents = jax.tree.map(_with_zeros, cotangents, is_leaf=is_value)
    out = call_rule(bwd, jax.tree.map(_with_leaves, residuals, is_leaf=is_value), cotangents)
    of = jax.tree.unflatten(in_tree, in_avals)
    operands = (None,) * len(of) if operands is None else operands
    if with_logs:
        return _conformed(out[0], of, operands), *out[1:]
    return _conformed(out, of, operands)


def _with_leaves(kept: Any) -> Any:
    """What the forward pass has kept: a tree, where its cotangent is one."""
    t = getattr(kept, "aval", None)
    return opened(kept) if type(t) is HighType and not t.dense_tangent else kept


def _conformed(cotangents: Any, of: Any, operands: Any) -> Any:
    """The cotangents of arguments, in the form that the types of their leaves ask for."""
    if not isinstance(cotangents, tuple | list):
        return cotangents
    is_leaf = lambda ct: ct is None or is_value(ct)
    try:
        return jax.tree.map(_cotangent, tuple(cotangents), of, operands, is_leaf=is_leaf)
    except ValueError:  # as JAX will say
        return cotangents


def _cotangent(ct: Any, of: Any, operand: Any = None) -> Any:
    if ct is None:
        return None
    if is_value(of) or (type(of) is HighType and not of.dense_tangent):
        return _by_leaves(ct, of, operand)
    if any(map(is_value, jax.tree.leaves(of, is_leaf=is_value))):
        raise _misfit(ct, of)
    return made_dense(COTANGENT, ct) if is_typed(ct) or is_value(exposed(ct)) else ct


def _by_leaves(ct: Any, of: Any, operand: Any) -> Any:
    """The cotangent of a value that has one for each of its leaves: in the form of that."""
    if isinstance(ct, SymbolicZero):
        return None
    value = opened(exposed(ct))
    if isinstance(getattr(value, "aval", None), TangentType):
        return value
    if type(value) is not (of.cls if type(of) is HighType else type(of)) or _is_dense(value):
        return _pulled_back(ct, of, operand)
    if is_value(of):
        is_leaf = lambda x: x is None or is_part(value)(x)
        return jax.tree.map(_cotangent, value, of, is_leaf=is_leaf)
    return _typed(value, of)


def _is_dense(value: Any) -> bool:
    """Return whether an implicit cotangent represents a dense one, not one per leaf."""
    float0 = jax.dtypes.float0
    return value.dense_tangent and all(jnp.result_type(x) != float0 for x in jax.tree.leaves(value))


def _pulled_back(ct: Any, of: Any, operand: Any) -> Any:
    """Return the cotangents of the leaves, given the cotangent of the dense array."""
    (ct,) = [made_dense(COTANGENT, ct)] if is_typed(ct) or is_value(exposed(ct)) else [ct]
    if operand is None or not hasattr(ct, "dtype"):
        raise _misfit(ct, of)
    value = opened(exposed(operand))
    ct = cast_cotangent(value, ct)
    if type(of) is HighType:
        pull = Vjp(Materialise(of), (True,), (True,))
        return apply(pull, canonical(value), ct)[0]
    types, structure = jax.tree.flatten(of)
    treedef: Any = structure
    value = jax.tree.unflatten(treedef, map(as_high_array, treedef.flatten_up_to(value)))
    pulled = zip(leaf_cotangents(COTANGENT, value, ct), types, strict=True)
    return jax.tree.unflatten(treedef, [_cotangent(x, t) for x, t in pulled])


def _typed(derivatives: Any, of: HighType) -> Any:
    """A tree of derivatives as one leaf."""
    each = zip(leaves_of(derivatives), of.leaves, strict=True)
    leaves = [_cotangent(leaf, t) for leaf, t in each if is_inexact(t)]
    return TangentType(of).raise_val(*leaves)


def _misfit(ct: Any, of: Any) -> TypeError:
    (described,) = describe([exposed(ct)])
    return TypeError(
        f"The backward rule of a custom_vjp returns {described} for the argument {of}. Return the "
        "cotangent of the dense array, an instance of its class with a cotangent for each leaf, "
        "or None."
    )


def pair_tangents(flatten_jvp: Callable) -> Callable:
    """JAX's function that has the rule of a `custom_jvp` be one of leaves."""

    def flatten(rule: Any, *args: Any) -> Any:
        return flatten_jvp(rule.wrap(_in_pairs, (args[-1],), None), *args)

    return flatten


def _in_pairs(rule: Callable, types_of_results: Callable, primals: Any, tangents: Any) -> Any:
    """A rule at values, each of which is a tree, as its tangent is, or one leaf."""
    if not is_enabled():
        return rule(primals, tangents)
    tangents = jax.tree.map(_with_zeros, tangents, primals, is_leaf=is_value)
    out = call_rule(rule, jax.tree.map(_with_tangent, tangents, primals), tangents)
    if not isinstance(out, tuple | list) or len(out) != 2:
        return out
    try:
        tree, avals, *_ = types_of_results()
    except StoreException:  # the function itself has not run, so that they may be any
        pairs: list[Any] = [out[1], out[1]]
    else:
        pairs = [jax.tree.unflatten(tree, avals)] * 2
    try:
        primal = jax.tree.map(_result, pairs[0], out[0], is_leaf=is_value)
        return primal, jax.tree.map(_tangent, pairs[1], out[1], primal, is_leaf=is_value)
    except ValueError:  # as JAX will say
        return out


def _with_tangent(tangent: Any, primal: Any) -> Any:
    return opened(primal) if type(getattr(tangent, "aval", None)) is TangentType else primal


def _result(of: Any, primal: Any) -> Any:
    """A result in the form of a type, or of its tangent."""
    if is_value(of):
        return with_dense_tangents(opened(primal))
    return canonical(primal) if isinstance(primal, Value) else primal


def _tangent(of: Any, tangent: Any, primal: Any) -> Any:
    """The tangent of a result in the form of a type; or as it is."""
    if is_value(of):
        leaves, structure = jax.tree.flatten(primal)
        treedef: Any = structure
        tangents = treedef.flatten_up_to(opened_derivatives(tangent))
        return jax.tree.unflatten(treedef, map(_tangent_of_leaf, leaves, tangents))
    if type(of) is not HighType or of.dense_tangent or type(tangent) is not of.cls:
        return tangent
    return _typed(tangent, of)


def _tangent_of_leaf(leaf: Any, tangent: Any) -> Any:
    """The tangent of a leaf, which is dense if the leaf is a value."""
    if not is_value(tangent):
        return tangent
    if not holds_derivatives(tangent):
        return made_dense(TANGENT, tangent)
    return combine_tangents(opened(exposed(leaf)), jax.tree.leaves(tangent), False)


# What rules are given.


def _with_zeros(derivative: Any, primal: Any = None) -> Any:
    """A derivative by leaves that are told to be zero: told so itself where no leaf moves."""
    if isinstance(derivative, SymbolicZero) and isinstance(derivative.aval, TangentType):
        t = derivative.aval.of
        return SymbolicZero(jax.core.ShapedArray(t.shape, t.dtype).to_tangent_aval())
    leaves, treedef = jax.tree.flatten(derivative)
    told = [isinstance(leaf, SymbolicZero) for leaf in leaves]
    if not is_value(derivative) or not any(told):
        return derivative
    if is_value(primal) and all(told):
        return SymbolicZero(primal.aval().to_tangent_aval())
    return jax.tree.unflatten(treedef, map(instantiate, leaves))


def call_rule(rule: Callable, others: Any, derivatives: Any) -> Any:
    """What a rule gives of other things and of derivatives, which are trees with a mark."""
    one = lambda x: mark_derivatives(opened_derivatives(x))
    derivatives = jax.tree.map(one, derivatives, is_leaf=is_value)
    with within_rule(within_rule.value or has_derivatives(derivatives)):
        return rule(others, derivatives)


def carry_to_call(call: Callable) -> Callable:
    """The method `__call__` of a function with derivatives of its own."""
    return wraps(call)(lambda self, *args, **kwargs: call(self, *carried(args), **carried(kwargs)))


class CarryToCheckpoint:
    """JAX's registry of trees, as its checkpoints use it."""

    def __init__(self, registry: Any):
        self._registry = registry

    def flatten(self, tree: Any, *args: Any) -> Any:
        return self._registry.flatten(carried(tree), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)
