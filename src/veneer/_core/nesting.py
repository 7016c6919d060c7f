"""Nested calls of `implicit`, and implicit values that programs build under them.

One call of `implicit` may run inside another: a layer calls it, or an operator of an array that the
program builds. A primitive may then have operands of both calls. A tracer that looks dense to the
inner trace may be an implicit array of the outer trace. So the inner trace passes such a primitive,
with its own values, on to the outer trace. Otherwise a rule would treat an implicit operand as a
dense one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from .._jax.primitives import Primitive, is_or_contains
from .._jax.tracing import Tracer, current_trace, primal_of, swap_trace, traces_around
from .errors import OutsideImplicitError
from .policy import report_materialised
from .sources import tag_sources
from .value import Value, describe, describe_operands, is_value, materialise_one

#: The primitive that builds a value from its leaves. Its rules are in `primitives/packing.py`.
pack = Primitive("pack_value")

#: True once `pack` was bound in this process. Until then, jaxprs are not searched for it, because a
#: search takes a tenth of the time to trace a dense model.
_is_pack_used = False

#: The trace of the innermost `implicit` whose program is running. In the body of a `shard_map`,
#: JAX does not tell which traces enclose it.
_running: ContextVar[Any] = ContextVar("running", default=None)

#: True while a program runs under `implicit`. A user context is part of the key of JAX's caches: a
#: jitted function that builds implicit arrays is another program outside `implicit`.
_IS_RUNNING: Any = jax.make_user_context(False)

#: The trace into which a rule stages a program. The rule was chosen by the types of all operands,
#: so an operand that looks dense here is dense in every enclosing `implicit` too.
_staged_program: ContextVar[Any] = ContextVar("staged_program", default=None)


def enter(trace: Any, running: Any) -> Any:
    """Make a trace current, and `running` the innermost `implicit`. Return a state for `leave`."""
    context = _IS_RUNNING(running is not None)
    context.__enter__()
    return swap_trace(trace), _running.set(running), context


def leave(state: Any) -> None:
    """Undo `enter`."""
    previous, token, context = state
    swap_trace(previous)
    _running.reset(token)
    context.__exit__(None, None, None)


@contextmanager
def entered(trace: Any, running: Any) -> Iterator[None]:
    """Call `enter` and `leave` around a block."""
    state = enter(trace, running)
    try:
        yield
    finally:
        leave(state)


@contextmanager
def staging_trace() -> Iterator[None]:
    """Mark the current trace as one into which a rule stages a program."""
    token = _staged_program.set(current_trace())
    try:
        yield
    finally:
        _staged_program.reset(token)


def is_implicit_trace(trace: Any) -> bool:
    """Return whether a trace belongs to a call of `implicit`."""
    return hasattr(trace, "no_filter")


def enclosing_implicit(trace: Any) -> Any:
    """Return the innermost `implicit` trace around a trace, or None if it has a filter."""
    innermost = next(filter(is_implicit_trace, traces_around(trace)), _running.get())
    return innermost if innermost is not None and innermost.no_filter else None


def mixes_with_outer(trace: Any, tracers: Sequence[Any]) -> bool:
    """Return whether an operand may be an implicit array of an enclosing `implicit` call.

    It may be a tracer of that call, or of a program that is traced inside it, where implicit arrays
    look dense.
    """
    if trace.outer is None:
        return False
    staged = _traces_in_implicit(trace.parent)  # of programs that an outer trace runs later
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

    These are the traces (of a `jit` body, for example) inside an `implicit` call that holds
    implicit arrays. The walk outwards stops at `_staged_program` and at a call with a filter.
    """
    inside: list[Any] = []
    candidates: list[Any] = []
    program, running = _staged_program.get(), _running.get()
    while getattr(trace, "no_filter", True):
        if trace is not None and trace is program:
            break
        if is_implicit_trace(trace):
            if trace.holds_values:
                inside += candidates
                candidates = []
            trace, running = trace.parent, None
        elif trace is not None:
            candidates.append(trace)
            trace = getattr(trace, "parent_trace", None)
        elif running is not None:
            trace, running = running, None
        else:
            break
    return inside


def as_tracer(value: Value) -> Any:
    """Return a tracer for a value that a program under `implicit` builds and uses as an array."""
    trace: Any = current_trace()
    if getattr(trace, "no_filter", False):
        with entered(trace.parent, trace.outer):  # aval() of a type may compute
            return trace.wrap(compose_value(jax.tree.map(trace.unwrap, value), trace.run))
    if outer := enclosing_implicit(trace):
        outer.holds_values = True
    leaves, structure = jax.tree.flatten(value)
    global _is_pack_used
    _is_pack_used = True
    return pack.bind(*leaves, structure=structure)


def outside_implicit_error(value: Value) -> OutsideImplicitError:
    """Return the error for a value that is an operand of a JAX function outside `implicit`."""
    (name,) = describe([value])
    return OutsideImplicitError(
        f"JAX functions cannot take {name} outside vn.implicit. Wrap the function that uses it, "
        "as in vn.implicit(f)(x), vn.implicit(module)(x) or vn.implicit(module.apply)(variables, "
        "x), or call vn.materialise on the array. If the function is already wrapped, pass the "
        "array as an argument, or write jax.jit(vn.implicit(f))."
    )


def builds_values(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Return whether a primitive, or a program in its parameters, builds an implicit array."""
    return _is_pack_used and is_or_contains(primitive, params, pack.name)


def compose_value(value: Value, run: Callable[[Callable, Sequence[Any]], list[Any]]) -> Any:
    """Return a value that a program built and whose leaves may be implicit arrays.

    If its type does not accept such leaves, as a `Diagonal` does not accept a `Quantity`, return
    its dense array instead, computed by `run` with the rules of the leaves.
    """
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda x: x is not value and is_value(x))
    if any(map(is_value, leaves)):
        try:
            value.aval()
        except OutsideImplicitError:
            why = f"{type(value).__name__} cannot hold it"
            report_materialised(pack.name, lambda: describe_operands(leaves), why)
            dense = lambda *leaves: [materialise_one(jax.tree.unflatten(structure, leaves))]
            return run(dense, leaves)[0]
    return tag_sources(value)
