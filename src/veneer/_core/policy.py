"""Policies: what happens when an implicit array is materialized, for the extent of a call."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import jax

from .._jax.source_lines import user_line, user_place
from .event import Event, MaterialiseError, MaterialiseWarning, Operands

OnMaterialise = (
    Literal["allow", "warn", "error", "warn_weights", "error_weights"] | Callable[[Event], None]
)


@dataclass(frozen=True, eq=False)
class Policy:
    """The reaction to materialization, and a list that collects events. Compared by identity."""

    on_materialise: OnMaterialise = "allow"
    events: list[Event] | None = None
    weights_only: bool = False


ALLOW = Policy()
ERROR = Policy("error")
RECORD = Policy()  # in force while a program is traced whose events are emitted in each call
_NAMED = {
    "allow": ALLOW,
    "warn": Policy("warn"),
    "error": ERROR,
    "warn_weights": Policy("warn", weights_only=True),
    "error_weights": Policy("error", weights_only=True),
}

# JAX traces a jitted function again when a user context changes, but not when a context variable
# does. So a function that was traced under one policy is not silent under another.
_policy = jax.make_user_context(ALLOW)


def current_policy() -> Policy:
    return _policy.value


def policy_in_force(policy: Policy) -> AbstractContextManager[None]:
    """Set the policy. A function that runs later can restore the policy of its definition."""
    is_over = policy is RECORD and _recorded.get(None) is None
    return nullcontext() if is_over or policy is _policy.value else _policy(policy)


def policy_of(choice: OnMaterialise) -> Policy:
    if isinstance(choice, str) and choice in _NAMED:
        return _NAMED[choice]
    if not callable(choice):
        raise ValueError(
            f"on_materialise must be {', '.join(map(repr, _NAMED))} or a callable, not {choice!r}."
        )
    return Policy(choice)


def nested_policy(policy: Policy) -> AbstractContextManager[None]:
    """Set the policy of a nested call. `ALLOW` keeps the current one. Events stay collected."""
    if policy is ALLOW:
        return nullcontext()
    events = _policy.value.events
    return policy_in_force(policy if events is None else replace(policy, events=events))


_recorded: ContextVar[list[Event]] = ContextVar("recorded")


@contextmanager
def recorded_events() -> Iterator[list[Event]]:
    """Collect events instead of emitting them, so that each call of a program can emit them."""
    events: list[Event] = []
    token = _recorded.set(events)
    try:
        with policy_in_force(RECORD):
            yield events
    finally:
        _recorded.reset(token)


def must_replay_events(policy: Policy) -> bool:
    """Return whether each call of a traced program must emit the events of the trace."""
    return policy not in (ALLOW, ERROR)


def emit_events(events: Iterable[Event]) -> None:
    """Warn, raise, call the callback and collect, as the current policy says."""
    policy = _policy.value
    for event in events:
        if policy is RECORD:
            _recorded.get().append(event)
        if policy.events is not None:
            policy.events.append(event)
        if not (event.weight_nbytes if policy.weights_only else event.made_dense):
            continue
        if policy.on_materialise == "warn":
            file, line = user_place()
            warnings.warn_explicit(str(event), MaterialiseWarning, file, line)
        elif policy.on_materialise == "error":
            remedy = "Allow it" if event.rule else "Register a rule for these types, or allow it"
            raise MaterialiseError(f"{event}. {remedy} with on_materialise='allow'.")
        elif callable(policy.on_materialise):
            policy.on_materialise(event)


# For the running rule: how it computes its result, the bytes that it materializes of each operand,
# and why it runs no kernel.
_how: ContextVar[tuple[str, Sequence[int], str]] = ContextVar("how", default=("", (), ""))


def note_how(how: str, dense: Sequence[int] = (), no_kernel: str = "") -> None:
    """Note how the running rule computes its result. A rule calls this before it returns."""
    if _policy.value is not ALLOW:
        _how.set((how, dense, no_kernel))


def report_rule(primitive: str, operands: Callable[[], Operands], rule: str) -> None:
    """Emit the event of a rule that ran, if it materialized an operand or a report needs it."""
    policy, (how, dense, no_kernel) = _policy.value, _how.get()
    _how.set(("", (), ""))
    if any(dense) or policy is RECORD or policy.events is not None:
        shown, sources, _, caches = operands()
        dense = (*dense, *[0] * (len(shown) - len(dense)))
        fields = shown, rule, sum(dense), user_line(), how, sources, dense, caches, no_kernel
        emit_events([Event(primitive, *fields)])


def report_materialised(primitive: str, operands: Callable[[], Operands], why: str = "") -> None:
    """Emit the event of a primitive that runs on materialized operands."""
    if _policy.value is not ALLOW:
        shown, sources, dense, caches = operands()
        fields = shown, None, sum(dense), user_line(), why, sources, dense, caches
        emit_events([Event(primitive, *fields)])
