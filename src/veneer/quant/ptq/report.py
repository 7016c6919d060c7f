"""What the weights of a model lost by being rounded: a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..._report.tables import Cells, Tabular


class WeightLoss(NamedTuple):
    """One weight.

    **Arguments:**

    - `path`, `shape`, `qtype`: of the weight.
    - `before`, `after`: how far the outputs of its products are from those of the dense weight, on
      the same activations, as a share of these: the root of the mean square of the one by that of
      the other. Rounded to nearest as `quantize_tree` does it, and as it is now.
    - `method`: by which it was rounded.
    """

    path: str
    shape: tuple[int, ...]
    qtype: str
    before: float
    after: float
    method: str


@dataclass(frozen=True, repr=False)
class CalibrationReport(Tabular):
    """The weights whose outputs are known: `print` it for a table; a notebook shows one of HTML."""

    rows: tuple[WeightLoss, ...]

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        names = ("path", "format", "shape", "nearest loses", "loses", "method")
        cells = [
            (
                row.path,
                row.qtype,
                str(list(row.shape)),
                percent(row.before),
                percent(row.after),
                row.method,
            )
            for row in self.rows
        ]
        mean = lambda x: percent(sum(x) / max(1, len(x)))
        before, after = ([getattr(row, x) for row in self.rows] for x in ("before", "after"))
        return names, cells, ("mean", "", "", mean(before), mean(after), ""), _NUMBERS


def percent(share: float) -> str:
    """Returns a share as it is shown, by two digits."""
    return f"{100 * share:.2g}%"


_NUMBERS = ("nearest loses", "loses")
