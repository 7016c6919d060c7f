"""Report how implicit operands were computed: `vn.explain`, and the `Report` that it returns.

`explain` traces a function. A report groups events by weight or by line of the program, and counts
equal events. It is shown as text and as an HTML page.

    tables      tables as plain text, as HTML and for rich
"""

import html
import linecache
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, ParamSpec

import jax
import numpy as np

from .._core.policy import BEFORE_CALL, Event, Policy, policy_in_force
from .._core.surface.implicit import implicit
from .._core.surface.operators import materialised_before
from .tables import (
    Cells,
    count_of,
    html_table,
    screen_width,
    short_size_of,
    size_of,
    text_table,
    wrap_text,
)

P = ParamSpec("P")

_HEADINGS = ("primitive", "operands", "times", "what ran", "dense", "where")
_NUMBERS = ("times", "dense")


@dataclass(frozen=True, repr=False)
class Report:
    """The report that `vn.explain` returns: the events of one traced call.

    `print` shows it as a table, and notebooks show it as HTML. `to_html` returns a page with
    sortable tables. The table groups events by weight, named by its path in the arguments. Events
    without a weight come last, as "intermediates". Equal events share one row with their count. The
    weights of numbered layers are grouped under one path, such as `layers.*.kernel`.

    **Arguments:**

    - `events`: a tuple of `vn.Event`, in the order of the program.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "int8")
    >>> report = vn.explain(lambda x, w: jnp.sin(w) + x)(1.0, w)
    >>> print(report.summary)
    1 primitive had implicit operands. 1 of them materialized 16 bytes (weights only).
    """

    events: tuple[Event, ...]

    @property
    def materialised(self) -> tuple[Event, ...]:
        """The events that materialized an operand."""
        return tuple(event for event in self.events if event.made_dense)

    @property
    def nbytes(self) -> int:
        """The number of bytes that were materialized."""
        return sum(event.nbytes for event in self.materialised)

    @property
    def weight_nbytes(self) -> int:
        """The number of bytes that were materialized from weights, including key-value caches."""
        return sum(event.weight_nbytes for event in self.materialised)

    @property
    def summary(self) -> str:
        """A short text with the number of events and the bytes that were materialized."""
        count = f"{count_of(len(self.events), 'primitive')} had implicit operands."
        if not self.materialised:
            return f"{count} None was materialized."
        cache_nbytes = sum(event.cache_nbytes for event in self.materialised)
        nbytes_by_kind = {"caches": cache_nbytes, "weights": self.weight_nbytes - cache_nbytes}
        parts = [f"{size_of(n)} of {kind}" for kind, n in nbytes_by_kind.items() if n]
        for kind, n in nbytes_by_kind.items():
            if 0 < n == self.nbytes:
                parts = [f"{kind} only"]
        total = (
            f"{count} {len(self.materialised)} of them materialized {size_of(self.nbytes)} "
            f"({', '.join(parts) or 'no weights'})."
        )
        expected_nbytes = sum(event.nbytes for event in self.materialised if event.no_kernel)
        if not expected_nbytes:
            return total
        share = "All" if expected_nbytes == self.nbytes else size_of(expected_nbytes)
        return f"{total} {share} of it is expected: the arrays are too small for a kernel."

    def __str__(self) -> str:
        rows: list[Cells | str] = []
        for row in self._rows():
            if isinstance(row, str):
                rows.append(row)
            else:
                primitive, operands, times, what_ran, dense, where = row
                rows += [(times, f"{primitive}({operands})", dense, where), f"         {what_ran}"]
        table = text_table(("times", "primitive", "dense", "where"), rows, right=_NUMBERS)
        return "\n".join([table, *wrap_text(self.summary, screen_width())])

    __repr__ = __str__

    def to_html(self) -> str:
        """Return a self-contained HTML page with two tables: by weight, and by program line.

        A click on a heading sorts a table. A click on a weight or a line hides its rows. The page
        shows the source code around each line, which this method reads from its file. Without
        JavaScript, the tables are complete but cannot be sorted.
        """
        return _make_page(self.events, self.summary)

    def _repr_html_(self) -> str:
        table = html_table(_HEADINGS, list(self._rows()), right=_NUMBERS)
        return f"{table}\n<p>{html.escape(self.summary)}</p>"

    def _rows(self) -> Iterator[Cells | str]:
        """Yield the rows of the table: a title for each weight, and the cells of its events."""
        for group in _group_by_weight(self.events):
            yield group.name + (f": {group.materialized}" if group.materialized else "")
            for row in group.rows:
                yield *row.cells, _shorten(row.event.line)


