"""Policies: what happens if an implicit array is materialized, for the extent of a call."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal

import jax

from .._jax.source_lines import user_line, user_place
from .surface.event import Event, MaterialiseError, MaterialiseWarning, Operands

OnMaterialise = (
    Literal["allow", "warn", "error", "warn_weights", "error_weights"] | Callable[[Event], None]
)


@dataclass(frozen=True, eq=False)
class Policy:
    """What to do on materialization, and a list that collects events. Compared by identity."""

    on_materialise: OnMaterialise = "allow"
    events: list[Event] | None = None
    weights_alone: bool = False


ALLOW = Policy()
ERROR = Policy("error")
RECORD = Policy()  # in force while events are recorded, to be told later
_NAMED = {
    "allow": ALLOW,
    "warn": Policy("warn"),
    "error": ERROR,
    "warn_weights": Policy("warn", weights_alone=True),
    "error_weights": Policy("error", weights_alone=True),
}

# A user context and not a context variable: JAX traces a jitted function anew when it changes, so
# that no function traced under one policy is silent under another.
_policy = jax.make_user_context(ALLOW)


def current_policy() -> Policy:
    return _policy.value


def policy_in_force(policy: Policy) -> AbstractContextManager[None]:
    """Puts a policy in force, for functions that run later than the call that set it."""
    stale = policy is RECORD and _recorded.get(None) is None  # what it recorded has been told
    return nullcontext() if stale or policy is _policy.value else _policy(policy)


def policy_of(choice: OnMaterialise) -> Policy:
    if isinstance(choice, str) and choice in _NAMED:
        return _NAMED[choice]
    if not callable(choice):
        raise ValueError(
            f"on_materialise must be {', '.join(map(repr, _NAMED))} or a callable, not {choice!r}."
        )
    return Policy(choice)


def overridden_by(policy: Policy) -> AbstractContextManager[None]:
    """Puts a policy in force; `ALLOW` keeps what an enclosing call set, and so do events."""
    if policy is ALLOW:
        return nullcontext()
    events = _policy.value.events
    return policy_in_force(policy if events is None else replace(policy, events=events))


_recorded: ContextVar[list[Event]] = ContextVar("recorded")


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Collects events instead of telling anyone, so that they can be told each time."""
    events: list[Event] = []
    token = _recorded.set(events)
    try:
        with policy_in_force(RECORD):
            yield events
    finally:
        _recorded.reset(token)


def tells_each_time(policy: Policy) -> bool:
    """Whether someone must hear of what was staged before, each time that it runs."""
    return policy not in (ALLOW, ERROR)


def tell(events: Iterable[Event]) -> None:
    """Tells whoever asked, by the policy in force."""
    policy = _policy.value
    for event in events:
        if policy is RECORD:
            _recorded.get().append(event)
        if policy.events is not None:
            policy.events.append(event)
        if not (event.weight_nbytes if policy.weights_alone else event.made_dense):
            continue
        if policy.on_materialise == "warn":
            file, line = user_place()
            warnings.warn_explicit(str(event), MaterialiseWarning, file, line)
        elif policy.on_materialise == "error":
            remedy = "Allow it" if event.rule else "Register a rule for these types, or allow it"
            raise MaterialiseError(f"{event}. {remedy} with on_materialise='allow'.")
        elif callable(policy.on_materialise):
            policy.on_materialise(event)


# How the running rule computes, the bytes of each operand that it materializes, and the reason why
# it ran no kernel.
_how: ContextVar[tuple[str, Sequence[int], str]] = ContextVar("how", default=("", (), ""))


def note_how(how: str, dense: Sequence[int] = (), no_kernel: str = "") -> None:
    """Called by a rule at its end: its way, and how many bytes of each operand that makes dense."""
    if _policy.value is not ALLOW:
        _how.set((how, dense, no_kernel))


def note_rule(primitive: str, operands: Callable[[], Operands], rule: str) -> None:
    """Tells that a rule ran, where someone asked for a report or it makes something dense."""
    policy, (how, dense, no_kernel) = _policy.value, _how.get()
    _how.set(("", (), ""))
    if any(dense) or policy is RECORD or policy.events is not None:
        shown, sources, _, caches = operands()
        dense = (*dense, *[0] * (len(shown) - len(dense)))
        said = shown, rule, sum(dense), user_line(), how, sources, dense, caches, no_kernel
        tell([Event(primitive, *said)])


def note_materialised(primitive: str, operands: Callable[[], Operands], why: str = "") -> None:
    if _policy.value is not ALLOW:
        shown, sources, dense, caches = operands()
        said = shown, None, sum(dense), user_line(), why, sources, dense, caches
        tell([Event(primitive, *said)])
