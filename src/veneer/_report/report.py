"""The report of `explain`: what happened to implicit operands, as a table and as a page."""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
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
        for row, _ in self._rows():
            if isinstance(row, str):
                rows.append(row)
            else:
                primitive, operands, times, what, dense, where = row
                rows += [(times, f"{primitive}({operands})", dense, where), f"         {what}"]
        table = text_table(("times", "primitive", "dense", "where"), rows, right=_NUMBERS)
        return "\n".join([table, *wrapped(self.summary, screen_width())])

    __repr__ = __str__

    def to_html(self) -> str:
        """The same table as a page of HTML, which needs nothing else."""
        import html  # which takes a while

        return _PAGE.format(summary=html.escape(self.summary), table=self._html_table())

    def _repr_html_(self) -> str:
        import html

        return f"{self._html_table()}\n<p>{html.escape(self.summary)}</p>"

    def _html_table(self) -> str:
        rows, kinds = zip(*self._rows(), strict=True) if self.events else ((), ())
        return html_table(_HEADINGS, rows, right=_NUMBERS, kinds=kinds)

    def _rows(self) -> Iterator[tuple[tuple[str, ...] | str, str]]:
        """The rows, those of each weight under its path, each with its kind."""
        groups: dict[str, Counter[Event]] = {}
        for event in self.events:
            group = groups.setdefault(_group_of(event), Counter())
            group[replace(event, sources=())] += 1  # what differs in a path alone is equal here
        in_passing = groups.pop(_IN_PASSING, None)
        if in_passing:
            groups[_IN_PASSING] = in_passing
        for path, group in groups.items():
            yield from _rows_of(path, group)


_HEADINGS = ("primitive", "operands", "times", "what ran", "dense", "where")
_NUMBERS = ("times", "dense")
_IN_PASSING = ""


def _group_of(event: Event) -> str:
    """The weights that an event met, with those as one whose paths differ in numbers alone."""
    weights = (re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in event.weights)
    return ", ".join(dict.fromkeys(weights))


def _rows_of(path: str, group: Counter[Event]) -> Iterator[tuple[tuple[str, ...] | str, str]]:
    nbytes = sum(event.nbytes * n for event, n in group.items())
    yield (path or "in passing") + (f": {size_of(nbytes)} made dense" if nbytes else ""), ""
    for event, times in group.items():
        cells = (
            event.primitive,
            ", ".join(event.operands),
            str(times),
            _what_ran(event),
            short_size_of(event.nbytes * times) if event.made_dense else "",
            _short(event.line),
        )
        yield cells, "dense" if event.made_dense else ""


def _what_ran(event: Event) -> str:
    if event.rule is None:
        return "materialised: no rule fits"
    return f"rule {_short(event.rule)}" + (f": {event.how}" if event.how else "")


def _short(place: str) -> str:
    """A place in a file, from where one works, or from where Python finds modules."""
    short = (place.removeprefix(folder) for folder in _folders(os.getcwd(), tuple(sys.path)))
    return min([place, *short], key=len).replace("<locals>.", "")


@lru_cache(maxsize=16)
def _folders(here: str, path: tuple[str, ...]) -> tuple[str, ...]:
    folders = (os.path.abspath(folder) for folder in (here, *path) if isinstance(folder, str))
    return tuple(dict.fromkeys(folder.rstrip(os.sep) + os.sep for folder in folders))


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>veneer: what happened to implicit arrays</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 75rem;
          padding: 0 1.5rem; }}
  h1 {{ font-size: 1.3rem; margin: 0; }}
  table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
  th {{ text-align: left; font-weight: 600; padding: .4rem .8rem; border-bottom: 2px solid #8886; }}
  td {{ font-family: ui-monospace, monospace; padding: .35rem .8rem; vertical-align: top;
        border-bottom: 1px solid #8883; overflow-wrap: anywhere; }}
  th:nth-child(3), td:nth-child(3), th:nth-child(5), td:nth-child(5) {{ white-space: nowrap; }}
  tr.over th {{ padding-top: 1.2rem; }}
  tr.dense td {{ background: #e8590c22; }}
  tr.dense td:nth-child(4) {{ font-weight: 600; }}
</style>
<h1>What happened to implicit arrays</h1>
<p>{summary}</p>
{table}
</html>
"""
