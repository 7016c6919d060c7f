"""`explain` traces a function, and `Report` shows how its implicit operands were computed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

import jax
import numpy as np

from .._core.policy import Event, Policy, policy_in_force
from .._core.surface.implicit import implicit
from .._core.surface.operators import materialised_before
from .groups import group_by_weight, shorten
from .tables import Cells, count_of, html_table, screen_width, size_of, text_table, wrap_text

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
        from .page import make_page  # imports modules that are slow to import

        return make_page(self.events, self.summary)

    def _repr_html_(self) -> str:
        import html  # slow to import

        table = html_table(_HEADINGS, list(self._rows()), right=_NUMBERS)
        return f"{table}\n<p>{html.escape(self.summary)}</p>"

    def _rows(self) -> Iterator[Cells | str]:
        """Yield the rows of the table: a title for each weight, and the cells of its events."""
        for group in group_by_weight(self.events):
            yield group.name + (f": {group.materialized}" if group.materialized else "")
            for row in group.rows:
                yield *row.cells, shorten(row.event.line)


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
