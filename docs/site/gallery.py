"""Draw the plots of the pages, from their tables and from the programs of the gallery.

    python docs/site/gallery.py [NAME ...]

Nothing is measured here. A figure comes from a table of a page, which a program of benchmarks/
prints. Each plot has a comment with a hash of its data, so that a test finds outdated plots. The
text of a plot has the light or dark color of the page.
"""

import hashlib
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from tables import ROOT, Table

GALLERY = ROOT / "docs" / "gallery"
PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)

# Similar to the colors of Okabe and Ito, which color-blind people can distinguish, on white and
# on black.
# Lines also have different marks, and names at their ends.
BLUE, RED, GREEN, PINK = "#2b86c9", "#D55E00", "#009E73", "#CC79A7"
COLORS, MARKS = (BLUE, RED, GREEN, PINK), "osD^vPX"
# The colors of text and grid lines, on a light and on a dark page.
INK, MUTED, GRID = "#1f2328", "#57606a", "#d8dee4"
DARK = {INK: "#e6e9ec", MUTED: "#a2abb5", GRID: "#3a424b"}


def figure(width: float = 6.4, height: float = 3.7, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty plot in the common style."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(drawn)
    panels = list(np.ravel(drawn.subplots(1, columns, sharey=True)))
    for axes in panels:
        axes.spines[:].set_visible(False)
        axes.tick_params(which="both", length=0, colors=MUTED, labelsize=10)
        axes.grid(color=GRID, lw=0.8)
        axes.set_axisbelow(True)
    return drawn, panels


def say(axes: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=10)


def ticks(axis: Any, at: Sequence[float], names: Iterable[str] | None = None) -> None:
    """Set the ticks of an axis to these values."""
    axis.set_ticks(at)
    axis.set_minor_formatter(NullFormatter())
    if names is None:
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    else:
        axis.set_ticklabels(list(names))


def name_ends(axes: Axes, lines: dict[str, tuple[float, float]], apart: float = 12) -> None:
    """Write the names of lines at their right ends, at least `apart` points from each other."""
    options: dict = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    write = lambda name, end: axes.annotate(name, end, (9, 0), color=INK, fontsize=9, **options)
    names = [(write(name, end), end) for name, end in lines.items()]
    axes.figure.canvas.draw()  # makes room for the names, which determines the height of the ends
    height = lambda end: axes.transData.transform(end)[1] * 72 / axes.figure.dpi
    free = -np.inf
    for name, end in sorted(names, key=lambda item: height(item[1])):
        at = max(height(end), free)
        name.set_position((9, at - height(end)))
        free = at + apart


def drawn_lines(
    axes: Axes, x: Sequence[float], lines: dict[str, Sequence[float]], apart: float = 12
) -> None:
    """Draw a line for each name, with its own color and mark, and write its name at its end."""
    ends = {}
    for i, (name, y) in enumerate(lines.items()):
        color, mark = COLORS[i % len(COLORS)], MARKS[i % len(MARKS)]
        axes.plot(x, y, marker=mark, ms=5, lw=1.8, color=color)
        ends[name] = (x[-1], y[-1])
    name_ends(axes, ends, apart)


def by_loss(axes: Axes, at: Sequence[float]) -> None:
    """Scale an axis of cosines by their distance from 1."""
    axes.set_yscale(
        "function",
        functions=(lambda y: -np.log(np.maximum(1 - y, 1e-9)), lambda z: 1 - np.exp(-z)),
    )
    ticks(axes.yaxis, at, map(str, at))


def fidelity(table: Table) -> Figure:
    drawn, (axes,) = figure(6.4, 4.4)
    alone = {name for name in table.rows if " by " not in name and "embeddings" not in name}
    rows = sorted(alone, key=lambda name: table.numbers(name, "MB"))
    ways = {
        "to nearest": "to nearest",
        "least error": "scales of the least error",
        "rotated, GPTQ": "rotated, calibrated",
    }
    megabytes = [table.numbers(name, "MB")[0] for name in rows]
    lines = {said: [table.numbers(name, way)[0] for name in rows] for way, said in ways.items()}
    by_loss(axes, [0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999])
    axes.set_xscale("log")
    axes.set_xlim(min(megabytes) / 1.06, max(megabytes) * 1.04)
    ticks(axes.xaxis, [8, 10, 12, 14, 17, 20, 23])
    for (name, y), color, mark in zip(lines.items(), COLORS, MARKS, strict=False):
        axes.plot(megabytes, y, marker=mark, ms=6, lw=1.6, color=color, label=name)
    axes.legend(loc="lower right", frameon=False, labelcolor=INK)
    for name, x, y in zip(rows, megabytes, lines["to nearest"], strict=True):
        side = "left" if 12 < x < 20 else "right"
        axes.annotate(
            name.replace(", ", "\n"),
            (x, y),
            xytext=(4 if side == "left" else -4, -5),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize=8,
            color=MUTED,
        )
    say(axes, x="MB of parameters, scales included", y="mean cosine to the f32 embeddings")
    return drawn


def demo(table: Table) -> Figure:
    drawn, (axes,) = figure(6.4, 4.2)
    by_loss(axes, [0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.999, 0.9999])
    axes.set_xscale("log")
    axes.set_ylim(0.92, 0.9998)
    for name in table.rows:
        nbytes, cosine = table.numbers(name, "bytes", "cosine")
        if " by " in name or name == "f32":
            continue
        kind = ["int8", "nf4", "int4"].index(name.partition(",")[0])
        axes.plot(nbytes / 1e6, cosine, MARKS[kind], ms=9, color=COLORS[kind])
        at, side = ((-10, 0), "right") if "128" in name else ((10, 0), "left")
        options: dict = {"textcoords": "offset points", "ha": side, "va": "center", "color": INK}
        axes.annotate(name, (nbytes / 1e6, cosine), at, fontsize=10, **options)
    axes.set_xlim(6, 40)
    ticks(axes.xaxis, [8, 10, 12, 14, 17, 20, 25, 30, 40])
    f32 = table.numbers("f32", "bytes")[0] / 1e6
    say(
        axes,
        x=f"MB of parameters, scales included; f32 has {f32:.0f}",
        y="mean cosine to the f32 embeddings",
    )
    return drawn


def rows(table: Table) -> Figure:
    drawn, (axes,) = figure(6.4, 4.2)
    lines = {
        "int4, activations int8": "w4a8, tile 128",
        "int8, activations int8": "w8a8",
        "int4": "int4, tile 128",
        "nf4": "nf4, tile 64",
        "int8": "int8",
        "int4 through XLA": "int4, tile 128, kernels off",
    }
    sizes = [1, 8, 256]
    milliseconds = [f"M = {m}, ms" for m in sizes]
    f32 = np.array(table.numbers("XLA f32", *milliseconds))
    faster = {name: f32 / table.numbers(row, *milliseconds) for name, row in lines.items()}
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks(axes.xaxis, sizes)
    ticks(axes.yaxis, [0.125, 0.25, 0.5, 1, 2, 4, 8], "⅛ ¼ ½ 1 2 4 8".split())
    axes.axhline(1, color=MUTED, lw=1, ls=":")
    drawn_lines(axes, sizes, faster)
    say(axes, x="rows", y="times as fast as XLA's f32", title="A weight of 4096 × 4096")
    return drawn


def decoding(table: Table) -> Figure:
    drawn, (axes,) = figure(6.4, 4.4)
    formats = [name for name in table.rows if name != "reading memory"][::-1]
    (bandwidth,) = table.numbers("reading memory", "MB a token")
    rows = np.arange(len(formats))
    column = lambda name: np.array([table.numbers(row, name)[0] for row in formats])
    most = bandwidth / column("MB a token")
    axes.hlines(rows, 1, most, color=GRID, lw=7, label="what reading memory allows")
    axes.plot(column("llama.cpp"), rows, "s", ms=6, color=RED, label="llama.cpp")
    axes.plot(column("tokens a second"), rows, "o", ms=6, color=BLUE, label="here")
    axes.set_xscale("log")
    ticks(axes.xaxis, [20, 50, 100, 200])
    axes.set_xlim(20, 220)
    ticks(axes.yaxis, [*rows], formats)
    axes.grid(visible=False, axis="y")
    options: dict = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "fontsize": 9}
    axes.legend(frameon=False, labelcolor=INK, **options)
    say(axes, x="tokens a second")
    return drawn


