"""Write a report as an HTML page with two tables: by weight, and by program line.

The page loads no other files. Scripts sort the tables and fold their groups. Without JavaScript,
both tables are shown in full.
"""

import html
import linecache
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from string import Template

from .._core.policy import Event
from .groups import EventGroup, group_by_line, group_by_weight, shorten

_CONTEXT_LINES = 2  # the number of source lines shown before and after a line of the program


def make_page(events: Sequence[Event], summary: str) -> str:
    """Return an HTML page with a summary and two tables of the events."""
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    weight_bodies = [
        _table_body(group, group.name, "", [shorten(row.event.line) for row in group.rows])
        for group in group_by_weight(events)
    ]
    line_bodies = [
        _table_body(
            group,
            shorten(group.name),
            _source_excerpt(group.name),
            [row.weights for row in group.rows],
        )
        for group in group_by_line(events)
    ]
    return template.substitute(
        summary=html.escape(summary),
        weights=_table(weight_bodies, last_heading="where"),
        lines=_table(line_bodies, last_heading="weight"),
    )


def _table(bodies: list[str], *, last_heading: str) -> str:
    headings = (
        f'<th scope="col"{_class("number" if name in ("times", "dense") else "")}>{name}</th>'
        for name in ("primitive", "operands", "times", "what ran", "dense", last_heading)
    )
    return f"<table>\n<thead><tr>{''.join(headings)}</tr></thead>\n{''.join(bodies)}</table>"


def _table_body(group: EventGroup, title: str, source: str, last_cells: list[str]) -> str:
    """Return a `tbody` element: a title row, and a row for each event of the group.

    The title row has the title, the number of materialized bytes and `source`: HTML that shows
    source code. `last_cells` has the text of the last cell of each other row.
    """
    note = f" <span>{group.materialized}</span>" if group.materialized else ""
    title_cell = f"<div><b>{html.escape(title)}</b>{note}</div>{source}"
    html_rows = [f'<tr class="over"><th colspan="6" scope="rowgroup">{title_cell}</th></tr>']
    for row, last_cell in zip(group.rows, last_cells, strict=True):
        primitive, operands, times, what_ran, dense = map(html.escape, row.cells)
        html_rows.append(
            f"<tr{_class('dense' if row.event.made_dense else '')}>"
            f"<td>{primitive}</td><td>{operands}</td>"
            f'<td class="number times" data-n="{row.times}">{times}</td>'
            f'<td class="what">{what_ran}</td>'
            f'<td class="number" data-n="{row.nbytes}">{dense}</td>'
            f'<td class="where">{html.escape(last_cell)}</td></tr>'
        )
    is_dense = any(row.event.made_dense for row in group.rows)
    return f"<tbody{_class('dense' if is_dense else '')}>\n" + "\n".join(html_rows) + "\n</tbody>\n"


def _source_excerpt(place: str) -> str:
    """Return the source code around a place in a program as HTML.

    `place` is a text such as "model.py:12 (Model.__call__)". The result is "" if there is no such
    file or line.
    """
    match = re.match(r"(.*):(\d+)( \(|$)", place)
    if not match:
        return ""
    lines, index = linecache.getlines(match[1]), int(match[2]) - 1
    if not 0 <= index < len(lines):
        return ""
    start = max(0, index - _CONTEXT_LINES)
    excerpt = textwrap.dedent("".join(lines[start : index + _CONTEXT_LINES + 1])).splitlines()
    width = len(str(start + len(excerpt)))
    shown = []
    for number, text in enumerate(excerpt, start + 1):
        line = html.escape(f"{number:>{width}}  {text}".rstrip())
        shown.append(f"<mark>{line}</mark>" if number == index + 1 else line)
    return "<pre>" + "\n".join(shown) + "</pre>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
