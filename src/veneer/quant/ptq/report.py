"""The reports of `calibrate` and `allocate_bits`: tables with a row per weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._report.tables import Cells, Tabular


class WeightLoss(NamedTuple):
    """The error of one weight after calibration.

    An error is the root mean square error of the outputs of the weight's products, divided by the
    root mean square of the dense outputs.

    **Arguments:**

    - `path`, `shape`, `qtype`: the path, shape and format of the weight.
    - `before`: the error after rounding to nearest, as in `quantize_tree`.
    - `after`: the error of the result, including a low-rank correction.
    - `method`: the rounding method.
    - `correction_rank`: the rank of the low-rank correction, or None without a correction.
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
    """The errors of the weights after a calibration.

    `print` shows a table, a notebook an HTML table, and `plot` a chart.
    """

    rows: tuple[WeightLoss, ...]

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        headings = ("path", "format", "shape", "nearest error", "error", "method")
        cells = []
        for row in self.rows:
            rank = row.correction_rank
            method = row.method if rank is None else f"{row.method}, rank {rank}"
            errors = percent(row.before), percent(row.after)
            cells.append((row.path, row.qtype, str(list(row.shape)), *errors, method))
        mean = "mean", "", "", self.mean("before"), self.mean("after"), ""
        number_columns = "nearest error", "error"
        return headings, cells, mean, number_columns

    def plot(self, axes: Any = None) -> Any:
        """Draw two bars per weight: the error of rounding to nearest, and of the chosen method.

        This needs matplotlib.

        **Arguments:**

        - `axes`: the matplotlib axes to draw on. None creates a figure.

        **Returns:** the axes.
        """
        if axes is None:
            import matplotlib.pyplot as plt

            _, axes = plt.subplots(figsize=(8, 1 + 0.25 * len(self.rows)), layout="constrained")
        positions = range(len(self.rows))
        for label, field, color in (("nearest", "before", "0.8"), ("calibrated", "after", "C0")):
            values = [100 * getattr(row, field) for row in self.rows]
            axes.barh(positions, values, color=color, label=label)
        axes.set_yticks(positions, [row.path for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel("error of the outputs, % of their norm")
        axes.legend()
        return axes

    def mean(self, field: str) -> str:
        """Return the mean error of the weights as a text, such as "1.2%".

        `field` is the error to average: "before" or "after", as in `WeightLoss`.
        """
        values = [getattr(row, field) for row in self.rows]
        return percent(sum(values) / max(1, len(values)))


class WeightBits(NamedTuple):
    """The format that `allocate_bits` chose for one weight.

    **Arguments:**

    - `path`, `shape`, `qtype`: the path, shape and format of the weight.
    - `bits`: the total number of bits, including scales and corrections.
    - `loses`: the relative error of the outputs of the weight's products, if the weight is rounded
      to nearest.
    - `model_loses`: the relative error of the model's output, if only this weight is rounded.
    """

    path: str
    shape: tuple[int, ...]
    qtype: str
    bits: int
    loses: float
    model_loses: float


@dataclass(frozen=True, repr=False)
class AllocationReport(Tabular):
    """The formats that `allocate_bits` chose for the weights of a model.

    `print` shows a table, and a notebook an HTML table.
    """

    rows: tuple[WeightBits, ...]

    @property
    def bits(self) -> float:
        """The number of bits per value, over all weights."""
        values = sum(math.prod(row.shape) for row in self.rows)
        return sum(row.bits for row in self.rows) / max(1, values)

    def _table(self) -> tuple[Cells, Sequence[Cells], Cells, Cells]:
        headings = ("path", "format", "shape", "bits per value", "error", "model error")
        cells = []
        for row in self.rows:
            bits = f"{row.bits / max(1, math.prod(row.shape)):.3g}"
            errors = percent(row.loses), percent(row.model_loses)
            cells.append((row.path, row.qtype, str(list(row.shape)), bits, *errors))
        model_error = percent(math.hypot(*(row.model_loses for row in self.rows)))
        total = ("total", "", "", f"{self.bits:.3g}", "", model_error)
        number_columns = "bits per value", "error", "model error"
        return headings, cells, total, number_columns


def percent(share: float) -> str:
    """Return a fraction as a text: a percentage with two significant digits, such as "1.2%"."""
    return f"{100 * share:.2g}%"
