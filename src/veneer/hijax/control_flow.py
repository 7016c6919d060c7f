"""Loops and branches over implicit arrays.

The carry of a loop must keep its type, and branches must return the same types. But an implicit
array can be a pytree of leaves, as an argument is, or one typed value, as the result of a primitive
is. So the body of a loop converts its carry to the form that it came in, and a branch converts its
results to the form of an operand of the same class. If types still differ, a `TypeMismatch` is
raised. Then the values are converted as under `vn.implicit`, which materializes them or makes them
labels, and JAX traces the loop or the branches again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from inspect import BoundArguments, signature
from typing import Any

import jax

from .._core.policy import ALLOW, current_policy, emit_events, recorded_events
from .._core.primitives.control_flow import common_form
from .._core.primitives.labels import can_become_label, has_no_dense_form
from .._core.primitives.staging import DENSE, value_type
from .._core.value import Value, is_value
from .._jax.primitives import Primitive, find_primitive
from .mapping import make_stackable, materialise_traced
from .mode import is_enabled
from .types import HighType, abstract_of, as_typed_operand, is_complete, is_typed, unpack
from .values import expose, flatten_value, value_of

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


def check_branches(check: Callable) -> Callable:
    """Patch JAX's comparison of the results of two branches, to raise `TypeMismatch` first."""

    def compare(name: str, *args: Any) -> None:
        _compare_types(f"output {{}} of {name}", *(avals.unflatten() for avals in args[-2:]))
        check(name, *args)

    return compare


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
        return materialise_traced(primitive, x) if _is_implicit(x) else x
    if form is _TYPED:
        return as_typed_operand(x) if isinstance(x, Value) else x
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
def _events_at_end() -> Iterator[None]:
    """Report the events of a block at its end. If the block raises, report none."""
    if current_policy() is ALLOW:
        yield
        return
    with recorded_events() as events:
        yield
    emit_events(events)


def _call_until_types_match(
    function: Callable, bound: BoundArguments, convert: Callable[[Forms, str, Any], Any]
) -> Any:
    """Call a loop or a conditional of JAX, and call it again after each `TypeMismatch`.

    `convert` is called with the forms and the name and value of each argument. It returns the
    argument for the next call.
    """
    forms: dict[int, Any] = {}
    arguments = dict(bound.arguments)
    while True:
        try:
            with _events_at_end():
                return jax.tree.map(expose, function(*bound.args, **bound.kwargs))
        except TypeMismatch as mismatch:
            changes = mismatch.forms
        for i, (form, next_form) in changes.items():
            is_tried = i in forms and forms[i] == form
            forms[i] = next_form(form) or DENSE if is_tried else form
        bound.arguments.update({name: convert(forms, name, x) for name, x in arguments.items()})


def _bind_arguments(function: Callable, *args: Any, **kwargs: Any) -> BoundArguments | None:
    """Return the arguments of a call by name. Return None if JAX will raise an error for them."""
    try:
        return signature(function).bind(*args, **kwargs) if is_enabled() else None
    except TypeError:
        return None


# Loops.


def unify_carry(loop: Callable) -> Callable:
    """Patch `lax.scan` or `lax.while_loop`, so that the carry keeps its type.

    The new carry gets the form of the old one. If the types still differ, the initial carry is
    converted. Results of a scan that cannot be stacked are materialized.
    """
    primitive = _SCAN if loop.__name__ == "scan" else _WHILE

    def convert(forms: Forms, name: str, x: Any) -> Any:
        if name in ("init", "init_val"):
            return _convert_leaves(forms, primitive, x)
        if callable(x):  # a new function, without the leaf names that fori_loop stores on a body
            return _wrap_once(x, "_veneer_of_other_leaves", lambda f: lambda *args: f(*args))
        return x

    @wraps(loop)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (bound := _bind_arguments(loop, *args, **kwargs)) is None:
            return loop(*args, **kwargs)
        for name, wrap in _WRAPPERS.items():
            if callable(function := bound.arguments.get(name)):
                bound.arguments[name] = _wrap_once(function, f"_veneer_{name}", wrap)
        return _call_until_types_match(loop, bound, convert)

    return call


def _wrap_scan_body(function: Callable) -> Callable:
    @wraps(function)
    def body(carry: Any, xs: Any) -> Any:
        out = function(carry, xs)
        if not isinstance(out, tuple) or len(out) != 2:
            return out  # JAX raises an error
        results = jax.tree.map(make_stackable, out[1], is_leaf=is_value)
        return _match_carry(_SCAN, "scan", carry, out[0]), results

    return body


