"""The demo from beginning to end: a table, a picture and an answered question."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import picture
from .fetch import fetch
from .measure import FORMATS, NF4, Measurement, compiled, embed, measure, quantise
from .model import load
from .sentences import sentences

QUERY = "How are objects that nobody needs any more cleaned up?"


def main(model: Path | None, output: Path) -> None:
    """Measures a BERT sentence encoder in each format, and searches with it.

    Prints a table and the three sentences nearest to a query, and writes
    `output/size_against_fidelity.png`.

    Args:
        model: a Hugging Face BERT folder; None fetches all-MiniLM-L6-v2.
        output: the folder for the picture, made if there is none.

    Raises:
        FileNotFoundError: the model or one of its files is missing and cannot be fetched.
        ValueError: the model is not a dense BERT encoder.
    """
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    with console.status("Loading the model") as status:
        if model is None:
            status.update("Fetching all-MiniLM-L6-v2 (88 MB)")
            model = fetch()
        bert = load(model)
        corpus = sentences()
        encode = compiled(bert)
        params, embeddings = {}, {}
        for format in [format.fitted(bert) for format in FORMATS]:
            status.update(f"Encoding {len(corpus)} sentences in {format}")
            params[format] = quantise(bert, format)
            embeddings[format] = embed(bert, encode, params[format], corpus)
        status.update("Timing the formats in turn")
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
    for score, sentence in nearest(query, embeddings[nf4], corpus):
        console.print(f"  {score:.3f}  {sentence}", highlight=False, soft_wrap=True)


def table(measurements: Sequence[Measurement]) -> Table:
    """The measurements, the first of which is f32, as the demo prints them."""
    dense = measurements[0]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns are enough
    table.add_column("format", no_wrap=True)
    for heading in ("bytes", "of f32", "cosine", "neighbour\nkept", "batch\nof 64", "batch\nof 1"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in measurements:
        table.add_row(
            str(row.format),
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
    """The sentences nearest to a query, best first, each with its cosine.

    `query` is a unit vector `[hidden]`, `embeddings` are the corpus's, `[len(corpus), hidden]`.

    >>> import numpy as np
    >>> nearest(np.array([0.0, 1.0]), np.array([[1.0, 0.0], [0.6, 0.8]]), ["east", "between"], 1)
    [(0.8, 'between')]
    """
    scores = embeddings @ query
    return [(float(scores[i]), corpus[i]) for i in np.argsort(-scores)[:count]]
