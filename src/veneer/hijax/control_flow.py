"""Loops and branches over implicit arrays.

The carry of a loop must keep its type, and branches must return the same types. But an implicit
array can be a pytree of leaves, as an argument is, or one typed value, as the result of a primitive
is. So the body of a loop converts its carry to the form that it came in, and a branch converts its
results to the form of an operand of the same class. If types still differ, JAX's own comparison
raises a `TypeMismatch` here. Then the values are converted as under `vn.implicit`, which
materializes them or makes them labels, and JAX traces the loop or the branches again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from inspect import signature
from typing import Any

import jax

from .._core.event import Event
from .._core.policy import ALLOW, current_policy, emit_events, recorded_events
from .._core.primitives.control_flow import common_form
from .._core.primitives.labels import can_become_label, has_no_dense_form
from .._core.primitives.staging import DENSE, value_type
from .._core.value import Value, is_value
from .._jax.primitives import Primitive, find_primitive
from .mapping import is_stackable, made_dense, stackable
from .mode import is_enabled
from .types import HighType, abstract_of, canonical, is_complete, is_typed, opened
from .values import flatten_value, value_of

_COND, _SCAN, _WHILE = map(find_primitive, ("cond", "scan", "while"))
#: The form of a value with a high type.
_TYPED = object()
#: From the index of a value in a carry or among results to the form that it must be converted to:
#: `DENSE`, `_TYPED`, or the tree structure of a label.
Forms = Mapping[int, Any]


class TypeMismatch(Exception):
    """A carry changes its type, or branches return different types.

    `forms` has, by the index of each value, the form to convert it to, and a function that returns
    the next form to try if this one does not suffice.
    """

    def __init__(self, forms: dict[int, tuple[Any, Callable[[Any], Any]]]):
        self.forms = forms


def _patch_check(name_value: Callable[[str], str]) -> Callable:
    """Patch JAX's comparison of two pytrees of types, to raise `TypeMismatch` first.

    `name_value` returns the name of a value in errors, with "{}" for its index.
    """

    def patch(check: Callable) -> Callable:
        def compare(name: str, *args: Any) -> None:
            _compare_types(name_value(name), *(avals.unflatten() for avals in args[-2:]))
            check(name, *args)

        return compare

    return patch


check_carry = _patch_check(lambda name: f"carry {{}} of {name.split()[0]}")
check_branches = _patch_check(lambda name: f"output {{}} of {name}")


def _compare_types(where: str, one: Any, other: Any) -> None:
    (types, tree), (other_types, other_tree) = map(_flatten, (one, other))
    if not is_enabled() or tree != other_tree:
        return  # JAX raises the error for different structures
    forms: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
    for i, pair in enumerate(zip(types, other_types, strict=True)):
        is_array = [isinstance(t, Value | jax.core.ShapedArray) for t in pair]
        if not any(map(_is_implicit_type, pair)) or not all(is_array):
            continue
        type_1, type_2 = (value_type(jax.tree.map(abstract_of, t)) for t in pair)
        next_form = partial(common_form, where.format(i), type_1, type_2)
        form = next_form(None)
        if form is None and is_value(pair[0]) != is_value(pair[1]):
            form = _TYPED
        if form is not None:
            forms[i] = form, next_form
    if forms:
        raise TypeMismatch(forms)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=is_value)


def _is_implicit(x: Any) -> bool:
    x = value_of(x)
    return is_typed(x) or (isinstance(x, Value) and is_complete(x))


def _is_implicit_type(t: Any) -> bool:
    """Return whether `t` is a high type or an implicit array whose leaves are types."""
    return type(t) is HighType or (is_value(t) and is_complete(jax.tree.map(abstract_of, t)))


def _has_implicit_types(tree: Any) -> bool:
    return any(map(_is_implicit_type, _flatten(tree)[0]))


def _wrap_once(function: Any, name: str, wrap: Callable[[Callable], Callable]) -> Callable:
    """Return `wrap(function)`, kept as an attribute of the function. JAX caches by the function."""
    wrapped = getattr(function, name, None)
    # functools.wraps copies attributes, and a bound method has the attributes of its function.
    if wrapped is None or wrapped.__wrapped__ is not function:
        wrapped = wrap(function)
        wrapped.__wrapped__ = function  # type: ignore[attr-defined]
        with suppress(AttributeError):  # a bound method, for example
            setattr(function, name, wrapped)
    return wrapped


def _convert(form: Any, primitive: Primitive, x: Any) -> Any:
    """Convert a value to a form. If it has no such form, return it unchanged."""
    if form is DENSE:
        return made_dense(primitive, x) if _is_implicit(x) else x
    if form is _TYPED:
        return canonical(x) if isinstance(x, Value) else x
    if _is_implicit(x):
        return x
    label = jax.tree.unflatten(form, [x])
    return label if can_become_label(x, label) else x


def _convert_leaves(forms: Forms, primitive: Primitive, tree: Any) -> Any:
    leaves, treedef = _flatten(tree)
    for i, form in forms.items():
        leaves[i] = _convert(form, primitive, leaves[i])
    return jax.tree.unflatten(treedef, leaves)


@contextmanager
def _events_at_end() -> Iterator[list[Event]]:
    """Report the events of a block at its end. If the block raises, report none.

    The block may clear the list of events.
    """
    if current_policy() is ALLOW:
        yield []
        return
    with recorded_events() as events:
        yield events
    emit_events(events)


def _retry(
    function: Callable, names: Sequence[str], convert: Callable[[Forms, Any], Any]
) -> Callable:
    """Wrap a loop or a conditional of JAX, to call it again after each `TypeMismatch`.

    `convert` is called with the forms and each argument in `names`, and returns the new argument.
    """

    @wraps(function)
    def call_until_types_match(*args: Any, **kwargs: Any) -> Any:
        forms: dict[int, Any] = {}
        converted_args, converted_kwargs = args, kwargs
        while True:
            try:
                with _events_at_end():
                    return function(*converted_args, **converted_kwargs)
            except TypeMismatch as mismatch:
                changes = mismatch.forms
            for i, (form, next_form) in changes.items():
                is_tried = i in forms and forms[i] == form
                forms[i] = next_form(form) or DENSE if is_tried else form
            bound = signature(function).bind(*args, **kwargs)
            for name in names:
                bound.arguments[name] = convert(forms, bound.arguments[name])
            converted_args, converted_kwargs = bound.args, bound.kwargs

    return call_until_types_match


# Loops.


def unify_carry(loop: Callable) -> Callable:
    """Patch `lax.scan` or `lax.while_loop`, to convert the initial carry if types differ."""
    is_scan = loop.__name__ == "scan"
    names = ["f", "init"] if is_scan else ["cond_fun", "body_fun", "init_val"]

    def convert(forms: Forms, x: Any) -> Any:
        if callable(x):  # a new function, without the leaf names that fori_loop stores on a body
            return _wrap_once(x, "_veneer_of_other_leaves", lambda f: lambda *args: f(*args))
        return _convert_leaves(forms, _SCAN if is_scan else _WHILE, x)

    return _retry(loop, names, convert)


def trace_loop(trace: Callable, function: Callable, in_avals: Any, *args: Any, **kw: Any) -> Any:
    """Call JAX's function that traces the body or condition of a loop, with the body adapted.

    The new carry gets the form of the old one. Results of a scan that cannot be stacked are
    materialized.
    """
    operands, _ = in_avals.unflatten()
    keeps_carry = _has_implicit_types(operands)
    if keeps_carry:
        function = _wrap_once(function, "_veneer_loop_body", _keep_carry_form)
    with _events_at_end() as events:
        traced = trace(function, in_avals, *args, **kw)
        out = traced[1].unflatten()
        adapted = function
        if _has_implicit_types(out) and not keeps_carry:
            adapted = _wrap_once(adapted, "_veneer_loop_body", _keep_carry_form)
        if _is_scan_body(operands, out) and not is_stackable(out[1]):
            adapted = _wrap_once(adapted, "_veneer_scan_body", _make_stackable)
        if adapted is not function:
            events.clear()
            traced = trace(adapted, in_avals, *args, **kw)
    return traced


def _is_scan_body(args: Any, out: Any) -> bool:
    return len(args) == 2 and isinstance(out, tuple) and len(out) == 2


def _keep_carry_form(function: Callable) -> Callable:
    def body(*args: Any) -> Any:
        out = function(*args)
        if len(args) == 1:  # while_loop
            if _is_implicit(out) and _is_predicate(out) and not _is_predicate(args[0]):
                return made_dense(_WHILE, out)  # the condition
            return _match_forms(_WHILE, args[0], out)
        if _is_scan_body(args, out):
            return _match_forms(_SCAN, args[0], out[0]), out[1]
        return out

    return body


def _is_predicate(x: Any) -> bool:
    return hasattr(x, "dtype") and (x.shape, x.dtype) == ((), bool)


def _make_stackable(function: Callable) -> Callable:
    def body(*args: Any) -> Any:
        carry, results = function(*args)
        return carry, jax.tree.map(stackable, results, is_leaf=is_value)

    return body


def _match_forms(primitive: Primitive, before: Any, after: Any) -> Any:
    (old, tree), (new, new_tree) = _flatten(before), _flatten(after)
    if tree != new_tree:
        return after  # JAX raises the error for different structures
    return jax.tree.unflatten(tree, list(map(partial(_match_form, primitive), old, new)))


def _match_form(primitive: Primitive, before: Any, after: Any) -> Any:
    """Convert `after` to the form of `before`: an implicit array, typed or dense.

    The types may still differ.
    """
    if is_value(before):
        after = opened(after)
        if not is_value(after):
            return after
        # A part with a dense tangent is one leaf, which may be typed, too.
        (old, _), (new, treedef) = flatten_value(before), flatten_value(after)
        if len(old) != len(new):
            return after
        return jax.tree.unflatten(treedef, list(map(partial(_match_form, primitive), old, new)))
    if is_typed(before):
        return canonical(after) if isinstance(after, Value) else after
    if not _is_implicit(after):
        return after
    value = abstract_of(after.aval) if is_typed(after) else value_of(after)
    return after if has_no_dense_form(value) else made_dense(primitive, after)


# Branches.


def unify_branches(choose: Callable) -> Callable:
    """Patch `lax.cond`, `lax.switch` or JAX's function for both, to convert results of branches.

    They are converted if types differ. An implicit predicate or index is materialized.
    """
    names = ["true_fun", "false_fun"] if choose.__name__ == "cond" else ["branches"]

    def convert(forms: Forms, branch: Any) -> Any:
        if not callable(branch):
            return [convert(forms, b) for b in branch]
        forms = dict(forms)  # `_retry` changes them
        wrap = lambda f: lambda *args: _convert_leaves(forms, _COND, f(*args))
        return _wrap_once(branch, f"_veneer_branch {forms}", wrap)

    retry = _retry(choose, names, convert)

    @wraps(choose)
    def call(which: Any = None, *args: Any, **kwargs: Any) -> Any:
        for name in {"pred", "index"} & kwargs.keys():
            which = kwargs.pop(name)
        if is_enabled() and _is_implicit(which):
            which = made_dense(_COND, which)
        return retry(which, *args, **kwargs)

    return call


def trace_branch(trace: Callable, function: Callable, in_avals: Any, *args: Any, **kw: Any) -> Any:
    """Call JAX's function that traces a branch, with the results in the forms of the operands."""
    if any(map(is_value, _flatten(in_avals.unflatten())[0])):
        function = _wrap_once(function, "_veneer_branch", _use_operand_forms)
    return trace(function, in_avals, *args, **kw)


def _use_operand_forms(function: Callable) -> Callable:
    def branch(*args: Any) -> Any:
        values: Sequence[Any] = [x for x in _flatten(args)[0] if is_value(x)]
        examples = {type(x): x for x in values}

        def match_example(x: Any) -> Any:
            value = opened(x) if is_typed(x) and x.aval.cls in examples else x
            example = examples.get(type(value))
            return value if example is None else _match_form(_COND, example, value)

        return jax.tree.map(match_example, function(*args), is_leaf=is_value)

    return branch
