"""The report of `explain`: what happened to implicit operands, as a table and as a page."""

from collections.abc import Iterator
from dataclasses import dataclass

from .._core.surface.event import Event
from .groups import by_weight, describe_materialized, short, what_ran
from .tables import (
    Cells,
    count_of,
    html_table,
    screen_width,
    short_size_of,
    size_of,
    text_table,
    wrapped,
)


@dataclass(frozen=True, repr=False)
class Report:
    """The events of one traced call: `print` it for a table; `to_html` gives a page.

    `events` holds every `Event` in the order of the program; `materialised` those of them in
    which an operand was made dense, for no rule fitted or by the way that a rule went. Tables show
    those of each weight together, by its path in the arguments, and then those that met none: of
    arrays that are implicit in passing. Equal events are shown once, with their number, and so are
    those of weights whose paths differ in numbers alone (`layers.*.kernel`).
    """

    events: tuple[Event, ...]

    @property
    def materialised(self) -> tuple[Event, ...]:
        """The events in which an operand was made dense."""
        return tuple(event for event in self.events if event.made_dense)

    @property
    def nbytes(self) -> int:
        """The bytes that were made dense."""
        return sum(event.nbytes for event in self.materialised)

    @property
    def weight_nbytes(self) -> int:
        """The bytes that were made dense of weights."""
        return sum(event.weight_nbytes for event in self.materialised)

    @property
    def summary(self) -> str:
        """What happened, in a sentence."""
        met = f"{count_of(len(self.events), 'primitive')} met an implicit array"
        if not self.materialised:
            return f"{met}, and none made it dense."
        dense = f"{len(self.materialised)} of them made it dense: {size_of(self.nbytes)} in all"
        of_caches = sum(event.cache_nbytes for event in self.materialised)
        kinds = {"caches": of_caches, "weights": self.weight_nbytes - of_caches}
        made = [f"{size_of(n)} of it of {kind}" for kind, n in kinds.items() if n]
        alone = [f"of {kind} alone" for kind, n in kinds.items() if 0 < n == self.nbytes]
        total = f"{met}, and {dense}, {' and '.join(alone or made or ['none of it of weights'])}."
        small = sum(event.nbytes for event in self.materialised if event.no_kernel)
        if not small:
            return total
        part = "All" if small == self.nbytes else size_of(small)
        return f"{total} {part} of it is expected: those arrays are too small for a kernel."

    def __str__(self) -> str:
        rows: list[Cells | str] = []
        for row in self._rows():
            if isinstance(row, str):
                rows.append(row)
            else:
                primitive, operands, times, what, dense, where = row
                rows += [(times, f"{primitive}({operands})", dense, where), f"         {what}"]
        table = text_table(("times", "primitive", "dense", "where"), rows, right=_NUMBERS)
        return "\n".join([table, *wrapped(self.summary, screen_width())])

    __repr__ = __str__

    def to_html(self) -> str:
        """A page of HTML, which needs nothing else: by weight, and by line of the program.

        It is sorted by a click on a heading, and folded by one on a weight or a line. Lines are
        shown with the source around them, as their files are now. Without JavaScript, the page is
        two tables.
        """
        from .page import page_of  # what it imports takes a while

        return page_of(self)

    def _repr_html_(self) -> str:
        import html  # which takes a while

        table = html_table(_HEADINGS, list(self._rows()), right=_NUMBERS)
        return f"{table}\n<p>{html.escape(self.summary)}</p>"

    def _rows(self) -> Iterator[Cells | str]:
        """The rows, those of each weight under its path."""
        for path, group in by_weight(self.events).items():
            nbytes = sum(event.nbytes * times for (event, _), times in group.items())
            yield path + (f": {describe_materialized(nbytes, group)}" if nbytes else "")
            for (event, _), times in group.items():
                dense = short_size_of(event.nbytes * times) if event.made_dense else ""
                operands, where = ", ".join(event.operands), short(event.line)
                yield event.primitive, operands, str(times), what_ran(event), dense, where


_HEADINGS = ("primitive", "operands", "times", "what ran", "dense", "where")
_NUMBERS = ("times", "dense")
