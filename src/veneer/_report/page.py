"""Show a report as a self-contained HTML page with two tables: by weight, and by program line.

The page loads nothing else. Scripts sort the tables and fold their groups. Without JavaScript, both
tables are shown in full.
"""

import html
import linecache
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template

from .._core.event import (
    Event,
)
from .groups import EventGroup, group_by_line, group_by_weight, shorten

_CONTEXT = 2  # how many source lines to show before and after a line of the program


def make_page(events: Sequence[Event], summary: str) -> str:
    """Return the HTML of the page."""
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    weights = [
        _body(group, group.name, "", [shorten(row.event.line) for row in group.rows])
        for group in group_by_weight(events)
    ]
    lines = [
        _body(group, shorten(group.name), _source(group.name), [row.weights for row in group.rows])
        for group in group_by_line(events)
    ]
    return template.substitute(
        summary=html.escape(summary),
        weights=_table("where", weights),
        lines=_table("weight", lines),
    )


def _table(last: str, bodies: list[str]) -> str:
    """Return a table of the given bodies. The heading of its last column is `last`."""
    numbers = ("times", "dense")
    headings = (
        f'<th scope="col"{_class("number" if name in numbers else "")}>{name}</th>'
        for name in ("primitive", "operands", "times", "what ran", "dense", last)
    )
    return f"<table>\n<thead><tr>{''.join(headings)}</tr></thead>\n{''.join(bodies)}</table>"


def _body(group: EventGroup, name: str, source: str, last: list[str]) -> str:
    """Return a `tbody` with the name of a group, a source excerpt, and a row per entry.

    `last` has the text of the last cell of each row.
    """
    note = f" <span>{group.materialized}</span>" if group.materialized else ""
    title = f"<div><b>{html.escape(name)}</b>{note}</div>{source}"
    rows = [f'<tr class="over"><th colspan="6" scope="rowgroup">{title}</th></tr>']
    for entry, where in zip(group.rows, last, strict=True):
        attributes = (
            "",
            "",
            f' class="number times" data-n="{entry.times}"',
            ' class="what"',
            f' class="number" data-n="{entry.nbytes}"',
            ' class="where"',
        )
        cells = zip(attributes, (*entry.cells, where), strict=True)
        row = "".join(f"<td{attribute}>{html.escape(text)}</td>" for attribute, text in cells)
        rows.append(f"<tr{_class('dense' if entry.event.made_dense else '')}>{row}</tr>")
    is_dense = any(entry.event.made_dense for entry in group.rows)
    return f"<tbody{_class('dense' if is_dense else '')}>\n" + "\n".join(rows) + "\n</tbody>\n"


def _source(line: str) -> str:
    """Return a program line with the lines around it as HTML, or "" if its file is unreadable."""
    place = re.match(r"(.*):(\d+)( \(|$)", line)
    lines = linecache.getlines(place[1]) if place else []
    if not place or not 0 < int(place[2]) <= len(lines):
        return ""
    at = int(place[2]) - 1
    start = max(0, at - _CONTEXT)
    around = textwrap.dedent("".join(lines[start : at + _CONTEXT + 1])).splitlines()
    width = len(str(start + len(around)))
    shown = (
        ("<mark>{}</mark>" if number == at else "{}").format(
            html.escape(f"{number + 1:>{width}}  {text}".rstrip())
        )
        for number, text in enumerate(around, start)
    )
    return "<pre>" + "\n".join(shown) + "</pre>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
