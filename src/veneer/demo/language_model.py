"""A language model from a GGUF file, packed as it lies there; its answers, and what it costs."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import veneer as vn

from ..files.gguf import GgufFile, tokenizer
from .programs import program

LONGEST = 96  # tokens of an answer
_WINDOW = 512  # tokens that are read at a time where perplexity is measured
_PROMPT_STEP = 64  # prompts are padded to multiples of this many tokens, so that few shapes compile


@dataclass(frozen=True)
class LanguageModel:
    """A Llama, its parameters packed, and what is needed to talk to it.

    **Arguments:**

    - `params`: by Hugging Face's names; a quantised weight is one array `[out, in]`.
    - `config`: of the program `llama`.
    - `tokenizer`, `stop`: the tokens of a text, and those that end an answer.
    - `template`: of a chat, as Jinja.
    - `types`: GGUF's names of how the tensors are stored, the most frequent first.
    """

    params: dict[str, Any]
    config: Any
    tokenizer: Tokenizer
    stop: tuple[int, ...]
    template: str
    types: tuple[str, ...]

    def prompt(self, question: str) -> list[int]:
        """Returns the tokens of a chat in which a question was asked."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a file's template is not ours

        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        jinja.filters["tojson"] = json.dumps
        text = jinja.from_string(self.template).render(
            messages=[{"role": "user", "content": question}], add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load(path: Path) -> LanguageModel:
    """Loads the model of a GGUF file, or of a folder that holds one; nothing is dequantised.

    **Raises:** `FileNotFoundError` where there is no file. `ValueError` where it is broken, or
    holds no model that the program `llama` runs, or no tokenizer that is made here.
    """
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} holds no GGUF file.")
    with GgufFile(files[0], names="huggingface") as file:
        params = {name: jax.tree.map(jnp.asarray, file.read(name)) for name in file}
        said, metadata = file.config, file.metadata
        types = list(file.types().values())
    end = metadata.get("tokenizer.ggml.eos_token_id")
    return LanguageModel(
        params,
        program("llama").Config.of(said),
        tokenizer(metadata),
        () if end is None else (int(end),),
        metadata.get("tokenizer.chat_template", "{{ messages[0]['content'] }}"),
        tuple(sorted(set(types), key=types.count, reverse=True)),
    )


class Speaker:
    """Answers, token by token, and keeps the time of each.

    **Arguments:**

    - `show`: what is done with each piece of an answer, as it comes.
    """

    def __init__(self, model: LanguageModel, show: Callable[[str], None] = lambda text: None):
        self.model, self.show = model, show
        llama = program("llama")
        # As for a dense model, but for `vn.implicit`.
        self._generate = llama.compiled(vn.implicit(llama.generate))
        self._times: list[float] = []
        self._tokens: list[int] = []
        self._shown = ""

    def answer(self, params: dict[str, Any], question: str, count: int = LONGEST) -> str:
        """Returns the likeliest answer to a question, of at most `count` tokens."""
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
            show=self._came,
        )
        jax.block_until_ready(written)
        jax.effects_barrier()
        return self.model.tokenizer.decode(self._tokens)

    def _came(self, token: Any) -> None:
        self._times.append(time.perf_counter())
        self._tokens.append(int(token[0]))
        text = self.model.tokenizer.decode(self._tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a token may end within a letter
            self.show(text[len(self._shown) :])
            self._shown = text

    @property
    def tokens_a_second(self) -> float:
        """How fast the last answer was written, once its prompt was read."""
        if len(self._times) < 2:
            return math.nan
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])


def perplexity(
    losses: Callable[..., jax.Array], model: LanguageModel, params: dict[str, Any], tokens: Any
) -> float:
    """Returns `exp` of the mean loss of tokens, read 512 at a time: `[windows * 512]`."""
    windows = np.asarray(tokens, np.int32).reshape(-1, 1, _WINDOW)
    return math.exp(np.mean([losses(params, model.config, w) for w in windows]))


def windows(model: LanguageModel, texts: Sequence[str], count: int) -> list[int]:
    """Returns the first `count` windows of 512 tokens of some texts.

    **Raises:** `ValueError` where they are shorter.
    """
    tokens = model.tokenizer.encode("\n".join(texts), add_special_tokens=False).ids
    if len(tokens) < count * _WINDOW:
        raise ValueError(f"the text has {len(tokens)} tokens, but {count * _WINDOW} are needed")
    return tokens[: count * _WINDOW]
