"""The first part of the demo: a sentence encoder in several formats, measured against f32."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import veneer as vn

from . import encoder
from .encoder import Batch, BertEncoder
from .fetch import ENCODER, PROSE, calibration_sentences, fetch, program, sentences

Params = Mapping[str, Any]
Encode = Callable[[Params, Batch], jax.Array]

QUERY = "How far is it from one place to another?"


@dataclass(frozen=True)
class Variant:
    """A way to store the weights of the encoder: a row of the table.

    **Arguments:**

    - `qtype`: the format, or None for f32.
    - `tile_size`: the number of values that share a scale. None means one scale per channel.
    - `act_qtype`: the format of activations in products, or None.
    - `least_error`: whether scales minimize the squared error, which clips outliers.
    - `rotate`: whether to rotate weights before rounding.
    - `calibrated`: whether to round with activations as calibration data (GPTQ).

    >>> from veneer.demo.encoder_demo import Variant
    >>> print(Variant("nf4", 64), Variant("int8"), Variant("int8", act_qtype="int8"), sep="; ")
    nf4, tile 64; int8, channelwise; int8 by int8
    """

    qtype: str | None = None
    tile_size: int | None = None
    act_qtype: str | None = None
    least_error: bool = False
    rotate: bool = False
    calibrated: bool = False

    def __str__(self) -> str:
        if self.qtype is None:
            return "f32"
        how = ", least error" if self.least_error else ", rotated" if self.rotate else ""
        how = ", calibrated" if self.calibrated else how
        if self.act_qtype is not None:
            return f"{self.qtype} by {self.act_qtype}{how}"
        tile = "channelwise" if self.tile_size is None else f"tile {self.tile_size}"
        return f"{self.qtype}, {tile}{how}"

    def fit_tile(self, bert: BertEncoder) -> "Variant":
        """Return this variant with a tile size that divides all contracted axes of the model.

        It is the largest divisor of `tile_size` that does.
        """
        if self.tile_size is None:
            return self
        return replace(self, tile_size=math.gcd(self.tile_size, *bert.contracted))


DENSE = Variant()
NF4 = Variant("nf4", 64)
VARIANTS = (
    DENSE,
    Variant("int8"),
    Variant("int8", act_qtype="int8"),
    Variant("int8", act_qtype="int8", rotate=True),
    NF4,
    Variant("int4", 32),
    Variant("int4", 128),
    Variant("int4", 128, least_error=True),
    Variant("int4", 128, rotate=True, calibrated=True),
)


@dataclass(frozen=True)
class Measurement:
    """The measurements of a variant.

    **Arguments:**

    - `variant`: the variant.
    - `nbytes`: the bytes of the parameters, packed codes and scales included.
    - `cosine`: the mean cosine of its embeddings to those in f32.
    - `kept`: the fraction of sentences whose nearest other sentence is the same as in f32.
    - `batch_ms`, `single_ms`: the milliseconds for a batch of 64 and for one sentence.
    """

    variant: Variant
    nbytes: int
    cosine: float
    kept: float
    batch_ms: float
    single_ms: float


def load(folder: Path | None, console: Console | None = None) -> BertEncoder:
    """Load the model of a Hugging Face BERT folder. None downloads all-MiniLM-L6-v2.

    **Raises:**

    - `FileNotFoundError` if the model or a file is missing and cannot be downloaded.
    - `ValueError` if it is not a dense BERT encoder.
    """
    console = console or Console()
    bert = encoder.load(fetch(ENCODER, console) if folder is None else folder)
    fetch(PROSE, console)
    return bert


def main(bert: BertEncoder, output: Path, console: Console | None = None) -> dict[str, Any]:
    """Measure a BERT sentence encoder in each variant, and search with it.

    Print a table and the three sentences nearest to a query, and write
    `output/size_against_fidelity.png`.

    **Arguments:**

    - `bert`: from `load`.
    - `output`: the folder for the picture. It is created if it is missing.
    - `console`: prints progress and results. The default is standard output.

    **Returns:** the results, as `veneer demo --json` prints them.

    **Raises:** `OSError` if the picture cannot be written.
    """
    console = console or Console()
    output.mkdir(parents=True, exist_ok=True)
    with console.status("") as status:

        def begin(step: str) -> None:
            status.update(step)
            if not console.is_terminal:  # a status is visible only in a terminal
                console.print(f"{step} ...", soft_wrap=True)

        begin("Reading the sentences")
        corpus = sentences()
        encode = compile_encoder(bert)
        params, embeddings = {}, {}
        for variant in [variant.fit_tile(bert) for variant in VARIANTS]:
            begin(f"Encoding {len(corpus)} sentences in {variant}")
            params[variant] = quantize(bert, variant)
            embeddings[variant] = embed(bert, encode, params[variant], corpus)
        begin("Timing the variants in turn")
        _, batch = next(bert.batches(corpus))
        measurements = measure(encode, params, embeddings, batch)
    console.print(make_table(measurements))
    console.print(f"The times are medians, for sentences of up to {batch.ids.shape[1]} tokens.")
    path = output / "size_against_fidelity.png"
    save_picture(measurements, path)
    console.print(f"Size against fidelity: {path}\n", soft_wrap=True)

    nf4 = NF4.fit_tile(bert)
    [query] = embed(bert, encode, params[nf4], [QUERY])
    console.print(f"Asked of the {nf4} model: [bold]{QUERY}[/bold]", soft_wrap=True)
    closest = search(query, embeddings[nf4], corpus)
    for score, sentence in closest:
        console.print(f"  {score:.3f}  {sentence}", highlight=False, soft_wrap=True)
    return {
        "variants": [
            {
                "name": str(row.variant),
                "bytes": row.nbytes,
                "cosine": row.cosine,
                "neighbor_kept": row.kept,
                "batch_ms": row.batch_ms,
                "single_ms": row.single_ms,
            }
            for row in measurements
        ],
        "picture": str(path),
        "query": QUERY,
        "nearest": [{"score": score, "sentence": sentence} for score, sentence in closest],
    }


def quantize(bert: BertEncoder, variant: Variant) -> Params:
    """Return the parameters of an encoder on the device, quantized as `variant` says.

    All weights of rank 2 are quantized. For the variant in f32, none are.
    """
    params = jax.device_put(bert.params)
    if variant.qtype is None:
        return params
    rule = partial(
        vn.quant.Rule,
        qtype=variant.qtype,
        tile_size=variant.tile_size,
        tile_axis=-1,
        calibration_method="mse,40,2.4" if variant.least_error else None,
    )
    rules = [  # embeddings are looked up or added, so they have no activations
        rule(r"embeddings\.word_embeddings\.weight", rotate=variant.rotate),
        rule(r"embeddings\..*weight"),
        rule(".*weight", rotate=variant.rotate, act_qtype=variant.act_qtype),
    ]
    if not variant.calibrated:
        return vn.quant.quantize_tree(params, rules)
    encode = jax.jit(program("sentence_encoder").encode, static_argnums=1)
    run = lambda params, ids, mask: encode(params, bert.config, ids, mask)
    calibration = vn.quant.calibrate(run, rules, params=params)
    return calibration([tuple(batch) for batch in bert.unpadded_batches(calibration_sentences())])


def compile_encoder(bert: BertEncoder) -> Encode:
    """Return a compiled function that runs an encoder.

    It takes parameters, dense or quantized, and a batch, and returns the embeddings. It compiles
    once per variant and shape of batch.
    """
    encode = jax.jit(vn.implicit(program("sentence_encoder").encode), static_argnums=1)
    return lambda params, batch: encode(params, bert.config, *batch)


def embed(
    bert: BertEncoder, encode: Encode, params: Params, sentences: Sequence[str]
) -> np.ndarray:
    """Return the embeddings of sentences: unit vectors, `[len(sentences), hidden]` in f32.

    `encode` is from `compile_encoder`, and `params` from `quantize`.
    """
    results = [
        (rows, np.asarray(encode(params, batch))[: len(rows)])
        for rows, batch in bert.batches(sentences)
    ]
    rows, embeddings = (np.concatenate(part) for part in zip(*results, strict=True))
    return embeddings[np.argsort(rows)]


def measure(
    encode: Encode,
    params: Mapping[Variant, Params],
    embeddings: Mapping[Variant, np.ndarray],
    batch: Batch,
) -> list[Measurement]:
    """Measure each variant: its size, its errors against `embeddings[DENSE]`, and its speed.

    **Arguments:**

    - `encode`: from `compile_encoder`.
    - `params`: a dict from variants to their parameters.
    - `embeddings`: a dict from variants to their embeddings of the same sentences.
    - `batch`: a batch of 64 sentences. Each variant is timed on it, and on its first sentence.
    """
    single = Batch(batch.ids[:1], batch.mask[:1])
    batch_ms = _median_ms(encode, list(params.values()), batch, repeats=5)
    single_ms = _median_ms(encode, list(params.values()), single, repeats=20)
    return [
        Measurement(
            variant,
            vn.summary(params[variant]).nbytes,
            mean_cosine(embeddings[variant], embeddings[DENSE]),
            neighbors_kept(embeddings[variant], embeddings[DENSE]),
            *times,
        )
        for variant, *times in zip(params, batch_ms, single_ms, strict=True)
    ]


def mean_cosine(embeddings: np.ndarray, reference: np.ndarray) -> float:
    """Return the mean cosine between the rows of two arrays of unit vectors.

    Both are `[sentences, hidden]`. Each row is compared with the same row of the other array.
    """
    return float((embeddings * reference).sum(1).mean())


def neighbors_kept(embeddings: np.ndarray, reference: np.ndarray) -> float:
    """Return the fraction of sentences whose nearest other sentence is the same in both arrays.

    Both are embeddings of the same sentences, `[sentences, hidden]`.
    """
    nearest = []
    for x in (embeddings, reference):
        similarity = x @ x.T
        np.fill_diagonal(similarity, -np.inf)
        nearest.append(similarity.argmax(1))
    return float((nearest[0] == nearest[1]).mean())


def _median_ms(
    encode: Encode, variants: Sequence[Params], batch: Batch, repeats: int
) -> list[float]:
    """Return the median milliseconds of `encode(params, batch)` for the parameters of each variant.

    Each is called `repeats` times. The variants take turns, so that other work of the machine slows
    all of them alike.
    """
    seconds: list[list[float]] = [[] for _ in variants]
    for turn in range(repeats + 1):
        for params, times in zip(variants, seconds, strict=True):
            start = time.perf_counter()
            encode(params, batch).block_until_ready()
            if turn > 0:  # the first turn may compile
                times.append(time.perf_counter() - start)
    return [1000 * statistics.median(times) for times in seconds]


def search(
    query: np.ndarray, embeddings: np.ndarray, corpus: Sequence[str], count: int = 3
) -> list[tuple[float, str]]:
    """Return the `count` sentences nearest to a query, best first, each with its cosine.

    **Arguments:**

    - `query`: a unit vector `[hidden]`.
    - `embeddings`: the embeddings of the sentences, `[len(corpus), hidden]`.
    - `corpus`: the sentences.

    >>> import numpy as np
    >>> from veneer.demo.encoder_demo import search
    >>> search(np.array([0.0, 1.0]), np.array([[1.0, 0.0], [0.6, 0.8]]), ["east", "between"], 1)
    [(0.8, 'between')]
    """
    scores = embeddings @ query
    return [(float(scores[i]), corpus[i]) for i in np.argsort(-scores)[:count]]


def make_table(measurements: Sequence[Measurement]) -> Table:
    """Return a table of measurements for rich. The first measurement is f32."""
    dense = measurements[0]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns are enough
    table.add_column("format")  # the only column that may wrap
    for heading in ("bytes", "of f32", "cosine", "neighbor\nkept", "batch\nof 64", "batch\nof 1"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in measurements:
        table.add_row(
            str(row.variant),
            f"{row.nbytes:,}",
            f"{row.nbytes / dense.nbytes:.3f}",
            f"{row.cosine:.4f}",
            f"{row.kept:.1%}",
            f"{row.batch_ms:.0f} ms",
            f"{row.single_ms:.1f} ms",
        )
    return table


_INK, _MUTED, _GRID = "#1f2933", "#6b7684", "#e4e7eb"
_COLORS = {None: "#8c6d46", "int8": "#2a6f97", "nf4": "#c8553d", "int4": "#588157"}


def save_picture(measurements: Sequence[Measurement], path: Path) -> None:
    """Write a PNG with one point per variant: megabytes (logarithmic) and mean cosine to f32.

    Variants with quantized activations are left out, because they have the same sizes as others.
    """
    measurements = [row for row in measurements if row.variant.act_qtype is None]
    # Not pyplot, which looks for a display and keeps figures alive.
    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    megabytes = [row.nbytes / 1e6 for row in measurements]
    largest, smallest = max(megabytes), min(megabytes)
    for row, x in zip(measurements, megabytes, strict=True):
        color = _COLORS[row.variant.qtype]
        axes.plot(x, row.cosine, "o", ms=11, color=color, mec="white", mew=1.5, zorder=3)
        offset = 10 if x < largest else -10  # in points; the largest is at the right edge
        axes.annotate(
            f"{row.variant}\n{x:.1f} MB · {row.cosine:.4f}",
            (x, row.cosine),
            xytext=(offset, 0),
            textcoords="offset points",
            ha="left" if offset > 0 else "right",
            va="center",
            color=color,
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
