"""Calls of `implicit` within others, and the arrays that programs build under them.

One call of `implicit` may run inside another: a layer calls it, or an operator of an array that the
program builds. A primitive may then have operands of both. What looks dense to the inner trace may
be an implicit array of the outer one. So the inner trace leaves such a primitive, with its own
values, to the outer trace. No value ever takes another for a dense array.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from ..._jax.primitives import Primitive, is_or_contains
from ..._jax.tracing import Tracer, current_trace, primal_of, swap_trace, traces_around
from ..policy import note_materialised
from ..value import Value, is_value, materialise_one, operands_met
from .found import found
from .mistakes import OutsideImplicitError

#: Makes a value of a tree structure from its leaves. The rules are in `primitives`.
pack = Primitive("pack_value")

#: Whether `pack` was bound in this process. Until then, no jaxpr has to be searched for it, which
#: would take a tenth of the time to trace a dense model.
_is_pack_used = False

#: The trace of the innermost `implicit` whose program is running. JAX forgets which traces are
#: around the body of a `shard_map` that it stages.
_running: ContextVar[Any] = ContextVar("running", default=None)

#: Whether a program runs under `implicit`. It is part of the key of JAX's caches: a jitted function
#: may build implicit arrays, and is then another program under `implicit` than outside.
_IS_RUNNING: Any = jax.make_user_context(False)

#: The trace into which a rule stages a program. The rule was chosen by the types of all operands,
#: so an operand that looks dense here is dense in every enclosing `implicit` too.
_staged_program: ContextVar[Any] = ContextVar("staged_program", default=None)


def enter(trace: Any, running: Any) -> Any:
    """Make a trace current, within an `implicit`; return what `leave` needs to undo it."""
    context = _IS_RUNNING(running is not None)
    context.__enter__()
    return swap_trace(trace), _running.set(running), context


def leave(state: Any) -> None:
    """Make the trace current that was so before `enter`."""
    previous, token, context = state
    swap_trace(previous)
    _running.reset(token)
    context.__exit__(None, None, None)


@contextmanager
def entered(trace: Any, running: Any) -> Iterator[None]:
    """Within, a trace is current, and the program of an `implicit` runs, or none does."""
    state = enter(trace, running)
    try:
        yield
    finally:
        leave(state)


@contextmanager
def staging_here() -> Iterator[None]:
    """Within, the current trace is one into which a rule stages a program."""
    token = _staged_program.set(current_trace())
    try:
        yield
    finally:
        _staged_program.reset(token)


def is_implicit_trace(trace: Any) -> bool:
    """Return whether a trace is that of a call of `implicit`."""
    return hasattr(trace, "takes_any")


def enclosing_implicit(trace: Any) -> Any:
    """Return the innermost `implicit` that a trace runs in, or None if that has a filter."""
    innermost = next(filter(is_implicit_trace, traces_around(trace)), _running.get())
    return innermost if innermost is not None and innermost.takes_any else None


def mixes_with_outer(trace: Any, tracers: Sequence[Any]) -> bool:
    """Return whether an operand may be an implicit array of an enclosing `implicit` call.

    It may be a tracer of that call, or of a program that is traced inside it, where implicit arrays
    look dense.
    """
    if trace.outer is None:
        return False
    staged = _traces_in_implicit(trace.parent)  # into programs that an outer trace runs later
    for x in map(primal_of, tracers):
        if not isinstance(x, Tracer):
            continue
        if is_implicit_trace(x._trace):
            if x._trace.tag is not trace.tag:
                return True
        elif any(x._trace is other for other in staged):
            return True
    return False


def _traces_in_implicit(trace: Any) -> list[Any]:
    """Return the enclosing traces whose dense-looking tracers may be implicit in an outer call.

    Such a trace, as of a `jit` body, lies inside an `implicit` call that holds implicit arrays. The
    walk outwards stops at `_staged_program` and at a call with a filter.
    """
    inside: list[Any] = []
    not_yet: list[Any] = []
    program, running = _staged_program.get(), _running.get()
    while getattr(trace, "takes_any", True):
        if trace is not None and trace is program:
            break
        if is_implicit_trace(trace):
            if trace.holds_values:
                inside += not_yet
                not_yet = []
            trace, running = trace.parent, None
        elif trace is not None:
            not_yet.append(trace)
            trace = getattr(trace, "parent_trace", None)
        elif running is not None:
            trace, running = running, None
        else:
            break
    return inside


def as_tracer(value: Value) -> Any:
    """Return a value as an array of the program that is running under `implicit`."""
    trace: Any = current_trace()
    if getattr(trace, "takes_any", False):
        with entered(trace.parent, trace.outer):  # for a type's aval() may compute
            return trace.wrap(composed(jax.tree.map(trace.unwrap, value), trace.run))
    if outer := enclosing_implicit(trace):
        outer.holds_values = True
    leaves, structure = jax.tree.flatten(value)
    global _is_pack_used
    _is_pack_used = True
    return pack.bind(*leaves, structure=structure)


def builds_values(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Return whether a primitive, or a program in its parameters, builds an implicit array."""
    return _is_pack_used and is_or_contains(primitive, params, pack.name)


def composed(value: Value, run: Callable[[Callable, Sequence[Any]], list[Any]]) -> Any:
    """Return a value that a program built, whose leaves may be implicit arrays.

    A type may not accept them: a `Diagonal` of a `Quantity` is no matrix that it knows. The result
    is then the dense array, computed by the rules of the leaves.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda x: x is not value and is_value(x))
    if any(map(is_value, leaves)):
        try:
            value.aval()
        except OutsideImplicitError:
            why = f"{type(value).__name__} cannot hold it"
            note_materialised(pack.name, lambda: operands_met(leaves), why)
            dense = lambda *leaves: [materialise_one(jax.tree.unflatten(structure, leaves))]
            return run(dense, leaves)[0]
    return found(value)
