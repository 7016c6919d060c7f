"""The report of `explain`: what happened to implicit operands, as a table and as a page."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .._core.surface.event import Event
from .tables import (
    Cells,
    count_of,
    html_table,
    screen_width,
    short_size_of,
    size_of,
    text_table,
    wrapped,
)


@dataclass(frozen=True, repr=False)
class Report:
    """The events of one traced call: `print` it for a table; `to_html` gives a page.

    `events` holds every `Event` in the order of the program; `materialised` those of them in
    which an operand was made dense, for no rule fitted or by the way that a rule went. Tables show
    those of each weight together, by its path in the arguments, and then those that met none: of
    arrays that are implicit in passing. Equal events are shown once, with their number, and so are
    those of weights whose paths differ in numbers alone (`layers.*.kernel`).
    """

    events: tuple[Event, ...]

    @property
    def materialised(self) -> tuple[Event, ...]:
        """The events in which an operand was made dense."""
        return tuple(event for event in self.events if event.made_dense)

    @property
    def nbytes(self) -> int:
        """The bytes that were made dense."""
        return sum(event.nbytes for event in self.materialised)

    @property
    def weight_nbytes(self) -> int:
        """The bytes that were made dense of weights."""
        return sum(event.weight_nbytes for event in self.materialised)

    @property
    def summary(self) -> str:
        """What happened, in a sentence."""
        met = f"{count_of(len(self.events), 'primitive')} met an implicit array"
        if not self.materialised:
            return f"{met}, and none made it dense."
        dense = f"{len(self.materialised)} of them made it dense: {size_of(self.nbytes)} in all"
        of_weights = f"{size_of(self.weight_nbytes)} of it of weights"
        if self.weight_nbytes in (0, self.nbytes):
            of_weights = "of weights alone" if self.weight_nbytes else "none of it of weights"
        return f"{met}, and {dense}, {of_weights}."

    def __str__(self) -> str:
        rows: list[Cells | str] = []
        for row in self._rows():
            if isinstance(row, str):
                rows.append(row)
            else:
                primitive, operands, times, what, dense, where = row
                rows += [(times, f"{primitive}({operands})", dense, where), f"         {what}"]
        table = text_table(("times", "primitive", "dense", "where"), rows, right=_NUMBERS)
        return "\n".join([table, *wrapped(self.summary, screen_width())])

    __repr__ = __str__

    def to_html(self) -> str:
        """A page of HTML, which needs nothing else: by weight, and by line of the program.

        It is sorted by a click on a heading, and folded by one on a weight or a line. Lines are
        shown with the source around them, as their files are now. Without JavaScript, the page is
        two tables.
        """
        from .page import page_of  # what it imports takes a while

        return page_of(self)

    def _repr_html_(self) -> str:
        import html  # which takes a while

        table = html_table(_HEADINGS, list(self._rows()), right=_NUMBERS)
        return f"{table}\n<p>{html.escape(self.summary)}</p>"

    def _rows(self) -> Iterator[Cells | str]:
        """The rows, those of each weight under its path."""
        for path, group in by_weight(self.events).items():
            nbytes = sum(event.nbytes * times for (event, _), times in group.items())
            yield path + (f": {size_of(nbytes)} made dense" if nbytes else "")
            for (event, _), times in group.items():
                dense = short_size_of(event.nbytes * times) if event.made_dense else ""
                operands, where = ", ".join(event.operands), short(event.line)
                yield event.primitive, operands, str(times), what_ran(event), dense, where


_HEADINGS = ("primitive", "operands", "times", "what ran", "dense", "where")
_NUMBERS = ("times", "dense")

#: In the place of the weights of what met none.
IN_PASSING = "in passing"

#: Equal events, each with the weights that it met, and their number.
Group = Counter[tuple[Event, str]]


def by_weight(events: Iterable[Event]) -> dict[str, Group]:
    """The events of each weight, and at last those of what is implicit in passing."""
    groups = _grouped(events, lambda event, weights: weights)
    in_passing = groups.pop(IN_PASSING, None)
    return groups | {IN_PASSING: in_passing} if in_passing else groups


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
        weights = ", ".join(dict.fromkeys(paths)) or IN_PASSING
        counted = replace(event, sources=()), weights  # what differs in a path alone is equal here
        groups.setdefault(name(event, weights), Counter())[counted] += 1
    return groups


def what_ran(event: Event) -> str:
    if event.rule is None:
        return "materialised: no rule fits"
    return f"rule {short(event.rule)}" + (f": {event.how}" if event.how else "")


def short(place: str) -> str:
    """A place in a file, from where one works, or from where Python finds modules."""
    short = (place.removeprefix(folder) for folder in _folders(os.getcwd(), tuple(sys.path)))
    return min([place, *short], key=len).replace("<locals>.", "")


@lru_cache(maxsize=16)
def _folders(here: str, path: tuple[str, ...]) -> tuple[str, ...]:
    folders = (os.path.abspath(folder) for folder in (here, *path) if isinstance(folder, str))
    return tuple(dict.fromkeys(folder.rstrip(os.sep) + os.sep for folder in folders))
