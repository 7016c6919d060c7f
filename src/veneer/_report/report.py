"""The report of `explain`: what happened to implicit operands, as a table and as a page."""

from collections.abc import Iterator
from dataclasses import dataclass

from .._core.event import Event
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
    """The report that `vn.explain` returns: the events of one traced call.

    `print` shows it as a table, and notebooks show it as HTML. `to_html` returns a page with
    sortable tables. The table groups events by weight, named by its path in the arguments. Events
    without a weight come last, as "intermediates". Equal events share one row, which shows how many
    they are. The weights of numbered layers are grouped under one path, such as `layers.*.kernel`.

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
        of_caches = sum(event.cache_nbytes for event in self.materialised)
        kinds = {"caches": of_caches, "weights": self.weight_nbytes - of_caches}
        parts = [f"{size_of(n)} of {kind}" for kind, n in kinds.items() if n]
        parts = [f"{kind} only" for kind, n in kinds.items() if 0 < n == self.nbytes] or parts
        shown = f"{size_of(self.nbytes)} ({', '.join(parts) or 'no weights'})"
        total = f"{count} {len(self.materialised)} of them materialized {shown}."
        small = sum(event.nbytes for event in self.materialised if event.no_kernel)
        if not small:
            return total
        part = "All" if small == self.nbytes else size_of(small)
        return f"{total} {part} of it is expected: the arrays are too small for a kernel."

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
        """Return a self-contained HTML page with two tables: by weight, and by program line.

        A click on a heading sorts a table. A click on a weight or a line hides its rows. The page
        shows the source code around each line, which this method reads from its file. Without
        JavaScript, the tables are complete but cannot be sorted.
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
