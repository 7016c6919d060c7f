"""Errors for mistakes in types, rules and calls. Each names the remedy."""

import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .tree import CHECK_METHODS, check_metadata, checks_of


def install_command(extra: str) -> str:
    """Return the `pip` command, as text, that installs this package with an extra such as "numba".

    It installs from a clone of the repository, because the package is not on PyPI yet.
    """
    return f"pip install '.[{extra}]' in a clone of the repository"


class OutsideImplicitError(RuntimeError):
    """The error for a JAX function that is called with an implicit array outside `vn.implicit`.

    Wrap the function in `vn.implicit`, or pass the dense array that `vn.materialise` returns. The
    error is a `RuntimeError`, because JAX would replace the message of a `TypeError`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> q = vn.quant.quantize(jnp.ones((4, 4)), "int8")
    >>> try:
    ...     jnp.sin(q)
    ... except vn.OutsideImplicitError:
    ...     y = vn.implicit(jnp.sin)(q)
    >>> y.shape
    (4, 4)
    """


# If the check of a class raises one of these errors, the check has a bug or needs concrete leaves.
# The leaves may be right.
CHECK_BUGS = (jax.errors.JAXTypeError, AttributeError, NameError)


def check_fields(value: Any, error: Exception | None = None) -> None:
    """Raise `TypeError` if an implicit array has an unhashable static field or a non-array leaf.

    `error` is an error that a method of the implicit array has raised. If JAX raised it because the
    method needs the concrete value of a traced bool or integer, raise a `TypeError` that names the
    leaf with this value.
    """
    check_metadata(value)
    leaves = jax.tree_util.tree_leaves_with_path(value)
    name_of = lambda path: f"{type(value).__name__}{jax.tree_util.keystr(path)}"
    for path, leaf in leaves:
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                f"{name_of(path)} is {leaf!r}, but a field must hold arrays or pytrees of "
                "arrays. Declare metadata with vn.static(), or register the class as a pytree."
            ) from None
    is_concretization_error = isinstance(error, TypeError) and "concrete" in str(error)
    if not is_concretization_error:
        return
    for path, leaf in leaves:
        aval = jax.typeof(leaf)
        is_scalar = getattr(aval, "shape", None) == ()
        if not is_scalar or getattr(aval.dtype, "kind", "") not in {"b", "i", "u"}:
            continue
        field = jax.tree_util.keystr(path[:1])[1:]
        raise TypeError(
            f"{name_of(path)} is {leaf!r}, a leaf. JAX traces leaves, but the type needs its "
            f"value. If it is metadata, declare it so: {field}: ... = vn.static()"
        ) from error


def check_leaves_fit(value: Any, error: Exception) -> None:
    """Raise `ValueError` if `__post_init__` or `__check_init__` rejects the leaves of `value`.

    Call this after a method of this implicit array has raised `error`. A function such as
    `jax.tree.map` may have changed each leaf separately, without the checks that the constructor
    runs. If a check has raised `error`, do nothing: its message is clear.
    """
    # Look for a running check of this value. The first variable of a method is `self`.
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name in CHECK_METHODS:
            self_name = next(iter(frame.f_code.co_varnames), "")
            if frame.f_locals.get(self_name) is value:
                return
    for check in checks_of(value):
        try:
            check()
        except ValueError as why:
            raise ValueError(
                f"{why}. A function such as jax.tree.map or lax.all_gather changed each leaf of "
                f"this {type(value).__name__} separately. To apply it to the array, call "
                "vn.implicit(function)(value)."
            ) from error
        except Exception:  # a bug in the check: only a ValueError is about the leaves
            return


def reject_refs_and_float0(values: Sequence[Any], error: Exception | None = None) -> None:
    """Raise `TypeError`, caused by `error`, if an implicit value has a `jax.Ref` or float0 leaf."""
    for value in values:
        if not hasattr(value, "materialise"):  # not an implicit value
            continue
        content, leaves = "", jax.tree.leaves(value)
        if any(isinstance(x, jax.Ref | jax.ref.AbstractRef) for x in leaves):
            content = "a jax.Ref for each leaf"
        elif jax.dtypes.float0 in [getattr(x, "dtype", None) for x in leaves]:
            content = "derivatives of its leaves (float0 for integers)"
        if content:
            raise TypeError(
                f"This {type(value).__name__} holds {content}, so it does not represent an array. "
                "Compute on its leaves with jax.tree.map."
            ) from error


def derivatives_error(name: str, mention_hijax: bool = False) -> TypeError:
    """Return the error for an implicit array that cannot be an operand: its leaves are derivatives.

    `jax.grad` returns such an array, with a gradient in place of each leaf. It represents no dense
    array. The message begins with `name`: the class of the implicit array, or the call that takes
    it. `mention_hijax` adds remedies that use `vn.hijax`.
    """
    remedy = (
        " With vn.hijax.enabled(), the backward rule of a jax.custom_vjp gets the dense cotangent. "
        "vn.ste gives a function the derivative of the identity."
    )
    return TypeError(
        f"{name}: derivatives with respect to the leaves of a value are not an array. "
        "Differentiate vn.materialise(value), or compute on the leaves with jax.tree.map."
        f"{remedy if mention_hijax else ''}"
    )


def is_marked_as_derivatives(value: Any) -> bool:
    """Return whether `vn.hijax` has marked an implicit array whose leaves are derivatives."""
    return getattr(value, "_holds_derivatives", False)


def holds_derivatives(value: Any) -> bool:
    """Return whether an implicit array is marked as derivatives, or has a leaf of dtype float0."""
    dtypes = [getattr(x, "dtype", None) for x in value.__dict__.values()]
    return is_marked_as_derivatives(value) or jax.dtypes.float0 in dtypes


def reject_derivatives(value: Any, error: Exception | None = None) -> None:
    """Raise `TypeError`, caused by `error`, if the leaves of an implicit array are derivatives.

    Such an array, which `jax.grad` returns, represents no dense array.
    """
    if holds_derivatives(value):
        raise derivatives_error(type(value).__name__, value.dense_tangent) from error


class _EndlessRuleError(RecursionError):
    """A `RecursionError` whose message already names the rule that calls itself."""


def endless_rule_error(error: RecursionError, call_rule: Callable) -> RecursionError:
    """Return an error with the name of the rule that calls itself, or `error` if no rule does.

    `call_rule` is the function that calls rules. Its frames hold the function of each running rule
    in the variable `function`, and the primitive in the variable `target`.
    """
    if isinstance(error, _EndlessRuleError):
        return error
    call_rule_code = inspect.unwrap(call_rule).__code__
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]  # the innermost first
    calls = [frame.f_locals for frame in frames if frame.f_code is call_rule_code]
    call_counts = Counter(call["function"] for call in calls)
    target_names = {call["function"]: call["target"].name for call in reversed(calls)}
    repeated = [rule for rule, count in call_counts.items() if count > 1]
    if not repeated:
        return error
    # Prefer a rule of the user: between two calls of it, rules of veneer run, such as the jit rule.
    is_of_user = lambda rule: not rule.__module__.startswith("veneer.")
    rule = max(repeated, key=lambda rule: (is_of_user(rule), call_counts[rule]))
    name, code = target_names[rule], inspect.unwrap(rule).__code__
    return _EndlessRuleError(
        f"The rule at {code.co_filename}:{code.co_firstlineno} for {name} calls itself without "
        f"an end: it calls {name} with operands of the same types ({call_counts[rule]} nested "
        "calls). Compute on the leaves of the operands or on vn.materialise(operand), or return "
        "NotImplemented."
    )
