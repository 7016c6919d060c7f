"""Tables of strings: as text, as HTML, and as rich draws them where it is installed.

A column is flush left unless `right` names its heading; `total` is a last row, set off.
"""

import io
from collections.abc import Collection, Sequence
from typing import Any

Cells = Sequence[str]


def text_table(
    headings: Cells, rows: Sequence[Cells], total: Cells | None = None, right: Collection[str] = ()
) -> str:
    """The table as lines of text."""
    lines = [headings, *rows, *([total] if total else [])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justify = [str.rjust if heading in right else str.ljust for heading in headings]
    return "\n".join(
        "  ".join(j(cell, w) for j, cell, w in zip(justify, line, widths, strict=True)).rstrip()
        for line in lines
    )


def html_table(
    headings: Cells,
    rows: Sequence[Cells],
    total: Cells | None = None,
    right: Collection[str] = (),
    kinds: Cells | None = None,
) -> str:
    """The table as an element of HTML; `kinds` are the classes of the rows, empty for none."""
    import html  # which takes a while

    styles = [' style="text-align: right"' if heading in right else "" for heading in headings]

    def row(tag: str, cells: Cells, kind: str = "") -> str:
        filled = zip(styles, cells, strict=True)
        inside = "".join(f"<{tag}{style}>{html.escape(cell)}</{tag}>" for style, cell in filled)
        return f'<tr class="{kind}">{inside}</tr>' if kind else f"<tr>{inside}</tr>"

    body = map(row, ["td"] * len(rows), rows, kinds or [""] * len(rows))
    foot = f"<tfoot>{row('th', total)}</tfoot>\n" if total else ""
    return (
        f"<table>\n<thead>{row('th', headings)}</thead>\n<tbody>\n"
        + "\n".join(body)
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
            no_wrap=True,
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


def text_of_rich(table: Any) -> str:
    """What `print_rich` prints, without colours."""
    file = io.StringIO()
    print_rich(table, file=file, force_terminal=False, force_jupyter=False, color_system=None)
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").splitlines())


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
