"""Tables of strings: as text that fits a screen, as HTML, and as rich draws them.

A column is flush left unless `right` names its heading; `total` is a last row, set off. A row that
is one string is a line of its own, over the rows that follow.
"""

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

Cells = Sequence[str]
Rows = Sequence[Cells | str]

_LEAST = 6  # what a column is never narrower than for the sake of others
_GAP = "  "


def screen_width() -> int:
    """The columns of the terminal that is printed to, or those of $COLUMNS; 80 without either."""
    knows = "COLUMNS" in os.environ or sys.stdout.isatty()
    return shutil.get_terminal_size((80, 24)).columns if knows else 80


def text_table(
    headings: Cells,
    rows: Rows,
    total: Cells | None = None,
    right: Collection[str] = (),
    *,
    may_stack: bool = False,
) -> str:
    """The table as lines of text that fit the screen: cells are wrapped, and none is cut.

    Numbers, flush right, are not wrapped. With `may_stack`, the first cell of each row is a line
    over the others where the table does not fit otherwise.
    """
    screen, last = screen_width(), [total] if total else []
    widths = _natural_widths(headings, [*rows, *last], right)
    if may_stack and sum(widths) + len(_GAP) * (len(widths) - 1) > screen:
        stack = lambda cells: [cells[0], cells[1:]] if any(cells[1:]) else [cells[0]]
        rows = [line for row in rows for line in ([row] if isinstance(row, str) else stack(row))]
        title, *headings = headings
        lines = [title, headings, *rows, *(line for row in last for line in stack(row))]
    else:
        lines = [headings, *rows, *last]
    indent = _GAP if any(isinstance(line, str) for line in lines) else ""
    room = screen - len(indent) - len(_GAP) * (len(headings) - 1)
    fixed = [heading in right for heading in headings]
    widths = _fitted(_natural_widths(headings, lines, right), fixed, room)

    def printed(row: Cells | str) -> Iterator[str]:
        if isinstance(row, str):
            yield from wrapped(row, screen)
            return
        cells = [wrapped(cell, n) for cell, n in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            line = [cell[i] if i < len(cell) else "" for cell in cells]
            aligned = (
                piece.rjust(n) if is_fixed else piece.ljust(n)
                for piece, n, is_fixed in zip(line, widths, fixed, strict=True)
            )
            yield (indent + _GAP.join(aligned)).rstrip()

    return "\n".join(line for row in lines for line in printed(row))


def _natural_widths(headings: Cells, rows: Rows, right: Collection[str]) -> list[int]:
    """The widths of columns in which nothing is wrapped but the headings of numbers."""
    words = [heading.split() if heading in right else [heading] for heading in headings]
    full = [row for row in rows if not isinstance(row, str) and row is not headings]
    columns = zip(*full, strict=True) if full else [()] * len(headings)
    return [max(map(len, [*w, *cells])) for w, cells in zip(words, columns, strict=True)]


def _fitted(natural: Sequence[int], fixed: Sequence[bool], room: int) -> list[int]:
    """The widths of columns that fit: the widest are made narrower, down to one width."""
    free = room - sum(n for n, is_fixed in zip(natural, fixed, strict=True) if is_fixed)
    texts = [n for n, is_fixed in zip(natural, fixed, strict=True) if not is_fixed]
    most = max([_LEAST, *texts])
    while most > _LEAST and sum(min(n, most) for n in texts) > free:
        most -= 1
    widths = [n if is_fixed else min(n, most) for n, is_fixed in zip(natural, fixed, strict=True)]
    for i, n in enumerate(natural):  # what is left over goes to the first
        widths[i] += min(n - widths[i], max(0, room - sum(widths)))
    return widths


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines, of which the later ones are indented as the first is.

    Lines end after a space or a slash; within a word that is longer than a line, after a mark.
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
    headings: Cells,
    rows: Rows,
    total: Cells | None = None,
    right: Collection[str] = (),
) -> str:
    """The table as an element of HTML."""
    import html  # which takes a while

    styles = [' style="text-align: right"' if heading in right else "" for heading in headings]

    def row(tag: str, cells: Cells | str) -> str:
        if isinstance(cells, str):
            return f'<tr class="over"><th colspan="{len(headings)}">{html.escape(cells)}</th></tr>'
        filled = zip(styles, cells, strict=True)
        inside = "".join(f"<{tag}{style}>{html.escape(cell)}</{tag}>" for style, cell in filled)
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
    """The table as a `rich.table.Table`."""
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
        table.add_row(*map(Text, row))  # as text: a name in brackets is no markup
    return table


def print_rich(table: Any, **options: Any) -> None:
    """Prints a rich table as wide as it is: a terminal may wrap lines, but no cell is cut.

    `options` are those of `rich.console.Console`.
    """
    from rich.console import Console

    console = Console(**options)
    unbounded = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table, soft_wrap=True)


def count_of(n: int, noun: str) -> str:
    """`1 byte`, `2 bytes`."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def size_of(nbytes: int) -> str:
    """A number of bytes in the unit that suits it: `9,999 bytes`, `2.1 MB`."""
    if nbytes < 10_000:
        return count_of(nbytes, "byte")
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000 or unit == "GB":
            break
    return f"{size:,.3g} {unit}"


def short_size_of(nbytes: int) -> str:
    """The same for a cell of a table: `9,999 B`."""
    return f"{nbytes:,} B" if nbytes < 10_000 else size_of(nbytes)


class Tabular:
    """What is a table wherever it is shown: by `print`, by rich, in a notebook."""

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        """The headings, the rows, the last row, and which columns are of numbers."""
        raise NotImplementedError

    def __str__(self) -> str:
        return text_table(*self._table(), may_stack=True)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return rich_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())
