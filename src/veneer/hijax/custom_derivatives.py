"""The rules of `jax.custom_vjp` and `jax.custom_jvp`, for functions of implicit arrays.

JAX flattens arguments and results, and uses one derivative for each flat argument or result. The
rule of a user has one derivative for each implicit array. An implicit array with a dense tangent is
one flat argument. Any other is a pytree of leaves, which are flat arguments, or one typed value
with a `Tangent`. The functions here convert the arguments and results of rules.

For the rule, a derivative with one array for each leaf is an instance of the class of the implicit
array. It is marked as derivatives: an operation that takes it as an array raises an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from .._core.errors import holds_derivatives
from .._core.primitives.custom_functions import (
    cast_cotangent,
    combine_tangents,
    instantiate,
    leaf_cotangents,
)
from .._core.value import describe, is_part, is_value
from .._jax.primitives import Primitive
from .mapping import materialise_traced
from .mode import is_enabled, wraps_with_signature
from .operations import Materialise, Vjp
from .types import (
    HighType,
    TangentType,
    as_high_array,
    as_typed_operand,
    is_typed,
    unpack,
    unpack_tangent,
    with_dense_tangents,
)
from .values import (
    apply,
    expose,
    has_derivatives,
    is_inexact,
    keep_marks,
    leaves_of,
    mark_derivatives,
    within_rule,
)

#: Primitives that reports name when a cotangent or a tangent is materialized. They are never bound.
_COTANGENT, _TANGENT = Primitive("custom_vjp"), Primitive("custom_jvp")


# custom_vjp.


def call_custom_vjp(call: Callable) -> Callable:
    """Wrap `jax.custom_vjp.__call__`, to convert the arguments and results of the user's rules.

    The rules take and return one derivative for each implicit array. JAX uses one for each of its
    leaves, or one for the dense array if the class sets `dense_tangent`.
    """

    @wraps(call)
    def call_with_values(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled() or not (function.fwd and function.bwd):
            return call(function, *args, **kwargs)
        flat = _with_functions(
            function,
            fun=_wrap_function(function.fun, function.nondiff_argnums),
            fwd=_wrap_forward(function.fwd, function.nondiff_argnums),
            bwd=_wrap_backward(function),
        )
        return jax.tree.map(expose, call(flat, *keep_marks(args), **keep_marks(kwargs)))

    return call_with_values


def _with_functions(function: Any, **functions: Callable) -> Any:
    """Return a copy of a `jax.custom_vjp` or `jax.custom_jvp` with other functions.

    `functions` maps the names of its attributes, such as `fun` and `fwd`, to the new functions.
    """
    copy = object.__new__(type(function))
    vars(copy).update(vars(function), **functions)
    return copy


def _wrap_function(
    function: Callable, nondiff_argnums: Sequence[int], result_types: list[Any] | None = None
) -> Callable:
    """Wrap the function that a `custom_vjp` or `custom_jvp` differentiates.

    The function gets implicit arrays. A result whose tangent is one dense array becomes one leaf
    for JAX. `nondiff_argnums` are the positions of static arguments, which stay unchanged. If
    `result_types` is a list, a call sets its only element to the pytree of the types of the
    results.
    """

    @wraps_with_signature(function)
    def flat(*args: Any) -> Any:
        out = with_dense_tangents(function(*_expose(args, nondiff_argnums)))
        if result_types is not None:
            result_types[:] = [jax.tree.map(jax.typeof, out)]
        return out

    return flat


def _expose(args: Sequence[Any], nondiff_argnums: Sequence[int]) -> list[Any]:
    """Return arguments with an implicit array in place of each `HighArray` or `Tangent`.

    The static arguments, at the positions `nondiff_argnums`, stay unchanged.
    """
    is_varied = lambda i: i not in nondiff_argnums
    return [jax.tree.map(expose, x) if is_varied(i) else x for i, x in enumerate(args)]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["residuals", "operands"],
    meta_fields=["treedef", "avals"],
)
@dataclass
class _Residuals:
    """The residuals of a `fwd` rule, with the arguments that the backward pass needs.

    `operands` are the arguments that are not static, with None for each dense array. The backward
    pass uses them to convert a dense cotangent to cotangents of leaves. JAX does not copy residuals
    that are arguments. `treedef` and `avals` are the structure and the types of the arguments as
    JAX flattens them.
    """

    residuals: Any
    operands: Any
    treedef: Any
    avals: tuple[Any, ...]


def _wrap_forward(fwd: Callable, nondiff_argnums: Sequence[int]) -> Callable:
    """Wrap the `fwd` rule of a `custom_vjp`, to take implicit arrays and return `_Residuals`.

    `nondiff_argnums` are the positions of static arguments.
    """
    value_of_leaf = lambda x: x.value if isinstance(x, CustomVJPPrimal) else x

    @wraps_with_signature(fwd)
    def flat_fwd(*args: Any) -> Any:
        if not is_enabled():
            return fwd(*args)
        varied = [x for i, x in enumerate(args) if i not in nondiff_argnums]
        leaves, treedef = jax.tree.flatten(varied)
        avals = tuple(jax.typeof(value_of_leaf(leaf)) for leaf in leaves)
        values = _expose(args, nondiff_argnums)
        if any(isinstance(leaf, CustomVJPPrimal) for leaf in leaves):
            # With `symbolic_zeros`, each leaf has a flag. Give the rule one flag for each value.
            values = [
                x if i in nondiff_argnums else jax.tree.map(_merge_flags, x, is_leaf=is_value)
                for i, x in enumerate(values)
            ]
        pair = fwd(*values)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return pair  # JAX raises an error
        out, residuals = pair
        values = [value_of_leaf(x) for i, x in enumerate(values) if i not in nondiff_argnums]
        keep = lambda x: x if _is_implicit(x) else None
        operands = jax.tree.map(keep, jax.tree.map(value_of_leaf, values), is_leaf=is_value)
        return with_dense_tangents(out), _Residuals(residuals, operands, treedef, avals)

    return flat_fwd


def _merge_flags(x: Any) -> Any:
    """Return one `CustomVJPPrimal` for an implicit array whose leaves are each a `CustomVJPPrimal`.

    This is JAX's pair of a value and the flag `perturbed`, which is true here if it is true for any
    leaf. A tree without such pairs is returned unchanged.
    """
    leaves = [leaf for leaf in jax.tree.leaves(x) if isinstance(leaf, CustomVJPPrimal)]
    if not leaves:
        return x
    value = jax.tree.map(lambda leaf: expose(leaf.value), x)
    return CustomVJPPrimal(value, any(leaf.perturbed for leaf in leaves))


def _wrap_backward(function: Any) -> Callable:
    """Wrap the `bwd` rule of `function`, a `jax.custom_vjp`.

    The wrapper returns one cotangent for each argument as JAX flattens it.
    """
    bwd, static_count = function.bwd, len(function.nondiff_argnums)

    @wraps_with_signature(bwd)
    def flat_bwd(*args: Any) -> Any:
        rule = partial(bwd, *args[:static_count])
        saved, cotangents, *accumulators = args[static_count:]
        if not isinstance(saved, _Residuals):  # high types were off in the forward pass
            return rule(saved, cotangents, *accumulators)
        residuals, cotangents = jax.tree.map(expose, (saved.residuals, cotangents))
        if accumulators or not is_enabled():  # a rule with accumulators returns no cotangents
            return rule(residuals, cotangents, *accumulators)
        cotangents = jax.tree.map(_merge_zeros, cotangents, is_leaf=is_value)
        unpack_tree = lambda x: unpack(x) if is_typed(x) and not x.aval.dense_tangent else x
        residuals = jax.tree.map(unpack_tree, residuals, is_leaf=is_value)
        out = _call_rule(rule, residuals, cotangents)
        types = tuple(jax.tree.unflatten(saved.treedef, saved.avals))
        operands = tuple(saved.operands)
        if getattr(function, "with_logs", False):  # JAX >= 0.12
            return _convert_cotangents(out[0], types, operands), *out[1:]
        return _convert_cotangents(out, types, operands)

    return flat_bwd


def _convert_cotangents(cotangents: Any, types: Any, operands: Any) -> Any:
    """Convert the cotangents that a `bwd` rule returns to the cotangents that JAX expects.

    `types` and `operands` are the types and the values of the arguments of the function, as in
    `_Residuals`. If the tree structures differ, return the cotangents unchanged, for which JAX
    raises an error.
    """
    if not isinstance(cotangents, tuple | list):
        return cotangents
    is_leaf = lambda ct: ct is None or is_value(ct)
    try:
        return jax.tree.map(_convert_cotangent, tuple(cotangents), types, operands, is_leaf=is_leaf)
    except ValueError:  # different tree structures, for which JAX raises an error
        return cotangents


def _convert_cotangent(ct: Any, t: Any, operand: Any = None) -> Any:
    """Convert `ct`, which a `bwd` rule returns for one argument, to the cotangent that JAX expects.

    None is a zero. `t` is the type of the argument: an array type, a high type, or an implicit
    array whose leaves are types. A cotangent has the same structure as its type. `operand` is the
    argument if it is an implicit array, or None. It is needed only if `ct` is dense.
    """
    if ct is None:
        return None
    if is_value(t) or (type(t) is HighType and not t.dense_tangent):
        return _convert_leaf_cotangents(ct, t, operand)
    if any(map(is_value, jax.tree.leaves(t, is_leaf=is_value))):
        raise _cotangent_error(ct, t)
    return materialise_traced(_COTANGENT, ct) if _is_implicit(ct) else ct


def _convert_leaf_cotangents(ct: Any, t: Any, operand: Any) -> Any:
    """Return an implicit array of cotangents, or a `Tangent` if `t` is a high type.

    `t` is the type of the argument `operand`, an implicit array. `ct` has a cotangent for each of
    its leaves, or is the cotangent of its dense array, which is then pulled back to the leaves.
    Return None if `ct` is a `SymbolicZero`.
    """
    if isinstance(ct, SymbolicZero):
        return None
    value = unpack(expose(ct))
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
    """Convert `ct`, the cotangent of the dense array of `operand`, to cotangents of its leaves.

    The result is a `Tangent` if `t`, the type of `operand`, is a high type. Otherwise it is an
    implicit array of cotangents.
    """
    ct = materialise_traced(_COTANGENT, ct) if _is_implicit(ct) else ct
    if operand is None or not hasattr(ct, "dtype"):
        raise _cotangent_error(ct, t)
    value = unpack(expose(operand))
    ct = cast_cotangent(value, ct)
    if type(t) is HighType:
        return apply(Vjp(Materialise(t), (True,), (True,)), as_typed_operand(value), ct)[0]
    types, structure = jax.tree.flatten(t)
    treedef: Any = structure
    value = jax.tree.unflatten(treedef, map(as_high_array, treedef.flatten_up_to(value)))
    pairs = zip(leaf_cotangents(_COTANGENT, value, ct), types, strict=True)
    return jax.tree.unflatten(treedef, [_convert_cotangent(x, a) for x, a in pairs])


def _pack_tangent(derivatives: Any, t: HighType) -> Any:
    """Convert an implicit array of derivatives to a `Tangent`.

    It is the tangent of a value of the high type `t`.
    """
    pairs = zip(leaves_of(derivatives), t.leaves, strict=True)
    return TangentType(t).raise_val(*(_convert_cotangent(x, a) for x, a in pairs if is_inexact(a)))


def _cotangent_error(ct: Any, t: Any) -> TypeError:
    (shown,) = describe([expose(ct)])
    return TypeError(
        f"The backward rule of a custom_vjp returns {shown} for the argument {t}. Return the "
        "cotangent of the dense array, an instance of its class with a cotangent for each leaf, "
        "or None."
    )


# custom_jvp.


def call_custom_jvp(call: Callable) -> Callable:
    """Wrap `jax.custom_jvp.__call__`, to convert the arguments and results of the user's rule.

    The rule takes and returns one derivative for each implicit array. JAX uses one for each of its
    leaves, or one for the dense array if the class sets `dense_tangent`.
    """

    @wraps(call)
    def call_with_values(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_enabled() or not function.jvp:
            return call(function, *args, **kwargs)
        static, result_types = function.nondiff_argnums, []  # type: ignore[var-annotated]
        fun = _wrap_function(function.fun, static, result_types)
        jvp = _wrap_jvp(function.jvp, len(static), result_types)
        flat = _with_functions(function, fun=fun, jvp=jvp)
        return jax.tree.map(expose, call(flat, *keep_marks(args), **keep_marks(kwargs)))

    return call_with_values


def _wrap_jvp(jvp: Callable, static_count: int, result_types: list[Any]) -> Callable:
    """Wrap the rule of a `custom_jvp`, to return results of the same types as the function.

    The first `static_count` arguments are static. When the function itself has run, the only
    element of the list `result_types` is the pytree of the types of its results. Before, the list
    is empty.
    """

    to_pytree = lambda x: with_dense_tangents(unpack(x))
    convert_primal = lambda t, x: to_pytree(x) if is_value(t) else as_typed_operand(x)

    @wraps_with_signature(jvp)
    def flat_jvp(*args: Any) -> Any:
        rule = partial(jvp, *args[:static_count])
        primals, tangents = jax.tree.map(expose, args[static_count:])
        if not is_enabled():
            return rule(primals, tangents)
        tangents = jax.tree.map(_merge_zeros, tangents, primals, is_leaf=is_value)
        has_leaf_tangents = lambda t: type(getattr(t, "aval", None)) is TangentType
        unpack_primal = lambda t, primal: unpack(primal) if has_leaf_tangents(t) else primal
        out = _call_rule(rule, jax.tree.map(unpack_primal, tangents, primals), tangents)
        if not isinstance(out, tuple | list) or len(out) != 2:
            return out  # JAX raises an error
        # If the function has not run, each result has the form of its tangent.
        (types,) = result_types or [out[1]]
        try:
            primal = jax.tree.map(convert_primal, types, out[0], is_leaf=is_value)
            return primal, jax.tree.map(_convert_tangent, types, out[1], primal, is_leaf=is_value)
        except ValueError:  # different tree structures, for which JAX raises an error
            return out

    return flat_jvp


def _convert_tangent(t: Any, tangent: Any, primal: Any) -> Any:
    """Convert `tangent`, which a `jvp` rule returns for a result, to the tangent that JAX expects.

    `primal` is the result. `t` is its type when the function itself runs: an array type, a high
    type, or an implicit array whose leaves are types.
    """
    if is_value(t):
        leaves, structure = jax.tree.flatten(primal)
        treedef: Any = structure
        tangents = treedef.flatten_up_to(unpack_tangent(tangent))
        return jax.tree.unflatten(treedef, map(_convert_leaf_tangent, leaves, tangents))
    if type(t) is not HighType or t.dense_tangent or type(tangent) is not t.cls:
        return tangent
    return _pack_tangent(tangent, t)


def _convert_leaf_tangent(leaf: Any, tangent: Any) -> Any:
    """Return the tangent of one leaf of a result as one array.

    If the leaf is an implicit array, `tangent` can have one array for each of its leaves. These are
    combined to the tangent of the dense array.
    """
    if not is_value(tangent):
        return tangent
    if not holds_derivatives(tangent):
        return materialise_traced(_TANGENT, tangent)
    return combine_tangents(unpack(expose(leaf)), jax.tree.leaves(tangent), False)


# Both.


def _is_implicit(x: Any) -> bool:
    return is_typed(x) or is_value(expose(x))


def _merge_zeros(derivative: Any, primal: Any = None) -> Any:
    """Return the derivative of a value, either as one `SymbolicZero` or without any.

    If all leaves of an implicit array of derivatives are `SymbolicZero`, and `primal` is the
    implicit array to which they belong, return one `SymbolicZero` with the shape of the dense
    array. Otherwise return arrays of zeros in place of the leaves that are `SymbolicZero`. A
    `SymbolicZero` whose type is a `TangentType` also gets the shape of the dense array.
    """
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
    """Call `rule(primals, derivatives)`, and mark implicit derivatives as derivatives of leaves.

    `rule` is the user's rule for a `custom_jvp`, or the `bwd` rule of a `custom_vjp`, for which
    `primals` are the residuals. An operation that takes a marked derivative as an array raises an
    error. `within_rule` is set during the call, so that the marks survive calls of JAX inside the
    rule.
    """
    mark = lambda x: mark_derivatives(unpack_tangent(x))
    derivatives = jax.tree.map(mark, derivatives, is_leaf=is_value)
    with within_rule(within_rule.value or has_derivatives(derivatives)):
        return rule(primals, derivatives)


# Calls inside a rule: JAX flattens the arguments, and derivatives keep their mark.


class CarryToCheckpoint:
    """A stand-in for JAX's pytree registry, which flattens the arguments of `jax.checkpoint`.

    Implicit arrays that are marked as derivatives (`mark_derivatives`) keep this mark.
    """

    def __init__(self, registry: Any):
        self._registry = registry

    def flatten(self, tree: Any, *args: Any) -> Any:
        return self._registry.flatten(keep_marks(tree), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)
