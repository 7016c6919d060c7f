"""Group the events of a report by weight or by line of the program, and count equal events."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from .._core.event import BEFORE_CALL, Event
from .tables import short_size_of, size_of

_INTERMEDIATES = "intermediates"  # the name of the group of events without a weight


class EventRow(NamedTuple):
    """Equal events of a group."""

    event: Event
    weights: str  # the paths of its weights, joined, or "intermediates"
    times: int

    @property
    def nbytes(self) -> int:
        """The bytes that all of the events materialized together."""
        return self.event.nbytes * self.times

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The texts for the primitive, its operands, the count, what ran, and the bytes."""
        event = self.event
        if event.rule is not None:
            ran = f"rule {shorten(event.rule)}" + (f": {event.how_and_why}" if event.how else "")
        else:
            when = f" {event.how}" if event.how == BEFORE_CALL else ""
            ran = f"materialized{when}: no rule fits"
        dense = short_size_of(self.nbytes) if event.made_dense else ""
        return event.primitive, ", ".join(event.operands), str(self.times), ran, dense


class EventGroup(NamedTuple):
    """The events of one weight, or of one line."""

    name: str
    rows: list[EventRow]

    @property
    def materialized(self) -> str:
        """A text with the number of materialized bytes, or "" for zero bytes."""
        nbytes = sum(row.nbytes for row in self.rows)
        dense = [row.event for row in self.rows if row.event.made_dense]
        small = ", too small for a kernel" if all(event.no_kernel for event in dense) else ""
        return f"{size_of(nbytes)} materialized{small}" if nbytes else ""


def group_by_weight(events: Iterable[Event]) -> list[EventGroup]:
    """Group events by the paths of their weights. Events without a weight come last."""
    groups = _group(events, lambda event, weights: weights)
    return sorted(groups, key=lambda group: group.name == _INTERMEDIATES)


def group_by_line(events: Iterable[Event]) -> list[EventGroup]:
    """Group events by their lines of the program, sorted by file and line number."""
    groups = _group(events, lambda event, weights: event.line)
    split_numbers = lambda line: re.split(r"(\d+)", line)  # numbers have odd indices
    place = lambda line: [int(x) if i % 2 else x for i, x in enumerate(split_numbers(line))]
    return sorted(groups, key=lambda group: place(group.name))


def _group(events: Iterable[Event], get_name: Callable[[Event, str], str]) -> list[EventGroup]:
    """Group events by a name, which may depend on the weights. Replace layer numbers by `*`."""
    counts: dict[str, Counter[tuple[Event, str]]] = {}
    for event in events:
        paths = (re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in event.weights)
        weights = ", ".join(dict.fromkeys(paths)) or _INTERMEDIATES
        key = replace(event, sources=()), weights  # events of different layers count as equal
        counts.setdefault(get_name(event, weights), Counter())[key] += 1
    return [
        EventGroup(name, [EventRow(*key, n) for key, n in c.items()]) for name, c in counts.items()
    ]


def shorten(place: str) -> str:
    """Return a file and line, relative to the working directory or to a folder of `sys.path`."""
    folders = (os.getcwd(), *(folder for folder in sys.path if isinstance(folder, str)))
    short = (place.removeprefix(os.path.join(os.path.abspath(f), "")) for f in folders)
    return min([place, *short], key=len).replace("<locals>.", "")
