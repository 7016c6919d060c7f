"""Dispatch: run a primitive on implicit operands by a rule, a default, or materialization."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax.primitives import Primitive
from .._jax.tracing import is_eager
from .batch_axes import unhandled_operands
from .policy import ALLOW, current_policy, note_rule
from .results import check_result
from .rules import Target, location_of, resolve
from .surface.annotations import Dense
from .surface.functions import JittedFunction
from .surface.mistakes import endless_rule
from .surface.weights import pass_on
from .value import Value, describe, is_value, operands_met


def dispatch(primitive: Primitive, values: Sequence[Any], params: dict[str, Any]) -> Any:
    """Run a primitive on values, at least one of them implicit.

    Try a matching rule, the `default` of the operand types, rules that map over leading axes, and
    materialization, in this order.
    """
    out = apply_rules(primitive, values, params)
    if out is not NotImplemented:
        return out
    kinds = {type(v) for v in values if isinstance(v, Value) and v.default is not Value.default}
    first = max((kind.default_precedence for kind in kinds), default=0)
    defaults = {k.default: k.__name__ for k in kinds if k.default_precedence == first}
    if not defaults:
        return Value.default(primitive, values, params)
    if len(defaults) > 1:
        names = " and ".join(sorted(defaults.values()))
        raise TypeError(
            f"{primitive.name}({', '.join(describe(values))}): no rule fits, and {names} each "
            "define `default`. Register a rule for the combination."
        )
    ((default, name),) = defaults.items()
    out = default(primitive, values, params)
    if out is NotImplemented:
        token = unhandled_operands.set(values)
        try:
            out = apply_rules(primitive, values, params, again=True)
        finally:
            unhandled_operands.reset(token)
        return Value.default(primitive, values, params) if out is NotImplemented else out
    location = location_of(default)
    return _checked(primitive, values, params, out, location, f"the default of {name}")


def apply_rules(
    target: Target, values: Sequence[Any], params: dict[str, Any], again: bool = False
) -> Any:
    """Run the most specific rule; `again`, only those for all types. May give NotImplemented."""
    classes = tuple([type(v) if isinstance(v, Value) else Dense for v in values])
    tried: tuple = ()
    while (rule := resolve(target, classes, tried)) is not None:
        out: Any = rule.eager(values, params) if rule.eager and is_eager() else NotImplemented
        if out is NotImplemented and not (again and rule.precedence >= 0):
            out = _call(rule.function, target, values, params)
        if out is not NotImplemented:
            if rule.structural:
                return out
            if isinstance(target, JittedFunction):
                out = jax.tree.leaves(out, is_leaf=is_value)
            source = f"the rule at {rule.location}"
            return _checked(target, values, params, out, rule.location, source)
        tried = (*tried, rule)
    return NotImplemented


def _call(function: Callable, target: Target, values: Sequence[Any], params: dict[str, Any]) -> Any:
    try:
        return function(*values, **params)
    except RecursionError as error:
        raise endless_rule(error, _call) from None
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # within the function
        raise TypeError(
            f"The rule at {location_of(function)} cannot be called for "
            f"{target.name}({', '.join(describe(values))}): {error}. A rule takes the operands "
            f"by position and the parameters ({', '.join(params)}) by keyword or as **params."
        ) from None


def _checked(
    target: Target,
    values: Sequence[Any],
    params: dict[str, Any],
    out: Any,
    location: str,
    source: str,
) -> Any:
    check_result(target, values, params, out, source)
    if current_policy() is not ALLOW:
        note_rule(target.name, lambda: operands_met(values), location)
        pass_on(target.name, values, params, out)
    return list(map(_array, out)) if target.multiple_results else _array(out)


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, _NOT_JAX) else x


_NOT_JAX = (np.ndarray, np.generic, bool, int, float, complex)
