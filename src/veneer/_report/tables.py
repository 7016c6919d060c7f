"""Format tables of strings: as text that fits the terminal, as HTML, or for rich.

The headings in `right` name the columns of numbers, which are right-aligned. `total` is a last row.
A row that is a single string is a title above the rows that follow, across all columns.
"""

import itertools
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

Cells = Sequence[str]
Rows = Sequence[Cells | str]

_MIN_WIDTH = 6  # columns of text are not made narrower than this
_GAP = "  "


def screen_width() -> int:
    """Return $COLUMNS or the width of the terminal; 80 if stdout is not a terminal."""
    is_known = "COLUMNS" in os.environ or sys.stdout.isatty()
    return shutil.get_terminal_size((80, 24)).columns if is_known else 80


def text_table(
    headings: Cells,
    rows: Rows,
    total: Cells | None = None,
    right: Collection[str] = (),
    *,
    may_stack: bool = False,
) -> str:
    """Return a table as lines of text that fit the terminal. Texts are wrapped.

    Numbers are not wrapped. With `may_stack`, a table that is too wide has the first cell of each
    row on a line of its own, above the other cells.
    """
    screen, footer = screen_width(), [total] if total else []
    lines: list[Cells | str] = [headings, *rows, *footer]
    widths = _natural_widths(headings, lines, right)
    if may_stack and sum(widths) + len(_GAP) * (len(widths) - 1) > screen:
        stack = lambda cells: [cells[0], cells[1:]] if any(cells[1:]) else [cells[0]]
        lines = [part for x in lines for part in ([x] if isinstance(x, str) else stack(x))]
        headings = headings[1:]
    indent = _GAP if any(isinstance(line, str) for line in lines) else ""
    room = screen - len(indent) - len(_GAP) * (len(headings) - 1)
    fixed = [heading in right for heading in headings]
    widths = _fit_widths(_natural_widths(headings, lines, right), fixed, room)

    def print_row(row: Cells | str) -> Iterator[str]:
        if isinstance(row, str):
            yield from wrap_text(row, screen)
            return
        cells = [wrap_text(cell, n) for cell, n in zip(row, widths, strict=True)]
        for pieces in itertools.zip_longest(*cells, fillvalue=""):
            aligned = (
                piece.rjust(n) if is_fixed else piece.ljust(n)
                for piece, n, is_fixed in zip(pieces, widths, fixed, strict=True)
            )
            yield (indent + _GAP.join(aligned)).rstrip()

    return "\n".join(line for row in lines for line in print_row(row))


def _natural_widths(headings: Cells, lines: Rows, right: Collection[str]) -> list[int]:
    """Return the widths of columns in which only the headings of numbers are wrapped."""
    words = [heading.split() if heading in right else [heading] for heading in headings]
    rows = [line for line in lines if not isinstance(line, str) and line != headings]
    columns = zip(*rows, strict=True) if rows else [()] * len(headings)
    return [max(map(len, [*w, *cells])) for w, cells in zip(words, columns, strict=True)]


def _fit_widths(natural: Sequence[int], fixed: Sequence[bool], room: int) -> list[int]:
    """Return widths that fit: limit the columns that are not fixed to the same maximum."""
    texts = [n for n, is_fixed in zip(natural, fixed, strict=True) if not is_fixed]
    free = room - (sum(natural) - sum(texts))
    limit = max([_MIN_WIDTH, *texts])
    while limit > _MIN_WIDTH and sum(min(n, limit) for n in texts) > free:
        limit -= 1
    widths = [n if is_fixed else min(n, limit) for n, is_fixed in zip(natural, fixed, strict=True)]
    for i, n in enumerate(natural):  # the first columns get the remaining room
        widths[i] += min(n - widths[i], max(0, room - sum(widths)))
    return widths


def wrap_text(text: str, width: int) -> list[str]:
    """Return the lines of a wrapped text. All lines have the indentation of the text.

    Lines end after a space or a slash. A word that is longer than a line is broken after a
    punctuation mark, or anywhere.
    """
    indent = text[: len(text) - len(text.lstrip())]
    room = max(1, width - len(indent))
    lines = [""]
    for word in re.findall(r"[^\s/]*[\s/]+|[^\s/]+", text.strip()):
        fits = len(word.rstrip()) <= room
        for piece in [word] if fits else re.findall(r"[^.,:_]*[.,:_]|[^.,:_]+", word):
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > room:
                lines.append("")
            while len(piece.rstrip()) > room:
                lines[-1:] = [piece[:room], ""]
                piece = piece[room:]
            lines[-1] += piece
    return [(indent + line).rstrip() for line in lines]


def html_table(
    headings: Cells, rows: Rows, total: Cells | None = None, right: Collection[str] = ()
) -> str:
    """Return a table as an HTML element."""
    import html  # slow to import

    styles = [' style="text-align: right"' if heading in right else "" for heading in headings]

    def row(tag: str, cells: Cells | str) -> str:
        if isinstance(cells, str):
            return f'<tr class="over"><th colspan="{len(headings)}">{html.escape(cells)}</th></tr>'
        pairs = zip(styles, cells, strict=True)
        inside = "".join(f"<{tag}{style}>{html.escape(cell)}</{tag}>" for style, cell in pairs)
        return f"<tr>{inside}</tr>"

    foot = f"<tfoot>{row('th', total)}</tfoot>\n" if total else ""
    return (
        f"<table>\n<thead>{row('th', headings)}</thead>\n<tbody>\n"
        + "\n".join(row("td", cells) for cells in rows)
        + f"\n</tbody>\n{foot}</table>"
    )


def rich_table(
    headings: Cells, rows: Sequence[Cells], total: Cells | None = None, right: Collection[str] = ()
) -> Any:
    """Return a table as a `rich.table.Table`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_footer=total is not None)
    for i, heading in enumerate(headings):
        table.add_column(
            heading,
            footer=total[i] if total else "",
            justify="right" if heading in right else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))  # rich would take brackets in a string for markup
    return table


def print_rich(table: Any, **options: Any) -> None:
    """Print a rich table at its full width. The terminal may wrap its lines.

    `options` are passed to `rich.console.Console`.
    """
    from rich.console import Console

    console = Console(**options)
    unbounded = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table, soft_wrap=True)


def count_of(n: int, noun: str) -> str:
    """Return a number and a noun in the right form, such as "1 byte" or "2 bytes"."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def size_of(nbytes: int) -> str:
    """Return a number of bytes in a suitable unit, such as "9,999 bytes" or "2.1 MB"."""
    if nbytes < 10_000:
        return count_of(nbytes, "byte")
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000 or unit == "GB":
            break
    return f"{size:,.3g} {unit}"


def short_size_of(nbytes: int) -> str:
    """Return a number of bytes for a cell of a table, such as "9,999 B" or "2.1 MB"."""
    return f"{nbytes:,} B" if nbytes < 10_000 else size_of(nbytes)


class Tabular:
    """A base class of objects that `print`, rich and notebooks show as a table."""

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        """Return the headings, the rows, the row of totals, and the headings of numbers."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_table(*self._table(), may_stack=True)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())
