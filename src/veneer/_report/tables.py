"""Format tables of strings: as text that fits the terminal, as HTML, or for rich.

A row is a sequence of cells, or one string: a title across all columns, above the next rows. The
argument `right` lists the headings of columns with numbers, which are right-aligned.
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

_MIN_WIDTH = 6  # the least width of a column of text
_GAP = "  "


def screen_width() -> int:
    """Return $COLUMNS or the width of the terminal, or 80 if stdout is not a terminal."""
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
    """Return a table as text that fits the width of the terminal.

    `total` is a last row, and `right` lists the headings of columns with numbers. Numbers are not
    wrapped. If `may_stack` is True and the table is too wide, the first cell of each row gets its
    own line, above the other cells of the row.
    """
    screen = screen_width()
    all_rows: list[Cells | str] = [headings, *rows, *([total] if total else [])]
    widths = _natural_widths(headings, all_rows, right)
    if may_stack and sum(widths) + len(_GAP) * (len(widths) - 1) > screen:
        unstacked, all_rows = all_rows, []
        for row in unstacked:
            first, others = (row, ()) if isinstance(row, str) else (row[0], row[1:])
            all_rows += [first, others] if any(others) else [first]
        headings = headings[1:]
        widths = _natural_widths(headings, all_rows, right)
    # Rows of cells are indented below titles.
    indent = _GAP if any(isinstance(row, str) for row in all_rows) else ""
    room = screen - len(indent) - len(_GAP) * (len(headings) - 1)
    is_number = [heading in right for heading in headings]
    widths = _fit_widths(widths, is_number, room)

    def format_row(row: Cells | str) -> Iterator[str]:
        if isinstance(row, str):
            yield from wrap_text(row, screen)
            return
        cells = [wrap_text(cell, width) for cell, width in zip(row, widths, strict=True)]
        for pieces in itertools.zip_longest(*cells, fillvalue=""):
            aligned = (
                piece.rjust(width) if align_right else piece.ljust(width)
                for piece, width, align_right in zip(pieces, widths, is_number, strict=True)
            )
            yield (indent + _GAP.join(aligned)).rstrip()

    return "\n".join(line for row in all_rows for line in format_row(row))


def _natural_widths(headings: Cells, all_rows: Rows, right: Collection[str]) -> list[int]:
    """Return the width that each column needs for its cells without wrapping.

    Headings are not wrapped either, except those in `right`, of columns with numbers: they are
    wrapped at spaces.
    """
    words = [heading.split() if heading in right else [heading] for heading in headings]
    rows = [row for row in all_rows if not isinstance(row, str) and row != headings]
    columns = zip(*rows, strict=True) if rows else [()] * len(headings)
    return [max(map(len, [*w, *cells])) for w, cells in zip(words, columns, strict=True)]


def _fit_widths(natural: Sequence[int], is_number: Sequence[bool], room: int) -> list[int]:
    """Return column widths whose sum is at most `room`, if possible.

    `natural` has the widths of the columns without wrapping. Columns of numbers (`is_number`) keep
    these widths. The other columns get a common maximum.
    """
    text_widths = [n for n, keeps in zip(natural, is_number, strict=True) if not keeps]
    text_room = room - (sum(natural) - sum(text_widths))
    limit = max([_MIN_WIDTH, *text_widths])
    while limit > _MIN_WIDTH and sum(min(n, limit) for n in text_widths) > text_room:
        limit -= 1
    widths = [n if keeps else min(n, limit) for n, keeps in zip(natural, is_number, strict=True)]
    for i, n in enumerate(natural):  # the first columns get the remaining room
        widths[i] += min(n - widths[i], max(0, room - sum(widths)))
    return widths


def wrap_text(text: str, width: int) -> list[str]:
    """Wrap a text, and return its lines. Each line has the indentation of the text.

    Lines break after a space or a slash. If a word is longer than a line, the word breaks after a
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
    """Return a table, given the arguments of `text_table`, as an HTML `table` element."""
    import html  # slow to import

    styles = [' style="text-align: right"' if heading in right else "" for heading in headings]

    def format_row(tag: str, cells: Cells | str) -> str:
        if isinstance(cells, str):
            return f'<tr class="over"><th colspan="{len(headings)}">{html.escape(cells)}</th></tr>'
        pairs = zip(styles, cells, strict=True)
        content = "".join(f"<{tag}{style}>{html.escape(cell)}</{tag}>" for style, cell in pairs)
        return f"<tr>{content}</tr>"

    foot = f"<tfoot>{format_row('th', total)}</tfoot>\n" if total else ""
    return (
        f"<table>\n<thead>{format_row('th', headings)}</thead>\n<tbody>\n"
        + "\n".join(format_row("td", cells) for cells in rows)
        + f"\n</tbody>\n{foot}</table>"
    )


def rich_table(
    headings: Cells, rows: Sequence[Cells], total: Cells | None = None, right: Collection[str] = ()
) -> Any:
    """Return a table, given the arguments of `text_table`, as a `rich.table.Table`."""
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
    """Print a rich table at its full width. `options` are passed to `rich.console.Console`."""
    from rich.console import Console

    console = Console(**options)
    unbounded = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table, soft_wrap=True)  # the terminal may wrap the lines


def count_of(n: int, noun: str) -> str:
    """Return a number and a noun in the singular or plural, such as "1 byte" or "2 bytes"."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def size_of(nbytes: int) -> str:
    """Return a number of bytes in a suitable unit, such as "9,999 bytes" or "2.1 MB"."""
    if nbytes < 10_000:
        return count_of(nbytes, "byte")
    if nbytes < 1e6:
        return f"{nbytes / 1e3:,.3g} kB"
    return f"{nbytes / 1e6:,.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:,.3g} GB"


def short_size_of(nbytes: int) -> str:
    """Return a number of bytes for a cell of a table, such as "9,999 B" or "2.1 MB"."""
    return f"{nbytes:,} B" if nbytes < 10_000 else size_of(nbytes)


class Tabular:
    """A base class of objects that `print`, rich and notebooks show as a table."""

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        """Return `(headings, rows, total, right)`, the arguments of `text_table`."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_table(*self._table(), may_stack=True)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())
