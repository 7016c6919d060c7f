"""The report of `explain`: what happened to implicit operands, as a table and as a page."""

import os
from collections import Counter
from dataclasses import dataclass

from .._core.policy import Event
from .tables import count_of, html_table, size_of, text_table


@dataclass(frozen=True, repr=False)
class Report:
    """The events of one traced call: `print` it for a table; `to_html` gives a page.

    `events` holds every `Event` in the order of the program; `materialised` those of them in
    which an operand was made dense, for no rule fitted or by the way that a rule went. Tables show
    equal events once, with their number.
    """

    events: tuple[Event, ...]

    @property
    def materialised(self) -> tuple[Event, ...]:
        """The events in which an operand was made dense."""
        return tuple(event for event in self.events if event.made_dense)

    @property
    def summary(self) -> str:
        """What happened, in a sentence."""
        met = f"{count_of(len(self.events), 'primitive')} met an implicit array"
        dense = self.materialised
        if not dense:
            return f"{met}, and none made it dense."
        total = size_of(sum(event.nbytes for event in dense))
        return f"{met}, and {len(dense)} of them made it dense: {total} in all."

    def __str__(self) -> str:
        return f"{text_table(_HEADINGS, self._rows())}\n{self.summary}"

    __repr__ = __str__

    def to_html(self) -> str:
        """The same table as a page of HTML, which needs nothing else."""
        import html  # which takes a while

        kinds = ["dense" if event.made_dense else "" for event in Counter(self.events)]
        table = html_table(_HEADINGS, self._rows(), right=("times", "dense"), kinds=kinds)
        return _PAGE.format(summary=html.escape(self.summary), table=table)

    def _rows(self) -> list[tuple[str, ...]]:
        return [_cells(event, n) for event, n in Counter(self.events).items()]


_HEADINGS = ("primitive", "operands", "times", "what ran", "dense", "where in the program")


def _cells(event: Event, times: int) -> tuple[str, ...]:
    return (
        event.primitive,
        ", ".join(event.operands),
        str(times),
        _what_ran(event),
        size_of(event.nbytes * times) if event.made_dense else "",
        _short(event.line),
    )


def _what_ran(event: Event) -> str:
    if event.rule is None:
        return "materialised"
    return f"rule {_short(event.rule)}" + (f": {event.how}" if event.how else "")


def _short(place: str) -> str:
    """A place in a file, without the directory that the program runs in."""
    return place.removeprefix(os.getcwd() + os.sep)


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
  tr.dense td {{ background: #e8590c22; }}
  tr.dense td:nth-child(4) {{ font-weight: 600; }}
</style>
<h1>What happened to implicit arrays</h1>
<p>{summary}</p>
{table}
</html>
"""
