"""Policies: what happens when a call of `implicit` materializes an implicit array."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import jax

from .._jax.source_lines import user_line, user_place
from .event import Event, MaterialiseError, MaterialiseWarning, Operands

T = TypeVar("T")
OnMaterialise = (
    Literal["allow", "warn", "error", "warn_weights", "error_weights"] | Callable[[Event], None]
)


@dataclass(frozen=True, eq=False)
class Policy:
    """The reaction to an implicit array that is materialized. Policies are compared by identity."""

    on_materialise: OnMaterialise = "allow"
    events: list[Event] | None = None  # a list to which each event is added
    weights_only: bool = False  # whether `on_materialise` ignores arrays that are not weights


ALLOW = Policy()
ERROR = Policy("error")
RECORD = Policy()  # adds events to the list of `recorded_events`, to emit them in each call later
_NAMED = {
    "allow": ALLOW,
    "warn": Policy("warn"),
    "error": ERROR,
    "warn_weights": Policy("warn", weights_only=True),
    "error_weights": Policy("error", weights_only=True),
}

# A user context, because JAX traces a jitted function again when a user context changes, but not
# when a context variable does. So a jitted function reports under each policy.
_policy = jax.make_user_context(ALLOW)
_recorded: ContextVar[list[Event]] = ContextVar("recorded")  # the list of `recorded_events`
# The arguments of `note_how` in the running rule.
_how: ContextVar[tuple[str, Sequence[int], str]] = ContextVar("how", default=("", (), ""))


def current_policy() -> Policy:
    return _policy.value


def policy_in_force(policy: Policy) -> AbstractContextManager[None]:
    """Return a context in which `policy` is the current policy.

    A function that runs later gets the policy under which it was defined. If that was `RECORD`, and
    its block of `recorded_events` has ended, the context keeps the current policy.
    """
    has_ended = policy is RECORD and _recorded.get(None) is None
    return nullcontext() if has_ended or policy is _policy.value else _policy(policy)


def policy_of(choice: OnMaterialise) -> Policy:
    """Return the policy for an argument `on_materialise`. Raise `ValueError` if it is invalid."""
    if isinstance(choice, str) and choice in _NAMED:
        return _NAMED[choice]
    if not callable(choice):
        raise ValueError(
            f"on_materialise must be {', '.join(map(repr, _NAMED))} or a callable, not {choice!r}."
        )
    return Policy(choice)


def nested_policy(policy: Policy) -> AbstractContextManager[None]:
    """Return a context in which `policy`, of a nested call of `implicit`, is in force.

    `ALLOW` keeps the policy of the outer call. If the outer policy collects events in a list, the
    nested policy adds its events to that list, too.
    """
    if policy is ALLOW:
        return nullcontext()
    events = _policy.value.events
    return policy_in_force(policy if events is None else replace(policy, events=events))


@contextmanager
def set_variable(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Return a context in which a context variable has the given value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """Yield a list that collects the events of the block. The block emits no warnings or errors.

    The caller traces a program in the block. Each call of the program emits the listed events.
    """
    events: list[Event] = []
    with set_variable(_recorded, events), policy_in_force(RECORD):
        yield events


def must_replay_events(policy: Policy) -> bool:
    """Return whether each call of a traced program must emit the events of its tracing.

    Under `ALLOW`, events have no effect. Under `ERROR`, tracing has raised the error already.
    """
    return policy not in (ALLOW, ERROR)


def emit_events(events: Iterable[Event]) -> None:
    """React to events as the current policy says: record, collect, warn, raise or call back."""
    policy = _policy.value
    for event in events:
        if policy is RECORD:
            _recorded.get().append(event)
        if policy.events is not None:
            policy.events.append(event)
        is_relevant = event.weight_nbytes > 0 if policy.weights_only else event.made_dense
        if not is_relevant:
            continue
        if policy.on_materialise == "warn":
            file, line = user_place()
            warnings.warn_explicit(str(event), MaterialiseWarning, file, line)
        elif policy.on_materialise == "error":
            remedy = "Allow it" if event.rule else "Register a rule for these types, or allow it"
            raise MaterialiseError(f"{event}. {remedy} with on_materialise='allow'.")
        elif callable(policy.on_materialise):
            policy.on_materialise(event)


def note_how(how: str, dense: Sequence[int] = (), no_kernel: str = "") -> None:
    """Set `how`, `dense` and `no_kernel` in the event of the running rule, before it returns.

    `how` is a text about the computation. `dense` is the number of materialized bytes of each
    operand; missing entries are 0. `no_kernel` names the operand that is too small for a kernel.
    """
    if _policy.value is not ALLOW:
        _how.set((how, dense, no_kernel))


def report_rule(primitive: str, operands: Callable[[], Operands], rule: str) -> None:
    """Emit the event of a rule that ran, if it materialized an operand or events are collected."""
    policy, (how, dense, no_kernel) = _policy.value, _how.get()
    _how.set(("", (), ""))
    if any(dense) or policy is RECORD or policy.events is not None:
        shown, sources, _, caches = operands()
        dense = (*dense, *[0] * (len(shown) - len(dense)))  # zeros for the missing entries
        fields = shown, rule, sum(dense), user_line(), how, sources, dense, caches, no_kernel
        emit_events([Event(primitive, *fields)])


def report_materialised(primitive: str, operands: Callable[[], Operands], why: str = "") -> None:
    """Emit the event of a primitive that runs on materialized operands, for the reason `why`."""
    if _policy.value is not ALLOW:
        shown, sources, dense, caches = operands()
        event = Event(primitive, shown, None, sum(dense), user_line(), why, sources, dense, caches)
        emit_events([event])