def explain(fn: Callable[P, Any]) -> Callable[P, Report]:
    """Return a function that reports what each primitive of `fn` does with implicit operands.

    The returned function traces `fn` under `vn.implicit`, but does not run the computation.

    **Arguments:**

    - `fn`: a function of pytrees. It may already be wrapped by `vn.implicit` or `jax.jit`.

    **Returns:** a function of the arguments of `fn` that returns a `vn.Report`. The report has a
    `vn.Event` for each primitive with an implicit operand: the rule that runs, if any, and the
    number of bytes that are materialized on the default backend of JAX. Weights are named by their
    paths in the arguments. If an operator such as `w + 1` materialized a weight before the call,
    and `fn` takes or captures the result, the report has an event for the operator too.

    **Raises:** The returned function raises `TypeError` if `fn` is not callable, and any error that
    `fn` raises while it is traced.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> report = vn.explain(lambda x, w: jnp.sin(x @ w) + w)(jnp.ones(2), w)
    >>> [(e.primitive, e.rule is not None, e.nbytes) for e in report.events]
    [('dot_general', True, 16), ('add', False, 16)]
    >>> [e.weights for e in report.events], report.weight_nbytes
    ([('w',), ('w',)], 32)
    """

    @wraps(fn, updated=())
    def traced(*args: Any, **kwargs: Any) -> Report:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]

        def call_with_arrays(arrays: list[Any]) -> Any:
            remaining = iter(arrays)
            new = [next(remaining) if a else x for a, x in zip(is_array, leaves, strict=True)]
            args, kwargs = jax.tree.unflatten(treedef, new)
            return implicit(fn)(*args, **kwargs)

        events: list[Event] = []
        arrays = [x for a, x in zip(is_array, leaves, strict=True) if a]
        with policy_in_force(Policy(events=events)):
            program = jax.make_jaxpr(call_with_arrays)(arrays)
        captured = program.consts  # arrays that `fn` uses, but does not take as arguments
        return Report((*materialised_before([*arrays, *captured]), *events))

    return traced


# Groups of events.

_INTERMEDIATES = "intermediates"  # the name of the group of events without a weight


class EventRow(NamedTuple):
    """A row of the table of a report: an event, and how often an equal event occurred."""

    event: Event
    weights: str  # the joined paths of the weights of the event, or "intermediates"
    times: int

    @property
    def nbytes(self) -> int:
        """The number of bytes that all events of the row materialized together."""
        return self.event.nbytes * self.times

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The texts of the cells: primitive, operands, count, rule if any, materialized bytes."""
        event = self.event
        if event.rule is not None:
            details = f": {event.how_and_why}" if event.how else ""
            what_ran = f"rule {_shorten(event.rule)}{details}"
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


def _group_by_weight(events: Iterable[Event]) -> list[EventGroup]:
    """Group events by the paths of their weights. Events without a weight come last."""
    groups = _group(events, lambda event, weights: weights)
    return sorted(groups, key=lambda group: group.name == _INTERMEDIATES)


def _group_by_line(events: Iterable[Event]) -> list[EventGroup]:
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


def _shorten(place: str) -> str:
    """Shorten a text such as "/home/me/model.py:12 (f)".

    The file becomes relative to the working directory or to a folder of `sys.path`.
    """
    folders = (os.getcwd(), *(folder for folder in sys.path if isinstance(folder, str)))
    relative = (place.removeprefix(os.path.join(os.path.abspath(f), "")) for f in folders)
    return min([place, *relative], key=len).replace("<locals>.", "")


# The HTML page. It loads no other files. Scripts sort its tables and fold their groups. Without
# JavaScript, both tables are shown in full.

_CONTEXT_LINES = 2  # the number of source lines shown before and after a line of the program


def _make_page(events: Sequence[Event], summary: str) -> str:
    """Return an HTML page with a summary and two tables of the events."""
    template = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
    weight_bodies = [
        _table_body(group, group.name, "", [_shorten(row.event.line) for row in group.rows])
        for group in _group_by_weight(events)
    ]
    line_bodies = [
        _table_body(
            group,
            _shorten(group.name),
            _source_excerpt(group.name),
            [row.weights for row in group.rows],
        )
        for group in _group_by_line(events)
    ]
    return template.substitute(
        summary=html.escape(summary),
        weights=_table(weight_bodies, last_heading="where"),
        lines=_table(line_bodies, last_heading="weight"),
    )


def _table(bodies: list[str], *, last_heading: str) -> str:
    headings = (
        f'<th scope="col"{_class("number" if name in _NUMBERS else "")}>{name}</th>'
        for name in (*_HEADINGS[:-1], last_heading)
    )
    return f"<table>\n<thead><tr>{''.join(headings)}</tr></thead>\n{''.join(bodies)}</table>"


def _table_body(group: EventGroup, title: str, source: str, last_cells: list[str]) -> str:
    """Return an HTML `tbody` element: a title row, and a row for each event of the group.

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
