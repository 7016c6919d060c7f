"""The demo's picture: size against fidelity, one point a variant."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from .measure import Measurement

_INK, _MUTED, _GRID = "#1f2933", "#6b7684", "#e4e7eb"
_COLOUR = {None: "#8c6d46", "int8": "#2a6f97", "nf4": "#c8553d", "int4": "#588157"}


def save(measurements: Sequence[Measurement], path: Path) -> None:
    """Writes a PNG of megabytes, on a logarithmic axis, against mean cosine to f32.

    Variants that differ from another in their activations alone are left out: they are as large.
    """
    measurements = [row for row in measurements if row.variant.act_qtype is None]
    # Not pyplot, which looks for a display and keeps figures alive.
    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    megabytes = [row.nbytes / 1e6 for row in measurements]
    largest, smallest = max(megabytes), min(megabytes)
    for row, x in zip(measurements, megabytes, strict=True):
        colour = _COLOUR[row.variant.qtype]
        axes.plot(x, row.cosine, "o", ms=11, color=colour, mec="white", mew=1.5, zorder=3)
        beside = 10 if x < largest else -10  # in points; the largest stands at the right edge
        axes.annotate(
            f"{row.variant}\n{x:.1f} MB · {row.cosine:.4f}",
            (x, row.cosine),
            xytext=(beside, 0),
            textcoords="offset points",
            ha="left" if beside > 0 else "right",
            va="center",
            color=colour,
            fontsize=9,
            linespacing=1.4,
        )
    axes.set_xscale("log")
    axes.set_xlim(smallest / 1.25, largest * 1.25)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", length=0, colors=_MUTED)
    axes.margins(y=0.12)
    axes.grid(color=_GRID, lw=0.8)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("parameters as stored, scales included (MB, log scale)", color=_INK)
    axes.set_ylabel("mean cosine to the f32 embeddings", color=_INK)
    axes.set_title(
        "The same program on the same weights, stored in fewer bits", loc="left", color=_INK, pad=14
    )
    figure.savefig(path)