def _wrap_while_body(function: Callable) -> Callable:
    match = lambda carry: _match_carry(_WHILE, "while_loop", carry, function(carry))
    return wraps(function)(match)


def _wrap_condition(function: Callable) -> Callable:
    @wraps(function)
    def condition(carry: Any) -> Any:
        out = function(carry)
        return materialise_traced(_WHILE, out) if _is_implicit(out) else out

    return condition


#: By the name of an argument of a loop, the wrapper of the function.
_WRAPPERS = {"f": _wrap_scan_body, "body_fun": _wrap_while_body, "cond_fun": _wrap_condition}


def _match_carry(primitive: Primitive, loop: str, before: Any, after: Any) -> Any:
    """Convert the new carry to the form of the old one. Raise `TypeMismatch` if types differ."""
    (old, tree), (new, new_tree) = _flatten(before), _flatten(after)
    if tree != new_tree or not any(map(_is_implicit, (*old, *new))):
        return after  # JAX raises the error for different structures
    after = jax.tree.unflatten(tree, list(map(partial(_match_form, primitive), old, new)))
    types = (jax.tree.map(jax.typeof, carry) for carry in (before, after))
    _compare_types(f"carry {{}} of {loop}", *types)
    return after


def _match_form(primitive: Primitive, before: Any, after: Any) -> Any:
    """Convert `after` to the form of `before`: an implicit array, typed or dense.

    The types may still differ.
    """
    if is_value(before):
        after = unpack(after)
        if not is_value(after):
            return after
        # A part with a dense tangent is one leaf, which may be typed, too.
        (old, _), (new, treedef) = flatten_value(before), flatten_value(after)
        if len(old) != len(new):
            return after
        return jax.tree.unflatten(treedef, list(map(partial(_match_form, primitive), old, new)))
    if is_typed(before):
        return as_typed_operand(after) if isinstance(after, Value) else after
    if not _is_implicit(after):
        return after
    value = abstract_of(after.aval) if is_typed(after) else value_of(after)
    return after if has_no_dense_form(value) else materialise_traced(primitive, after)


# Branches.


def unify_branches(choose: Callable) -> Callable:
    """Patch `lax.cond`, or JAX's function for `lax.switch` and `lax.platform_dependent`.

    The branches return values in the forms of the operands, and convert them if types differ. An
    implicit predicate or index is materialized.
    """

    def convert(forms: Forms, name: str, x: Any) -> Any:
        forms = dict(forms)  # the caller changes them
        wrap = lambda f: lambda *args: _convert_leaves(forms, _COND, f(*args))
        return _map_branches(name, f"_veneer_branch {forms}", wrap, x)

    @wraps(choose)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (bound := _bind_arguments(choose, *args, **kwargs)) is None:
            return choose(*args, **kwargs)
        which, *_ = bound.arguments
        if _is_implicit(bound.arguments[which]):
            bound.arguments[which] = materialise_traced(_COND, bound.arguments[which])
        operands = bound.arguments.get("operands"), bound.arguments.get("operand")
        if any(map(is_value, _flatten(operands)[0])):
            for name, x in bound.arguments.items():
                x = _map_branches(name, "_veneer_branch", _use_operand_forms, x)
                bound.arguments[name] = x
        return _call_until_types_match(choose, bound, convert)

    return call


def _map_branches(
    argument: str, attribute: str, wrap: Callable[[Callable], Callable], x: Any
) -> Any:
    """Wrap the branches in an argument of a conditional."""
    if argument == "branches":
        return [_wrap_once(branch, attribute, wrap) for branch in x]
    return _wrap_once(x, attribute, wrap) if argument.endswith("_fun") and callable(x) else x


def _use_operand_forms(function: Callable) -> Callable:
    def branch(*args: Any) -> Any:
        values: Sequence[Any] = [x for x in _flatten(args)[0] if is_value(x)]
        examples = {type(x): x for x in values}

        def match_example(x: Any) -> Any:
            value = unpack(x) if is_typed(x) and x.aval.cls in examples else x
            example = examples.get(type(value))
            return value if example is None else _match_form(_COND, example, value)

        return jax.tree.map(match_example, function(*args), is_leaf=is_value)

    return branch
