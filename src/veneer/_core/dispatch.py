"""Dispatch: run a primitive on implicit operands by a rule, a default, or materialization."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax.primitives import Primitive
from .._jax.tracing import is_eager
from .annotations import Dense
from .errors import endless_rule_error
from .jitted_functions import JittedFunction
from .policy import ALLOW, current_policy, report_rule
from .rules import Target, location_of, resolve
from .sources import propagate_sources
from .value import Value, aval_of, describe, describe_operands, is_value

#: The operands of a primitive whose `default` has returned NotImplemented.
unhandled_operands: ContextVar[Sequence[Any]] = ContextVar("unhandled_operands", default=())


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
            out = apply_rules(primitive, values, params, only_generic=True)
        finally:
            unhandled_operands.reset(token)
        return Value.default(primitive, values, params) if out is NotImplemented else out
    location = location_of(default)
    return _finish(primitive, values, params, out, location, f"the default of {name}")


def apply_rules(
    target: Target, values: Sequence[Any], params: dict[str, Any], only_generic: bool = False
) -> Any:
    """Run the most specific rule that accepts the operands. Return NotImplemented if none does.

    `only_generic` skips the rules of users' types: generic rules have a negative precedence.
    """
    classes = tuple([type(v) if isinstance(v, Value) else Dense for v in values])
    tried: tuple = ()
    while (rule := resolve(target, classes, tried)) is not None:
        out: Any = rule.eager(values, params) if rule.eager and is_eager() else NotImplemented
        if out is NotImplemented and not (only_generic and rule.precedence >= 0):
            out = _call(rule.function, target, values, params)
        if out is not NotImplemented:
            if rule.structural:
                return out
            if isinstance(target, JittedFunction):
                out = jax.tree.leaves(out, is_leaf=is_value)
            source = f"the rule at {rule.location}"
            return _finish(target, values, params, out, rule.location, source)
        tried = (*tried, rule)
    return NotImplemented


def _call(function: Callable, target: Target, values: Sequence[Any], params: dict[str, Any]) -> Any:
    try:
        return function(*values, **params)
    except RecursionError as error:
        raise endless_rule_error(error, _call) from None
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # inside the function
        raise TypeError(
            f"The rule at {location_of(function)} cannot be called for "
            f"{target.name}({', '.join(describe(values))}): {error}. A rule takes the operands "
            f"by position and the parameters ({', '.join(params)}) by keyword or as **params."
        ) from None


def _finish(
    target: Target,
    values: Sequence[Any],
    params: dict[str, Any],
    out: Any,
    location: str,
    source: str,
) -> Any:
    """Check and report the result of a rule, and convert NumPy arrays and numbers."""
    _check_result(target, values, params, out, source)
    if current_policy() is not ALLOW:
        report_rule(target.name, lambda: describe_operands(values), location)
        propagate_sources(target.name, values, params, out)
    return list(map(_as_jax, out)) if target.multiple_results else _as_jax(out)


def _as_jax(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, _NOT_JAX) else x


_NOT_JAX = (np.ndarray, np.generic, bool, int, float, complex)


def _check_result(
    target: Target, values: Sequence[Any], params: dict[str, Any], out: Any, source: str
) -> None:
    """Reject a result whose shapes or dtypes differ from the results of the primitive."""
    several = target.multiple_results
    results = out if several else [out]
    actual = None
    if isinstance(results, list | tuple):  # another iterable may be endless
        with suppress(TypeError):
            actual = [_shape_and_dtype(aval_of(x)) for x in results]
    call = lambda: f"{source} for {target.name}({', '.join(describe(values))})"
    if actual is None:
        kind = "a sequence of arrays" if several else "one array"
        raise TypeError(
            f"{call()} returns {out!r}. "
            f"It must return {kind}, like {target.name}. A rule can also return NotImplemented."
        )
    avals, items = tuple(map(aval_of, values)), tuple(params.items())
    try:
        expected = _abstract_results(target, avals, items)
    except TypeError:  # parameters that cannot be hashed
        expected = _abstract_results.__wrapped__(target, avals, items)
    if expected is None or actual == expected:
        return
    shapes = lambda pairs: [pair and pair[0] for pair in pairs]
    any_dtype = not all(v.keeps_dtypes for v in values if isinstance(v, Value))
    if not (any_dtype and shapes(actual) == shapes(expected)):
        short = lambda pair: jax.core.ShapedArray(*pair).str_short(short_dtypes=True)
        show = lambda pairs: ", ".join(short(pair) if pair else "?" for pair in pairs)
        raise TypeError(
            f"{call()} returns {show(actual)}, where {target.name} gives {show(expected)}"
        )


def _shape_and_dtype(aval: Any) -> tuple[Any, Any] | None:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else None


@lru_cache(maxsize=4096)
def _abstract_results(target: Target, avals: Any, items: Any) -> list[Any] | None:
    try:
        out, _ = target.abstract_eval(*avals, **dict(items))
    except Exception:  # a primitive may raise anything for operands that it does not take
        return None
    out = out if target.multiple_results else [out]
    return list(map(_shape_and_dtype, out))
