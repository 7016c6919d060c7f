"""Where values meet, of two types or in two forms: in the carry of a loop, and between branches.

A loop's carry must come out as it went in, and branches must agree. An argument is a tree, and what
a primitive made of it is of a high type: one of the two is brought into the form of the other. What
then still is of two types takes the form that it takes under `vn.implicit`: dense, visibly, or that
of a label; or it is refused. JAX's comparison tells of it, and all is traced once more.
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

#: What values must be at some places: `DENSE`, `_TYPED`, or the structure of a label.
Forms = Mapping[int, Any]
#: The form of one leaf, which has the type of a value.
_TYPED = object()


class Disagreement(Exception):
    """Raised where values of two types meet: the forms that they must take, by their places.

    With each is a function of that form: another, if the first will not do, or an error.
    """

    def __init__(self, forms: dict[int, tuple[Any, Callable[[Any], Any]]]):
        self.forms = forms


def _check_types(what: str, one: Any, other: Any) -> None:
    (some, tree), (others, other_tree) = map(_flat, (one, other))
    if not is_enabled() or tree != other_tree:
        return  # as JAX will say
    forms = {}
    for i, pair in enumerate(zip(some, others, strict=True)):
        if any(map(_is_type, pair)) and all(map(_has_type, pair)):
            another = _meeting(what.format(i), *pair)
            form = another(None)
            if form is None and len(set(map(is_value, pair))) > 1:
                form = _TYPED
            if form is not None:
                forms[i] = form, another
    if forms:
        raise Disagreement(forms)


def _meeting(what: str, *pair: Any) -> Callable[[Any], Any]:
    one, other = (value_type(jax.tree.map(abstract_of, x)) for x in pair)
    return lambda tried: common_form(what, one, other, tried)


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree, is_leaf=is_value)


def _is_array(x: Any) -> bool:
    """Whether it is an implicit array, as a tree or traced with its type."""
    x = value_of(x)
    return is_typed(x) or (isinstance(x, Value) and is_complete(x))


def _is_type(x: Any) -> bool:
    """The same of abstract values, as JAX has them: a type, or a tree of types."""
    return type(x) is HighType or (is_value(x) and is_complete(jax.tree.map(abstract_of, x)))


def _has_type(x: Any) -> bool:
    return isinstance(x, Value | jax.core.ShapedArray)


def _kept_on(function: Any, name: str, wrap: Callable[[Callable], Callable]) -> Callable:
    """A function made of another, and kept on it: JAX caches what it traces by the function."""
    made = getattr(function, name, None)
    # functools.wraps copies attributes, and a bound method has those of its function.
    if made is None or made.__wrapped__ is not function:
        made = wrap(function)
        made.__wrapped__ = function  # type: ignore[attr-defined]
        with suppress(AttributeError):  # of a bound method, say
            setattr(function, name, made)
    return made


def _in_form(form: Any, primitive: Primitive, x: Any) -> Any:
    """A value as a form says, if it can be."""
    if form is DENSE:
        return made_dense(primitive, x) if _is_array(x) else x
    if form is _TYPED:
        return canonical(x) if isinstance(x, Value) else x
    if _is_array(x):
        return x
    labelled = jax.tree.unflatten(form, [x])
    return labelled if can_become_label(x, labelled) else x


@contextmanager
def _attempt() -> Iterator[list[Event]]:
    """What happens within is told at its end, and nobody hears of what is dropped."""
    if current_policy() is ALLOW:
        yield []
        return
    with recorded_events() as events:
        yield events
    emit_events(events)


def _retried(
    function: Callable, names: Sequence[str], put: Callable[[Forms, Any], Any]
) -> Callable:
    """One of JAX's functions, called until what meets in it agrees.

    `put` gives, of forms and an argument of one of the names, one that has them at their places.
    """

    @wraps(function)
    def until_agreed(*args: Any, **kwargs: Any) -> Any:
        forms: dict[int, Any] = {}
        given = args, kwargs
        while True:
            try:
                with _attempt():
                    return function(*given[0], **given[1])
            except Disagreement as disagreement:
                changed = disagreement.forms
            for i, (form, another) in changed.items():
                is_tried = i in forms and forms[i] == form
                forms[i] = another(form) or DENSE if is_tried else form
            bound = signature(function).bind(*args, **kwargs)
            for name in names:
                bound.arguments[name] = put(forms, bound.arguments[name])
            given = bound.args, bound.kwargs

    return until_agreed


# Loops.


def meet_in_carry(loop: Callable) -> Callable:
    """`lax.scan` or `lax.while_loop`, whose carry begins as what it becomes."""
    primitive, *names = {
        "scan": ("scan", "f", "init"),
        "while_loop": ("while", "cond_fun", "body_fun", "init_val"),
    }[loop.__name__]

    def begun(forms: Forms, x: Any) -> Any:
        if callable(x):  # without the names of leaves that fori_loop keeps on a body
            return _kept_on(x, "_veneer_of_other_leaves", lambda f: lambda *args: f(*args))
        leaves, tree = _flat(x)
        for i, form in forms.items():
            leaves[i] = _in_form(form, find_primitive(primitive), leaves[i])
        return jax.tree.unflatten(tree, leaves)

    return _retried(loop, names, begun)


def check_carry(check: Callable) -> Callable:
    """JAX's comparison of what a loop carries, before and after a turn."""

    def checked(name: str, body: Any, before: Any, after: Any) -> None:
        _check_types(f"carry {{}} of {name.split()[0]}", before.unflatten(), after.unflatten())
        check(name, body, before, after)

    return checked


