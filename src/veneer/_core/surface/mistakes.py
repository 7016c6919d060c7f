"""Mistakes in a type or a rule, told by the names that its author gave.

What they are told of (fields, rules, calls) comes as it is: nothing here knows more of the core.
"""

import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import jax

from ..._jax.caller_errors import has_quantized_array, raise_update_error

#: The methods in which a class checks the fields of a value: of dataclasses, and of Equinox.
CHECKS = ("__post_init__", "__check_init__")


def check_metadata(value: Any) -> None:
    """Refuses static fields that cannot be hashed, as JAX must."""
    for field in dataclasses.fields(value):
        if field.metadata.get("static", False):
            data = getattr(value, field.name, None)
            try:
                hash(data)
            except TypeError:
                raise TypeError(
                    f"{type(value).__name__}.{field.name} is static, so it must be hashable, but "
                    f"{data!r} is a {type(data).__name__}. Use a tuple for a list or an array."
                ) from None


def check_fields(value: Any, error: Exception | None = None) -> None:
    """Refuses metadata that cannot be hashed, and leaves that are no arrays.

    After an `error` that says that a traced number must be known, leaves that may be it as well.
    """
    check_metadata(value)
    leaves = jax.tree_util.tree_leaves_with_path(value)
    for path, leaf in leaves:
        try:
            jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                f"{_named(value, path)} is {leaf!r}, but a field must hold arrays or pytrees of "
                "arrays. Declare metadata with vn.static(), or register the class as a pytree."
            ) from None
    counts = [(path, leaf) for path, leaf in leaves if _is_count(leaf)]
    if counts and isinstance(error, TypeError) and "concrete" in str(error):
        path, leaf = counts[0]
        field = jax.tree_util.keystr(path[:1])[1:]
        raise TypeError(
            f"{_named(value, path)} is {leaf!r}, a leaf. JAX traces leaves, but the type needs its "
            f"value. If it is metadata, declare it so: {field}: ... = vn.static()"
        ) from error


def check_leaves_fit(value: Any, checks: Iterable[Callable[[], None]], error: Exception) -> None:
    """Refuses, after an `error`, a value that its type would not have made of these leaves.

    Functions of trees have changed each by itself, and call no check. A check that asks for the
    shape is asked already, and its own error is what there is to say.
    """
    if _is_checked(value):
        return
    for check in checks:
        try:
            check()
        except ValueError as why:
            raise ValueError(
                f"{why}. A function such as jax.tree.map or lax.all_gather changed each leaf of "
                f"this {type(value).__name__} separately. To apply it to the array, call "
                "vn.implicit(function)(value)."
            ) from error
        except Exception:  # which is none about leaves that do not fit
            return


