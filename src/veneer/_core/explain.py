"""What happens to implicit operands, and who is told: policies, events and the report.

A policy says what to do when an implicit array is about to be made dense because no rule fits.
It holds for the dynamic extent of a call, so that rules which redispatch, and loops, obey it too.
"""

import html
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import jax

from .jax_internals import user_line, user_place

OnMaterialise = Literal["allow", "warn", "error"] | Callable[["Event"], None]


class MaterialiseError(TypeError):
    """No rule fits, and the policy in force forbids making the operand dense."""


class MaterialiseWarning(UserWarning):
    """No rule fits, and an implicit array was made dense."""


@dataclass(frozen=True, slots=True)
class Event:
    """One primitive that met an implicit operand.

    `rule` is the file and line of the rule that ran, or None where the operands were made dense;
    `nbytes` is the size of those dense arrays, in bytes; `line` is the user's own line.
    """

    primitive: str
    operands: tuple[str, ...]
    rule: str | None
    nbytes: int
    line: str

    def __str__(self) -> str:
        met = f"{self.primitive}({', '.join(self.operands)}) at {self.line}"
        if self.rule is not None:
            return f"{met}: rule {self.rule}"
        return f"{met}: no rule fits, so {self.nbytes:,} bytes are made dense"


@dataclass(frozen=True, eq=False)
class Policy:
    """What to do on materialisation, and the list to which all events are added, if any.

    Compared by identity: what was staged under one policy says nothing under another.
    """

    on_materialise: OnMaterialise = "allow"
    events: list[Event] | None = None


ALLOW = Policy()
ERROR = Policy("error")
_NAMED = {"allow": ALLOW, "warn": Policy("warn"), "error": ERROR}

# A user context and not a context variable: JAX traces a jitted function anew when it changes, so
# that no function traced under one policy is silent under another.
_policy = jax.make_user_context(ALLOW)


def current_policy() -> Policy:
    """The policy in force."""
    return _policy.value


def policy_in_force(policy: Policy) -> AbstractContextManager[None]:
    """Puts a policy in force, for functions that run later than the call that set it."""
    return nullcontext() if policy is _policy.value else _policy(policy)


def policy_of(choice: OnMaterialise) -> Policy:
    """The policy of a choice of what to do on materialisation; refuses what is none."""
    if isinstance(choice, str) and choice in _NAMED:
        return _NAMED[choice]
    if not callable(choice):
        raise ValueError(
            f"on_materialise must be 'allow', 'warn', 'error' or a callable, got {choice!r}"
        )
    return Policy(choice)


def overridden_by(policy: Policy) -> AbstractContextManager[None]:
    """Puts a policy in force; `ALLOW` keeps what an enclosing call set, and so do events."""
    if policy is ALLOW:
        return nullcontext()
    events = _policy.value.events
    return policy_in_force(policy if events is None else Policy(policy.on_materialise, events))


def note_rule(primitive: str, operands: Callable[[], tuple[str, ...]], rule: str) -> None:
    """Records that a rule ran, where someone asked for a report."""
    events = _policy.value.events
    if events is not None:
        events.append(Event(primitive, operands(), rule, 0, user_line()))


def note_materialised(primitive: str, operands: Callable[[], tuple[str, ...]], nbytes: int) -> None:
    """Tells whoever asked that operands are about to be made dense."""
    policy = _policy.value
    if policy.events is None and policy.on_materialise == "allow":
        return
    event = Event(primitive, operands(), None, nbytes, user_line())
    if policy.events is not None:
        policy.events.append(event)
    if policy.on_materialise == "warn":
        file, line = user_place()
        warnings.warn_explicit(str(event), MaterialiseWarning, file, line)
    elif policy.on_materialise == "error":
        raise MaterialiseError(
            f"{event}. Register a rule for these types, or allow it with on_materialise='allow'."
        )
    elif callable(policy.on_materialise):
        policy.on_materialise(event)


@dataclass(frozen=True, repr=False)
class Report:
    """The events of one traced call: `print` it for a table; `to_html` gives a page.

    `events` holds every `Event` in the order of the program; `materialised` those of them in
    which no rule fitted.
    """

    events: tuple[Event, ...]

    @property
    def materialised(self) -> tuple[Event, ...]:
        """The events in which an operand was made dense."""
        return tuple(event for event in self.events if event.rule is None)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                event.primitive,
                ", ".join(event.operands),
                event.rule or "materialised",
                f"{event.nbytes:,}" if event.nbytes else "",
                event.line,
            )
            for event in self.events
        ]

    def _summary(self) -> str:
        dense = self.materialised
        total = sum(event.nbytes for event in dense)
        return f"{len(self.events)} primitives met an implicit array; {len(dense)} of them " + (
            f"made {total:,} bytes dense." if dense else "made it dense: none."
        )

    def __str__(self) -> str:
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, self._summary()])

    __repr__ = __str__

    def to_html(self) -> str:
        """The same table as a page of HTML."""
        cells = lambda tag, row: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self._rows())
        return (
            "<!doctype html><meta charset='utf-8'><title>veneer: explain</title>"
            "<style>body{font:14px sans-serif}td,th{padding:2px 12px;text-align:left}</style>"
            f"<p>{html.escape(self._summary())}</p>"
            f"<table><tr>{cells('th', _HEADINGS)}</tr>{body}</table>"
        )


_HEADINGS = ("primitive", "operands", "rule", "dense bytes", "line")
