"""The report of `explain` as a page that is sorted and folded, by weight and by line.

It needs nothing else, and no other host. Without JavaScript both tables are there, whole.
"""

import html
import linecache
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from .groups import Group, by_line, by_weight, describe_materialized, short, what_ran
from .tables import short_size_of

if TYPE_CHECKING:
    from .report import Report

_CONTEXT = 2  # lines of the source before the one that is shown, and after it


def page_of(report: "Report") -> str:
    """The page of HTML."""
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    lines = by_line(report.events)
    return template.substitute(
        summary=html.escape(report.summary),
        weights=_table("where", map(_of_weight, by_weight(report.events).items())),
        lines=_table("weight", (_of_line(line, group) for line, group in lines.items())),
    )


def _table(last: str, bodies: Iterator[str]) -> str:
    numbers = ("times", "dense")
    headings = (
        f'<th scope="col"{_class("number" if name in numbers else "")}>{name}</th>'
        for name in ("primitive", "operands", "times", "what ran", "dense", last)
    )
    return f"<table>\n<thead><tr>{''.join(headings)}</tr></thead>\n{''.join(bodies)}</table>"


def _of_weight(item: tuple[str, Group]) -> str:
    weight, group = item
    return _body(weight, "", group, [short(event.line) for event, _ in group])


def _of_line(line: str, group: Group) -> str:
    return _body(short(line), _source(line), group, [weight for _, weight in group])


def _body(name: str, source: str, group: Group, last: list[str]) -> str:
    """The rows of a group under its name, of which the last cells are given."""
    nbytes = sum(event.nbytes * times for (event, _), times in group.items())
    is_dense = any(event.made_dense for event, _ in group)
    told = f" <span>{describe_materialized(nbytes, group)}</span>" if nbytes else ""
    rows = [f"<div><b>{html.escape(name)}</b>{told}</div>{source}"]
    rows = [f'<tr class="over"><th colspan="6" scope="rowgroup">{rows[0]}</th></tr>']
    for ((event, _), times), where in zip(group.items(), last, strict=True):
        dense = event.nbytes * times
        cells = (
            ("", "", event.primitive),
            ("", "", ", ".join(event.operands)),
            ("number times", f' data-n="{times}"', str(times)),
            ("what", "", what_ran(event)),
            ("number", f' data-n="{dense}"', short_size_of(dense) if event.made_dense else ""),
            ("where", "", where),
        )
        row = "".join(f"<td{_class(c)}{n}>{html.escape(text)}</td>" for c, n, text in cells)
        rows.append(f"<tr{_class('dense' if event.made_dense else '')}>{row}</tr>")
    return f"<tbody{_class('dense' if is_dense else '')}>\n" + "\n".join(rows) + "\n</tbody>\n"


def _source(line: str) -> str:
    """The line of a program, among those around it, if its file can be read."""
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
