"""Errors about implicit values and rules that users can make by mistake."""

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import jax

from .._jax.caller_errors import calling_frame, frame_of
from .._jax.tracing import is_differentiated
from .tree import CHECK_METHODS, check_metadata


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


def check_fields(value: Any, error: Exception | None = None) -> None:
    """Reject static fields that cannot be hashed, and leaves that are not arrays.

    If `error` says that JAX needs the value of a traced number, also reject a leaf that is a Python
    bool or integer, because it should be metadata.
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
    kind_of = lambda aval: getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "")
    numbers = [(path, leaf) for path, leaf in leaves if kind_of(jax.typeof(leaf)) in {*"biu"}]
    if numbers and isinstance(error, TypeError) and "concrete" in str(error):
        path, leaf = numbers[0]
        field = jax.tree_util.keystr(path[:1])[1:]
        raise TypeError(
            f"{name_of(path)} is {leaf!r}, a leaf. JAX traces leaves, but the type needs its "
            f"value. If it is metadata, declare it so: {field}: ... = vn.static()"
        ) from error


def check_leaves_fit(value: Any, checks: Iterable[Callable[[], None]], error: Exception) -> None:
    """Call the checks of a class after an `error`, and raise `ValueError` if one of them does.

    Tree functions, which change each leaf separately, do not call the checks. If a check of the
    class has caused the error, return: its own message is clear.
    """
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in CHECK_METHODS and any(
            frame.f_locals.get(name) is value for name in code.co_varnames[:1]
        ):
            return
        frame = frame.f_back
    for check in checks:
        try:
            check()
        except ValueError as why:
            raise ValueError(
                f"{why}. A function such as jax.tree.map or lax.all_gather changed each leaf of "
                f"this {type(value).__name__} separately. To apply it to the array, call "
                "vn.implicit(function)(value)."
            ) from error
        except Exception:  # not about leaves that do not fit
            return


def reject_leaves(values: Sequence[Any], error: Exception | None = None) -> None:
    """Reject implicit values with a leaf that is a `jax.Ref` or has dtype float0."""
    for value in (v for v in values if hasattr(v, "materialise")):
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


def derivatives_error(name: str, dense_tangent: bool = False) -> TypeError:
    """Return the error for an operand that holds derivatives with respect to its leaves."""
    remedy = (
        " With vn.hijax.enabled(), the backward rule of a jax.custom_vjp gets the dense cotangent. "
        "vn.ste gives a function the derivative of the identity."
    )
    return TypeError(
        f"{name}: derivatives with respect to the leaves of a value are not an array. "
        "Differentiate vn.materialise(value), or compute on the leaves with jax.tree.map."
        f"{remedy if dense_tangent else ''}"
    )


def is_marked_as_derivatives(value: Any) -> bool:
    """Return whether a value was marked because it holds derivatives. Eager operators call this."""
    return getattr(value, "_holds_derivatives", False)


def holds_derivatives(value: Any) -> bool:
    """Return whether a value holds derivatives with respect to its leaves instead of arrays.

    JAX gives integer leaves, such as codes, a derivative of dtype float0.
    """
    if is_marked_as_derivatives(value):
        return True
    float0 = jax.dtypes.float0
    return any(getattr(x, "dtype", None) == float0 for x in value.__dict__.values())


def reject_derivatives(value: Any, error: Exception | None = None) -> None:
    """Reject a value that holds derivatives where an array is needed."""
    if holds_derivatives(value):
        raise derivatives_error(type(value).__name__, value.dense_tangent) from error


def warn_of_scales_without_codes(value: Any) -> None:
    """Warn if `equinox.filter_grad` differentiates with respect to scales without their codes.

    The warning is at the call of `filter_grad`, so that Python shows it once.
    """
    has_dense_tangent = lambda x: getattr(x, "dense_tangent", False)
    for part in filter(has_dense_tangent, jax.tree.leaves(value, is_leaf=has_dense_tangent)):
        if not any(map(is_differentiated, jax.tree.leaves(part))):
            continue
        if frame := frame_of("equinox._ad"):
            frame = calling_frame(frame, ("equinox", "jax"))
            warnings.warn_explicit(
                "equinox.filter_grad differentiates with respect to every floating leaf, so the "
                f"scales of a {type(part).__name__} would be trained without its codes. "
                "Differentiate with respect to the first tree of "
                "vn.tree.partition(model, vn.trainable(model)).",
                UserWarning,
                frame.f_code.co_filename,
                frame.f_lineno,
            )


class EndlessRuleError(RecursionError):
    """The error for a rule that calls itself without an end."""


def endless_rule_error(error: RecursionError, call: Callable) -> RecursionError:
    """Return an error that names the rule that calls itself, or `error` if no rule does.

    `call` is the function that calls rules. Its frames hold each rule in the variable `function`
    and the primitive in the variable `target`.
    """
    if isinstance(error, EndlessRuleError):
        return error
    code = inspect.unwrap(call).__code__
    calls: Counter[Callable] = Counter()
    innermost: dict[Callable, dict[str, Any]] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            calls[frame.f_locals["function"]] += 1
            innermost.setdefault(frame.f_locals["function"], frame.f_locals)
        frame = frame.f_back
    repeated = [function for function, count in calls.items() if count > 1]
    if not repeated:
        return error
    # Prefer a rule of the user: between two calls of it, rules of veneer run, such as the jit rule.
    function = max(repeated, key=lambda f: (not f.__module__.startswith("veneer."), calls[f]))
    name, code = innermost[function]["target"].name, inspect.unwrap(function).__code__
    return EndlessRuleError(
        f"The rule at {code.co_filename}:{code.co_firstlineno} for {name} calls itself without "
        f"an end: it calls {name} with operands of the same types ({calls[function]} nested "
        "calls). Compute on the leaves of the operands or on vn.materialise(operand), or return "
        "NotImplemented."
    )
