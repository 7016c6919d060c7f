"""What the weights of a model lost by being rounded, and the bits they were given: tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._report.tables import Cells, Tabular


class WeightLoss(NamedTuple):
    """One weight.

    **Arguments:**

    - `path`, `shape`, `qtype`: of the weight.
    - `before`, `after`: how far the outputs of its products are from those of the dense weight, on
      the same activations, as a share of these: the root of the mean square of the one by that of
      the other. Rounded to nearest as `quantize_tree` does it, and as it is now.
    - `method`: by which it was rounded.
    - `correction_rank`: of its correction of low rank, which `after` counts; None without one.
    """

    path: str
    shape: tuple[int, ...]
    qtype: str
    before: float
    after: float
    method: str
    correction_rank: int | None = None


@dataclass(frozen=True, repr=False)
class CalibrationReport(Tabular):
    """The weights whose outputs are known: `print` it for a table; a notebook shows one of HTML.

    `plot` draws it.
    """

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
                _how(row),
            )
            for row in self.rows
        ]
        mean = "mean", "", "", self.mean("before"), self.mean("after"), ""
        return names, cells, mean, _NUMBERS

    def plot(self, axes: Any = None) -> Any:
        """Draws a bar for each weight, rounded to nearest and as it is now; needs matplotlib.

        **Arguments:**

        - `axes`: of matplotlib, to draw on; None makes a figure.

        **Returns:** the axes.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            _, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(self.rows)), layout="constrained")
        places = range(len(self.rows))
        for label, field, colour in (("nearest", "before", "0.8"), ("as it is", "after", "C0")):
            values = [100 * getattr(row, field) for row in self.rows]
            axes.barh(places, values, color=colour, label=label)
        axes.set_yticks(places, [row.path for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel("error of the outputs, % of their norm")
        axes.legend()
        return axes

    def mean(self, field: str) -> str:
        """Returns the mean over the weights of `before` or `after`, as a percentage."""
        values = [getattr(row, field) for row in self.rows]
        return percent(sum(values) / max(1, len(values)))


class WeightBits(NamedTuple):
    """How one weight is stored.

    **Arguments:**

    - `path`, `shape`, `qtype`: of the weight.
    - `bits`: of all of it, scales and corrections included.
    - `loses`: how far the outputs of its products are from those of the dense weight, as a share of
      these, rounded to nearest.
    - `model_loses`: how far those of the model are, by this weight alone.
    """

    path: str
    shape: tuple[int, ...]
    qtype: str
    bits: int
    loses: float
    model_loses: float


@dataclass(frozen=True, repr=False)
class AllocationReport(Tabular):
    """The weights that bits were given to: `print` it for a table; a notebook shows one of HTML."""

    rows: tuple[WeightBits, ...]

    @property
    def bits(self) -> float:
        """Bits a value, of all weights."""
        values = sum(math.prod(row.shape) for row in self.rows)
        return sum(row.bits for row in self.rows) / max(1, values)

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        names = ("path", "format", "shape", "bits a value", "loses", "model loses")
        cells = [
            (
                row.path,
                row.qtype,
                str(list(row.shape)),
                f"{row.bits / max(1, math.prod(row.shape)):.3g}",
                percent(row.loses),
                percent(row.model_loses),
            )
            for row in self.rows
        ]
        together = percent(math.hypot(*(row.model_loses for row in self.rows)))
        total = ("together", "", "", f"{self.bits:.3g}", "", together)
        return names, cells, total, ("bits a value", "loses", "model loses")


def percent(share: float) -> str:
    """Returns a share as it is shown, by two digits."""
    return f"{100 * share:.2g}%"


def _how(row: WeightLoss) -> str:
    rank = row.correction_rank
    return row.method if rank is None else f"{row.method}, rank {rank}"


_NUMBERS = ("nearest loses", "loses")
