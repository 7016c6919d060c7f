"""The second part of the demo: a Llama from a GGUF file, packed as stored, answers a question."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import veneer as vn

from ..models import LanguageModel, llama, load
from ..models.comparison import WINDOW, split_windows
from .fetch import LANGUAGE_MODEL, all_sentences, fetch

QUESTION = "Why is the sky blue?"
MAX_ANSWER = 96  # tokens
_WINDOWS = 4


def load_model(path: Path | None, console: Console | None = None) -> LanguageModel:
    """Load the language model at `path`, as `models.load` does.

    If `path` is None, download SmolLM2-135M-Instruct. Progress is printed to `console`.
    """
    if path is None:
        folder = fetch(LANGUAGE_MODEL, console or Console())
        (path,) = folder.glob("*.gguf")
    return load(path)


def perplexity(
    losses: Callable[..., jax.Array], model: LanguageModel, params: Mapping[str, Any], tokens: Any
) -> float:
    """Return the perplexity of a model with the parameters `params` on tokens `[windows, 512]`.

    `losses` is `llama.losses` under `jax.jit`. The windows are read independently.
    """
    windows = np.asarray(tokens, np.int32).reshape(-1, 1, WINDOW)
    return math.exp(np.mean([losses(params, model.config, w) for w in windows]))


def quantize(model: LanguageModel) -> dict[str, LanguageModel]:
    """Return the model in four formats: as in its file, f32, int8 and nf4.

    **Returns:** a dict from the names of the formats, for a table, to models.
    """
    dense, config = vn.materialise(dict(model.params)), model.config
    attended = config.num_attention_heads * config.head_dim
    tile = math.gcd(64, config.hidden_size, config.intermediate_size, attended)
    rule = partial(vn.quant.Rule, r".*(proj|embed_tokens|lm_head)\.weight", tile_axis=-1)
    params = {
        f"{_packed_formats(model, ' and ')}, as in the file": model.params,
        "f32, the same values": dense,
        "int8, channelwise": vn.quant.quantize_tree(dense, [rule("int8")]),
        f"nf4, tile {tile}": vn.quant.quantize_tree(dense, [rule("nf4", tile_size=tile)]),
    }
    return {name: replace(model, params=x) for name, x in params.items()}


def _packed_formats(model: LanguageModel, separator: str) -> str:
    return separator.join(name for name in model.formats if name != "F32")


def main(
    model: LanguageModel, question: str = QUESTION, console: Console | None = None
) -> dict[str, Any]:
    """Ask the model a question. Print the answer word by word, and then a table of formats.

    **Returns:** the results, as `veneer demo --json` prints them.
    """
    console = console or Console()
    pieces = partial(console.print, end="", soft_wrap=True, highlight=False, markup=False)
    packed = sum(1 for w in model.params.values() if isinstance(w, vn.ImplicitArray))
    console.print(
        f"A language model with {len(model.params)} tensors, {packed} of them packed "
        f"({_packed_formats(model, ', ')}): {model.nbytes:,} bytes."
    )
    console.print(f"Asked: [bold]{question}[/bold]", soft_wrap=True)
    answer = model.generate(question, max_tokens=MAX_ANSWER, on_text=pieces).text
    console.print("\n")

    console.print(f"Reading {_WINDOWS} × 512 tokens and answering in each format ...")
    text = split_windows(model.tokenizer, "\n".join(all_sentences()), _WINDOWS)
    losses = jax.jit(vn.implicit(llama.losses), static_argnums=1)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("weights", no_wrap=True)
    for heading in ("bytes", "perplexity", "tokens\nper second"):
        table.add_column(heading, justify="right", no_wrap=True)
    variants = []
    for name, variant in quantize(model).items():
        for _ in range(2):  # the first answer may compile
            speed = variant.generate(question, max_tokens=32).tokens_per_second or math.nan
        score = perplexity(losses, model, variant.params, text)
        row = {"name": name, "bytes": variant.nbytes, "perplexity": score}
        variants.append(row | {"tokens_per_second": speed})
        table.add_row(name, f"{variant.nbytes:,}", f"{score:.2f}", f"{speed:.0f}")
    console.print(table)
    operations, largest = count_operations(model)
    console.print(
        f"In a step, {operations} operations had packed operands. No weight was materialized: the "
        f"largest materialized array has {largest:,} bytes, which are embedding rows."
    )
    return {
        "variants": variants,
        "question": question,
        "answer": answer,
        "operations": operations,
        "largest_materialized": largest,
    }


def count_operations(model: LanguageModel) -> tuple[int, int]:
    """Trace one step of decoding, and count its operations on packed arrays.

    **Returns:** their number, and the bytes of the largest array that the step materializes.
    """
    token = jnp.zeros((1, 1), jnp.int32)
    cache = llama.empty_cache(model.config, 1, 64)

    def step(params: Any, token: Any, cache: Any) -> Any:
        return llama.logits(params, llama.hidden(params, model.config, token, cache)[0])

    report = vn.explain(step)(model.params, token, cache)
    largest = max((event.nbytes for event in report.materialised), default=0)
    return len(report.events), largest