def structured(table: Table) -> Figure:
    drawn, (axes,) = figure(6.4, 4.8)
    columns = [name for name in table.headings if name.startswith("µs")]
    sizes = [int(name.rpartition(" ")[2]) for name in columns]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks(axes.xaxis, sizes)
    ticks(axes.yaxis, [10, 100, 1000, 10_000])
    names = [name for name in table.rows if name != "a call"]
    drawn_lines(axes, sizes, {name: table.numbers(name, *columns) for name in names}, 11)
    axes.lines[0].set(color=INK, lw=2.4)
    title = {"solve": "jnp.linalg.solve(A, b)", "product": "A @ x"}[table.headings[0]]
    say(axes, x="n", y="microseconds", title=title)
    return drawn


def memory(names: dict[str, Any]) -> Figure:
    drawn, (axes,) = figure(6.4, 3.9)
    ends = {}
    for (name, program), color in zip(names["steps"].items(), COLORS, strict=False):
        held = megabytes_held(program)
        x = np.linspace(0, 1, len(held))
        axes.plot(x, held, lw=2, color=color)
        axes.fill_between(x, held, color=color, alpha=0.12, lw=0)
        ends[name] = (1.0, held[-1])
    axes.set_xlim(0, 1)
    axes.set_ylim(0)
    ticks(axes.xaxis, [0, 0.5, 1], ["start", "forward, then backward", "end"])
    name_ends(axes, ends)
    say(axes, y="MB held", title="8 layers of 512 × 512, 128 rows, by XLA's schedule")
    return drawn


