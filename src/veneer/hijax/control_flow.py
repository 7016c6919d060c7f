"""Loops and branches over implicit arrays.

The carry of a loop must keep its type, and branches must return the same types. But an implicit
array can have two forms: a pytree of leaves, as an argument has, or one value of a high type, as
the result of a primitive has. So the body of a loop converts the new carry to the form of the old
carry, and a branch converts its results to the form of an operand of the same class.

If the types still differ while JAX traces, `TypeMismatch` is raised. It never reaches the user:
`_call_until_types_match` catches it, and calls the loop or the conditional again with converted
values. As under `vn.implicit`, a value is materialized or becomes a label: a type whose only leaf
is the dense array, with metadata such as a unit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any

import jax

from .._core.policy import ALLOW, current_policy, emit_events, recorded_events
from .._core.primitives.leaves import can_become_label, has_no_dense_form
from .._core.primitives.programs import common_form
from .._core.primitives.staging import DENSE, value_type
from .._core.value import Value, is_value
from .._jax.primitives import Primitive, find_primitive
from .mapping import make_stackable, materialise_traced
from .mode import is_enabled, signature_of, wraps_with_signature
from .types import HighType, abstract_of, as_typed_operand, is_complete, is_typed, unpack
from .values import expose, flatten_value, value_of

_COND, _SCAN, _WHILE = map(find_primitive, ("cond", "scan", "while"))
#: The form of an implicit array that is one typed value.
_TYPED = object()
#: From the index of a value in a carry or among results to the form that it must be converted to:
#: `DENSE`, `_TYPED`, or the tree structure of a label.
Forms = Mapping[int, Any]


class TypeMismatch(Exception):
    """An internal signal: a carry changes its type, or branches return different types.

    `forms` maps the index of each value whose types differ, in the carry or among the results, to a
    pair `(form, next_form)`. `form` says what to convert the value to: a dense array, one operand
    of a high type, or a label (a dense array with metadata). If the types still differ after the
    conversion, `next_form(form)` returns the form to try next, or raises `TypeError`.
    """

    def __init__(self, forms: dict[int, tuple[Any, Callable[[Any], Any]]]):
        self.forms = forms


def check_branches(check: Callable) -> Callable:
    """Wrap JAX's check that two branches return the same types.

    If the branches return an implicit array of different types, the wrapper raises `TypeMismatch`
    before JAX raises its own error. The conditional is then called again with converted results.
    """

    def compare(name: str, *args: Any) -> None:
        _compare_types(f"output {{}} of {name}", *(avals.unflatten() for avals in args[-2:]))
        check(name, *args)

    return compare


def _compare_types(where: str, tree_1: Any, tree_2: Any) -> None:
    """Raise `TypeMismatch` if an implicit array has different types in two pytrees of types.

    For pytrees of different structures, and for different types of dense arrays, JAX itself raises
    an error. `where` names a value in errors, with `{}` for the index of the value, as in "carry {}
    of scan".
    """
    (types_1, treedef_1), (types_2, treedef_2) = map(_flatten, (tree_1, tree_2))
    if not is_enabled() or treedef_1 != treedef_2:
        return
    # A high type, or an implicit array whose leaves are types.
    is_pytree = lambda t: is_value(t) and is_complete(jax.tree.map(abstract_of, t))
    is_implicit = lambda t: type(t) is HighType or is_pytree(t)
    forms: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
    for i, pair in enumerate(zip(types_1, types_2, strict=True)):
        are_arrays = all(isinstance(t, Value | jax.core.ShapedArray) for t in pair)
        if not any(map(is_implicit, pair)) or not are_arrays:
            continue
        type_1, type_2 = (value_type(jax.tree.map(abstract_of, t)) for t in pair)
        next_form = partial(common_form, where.format(i), type_1, type_2)
        form = next_form(None)  # None if the types are the same
        if form is None and is_value(pair[0]) != is_value(pair[1]):
            form = _TYPED  # one is a pytree of leaves, and the other is one typed value
        if form is not None:
            forms[i] = form, next_form
    if forms:
        raise TypeMismatch(forms)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=is_value)


def _is_implicit(x: Any) -> bool:
    """Return whether `x` is an implicit array, in either of its two forms.

    The forms are a pytree that has all of its leaves, and one operand of a high type, which is a
    `HighArray` or a tracer.
    """
    x = value_of(x)
    return is_typed(x) or (isinstance(x, Value) and is_complete(x))


def _wrap_once(function: Any, name: str, wrap: Callable[[Callable], Callable]) -> Callable:
    """Return `wrap(function)`, and the same wrapper in later calls for the same function.

    The wrapper is stored on the function, as the attribute `name`. With a new wrapper for each
    call, JAX would trace again, because its caches compare functions by identity.
    """
    wrapped = getattr(function, name, None)
    # functools.wraps copies attributes, and a bound method has the attributes of its function.
    if wrapped is None or wrapped.__wrapped__ is not function:
        wrapped = wrap(function)
        wrapped.__wrapped__ = function  # type: ignore[attr-defined]
        with suppress(AttributeError):  # a bound method, for example
            setattr(function, name, wrapped)
    return wrapped


def _convert(form: Any, primitive: Primitive, x: Any) -> Any:
    """Convert `x`, a value in the carry of a loop or a result of a branch, to a form.

    `form` is `DENSE` (materialize `x`), `_TYPED` (one operand of a high type), or the tree
    structure of a label, which holds a dense array and metadata. If `x` cannot have the form,
    return it unchanged. A report of materialization names `primitive`, the loop or the conditional.
    """
    if form is DENSE:
        return materialise_traced(primitive, x) if _is_implicit(x) else x
    if form is _TYPED:
        return as_typed_operand(x)
    if _is_implicit(x):  # only a dense array can become a label
        return x
    label = jax.tree.unflatten(form, [x])  # `form` is the tree structure of the label
    return label if can_become_label(x, label) else x


def _convert_leaves(forms: Forms, primitive: Primitive, tree: Any) -> Any:
    """Convert some of the values in a carry or among results to other forms.

    `forms` maps the index of a value in the pytree `tree` to its new form, as for `_convert`. A
    report of materialization names `primitive`, the loop or the conditional.
    """
    leaves, treedef = _flatten(tree)
    for i, form in forms.items():
        leaves[i] = _convert(form, primitive, leaves[i])
    return jax.tree.unflatten(treedef, leaves)


@contextmanager
def _events_at_end() -> Iterator[None]:
    """Record the events of a block, such as materializations, and report them when it ends.

    If the block raises, report none, because the block runs again after a `TypeMismatch`.
    """
    if current_policy() is ALLOW:
        yield
        return
    with recorded_events() as events:
        yield
    emit_events(events)


def _call_until_types_match(
    function: Callable[[dict[str, Any]], Any],
    arguments: dict[str, Any],
    convert: Callable[[Forms, str, Any], Any],
) -> Any:
    """Call a loop or a conditional of JAX, and call it again after each `TypeMismatch`.

    `function(arguments)` makes the call. `arguments` maps the names of the arguments to their
    values. Before another call, each argument becomes `convert(forms, name, x)`, where `x` is its
    original value. `forms` maps the index of a value, in the carry or among the results, to the
    form that it needs.
    """
    forms: dict[int, Any] = {}  # by the index of a value in the carry or among the results
    converted = arguments
    while True:
        try:
            with _events_at_end():
                return jax.tree.map(expose, function(converted))
        except TypeMismatch as mismatch:
            changes = mismatch.forms
        # This ends: the last form of a value is `DENSE`, and `next_form(DENSE)` raises TypeError.
        for i, (form, next_form) in changes.items():
            if i in forms and forms[i] == form:  # converted to this form, and types still differ
                form = next_form(form) or DENSE
            forms[i] = form
        converted = {name: convert(forms, name, x) for name, x in arguments.items()}


# Loops.


def unify_carry(loop: Callable) -> Callable:
    """Wrap `lax.scan` or `lax.while_loop`, so that the carry keeps its type.

    The body returns each implicit array of the carry in the form of the initial carry: as a pytree
    of leaves, or as one operand of a high type. If the types still differ, the initial carry is
    converted, for example to dense arrays. Results of a scan that cannot be stacked are
    materialized.
    """
    primitive = _SCAN if loop.__name__ == "scan" else _WHILE

    def convert(forms: Forms, name: str, x: Any) -> Any:
        if name in ("init", "init_val"):
            return _convert_leaves(forms, primitive, x)
        if callable(x):
            # A new function: `fori_loop` stores on the body the names of the leaves, which change.
            return _wrap_once(x, "_veneer_of_other_leaves", lambda f: lambda *args: f(*args))
        return x

    @wraps(loop)
    def call(*args: Any, **kwargs: Any) -> Any:
        names = tuple(signature_of(loop).parameters)[: len(args)]
        if not is_enabled() or len(args) > len(names) or not kwargs.keys().isdisjoint(names):
            return loop(*args, **kwargs)  # JAX raises an error for wrong arguments
        arguments = dict(zip(names, args, strict=True), **kwargs)
        for name, wrap in _WRAPPERS.items():
            if callable(function := arguments.get(name)):
                arguments[name] = _wrap_once(function, f"_veneer_{name}", wrap)
        return _call_until_types_match(lambda arguments: loop(**arguments), arguments, convert)

    return call


def _wrap_scan_body(function: Callable) -> Callable:
    """Wrap the body of a scan.

    Each implicit array in the new carry gets the form that it has in the old carry: a pytree of
    leaves, or one operand of a high type. Results that cannot be stacked are materialized.
    """

    @wraps_with_signature(function)
    def body(carry: Any, xs: Any) -> Any:
        out = function(carry, xs)
        if not isinstance(out, tuple) or len(out) != 2:
            return out  # JAX raises an error
        results = jax.tree.map(make_stackable, out[1], is_leaf=is_value)
        return _match_carry(_SCAN, "scan", carry, out[0]), results

    return body


def _wrap_while_body(function: Callable) -> Callable:
    match = lambda carry: _match_carry(_WHILE, "while_loop", carry, function(carry))
    return wraps_with_signature(function)(match)


def _wrap_condition(function: Callable) -> Callable:
    @wraps_with_signature(function)
    def condition(carry: Any) -> Any:
        out = function(carry)
        return materialise_traced(_WHILE, out) if _is_implicit(out) else out

    return condition


#: By the name of an argument of a loop, the wrapper of the function.
_WRAPPERS = {"f": _wrap_scan_body, "body_fun": _wrap_while_body, "cond_fun": _wrap_condition}


def _match_carry(primitive: Primitive, loop_name: str, before: Any, after: Any) -> Any:
    """Convert `after`, the new carry of a loop, to the form of `before`, the old carry.

    The form of an implicit array is a pytree of leaves or one operand of a high type. Raise
    `TypeMismatch` if the types of an implicit array still differ. A report of materialization names
    `primitive`, and an error names `loop_name`.
    """
    (old, tree), (new, new_tree) = _flatten(before), _flatten(after)
    if tree != new_tree or not any(map(_is_implicit, (*old, *new))):
        return after  # JAX raises the error for different structures
    after = jax.tree.unflatten(tree, list(map(partial(_match_form, primitive), old, new)))
    types = (jax.tree.map(jax.typeof, carry) for carry in (before, after))
    _compare_types(f"carry {{}} of {loop_name}", *types)
    return after


def _match_form(primitive: Primitive, example: Any, result: Any) -> Any:
    """Convert `result`, from the body of a loop or from a branch, to the form of `example`.

    The form is a pytree of leaves, one operand of a high type, or a dense array. `result` is
    materialized only if `example` is dense. Otherwise it keeps its class and the types of its
    leaves, so its type can still differ from the type of `example`. A report of materialization
    names `primitive`.
    """
    if is_value(example):
        result = unpack(result)
        if not is_value(result):
            return result
        # A part with a dense tangent is one leaf, which can have either form.
        (examples, _), (leaves, treedef) = flatten_value(example), flatten_value(result)
        if len(examples) != len(leaves):
            return result
        matched = list(map(partial(_match_form, primitive), examples, leaves))
        return jax.tree.unflatten(treedef, matched)
    if is_typed(example):
        return as_typed_operand(result)
    if not _is_implicit(result):
        return result
    value = abstract_of(result.aval) if is_typed(result) else value_of(result)
    return result if has_no_dense_form(value) else materialise_traced(primitive, result)


# Branches.


def unify_branches(choose: Callable) -> Callable:
    """Wrap `lax.cond`, or JAX's function for `lax.switch` and `lax.platform_dependent`.

    An implicit result becomes a pytree of leaves if an operand of the same class is a pytree. If
    the types of two branches still differ, the results become one operand of a high type, a label
    (a dense array with metadata), or a dense array. An implicit predicate or index is materialized.
    """

    def convert(forms: Forms, name: str, x: Any) -> Any:
        forms = dict(forms)  # a copy, because the caller changes the dict
        wrap = lambda f: lambda *args: _convert_leaves(forms, _COND, f(*args))
        # The attribute that keeps the wrapper has a name for each set of forms.
        return _map_branches(name, f"_veneer_branch {forms}", wrap, x)

    @wraps(choose)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_enabled():
            return choose(*args, **kwargs)
        try:
            bound = signature_of(choose).bind(*args, **kwargs)
        except TypeError:
            return choose(*args, **kwargs)  # JAX raises an error for wrong arguments
        arguments = dict(bound.arguments)
        condition, *_ = arguments  # the name of the predicate or of the index
        if _is_implicit(arguments[condition]):
            arguments[condition] = materialise_traced(_COND, arguments[condition])
        operands = arguments.get("operands"), arguments.get("operand")
        if any(map(is_value, _flatten(operands)[0])):
            for name, x in arguments.items():
                arguments[name] = _map_branches(name, "_veneer_branch", _use_operand_forms, x)

        def call_branches(arguments: dict[str, Any]) -> Any:
            bound.arguments.update(arguments)
            return choose(*bound.args, **bound.kwargs)

        return _call_until_types_match(call_branches, arguments, convert)

    return call


def _map_branches(
    argument: str, attribute: str, wrap: Callable[[Callable], Callable], x: Any
) -> Any:
    """Wrap the branches in one argument of `lax.cond` or `lax.switch`.

    `argument` is the name of the argument and `x` is its value: a branch, a list of branches, or
    something else, which is returned unchanged. `wrap` wraps one branch. The wrapper is stored on
    the branch, as the attribute `attribute`, so that later calls reuse it.
    """
    if argument == "branches":
        return [_wrap_once(branch, attribute, wrap) for branch in x]
    return _wrap_once(x, attribute, wrap) if argument.endswith("_fun") and callable(x) else x


def _use_operand_forms(function: Callable) -> Callable:
    """Wrap a branch: an implicit result becomes a pytree of leaves if an operand is such a pytree.

    The operand must have the class of the result. If several operands have this class, the last one
    counts. An implicit array inside the result gets the form that it has inside this operand.
    """

    def branch(*args: Any) -> Any:
        values: Sequence[Any] = [x for x in _flatten(args)[0] if is_value(x)]
        examples = {type(x): x for x in values}

        def match_example(x: Any) -> Any:
            value = unpack(x) if is_typed(x) and x.aval.cls in examples else x
            example = examples.get(type(value))
            return value if example is None else _match_form(_COND, example, value)

        return jax.tree.map(match_example, function(*args), is_leaf=is_value)

    return branch
