"""Read the tables of pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Table:
    """The table of a page that begins with a given line, without bold and links."""

    def __init__(self, page: str, first: str) -> None:
        text = (ROOT / page).read_text("utf-8")
        self.text = text[text.index(first) :].partition("\n\n")[0]
        rows = [
            [cell.strip(" *") for cell in line.strip()[1:-1].split("|")]
            for line in self.text.splitlines()
        ]
        self.headings, self.rows = rows[0], {row[0]: row[1:] for row in rows[2:]}

    def numbers(self, row: str, *columns: str) -> list[float]:
        """Return the numbers of a row in the columns of these headings. An empty cell is NaN."""
        cells = [self.rows[row][self.headings.index(column) - 1] for column in columns]
        return [float(re.sub(r"[,%A-Za-z ]", "", cell) or "nan") for cell in cells]