def trace_loop(trace: Callable, function: Callable, in_avals: Any, *args: Any, **kw: Any) -> Any:
    """JAX traces the function of a loop, whose carry goes out in the form that it comes in with.

    What a scan stacks is made dense if it cannot be.
    """
    operands, _ = in_avals.unflatten()
    holds_arrays = lambda tree: any(map(_is_type, _flat(tree)[0]))
    if holds_arrays(operands):
        function = _kept_on(function, "_veneer_loop_body", _with_carry)
    with _attempt() as events:
        jaxpr, out_avals = trace(function, in_avals, *args, **kw)
        out = out_avals.unflatten()
        if holds_arrays(out) and not holds_arrays(operands):
            function = _kept_on(function, "_veneer_loop_body", _with_carry)
            events.clear()
            jaxpr, out_avals = trace(function, in_avals, *args, **kw)
        if _is_of_scan(operands, out) and not is_stackable(out[1]):
            function = _kept_on(function, "_veneer_scan_body", _with_stackable)
            events.clear()
            jaxpr, out_avals = trace(function, in_avals, *args, **kw)
    return jaxpr, out_avals


def _is_of_scan(args: Any, out: Any) -> bool:
    return len(args) == 2 and isinstance(out, tuple) and len(out) == 2


def _with_carry(function: Callable) -> Callable:
    def body(*args: Any) -> Any:
        out = function(*args)
        if len(args) == 1:  # of while_loop
            while_p = find_primitive("while")
            if _is_array(out) and _is_predicate(out) and not _is_predicate(args[0]):
                return made_dense(while_p, out)
            return _as_before(while_p, args[0], out)
        if _is_of_scan(args, out):
            return _as_before(find_primitive("scan"), args[0], out[0]), out[1]
        return out

    return body


def _is_predicate(x: Any) -> bool:
    return hasattr(x, "dtype") and (x.shape, x.dtype) == ((), bool)


def _with_stackable(function: Callable) -> Callable:
    def body(*args: Any) -> Any:
        carry, results = function(*args)
        return carry, jax.tree.map(stackable, results, is_leaf=is_value)

    return body


def _as_before(primitive: Primitive, before: Any, after: Any) -> Any:
    (old, tree), (new, new_tree) = _flat(before), _flat(after)
    if tree != new_tree:
        return after  # as JAX will say
    return jax.tree.unflatten(tree, list(map(partial(_like, primitive), old, new)))


def _like(primitive: Primitive, before: Any, after: Any) -> Any:
    """What comes out in the form of what went in; still of another type, perhaps."""
    if is_value(before):
        after = opened(after)
        return _with_leaves_of(primitive, before, after) if is_value(after) else after
    if is_typed(before):
        return canonical(after) if isinstance(after, Value) else after
    if not _is_array(after):
        return after
    value = abstract_of(after.aval) if is_typed(after) else value_of(after)
    return after if has_no_dense_form(value) else made_dense(primitive, after)


def _with_leaves_of(primitive: Primitive, before: Any, after: Any) -> Any:
    """A value of which each part with a dense tangent has the form that it had."""
    (old, _), (new, treedef) = flatten_value(before), flatten_value(after)
    if len(old) != len(new):
        return after
    return jax.tree.unflatten(treedef, list(map(partial(_like, primitive), old, new)))


# Branches.


def meet_in_branches(choose: Callable) -> Callable:
    """`lax.cond` or `lax.switch`, whose branches give the same types.

    Or the function by which JAX stages a switch, whose branches may be for platforms.
    """
    names = ["true_fun", "false_fun"] if choose.__name__ == "cond" else ["branches"]

    def agreeing(forms: Forms, branch: Any) -> Any:
        if not callable(branch):
            return [agreeing(forms, one) for one in branch]
        return _kept_on(branch, f"_veneer_branch {forms}", partial(_with_forms, dict(forms)))

    retried = _retried(choose, names, agreeing)

    @wraps(choose)
    def by_number(which: Any = None, *args: Any, **kwargs: Any) -> Any:
        for name in {"pred", "index"} & kwargs.keys():
            which = kwargs.pop(name)
        if is_enabled() and _is_array(which):
            which = made_dense(find_primitive("cond"), which)
        return retried(which, *args, **kwargs)

    return by_number


def check_branches(check: Callable) -> Callable:
    """JAX's comparison of what two branches give."""

    def checked(name: str, *args: Any) -> None:
        *_, one, other = args
        _check_types(f"output {{}} of {name}", one.unflatten(), other.unflatten())
        check(name, *args)

    return checked


def trace_branch(trace: Callable, function: Callable, in_avals: Any, *args: Any, **kw: Any) -> Any:
    """JAX traces a branch, whose results are trees if of the class of an operand that is one."""
    if any(map(is_value, _flat(in_avals.unflatten())[0])):
        function = _kept_on(function, "_veneer_branch", _with_trees)
    return trace(function, in_avals, *args, **kw)


def _with_forms(forms: Forms, function: Callable) -> Callable:
    def branch(*args: Any) -> Any:
        leaves, tree = _flat(function(*args))
        for i, form in forms.items():
            leaves[i] = _in_form(form, find_primitive("cond"), leaves[i])
        return jax.tree.unflatten(tree, leaves)

    return branch


def _with_trees(function: Callable) -> Callable:
    def branch(*args: Any) -> Any:
        values: Sequence[Any] = [x for x in _flat(args)[0] if is_value(x)]
        examples = {type(x): x for x in values}

        def as_example(x: Any) -> Any:
            value = opened(x) if is_typed(x) and x.aval.cls in examples else x
            like = examples.get(type(value))
            return value if like is None else _like(find_primitive("cond"), like, value)

        return jax.tree.map(as_example, function(*args), is_leaf=is_value)

    return branch
