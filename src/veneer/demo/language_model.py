"""The second part of the demo: a Llama from a GGUF file, packed as stored, answers a question."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import veneer as vn

from ..files.gguf import GgufFile, tokenizer
from .fetch import LANGUAGE_MODEL, all_sentences, fetch, program

QUESTION = "Why is the sky blue?"
MAX_ANSWER = 96  # tokens
WINDOW = 512  # tokens that are read at once, to measure perplexity and to calibrate
_WINDOWS = 4
_PROMPT_STEP = 64  # lengths of prompts are multiples of this, so that few shapes are compiled


@dataclass(frozen=True)
class LanguageModel:
    """A Llama. The program `examples/llama.py` runs it.

    **Arguments:**

    - `params`: the parameters. The keys are Hugging Face's names. A quantized weight is one
      implicit array `[out, in]`.
    - `config`: the `Config` of the program.
    - `tokenizer`: the tokenizer.
    - `stop`: the tokens that end an answer.
    - `template`: the chat template, in Jinja.
    - `types`: GGUF's names of the formats of the tensors, the most frequent first.
    """

    params: dict[str, Any]
    config: Any
    tokenizer: Tokenizer
    stop: tuple[int, ...]
    template: str
    types: tuple[str, ...]

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a chat with one question."""
        # A sandbox, because the template comes from the file.
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        jinja.filters["tojson"] = json.dumps
        text = jinja.from_string(self.template).render(
            messages=[{"role": "user", "content": question}], add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load(path: Path | None, console: Console | None = None) -> LanguageModel:
    """Load a model from a GGUF file, or a folder with one. None downloads SmolLM2-135M-Instruct.

    Weights stay packed in the formats of the file.

    **Raises:**

    - `FileNotFoundError` if the file is missing and cannot be downloaded.
    - `ValueError` if the file is broken, `examples/llama.py` does not run the architecture, or the
      tokenizer is not supported.
    """
    if path is None:
        path = fetch(LANGUAGE_MODEL, console or Console())
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} holds no GGUF file.")
    with GgufFile(files[0], names="huggingface") as file:
        params = {name: jax.tree.map(jnp.asarray, file.read(name)) for name in file}
        config, metadata = file.config, file.metadata
        types = list(file.types().values())
    end = metadata.get("tokenizer.ggml.eos_token_id")
    return LanguageModel(
        params,
        program("llama").Config.from_dict(config),
        tokenizer(metadata),
        () if end is None else (int(end),),
        metadata.get("tokenizer.chat_template", "{{ messages[0]['content'] }}"),
        tuple(sorted(set(types), key=types.count, reverse=True)),
    )


class Speaker:
    """A model that answers questions, and measures its speed.

    **Arguments:**

    - `model`: the model.
    - `show`: a function that receives each newly generated piece of an answer.
    """

    def __init__(self, model: LanguageModel, show: Callable[[str], None] = lambda text: None):
        self.model, self.show = model, show
        llama = program("llama")
        # Without `vn.implicit`, this would be the program for dense weights.
        self._generate = llama.compile_generate(vn.implicit(llama.generate))
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._shown = ""

    def answer(self, params: dict[str, Any], question: str, count: int = MAX_ANSWER) -> str:
        """Return the most likely answer to a question, with at most `count` tokens."""
        tokens = self.model.prompt(question)
        padding = [0] * (-len(tokens) % _PROMPT_STEP)
        self._times, self._tokens, self._shown = [], [], ""
        written = self._generate(
            params,
            self.model.config,
            jnp.array([tokens + padding], jnp.int32),
            len(tokens),
            jax.random.key(0),
            count=count,
            stop=self.model.stop,
            show=self._receive,
        )
        jax.block_until_ready(written)
        jax.effects_barrier()
        return self.model.tokenizer.decode(self._tokens)

    def _receive(self, token: Any) -> None:
        self._times.append(time.perf_counter())
        self._tokens.append(int(token[0]))
        text = self.model.tokenizer.decode(self._tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a token may end within a letter
            self.show(text[len(self._shown) :])
            self._shown = text

    @property
    def tokens_per_second(self) -> float:
        """The speed of the last answer, after its first token; NaN if it has only one token."""
        if len(self._times) < 2:
            return math.nan
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])


def perplexity(
    losses: Callable[..., jax.Array], model: LanguageModel, params: dict[str, Any], tokens: Any
) -> float:
    """Return the perplexity of tokens `[windows * 512]`, read in windows of 512.

    `losses` is the function of `examples/llama.py`, compiled.
    """
    windows = np.asarray(tokens, np.int32).reshape(-1, 1, WINDOW)
    return math.exp(np.mean([losses(params, model.config, w) for w in windows]))


def encode_windows(tokenizer: Tokenizer, text: str, count: int | None = None) -> list[int]:
    """Return the tokens of the first `count` windows of 512 tokens of a text. None is all windows.

    **Raises:** `ValueError` if the text is shorter than `count` windows, or than one.
    """
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    needed = (count or len(tokens) // WINDOW or 1) * WINDOW
    if len(tokens) < needed:
        raise ValueError(f"the text has {len(tokens)} tokens, but {needed} are needed")
    return tokens[:needed]


def quantize(model: LanguageModel) -> dict[str, Any]:
    """Return the parameters in four formats: a dict from the names of formats to parameters."""
    dense, config = vn.materialise(model.params), model.config
    attended = config.num_attention_heads * config.head_dim
    tile = math.gcd(64, config.hidden_size, config.intermediate_size, attended)
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
    packed = sum(1 for w in model.params.values() if isinstance(w, vn.ImplicitArray))
    console.print(
        f"A language model with {len(model.params)} tensors, {packed} of them packed "
        f"({', '.join(t for t in model.types if t != 'F32')}): "
        f"{vn.summary(model.params).nbytes:,} bytes."
    )
    console.print(f"Asked: [bold]{question}[/bold]", soft_wrap=True)
    answer = speaker.answer(model.params, question)
    console.print("\n")
    speaker.show = lambda text: None

    console.print(f"Reading {_WINDOWS} × 512 tokens and answering in each format ...")
    text = encode_windows(model.tokenizer, "\n".join(all_sentences()), _WINDOWS)
    losses = jax.jit(vn.implicit(program("llama").losses), static_argnums=1)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("weights", no_wrap=True)
    for heading in ("bytes", "perplexity", "tokens\nper second"):
        table.add_column(heading, justify="right", no_wrap=True)
    variants = []
    for name, params in quantize(model).items():
        for _ in range(2):  # the first answer may compile
            speaker.answer(params, question, 32)
        nbytes, speed = vn.summary(params).nbytes, speaker.tokens_per_second
        score = perplexity(losses, model, params, text)
        row = {"name": name, "bytes": nbytes, "perplexity": score, "tokens_per_second": speed}
        variants.append(row)
        table.add_row(name, f"{nbytes:,}", f"{score:.2f}", f"{speed:.0f}")
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
    """Return the number of operations on packed arrays in one step of decoding.

    Also return the bytes of the largest array that the step materializes.
    """
    llama = program("llama")
    token = jnp.zeros((1, 1), jnp.int32)
    cache = llama.empty_cache(model.config, 1, 64)

    def step(params: Any, token: Any, cache: Any) -> Any:
        return llama.logits(params, llama.hidden(params, model.config, token, cache)[0])

    report = vn.explain(step)(model.params, token, cache)
    largest = max((event.nbytes for event in report.materialised), default=0)
    return len(report.events), largest