def megabytes_held(program: Any) -> list[float]:
    """Return the megabytes that a compiled program holds after each instruction.

    They include the arguments, and each value from its computation to its last use. Donated
    arguments become results.
    """
    text = program.as_text()
    lines = text[text.index("\nENTRY") :].splitlines()[2:]
    matches = [re.match(r"  (ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)", line) for line in lines]
    found = [match.groups() for match in matches if match]
    # XLA writes copies of donated arguments where these are.
    views = {"bitcast", "copy", "get-tuple-element", "tuple"}
    owner: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, (root, name, shape, kind, rest) in enumerate(found):
        used = set[str]().union(*(owner.get(x, ()) for x in re.findall(r"%([\w.-]+)", rest)))
        last |= dict.fromkeys(used, i)
        owner[name] = used if kind in views else {name}
        sizes[name] = 0 if kind in {*views, "parameter", "constant"} else bytes_of(shape)
        last[name] = i
        if root:  # results replace donated arguments
            sizes |= dict.fromkeys(used, 0)
    arguments = program.memory_analysis().argument_size_in_bytes
    held = [arguments / 1e6]
    for i in range(len(found)):
        live = (sizes[n] for j, (_, n, *_) in enumerate(found[: i + 1]) if last[n] >= i or j == i)
        held.append((arguments + sum(live)) / 1e6)
    return held


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape in HLO, such as `f32[8,512]{1,0}`, or of a tuple of shapes."""
    width = lambda kind: max(8, int(re.sub(r"\D", "", kind)[:2] or 8)) // 8
    sides = [
        (kind, [int(side) for side in dims.split(",") if side])
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)
    ]
    return sum(int(np.prod(dims)) * width(kind) for kind, dims in sides)


def throws(names: dict[str, Any]) -> Figure:
    drawn, (axes,) = figure(6.4, 3.2)
    for (degrees, path), color in zip(names["paths"].items(), COLORS, strict=False):
        x, y = np.asarray(path.value).T
        flying = np.flatnonzero(y >= 0)
        axes.plot(x[flying], y[flying], lw=2, color=color)
        top = int(np.argmax(y))
        options: dict = {"textcoords": "offset points", "ha": "center", "color": INK}
        axes.annotate(f"{degrees}°", (x[top], y[top]), xytext=(0, 5), fontsize=10, **options)
    axes.set_aspect("equal")
    axes.margins(y=0.15)
    unit = next(iter(names["paths"].values())).unit
    say(axes, x=str(unit), y=str(unit))
    return drawn


def sampler(names: dict[str, Any]) -> Figure:
    drawn, (axes,) = figure(6.4, 3.8)
    x, y = names["samples"][::100].T
    axes.plot(x, y, "o", ms=3.5, mew=0, alpha=0.5, color=BLUE)
    axes.set_aspect("equal")
    ticks(axes.xaxis, [-2, 0, 2])
    ticks(axes.yaxis, [-2, 0, 2])
    return drawn


def sharding(names: dict[str, Any]) -> Figure:
    drawn, panels = figure(6.4, 2.4, columns=2)
    for axes, part in zip(panels, ("packed", "scale"), strict=True):
        array = getattr(names["placed"], part)
        for shard in array.addressable_shards:
            (top, bottom), (left, right) = (
                (cut.start / side, cut.stop / side)
                for cut, side in zip(shard.index, array.shape, strict=True)
            )
            color = COLORS[shard.device.id % len(COLORS)]
            box = (left, top), right - left, bottom - top
            axes.add_patch(Rectangle(*box, facecolor=f"{color}30", edgecolor=color, lw=1.5))
            middle = (left + right) / 2, (top + bottom) / 2
            label = {"ha": "center", "va": "center", "color": INK, "fontsize": 11}
            axes.annotate(f"CPU {shard.device.id}", middle, **label)
        axes.set(xlim=(-0.01, 1.01), ylim=(1.02, -0.02), xticks=[], yticks=[])
        shape = ", ".join(map(str, array.shape))
        say(axes, title=f"{'codes, two a byte' if part == 'packed' else 'scales'} [{shape}]")
    return drawn


def programs() -> dict[str, Any]:
    """Run the programs of the gallery, and return their variables."""
    names: dict[str, Any] = {"__name__": "example"}
    page = (ROOT / "docs" / "gallery.md").read_text("utf-8")
    for program in PROGRAM.findall(page):
        exec(compile(program, "example.py", "exec"), names)
    return names


TABLES: dict[str, tuple[Callable[[Table], Figure], str, str]] = {
    "fidelity": (fidelity, "docs/ptq.md", "|  | MB | to nearest | least error"),
    "demo": (demo, "docs/demo.md", "| format | bytes | of f32 |"),
    "rows": (rows, "docs/performance.md", "| N = 4096 | M = 1, ms |"),
    "decoding": (decoding, "docs/performance.md", "| Llama, bounds |"),
    "solves": (structured, "docs/benchmarks.md", "| solve | operations |"),
    "products": (structured, "docs/benchmarks.md", "| product | operations |"),
}
PROGRAMS = {"memory": memory, "throws": throws, "sampler": sampler, "sharding": sharding}


def source(name: str) -> str:
    """Return a hash of the data of a plot."""
    if name in PROGRAMS:
        page = (ROOT / "docs" / "gallery.md").read_text("utf-8")
        text = "".join(PROGRAM.findall(page))
    else:
        text = Table(*TABLES[name][1:]).text
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def svg(drawn: Figure, of: str) -> str:
    """Return the plot as SVG, with text as text, in the colors of the page."""
    options = {"svg.fonttype": "none", "svg.hashsalt": "veneer"}
    with matplotlib.rc_context(options), io.StringIO() as written:
        drawn.savefig(
            written, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None}
        )
        text = written.getvalue()
    light = "".join(f"--c{i}:{color};" for i, color in enumerate(DARK))
    dark = "".join(f"--c{i}:{color};" for i, color in enumerate(DARK.values()))
    for i, color in enumerate(DARK):
        text = text.replace(color, f"var(--c{i})")
    text = re.sub(r"font-family: [^;]*", "font-family: system-ui, sans-serif", text)
    style = f"svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    text = re.sub(
        r"( <defs>\n  <style)", rf"<!-- {of} -->\n <style>{style}</style>\n\1", text, count=1
    )
    return re.sub(r"[ \t]+\n", "\n", text)


def main(chosen: Sequence[str], out: Path) -> None:
    names: dict[str, Any] | None = None
    for name in chosen or (*TABLES, *PROGRAMS):
        if name in PROGRAMS:
            names = names or programs()
            drawn = PROGRAMS[name](names)
        else:
            draw, *place = TABLES[name]
            drawn = draw(Table(*place))
        (out / f"{name}.svg").write_text(svg(drawn, source(name)), "utf-8")


if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # for the mesh
    main(sys.argv[1:], GALLERY)
