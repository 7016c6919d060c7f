"""Tables of the errors of rounded weights, and of the formats of weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._report.tables import Cells, Tabular


class WeightLoss(NamedTuple):
    """The error of one weight.

    **Arguments:**

    - `path`, `shape`, `qtype`: of the weight.
    - `before`, `after`: the root mean square error of the outputs of its products, relative to the
      root mean square of the dense outputs for the same activations. `before` is for rounding to
      nearest as in `quantize_tree`, and `after` for the result.
    - `method`: the method of rounding.
    - `correction_rank`: the rank of its correction, which `after` includes, or None.
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
    """The errors of the weights of a calibration.

    `print` shows a table, a notebook an HTML table, and `plot` a chart.
    """

    rows: tuple[WeightLoss, ...]

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        names = ("path", "format", "shape", "nearest error", "error", "method")
        cells = []
        for row in self.rows:
            rank = row.correction_rank
            method = row.method if rank is None else f"{row.method}, rank {rank}"
            errors = percent(row.before), percent(row.after)
            cells.append((row.path, row.qtype, str(list(row.shape)), *errors, method))
        mean = "mean", "", "", self.mean("before"), self.mean("after"), ""
        return names, cells, mean, ("nearest error", "error")

    def plot(self, axes: Any = None) -> Any:
        """Draw two bars for each weight: rounded to nearest, and calibrated. This needs matplotlib.

        **Arguments:**

        - `axes`: the matplotlib axes to draw on. None creates a figure.

        **Returns:** the axes.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            _, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(self.rows)), layout="constrained")
        places = range(len(self.rows))
        for label, field, color in (("nearest", "before", "0.8"), ("calibrated", "after", "C0")):
            values = [100 * getattr(row, field) for row in self.rows]
            axes.barh(places, values, color=color, label=label)
        axes.set_yticks(places, [row.path for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel("error of the outputs, % of their norm")
        axes.legend()
        return axes

    def mean(self, field: str) -> str:
        """Return the mean of `before` or `after` over the weights, as a percentage."""
        values = [getattr(row, field) for row in self.rows]
        return percent(sum(values) / max(1, len(values)))


class WeightBits(NamedTuple):
    """The format of one weight.

    **Arguments:**

    - `path`, `shape`, `qtype`: of the weight.
    - `bits`: the total number of bits, including scales and corrections.
    - `loses`: the relative error of the outputs of its products when it is rounded to nearest.
    - `model_loses`: the relative error of the model's output when only this weight is rounded.
    """

    path: str
    shape: tuple[int, ...]
    qtype: str
    bits: int
    loses: float
    model_loses: float


@dataclass(frozen=True, repr=False)
class AllocationReport(Tabular):
    """The formats of the weights of an allocation.

    `print` shows a table, and a notebook an HTML table.
    """

    rows: tuple[WeightBits, ...]

    @property
    def bits(self) -> float:
        """The number of bits per value, over all weights."""
        values = sum(math.prod(row.shape) for row in self.rows)
        return sum(row.bits for row in self.rows) / max(1, values)

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        names = ("path", "format", "shape", "bits per value", "error", "model error")
        cells = []
        for row in self.rows:
            bits = f"{row.bits / max(1, math.prod(row.shape)):.3g}"
            errors = percent(row.loses), percent(row.model_loses)
            cells.append((row.path, row.qtype, str(list(row.shape)), bits, *errors))
        model_error = percent(math.hypot(*(row.model_loses for row in self.rows)))
        total = ("total", "", "", f"{self.bits:.3g}", "", model_error)
        return names, cells, total, ("bits per value", "error", "model error")


def percent(share: float) -> str:
    """Return a fraction as a percentage with two significant digits."""
    return f"{100 * share:.2g}%"
