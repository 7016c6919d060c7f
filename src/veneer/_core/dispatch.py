"""Dispatch: choose how a primitive with implicit operands (`Value`) runs, and run it.

It runs by a registered rule, by the method `default` of an operand's class, or on the dense arrays
of its operands.
"""

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
from .errors import endless_rule_error
from .policy import ALLOW, current_policy, report_rule, set_variable
from .rules import Dense, JittedFunction, Target, location_of, resolve
from .sources import propagate_sources
from .value import Value, aval_of, describe, describe_operands, is_value

#: The operands of the running primitive, if the `default` of their types returned NotImplemented.
unhandled_operands: ContextVar[Sequence[Any]] = ContextVar("unhandled_operands", default=())

Params = dict[str, Any]  # the parameters of a primitive
_NOT_JAX = (np.ndarray, np.generic, bool, int, float, complex)


def dispatch(primitive: Primitive, values: Sequence[Any], params: Params) -> Any:
    """Run a primitive with at least one implicit operand, and return its results.

    `values` are the operands. Use the first of these that does not return NotImplemented: a rule
    that accepts the operand types, the method `default` that an operand's class defines, a rule for
    all implicit types, and the primitive on materialized operands.
    """
    out = apply_rules(primitive, values, params)
    if out is not NotImplemented:
        return out
    classes = {type(v) for v in values if isinstance(v, Value) and v.default is not Value.default}
    highest = max((cls.default_precedence for cls in classes), default=0)
    # Classes that inherit the same `default` count as one.
    defaults = {c.default: c.__name__ for c in classes if c.default_precedence == highest}
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
        # Some rules for all types returned NotImplemented above, so that `default` runs first. Now
        # that `unhandled_operands` is set, they compute a result.
        with set_variable(unhandled_operands, values):
            out = apply_rules(primitive, values, params, only_generic=True)
        return Value.default(primitive, values, params) if out is NotImplemented else out
    location = location_of(default)
    return _check_and_report(primitive, values, params, out, location, f"the default of {name}")


def apply_rules(
    target: Target, values: Sequence[Any], params: Params, only_generic: bool = False
) -> Any:
    """Run the rules that accept the operands, the most specific first, until one has a result.

    `target` is the primitive or jitted function whose rules are tried, and `values` are the
    operands. Return NotImplemented if no rule accepts them, or all rules return NotImplemented.
    `only_generic` skips all rules but those for all types, which have a negative precedence.
    """
    classes = tuple([type(v) if isinstance(v, Value) else Dense for v in values])
    tried: tuple = ()
    while (rule := resolve(target, classes, tried)) is not None:
        out: Any = NotImplemented
        if not (only_generic and rule.precedence >= 0):
            if rule.eager and is_eager():
                out = rule.eager(values, params)
            if out is NotImplemented:
                out = _call_rule(rule.function, target, values, params)
        if out is not NotImplemented:
            if rule.structural:  # a structural rule checks and reports its results itself
                return out
            if isinstance(target, JittedFunction):
                out = jax.tree.leaves(out, is_leaf=is_value)
            name = f"the rule at {rule.location}"
            return _check_and_report(target, values, params, out, rule.location, name)
        tried = (*tried, rule)
    return NotImplemented


def _call_rule(function: Callable, target: Target, values: Sequence[Any], params: Params) -> Any:
    """Call `function`, the rule of the primitive `target`, with operands and parameters.

    If the rule calls itself without an end, or does not accept the arguments, raise an error with
    its file and line.
    """
    try:
        return function(*values, **params)
    except RecursionError as error:  # `function` and `target` are read from the stack frames
        raise endless_rule_error(error, _call_rule) from None
    except TypeError as error:
        is_raised_inside = error.__traceback__ is None or error.__traceback__.tb_next is not None
        if is_raised_inside:
            raise
        raise TypeError(
            f"The rule at {location_of(function)} cannot be called for "
            f"{target.name}({', '.join(describe(values))}): {error}. A rule takes the operands "
            f"by position and the parameters ({', '.join(params)}) by keyword or as **params."
        ) from None


def _check_and_report(
    target: Target, values: Sequence[Any], params: Params, out: Any, location: str, name: str
) -> Any:
    """Check the shape and dtype of `out`, the result of a rule, and emit the event of the rule.

    Return `out`, with NumPy arrays and Python numbers converted to JAX arrays. `location` is the
    file and line of the rule. `name` is the name of the rule in error messages.
    """
    _check_result(target, values, params, out, name)
    if current_policy() is not ALLOW:
        report_rule(target.name, lambda: describe_operands(values), location)
        propagate_sources(target.name, values, params, out)
    as_jax = lambda x: jnp.asarray(x) if isinstance(x, _NOT_JAX) else x
    return list(map(as_jax, out)) if target.multiple_results else as_jax(out)


def _check_result(
    target: Target, values: Sequence[Any], params: Params, out: Any, name: str
) -> None:
    """Raise `TypeError` if the results `out` of the rule `name` have wrong shapes or dtypes.

    Accept any dtype if the class of an operand sets `keeps_dtypes = False`.
    """
    has_several = target.multiple_results
    results = out if has_several else [out]
    actual = None  # unless each result is an array
    if isinstance(results, list | tuple):  # another iterable may be endless
        with suppress(TypeError):
            actual = [_shape_and_dtype(aval_of(x)) for x in results]
    call_text = lambda: f"{name} for {target.name}({', '.join(describe(values))})"
    if actual is None:
        kind = "a sequence of arrays" if has_several else "one array"
        raise TypeError(
            f"{call_text()} returns {out!r}. "
            f"It must return {kind}, like {target.name}. A rule can also return NotImplemented."
        )
    arguments = target, tuple(map(aval_of, values)), tuple(params.items())
    try:
        expected = _abstract_results(*arguments)
    except TypeError:  # parameters that cannot be hashed, so the result is not cached
        expected = _abstract_results.__wrapped__(*arguments)
    if expected is None or actual == expected:
        return
    # Each element is a pair (shape, dtype), or None for a result without a shape.
    shapes_of = lambda pairs: [pair and pair[0] for pair in pairs]
    may_change_dtype = not all(v.keeps_dtypes for v in values if isinstance(v, Value))
    if may_change_dtype and shapes_of(actual) == shapes_of(expected):
        return
    pair_text = lambda pair: jax.core.ShapedArray(*pair).str_short(short_dtypes=True)
    text = lambda pairs: ", ".join(pair_text(pair) if pair else "?" for pair in pairs)
    raise TypeError(
        f"{call_text()} returns {text(actual)}, where {target.name} gives {text(expected)}"
    )


def _shape_and_dtype(aval: Any) -> tuple[Any, Any] | None:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") else None


@lru_cache(maxsize=4096)
def _abstract_results(target: Target, avals: Any, param_items: Any) -> list[Any] | None:
    """Return the shape and dtype of each result of `target` for dense operands of types `avals`.

    Return None if `target` rejects these types. `param_items` are the parameters, as pairs.
    """
    try:
        out, _ = target.abstract_eval(*avals, **dict(param_items))
    except Exception:  # a primitive may raise anything for operands that it does not take
        return None
    return list(map(_shape_and_dtype, out if target.multiple_results else [out]))
