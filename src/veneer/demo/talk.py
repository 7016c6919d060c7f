"""The second act of the demo: a language model that is loaded packed, and answers a question."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import veneer as vn

from .fetch import LANGUAGE_MODEL, fetch, is_fetched
from .language_model import LanguageModel, Speaker, perplexity, windows
from .language_model import load as load_gguf
from .measure import nbytes
from .programs import program
from .sentences import all_sentences

QUESTION = "Why is the sky blue?"
_WINDOWS = 4


@dataclass(frozen=True)
class Spoken:
    """One row of the table: how weights are stored, their bytes, perplexity, tokens a second."""

    name: str
    nbytes: int
    perplexity: float
    tokens_a_second: float


def load(path: Path | None, console: Console | None = None) -> LanguageModel:
    """Load the model of a GGUF file. None downloads SmolLM2-135M-Instruct.

    **Raises:**

    - `FileNotFoundError` if the file is missing and cannot be downloaded.
    - `ValueError` if it is not a model that `examples/llama.py` runs.
    """
    console = console or Console()
    if path is None and not is_fetched(LANGUAGE_MODEL):
        console.print(f"Fetching {LANGUAGE_MODEL.name} ({LANGUAGE_MODEL.size}) ...")
    return load_gguf(fetch(LANGUAGE_MODEL) if path is None else path)


def variants(model: LanguageModel) -> dict[str, Any]:
    """Returns the parameters in the formats that are compared, by what they are called."""
    dense, config = vn.materialise(model.params), model.config
    mixed = config.num_attention_heads * config.head_dim
    tile = math.gcd(64, config.hidden_size, config.intermediate_size, mixed)
    rule = partial(vn.quant.Rule, r".*(proj|embed_tokens|lm_head)\.weight", tile_axis=-1)
    return {
        f"{' and '.join(t for t in model.types if t != 'F32')}, as in the file": model.params,
        "f32, the same values": dense,
        "int8, channelwise": vn.quant.quantize_tree(dense, [rule("int8")]),
        f"nf4, tile {tile}": vn.quant.quantize_tree(dense, [rule("nf4", tile_size=tile)]),
    }


def main(
    model: LanguageModel, question: str = QUESTION, console: Console | None = None
) -> dict[str, Any]:
    """Ask the model a question. Print the answer word by word, and then a table of formats.

    **Returns:** the results, as `veneer demo --json` prints them.
    """
    console = console or Console()
    pieces = partial(console.print, end="", soft_wrap=True, highlight=False, markup=False)
    speaker = Speaker(model, pieces)
    stored = sum(1 for w in model.params.values() if isinstance(w, vn.ImplicitArray))
    console.print(
        f"A language model with {len(model.params)} tensors, {stored} of them packed "
        f"({', '.join(t for t in model.types if t != 'F32')}): {nbytes(model.params):,} bytes."
    )
    console.print(f"Asked: [bold]{question}[/bold]", soft_wrap=True)
    answer = speaker.answer(model.params, question)
    console.print("\n")
    speaker.show = lambda text: None

    console.print(f"Reading {_WINDOWS} × 512 tokens and answering in each format ...")
    text = windows(model, all_sentences(), _WINDOWS)
    losses = jax.jit(vn.implicit(program("llama").losses), static_argnums=1)
    rows = []
    for name, params in variants(model).items():
        found = perplexity(losses, model, params, text)
        speaker.answer(params, question, 32)  # which may compile
        speaker.answer(params, question, 32)
        rows.append(Spoken(name, nbytes(params), found, speaker.tokens_a_second))
    console.print(table(rows))
    operations, largest = materialized(model)
    console.print(
        f"In a step, {operations} operations had packed operands. No weight was materialized: the "
        f"largest materialized array has {largest:,} bytes, which are embedding rows."
    )
    return {
        "variants": [_entries(row) for row in rows],
        "question": question,
        "answer": answer,
        "operations": operations,
        "largest_materialized": largest,
    }


def _entries(row: Spoken) -> dict[str, Any]:
    return {
        "name": row.name,
        "bytes": row.nbytes,
        "perplexity": row.perplexity,
        "tokens_per_second": row.tokens_a_second,
    }


def table(rows: list[Spoken]) -> Table:
    """Lays out what was measured, as the demo prints it."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("weights", no_wrap=True)
    for heading in ("bytes", "perplexity", "tokens\nper second"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        speed = f"{row.tokens_a_second:.0f}"
        table.add_row(row.name, f"{row.nbytes:,}", f"{row.perplexity:.2f}", speed)
    return table


def materialized(model: LanguageModel) -> tuple[int, int]:
    """Count the operations of a step on packed arrays, and the bytes of the largest dense array."""
    llama = program("llama")
    token = jax.numpy.zeros((1, 1), jax.numpy.int32)
    cache = llama.empty_cache(model.config, 1, 64)

    def step(params: Any, token: Any, cache: Any) -> Any:
        return llama.logits(params, llama.hidden(params, model.config, token, cache)[0])

    report = vn.explain(step)(model.params, token, cache)
    largest = max((event.nbytes for event in report.materialised), default=0)
    return len(report.events), largest
