"""Nested calls of `implicit`, and implicit values that programs build under them.

One call of `implicit` may run inside another: a layer calls it, or an operator of an array that the
program builds. Each call has its own trace. To the inner trace, implicit arrays of the outer trace
look dense. If a primitive has operands of both traces, a rule of the inner trace would compute on
them as dense arrays. So the inner trace passes such a primitive to the outer trace. First, the
primitive `pack` turns the implicit arrays of the inner trace into arrays of the outer trace.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax

from .._jax.primitives import Primitive, is_or_contains
from .._jax.tracing import Tracer, current_trace, primal_of, swap_trace, traces_around
from .errors import OutsideImplicitError
from .policy import report_materialised, set_variable
from .sources import tag_sources
from .value import Value, describe, describe_operands, is_part, is_value, materialise_one

#: The primitive that builds a value from its leaves. Its rules are in `surface/operands.py`.
pack = Primitive("pack_value")

#: True once `pack` was bound in this process. Until then, jaxprs are not searched for it, because a
#: search takes a tenth of the time to trace a dense model.
_is_pack_used = False

#: The trace of the innermost `implicit` whose program is running. In the body of a `shard_map`,
#: JAX does not tell which traces enclose the current trace.
_innermost_implicit: ContextVar[Any] = ContextVar("innermost_implicit", default=None)

#: True while a program runs under `implicit`. A user context is part of the key of JAX's caches, so
#: a jitted function that builds implicit arrays is traced again when it is called under `implicit`.
_is_under_implicit: Any = jax.make_user_context(False)

#: The trace with which a rule traces a program to a jaxpr. The rule was chosen by the types of all
#: operands, so an operand that looks dense in this trace is dense in every enclosing `implicit`.
_staging_trace: ContextVar[Any] = ContextVar("staging_trace", default=None)


class use_trace:
    """A context in which `trace` is JAX's current trace.

    `innermost` is the trace of the innermost call of `implicit` in the context, or None outside all
    calls. This is a class, because each primitive enters the context and a generator is slower.
    """

    __slots__ = ("_innermost", "_previous", "_token", "_trace", "_user_context")

    def __init__(self, trace: Any, innermost: Any):
        self._trace, self._innermost = trace, innermost

    def __enter__(self) -> None:
        self._user_context = _is_under_implicit(self._innermost is not None)
        self._user_context.__enter__()
        self._previous = swap_trace(self._trace)
        self._token = _innermost_implicit.set(self._innermost)

    def __exit__(self, *error: object) -> None:
        swap_trace(self._previous)
        _innermost_implicit.reset(self._token)
        self._user_context.__exit__(None, None, None)


def mark_staging_trace() -> AbstractContextManager[None]:
    """Return a context for a rule that traces a program to a jaxpr with the current trace.

    In this context, `mixes_with_outer` treats tracers of the current trace as dense. They cannot be
    implicit arrays of an outer call, because the rule was selected by the types of all operands.
    """
    return set_variable(_staging_trace, current_trace())


def is_implicit_trace(trace: Any) -> bool:
    """Return whether a trace belongs to a call of `implicit`."""
    return hasattr(trace, "no_filter")


def enclosing_implicit(trace: Any) -> Any:
    """Return the innermost trace of `implicit` that is `trace` or encloses it.

    Return None if there is no such trace, or if its call of `implicit` has a `filter_spec`.
    """
    innermost = next(filter(is_implicit_trace, traces_around(trace)), _innermost_implicit.get())
    return innermost if innermost is not None and innermost.no_filter else None


def mixes_with_outer(trace: Any, tracers: Sequence[Any]) -> bool:
    """Return whether an operand of a primitive may be an implicit array of an outer call.

    `trace` is the trace of the inner call of `implicit`, and `tracers` are the operands. An
    implicit array of the outer call is a tracer of that call, or of a transformation inside the
    outer call, where implicit arrays look dense.
    """
    if trace.outer is None:
        return False
    traces = [x._trace for x in map(primal_of, tracers) if isinstance(x, Tracer)]
    if any(t.tag is not trace.tag for t in traces if is_implicit_trace(t)):
        return True
    return any(t is other for other in _traces_hiding_values(trace.parent) for t in traces)


def _traces_hiding_values(trace: Any) -> list[Any]:
    """Return the traces whose tracers look dense but may be implicit in an outer call.

    These are traces of `jit`, `grad` and others inside a call of `implicit` that has implicit
    arrays. Search outwards from `trace`, up to the trace that `mark_staging_trace` marked or to a
    call of `implicit` with a `filter_spec`.
    """
    traces: list[Any] = []
    since_implicit: list[Any] = []  # the traces since the last `implicit` trace
    staging, innermost = _staging_trace.get(), _innermost_implicit.get()
    while True:
        if trace is None:  # JAX knows no trace further out, as in a `shard_map`
            trace, innermost = innermost, None
        if trace is None or trace is staging or not getattr(trace, "no_filter", True):
            return traces
        if is_implicit_trace(trace):
            if trace.holds_values:
                traces += since_implicit
                since_implicit = []
            trace, innermost = trace.parent, None
        else:
            since_implicit.append(trace)
            trace = getattr(trace, "parent_trace", None)


def as_tracer(value: Value) -> Any:
    """Return a tracer of the current trace for an implicit array built by a program.

    In a trace of another transformation, such as `jax.grad`, the tracer is the result of the
    primitive `pack`, which makes one array of the leaves.
    """
    trace: Any = current_trace()
    if getattr(trace, "no_filter", False):  # a trace of `implicit`
        with use_trace(trace.parent, trace.outer):  # aval() of a type may run primitives
            return trace.wrap(compose_value(jax.tree.map(trace.unwrap, value), trace.run))
    if outer := enclosing_implicit(trace):
        outer.holds_values = True
    leaves, structure = jax.tree.flatten(value)
    global _is_pack_used
    _is_pack_used = True
    return pack.bind(*leaves, structure=structure)


def outside_implicit_error(value: Value) -> OutsideImplicitError:
    """Return the error for a JAX function that is called with `value` outside `implicit`."""
    (name,) = describe([value])
    return OutsideImplicitError(
        f"JAX functions cannot take {name} outside vn.implicit. Wrap the function that uses it, "
        "as in vn.implicit(f)(x), vn.implicit(module)(x) or vn.implicit(module.apply)(variables, "
        "x), or call vn.materialise on the array. If the function is already wrapped, pass the "
        "array as an argument, or write jax.jit(vn.implicit(f))."
    )


def builds_values(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Return whether a primitive is `pack`, or has a parameter that is a jaxpr with `pack`.

    `pack` builds an implicit array from its leaves. If it was never used, do not search the jaxpr.
    """
    return _is_pack_used and is_or_contains(primitive, params, pack.name)


def compose_value(value: Value, run: Callable[[Callable, Sequence[Any]], list[Any]]) -> Any:
    """Return an implicit array that a program built, and record the weights it is built from.

    If a leaf is an implicit array that the type of `value` does not accept, such as a `Quantity` in
    a `Diagonal`, report this and return the dense array of `value`. For that, `run(function,
    leaves)` must call `function(*leaves)` with the rules of the leaves.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=is_part(value))
    if any(map(is_value, leaves)):
        try:
            value.aval()
        except OutsideImplicitError:
            why = f"{type(value).__name__} cannot hold it"
            report_materialised(pack.name, lambda: describe_operands(leaves), why)
            dense = lambda *leaves: [materialise_one(jax.tree.unflatten(structure, leaves))]
            return run(dense, leaves)[0]
    return tag_sources(value)
