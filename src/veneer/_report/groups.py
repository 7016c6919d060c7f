"""Group the events of a report by weight or by line of the program, and count equal events."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from .._core.policy import BEFORE_CALL, Event
from .tables import short_size_of, size_of

_INTERMEDIATES = "intermediates"  # the name of the group of events without a weight


class EventRow(NamedTuple):
    """A row of a table: how a primitive ran (its event), and how often in the group."""

    event: Event
    weights: str  # the joined paths of the weights of the event, or "intermediates"
    times: int

    @property
    def nbytes(self) -> int:
        """The number of bytes that all events of the row materialized together."""
        return self.event.nbytes * self.times

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The texts of the cells: primitive, operands, count, what ran, and materialized bytes."""
        event = self.event
        if event.rule is not None:
            details = f": {event.how_and_why}" if event.how else ""
            what_ran = f"rule {shorten(event.rule)}{details}"
        else:
            when = f" {event.how}" if event.how == BEFORE_CALL else ""
            what_ran = f"materialized{when}: no rule fits"
        dense = short_size_of(self.nbytes) if event.made_dense else ""
        return event.primitive, ", ".join(event.operands), str(self.times), what_ran, dense


class EventGroup(NamedTuple):
    """The events of one weight or program line. `name` is the path of the weight, or the line."""

    name: str
    rows: list[EventRow]

    @property
    def materialized(self) -> str:
        """A text such as "64 bytes materialized", or "" if nothing was materialized."""
        nbytes = sum(row.nbytes for row in self.rows)
        is_small = all(row.event.no_kernel for row in self.rows if row.event.made_dense)
        reason = ", too small for a kernel" if is_small else ""
        return f"{size_of(nbytes)} materialized{reason}" if nbytes else ""


def group_by_weight(events: Iterable[Event]) -> list[EventGroup]:
    """Group events by the paths of their weights. Events without a weight come last."""
    groups = _group(events, lambda event, weights: weights)
    return sorted(groups, key=lambda group: group.name == _INTERMEDIATES)


def group_by_line(events: Iterable[Event]) -> list[EventGroup]:
    """Group events by their lines of the program, sorted by file and line number."""

    def sort_key(group: EventGroup) -> list[str | int]:
        parts = re.split(r"(\d+)", group.name)  # parts with odd indices are numbers
        return [int(part) if i % 2 else part for i, part in enumerate(parts)]

    return sorted(_group(events, lambda event, weights: event.line), key=sort_key)


def _group(events: Iterable[Event], get_name: Callable[[Event, str], str]) -> list[EventGroup]:
    """Group events, and count equal events in each group.

    `get_name(event, weights)` returns the name of the group of an event. `weights` is a text: the
    paths of the weights of the event, with "*" in place of layer numbers.
    """
    counts_by_name: dict[str, Counter[tuple[Event, str]]] = {}
    for event in events:
        # A layer number is a key of a path: digits between two dots, or at an end of the path.
        paths = (re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in event.weights)
        weights = ", ".join(dict.fromkeys(paths)) or _INTERMEDIATES
        # `sources` has paths with layer numbers. Without it, events of several layers are equal.
        key = replace(event, sources=()), weights
        counts_by_name.setdefault(get_name(event, weights), Counter())[key] += 1
    return [
        EventGroup(name, [EventRow(*key, times) for key, times in counts.items()])
        for name, counts in counts_by_name.items()
    ]


def shorten(place: str) -> str:
    """Shorten a text such as "/home/me/model.py:12 (f)".

    The file becomes relative to the working directory or to a folder of `sys.path`.
    """
    folders = (os.getcwd(), *(folder for folder in sys.path if isinstance(folder, str)))
    relative = (place.removeprefix(os.path.join(os.path.abspath(f), "")) for f in folders)
    return min([place, *relative], key=len).replace("<locals>.", "")