def _is_checked(value: Any) -> bool:
    """Whether one of its class's checks has called what calls this."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in CHECKS and any(
            frame.f_locals.get(name) is value for name in code.co_varnames[:1]
        ):
            return True
        frame = frame.f_back
    return False


def _named(value: Any, path: Any) -> str:
    return f"{type(value).__name__}{jax.tree_util.keystr(path)}"


def _is_count(leaf: Any) -> bool:
    """Whether a leaf is a bool or an integer by itself, as sizes, axes and flags are."""
    aval = jax.typeof(leaf)
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "") in set("biu")


def check_is_first(rule: Any, registered: Iterable[Any], primitive: str) -> None:
    """Refuses a rule that would take the place of one of another module, as they are imported."""
    signature = lambda r: (r.operands, r.more, r.precedence, r.conditional, r.swapped)
    for other in registered:
        if signature(other) == signature(rule):
            modules = [r.function.__module__ for r in (other, rule)]
            if modules[0] != modules[1]:
                raise ValueError(
                    f"{primitive} already has a rule for these operands, in another module:\n  "
                    f"{other}, of {modules[0]}\n  {rule}, of {modules[1]}\nTo replace it, register "
                    "the new rule with a higher precedence."
                )


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


def check_arguments(fn: Any, filter_spec: Any, is_leaf: Callable[[Any], bool]) -> None:
    """Check the arguments of `implicit`: `fn` can be called, and `filter_spec` holds no arrays."""
    if not callable(fn):
        raise _not_a_function(fn, jax.tree.leaves(fn, is_leaf=is_leaf))
    if isinstance(filter_spec, bool) or callable(filter_spec):
        return
    if any(str(getattr(x, "dtype", "bool")) != "bool" for x in jax.tree.leaves(filter_spec)):
        raise TypeError(
            "filter_spec holds arrays, but it must be a bool, a predicate, or a pytree of them. "
            "Pass arguments of the function to the result: vn.implicit(f)(params, x)."
        )


def _not_a_function(x: Any, leaves: Sequence[Any]) -> TypeError:
    shown = type(x).__name__
    if leaves and leaves[0] is not x:
        kinds = {"Array" if isinstance(y, jax.Array) else type(y).__name__ for y in leaves}
        shown += f" (leaves: {', '.join(sorted(kinds))})"
    return TypeError(
        f"vn.implicit takes a function, not an object of type {shown}. Call "
        "vn.implicit(model)(params, x), where model is the function. To get dense arrays, call "
        "vn.materialise(params)."
    )


def check_parameters(params: Any, call: str) -> None:
    """Check that a tree of parameters holds arrays. `call` shows how they are passed."""
    if not any(hasattr(x, "dtype") for x in jax.tree.leaves(params)):
        raise ValueError(
            f"params, a {type(params).__name__}, holds no arrays. Pass the parameters, a tree of "
            f"arrays: {call}"
        )


def check_key(key: Any) -> None:
    """Check that `key` is a PRNG key of JAX, typed or raw."""
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key and not (dtype == "uint32" and key.ndim == 1):
        shown = repr(key) if dtype is None else f"an array {dtype.name}{list(key.shape)}"
        raise TypeError(f"key must be a JAX PRNG key, such as jax.random.key(0), not {shown}")


def no_array(what: str, dense_tangent: bool = False) -> TypeError:
    """The error where derivatives by the leaves of a value are an operand."""
    remedy = (
        " With vn.hijax.enabled(), the backward rule of a jax.custom_vjp gets the dense cotangent. "
        "vn.ste gives a function the derivative of the identity."
    )
    return TypeError(
        f"{what}: derivatives with respect to the leaves of a value are not an array. "
        "Differentiate vn.materialise(value), or compute on the leaves with jax.tree.map."
        f"{remedy if dense_tangent else ''}"
    )


def is_marked(value: Any) -> bool:
    """Return whether a value is known to hold derivatives by each leaf: it is then no array."""
    return getattr(value, "_holds_derivatives", False)  # in each eager operation: faster


def holds_derivatives(value: Any) -> bool:
    """Return whether a value has derivatives in the places of its leaves, and is no array.

    JAX gives integers, such as codes, a derivative of dtype float0, by which nothing is computed.
    """
    if is_marked(value):
        return True
    float0 = jax.dtypes.float0
    return any(getattr(x, "dtype", None) == float0 for x in value.__dict__.values())


def refuse_derivatives(value: Any, error: Exception | None = None) -> None:
    """Reject a value that holds derivatives, where an array is asked for."""
    if holds_derivatives(value):
        raise no_array(type(value).__name__, value.dense_tangent) from error


class EndlessRule(RecursionError):
    """A rule that calls itself without an end."""


def endless_rule(error: RecursionError, call: Callable) -> RecursionError:
    """The error of a recursion without an end, with the rule that calls itself.

    `call` is the function that calls rules, from which this is called, and whose frames have the
    `function` and what it was called for.
    """
    if isinstance(error, EndlessRule):  # told further in
        return error
    code = inspect.unwrap(call).__code__
    calls: Counter[Callable] = Counter()
    frame: FrameType | None = sys._getframe(1)
    last: dict[Callable, dict[str, Any]] = {}
    while frame is not None:
        if frame.f_code is code:
            calls[frame.f_locals["function"]] += 1
            last.setdefault(frame.f_locals["function"], frame.f_locals)
        frame = frame.f_back
    again = [function for function, count in calls.items() if count > 1]
    if not again:
        return error
    # Between two calls of it lie rules of ours: those of jit, for one.
    function = max(again, key=lambda f: (not f.__module__.startswith("veneer."), calls[f]))
    name, code = last[function]["target"].name, inspect.unwrap(function).__code__
    return EndlessRule(
        f"The rule at {code.co_filename}:{code.co_firstlineno} for {name} calls itself without "
        f"an end: it calls {name} with operands of the same types ({calls[function]} nested "
        "calls). Compute on the leaves of the operands or on vn.materialise(operand), or return "
        "NotImplemented."
    )


_UPDATES = {"equinox._update": "equinox.apply_updates", "optax._src.update": "optax.apply_updates"}


def refuse_dense_update(parameter: Any, primitive: str = "") -> None:
    """Reject an update of quantized weights by a dense array, which would replace them.

    The functions of `_UPDATES` add an update to a parameter. Call this with the left operand of a
    sum, from its operator, or with the name of the primitive that materializes its operands.
    """
    if primitive:
        callers = [m for m in _UPDATES if primitive == "add" and m in sys.modules and frame_of(m)]
    else:
        frame = calling_frame(sys._getframe(1), ("veneer", "jaxtyping", "beartype"))
        callers = [m for m in _UPDATES if m == frame.f_globals.get("__name__")]
    if callers and has_quantized_array(parameter):
        raise_update_error(_UPDATES[callers[0]], parameter)


def calling_frame(frame: FrameType, packages: tuple[str, ...]) -> FrameType:
    """Return the innermost frame, from this one on, of a function outside of some packages."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(packages):
        frame = frame.f_back
    return frame


def frame_of(module: str) -> FrameType | None:
    """Return the innermost frame of a function of a module, or None if none is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame
