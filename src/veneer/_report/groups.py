"""The events of a report in groups, counted: by weight, and by line of the program."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from .._core.event import BEFORE_CALL, Event
from .tables import size_of

#: The heading of the events that have no weight among their operands.
INTERMEDIATES = "intermediates"

#: Equal events, each with the weights that it met, and their number.
Group = Counter[tuple[Event, str]]


def by_weight(events: Iterable[Event]) -> dict[str, Group]:
    """Group events by the paths of their weights. Events without a weight come last."""
    groups = _grouped(events, lambda event, weights: weights)
    intermediates = groups.pop(INTERMEDIATES, None)
    return groups | {INTERMEDIATES: intermediates} if intermediates else groups


def by_line(events: Iterable[Event]) -> dict[str, Group]:
    """The events of each line of the program, in the order of its files."""
    groups = _grouped(events, lambda event, weights: event.line)
    place = lambda line: [int(x) if i % 2 else x for i, x in enumerate(re.split(r"(\d+)", line))]
    return {line: groups[line] for line in sorted(groups, key=place)}


def _grouped(events: Iterable[Event], name: Callable[[Event, str], str]) -> dict[str, Group]:
    """Those of each name, of an event and its weights. Paths that differ in numbers are one."""
    groups: dict[str, Group] = {}
    for event in events:
        paths = (re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in event.weights)
        weights = ", ".join(dict.fromkeys(paths)) or INTERMEDIATES
        counted = replace(event, sources=()), weights  # what differs in a path alone is equal here
        groups.setdefault(name(event, weights), Counter())[counted] += 1
    return groups


def describe_materialized(nbytes: int, group: Group) -> str:
    """Return how many bytes of a group were materialized, and whether its size is the reason."""
    small = all(event.no_kernel for event, _ in group if event.made_dense)
    return f"{size_of(nbytes)} materialized" + (", too small for a kernel" if small else "")


def what_ran(event: Event) -> str:
    """Returns the rule that ran, and how; or that none fitted."""
    if event.rule is None:
        when = f" {event.how}" if event.how == BEFORE_CALL else ""
        return f"materialized{when}: no rule fits"
    return f"rule {short(event.rule)}" + (f": {event.how_and_why}" if event.how else "")


def short(place: str) -> str:
    """A place in a file, from where one works, or from where Python finds modules."""
    short = (place.removeprefix(folder) for folder in _folders(os.getcwd(), tuple(sys.path)))
    return min([place, *short], key=len).replace("<locals>.", "")


@lru_cache(maxsize=16)
def _folders(here: str, path: tuple[str, ...]) -> tuple[str, ...]:
    folders = (os.path.abspath(folder) for folder in (here, *path) if isinstance(folder, str))
    return tuple(dict.fromkeys(folder.rstrip(os.sep) + os.sep for folder in folders))
