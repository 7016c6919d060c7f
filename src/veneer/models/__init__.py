"""Language models: load a checkpoint, generate text with it, and compare two models.

    llama       the model in plain JAX: Llama, Mistral, Qwen2, Qwen3 and SmolLM
    comparison  `compare`: perplexity, KL divergence and agreement of two models

The functions here load a `LanguageModel` and generate text.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import install_command
from .._core.surface.implicit import implicit
from ..files.checkpoint import open_checkpoint
from ..files.gguf import GgufFile, tokenizer
from ..files.load_save import load as load_arrays
from ..quant import QArray, zeros
from ..quant.models.checkpoint import Selector, plan
from . import llama
from .comparison import Comparison, compare

__all__ = ["Comparison", "Generation", "LanguageModel", "compare", "llama", "load"]

#: The weights that `load` quantizes: the matrices of all products, and the embedding.
WEIGHTS = r".*(_proj|embed_tokens|lm_head)\.weight"

#: Prompts are padded to a power of two, and to this many tokens or more, because each size compiles
#: a program. Chunks of a prompt that hold only padding are not computed.
_SHORTEST_PROMPT = 64

#: A chat template for checkpoints without one: the texts of all messages, one per line.
_PLAIN_TEMPLATE = "{{ messages | map(attribute='content') | join('\n') }}"

Message = Mapping[str, str]


@dataclass(frozen=True)
class Generation:
    """A generated text, with its tokens and times.

    - `text`: the text, without the token that ended it.
    - `tokens`: the tokens of the text.
    - `prompt_tokens`: the number of tokens in the prompt.
    - `is_complete`: whether the model ended the text. False if `max_tokens` ended it.
    - `first_token_seconds`: the time from the call to the first token. The first call of a model
      includes the time to compile it.
    - `tokens_per_second`: the speed after the first token. None for a text of one token.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    is_complete: bool
    first_token_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class LanguageModel:
    """A language model with its tokenizer. `load` makes one from a checkpoint.

    **Arguments:**

    - `params`: a dict from Hugging Face's names to arrays. Matrices have the shape `[out, in]` and
      may be quantized.
    - `config`: the sizes of the model.
    - `tokenizer`: a `tokenizers.Tokenizer`.
    - `stop`: the tokens that end a text.
    - `template`: the chat template, in Jinja: it converts a list of messages to one text.
    - `special_tokens`: the texts of `bos_token`, `eos_token` and others, for the template.
    - `formats`: the number formats of the tensors, the most frequent first. For a GGUF file, the
      names of GGUF, such as "Q4_K".
    """

    params: Mapping[str, Any]
    config: llama.LlamaConfig
    tokenizer: Any
    stop: tuple[int, ...] = ()
    template: str = _PLAIN_TEMPLATE
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    formats: tuple[str, ...] = ()
    _stream: "_Stream" = field(default_factory=lambda: _Stream(), repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters, as stored."""
        return sum(x.nbytes for x in jax.tree.leaves(self.params))

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a chat, up to the place where the model's answer begins.

        **Arguments:**

        - `messages`: a question, or a list of `{"role": "user", "content": text}`. Roles are
          "system", "user" and "assistant".

        **Raises:** `ValueError` if the chat template rejects the messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = _render(self.template, messages, self.special_tokens)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def generate(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        cache_format: str | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Generate the answer to a chat.

        **Arguments:**

        - `messages`: a question or a list of messages, as for `encode_chat`.
        - `max_tokens`: the largest number of tokens of the answer.
        - `temperature`: 0 chooses the most likely token. Larger values draw tokens at random.
        - `top_k`, `top_p`: draw only among the `top_k` most likely tokens, and among the fewest
          tokens that have a total probability of `top_p`.
        - `seed`: the seed of the random numbers.
        - `cache_format`: the number format of the cache of keys and values, such as "int8". None
          is the dtype of the model.
        - `on_text`: a function that is called with each new piece of the text.

        **Returns:** a `Generation`.

        **Raises:** `ValueError` if `max_tokens` is below 1 or the chat template rejects the
        messages.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, not {max_tokens}")
        tokens = self.encode_chat(messages)
        padded = max(_SHORTEST_PROMPT, 1 << (len(tokens) - 1).bit_length())
        cache = None
        if cache_format is not None:
            cache = quantized_cache(self.config, padded + max_tokens, cache_format)
        with self._stream.listen(self.tokenizer, self.stop, on_text) as stream:
            out = _generate()(
                self.params,
                self.config,
                jnp.array([tokens + [0] * (padded - len(tokens))], jnp.int32),
                len(tokens),
                jax.random.key(seed),
                cache,
                count=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=self.stop,
                show=stream,
            )
            jax.block_until_ready(out)
            jax.effects_barrier()
            return stream.result(len(tokens))


@cache
def _generate() -> Callable:
    return llama.compile_generate(implicit(llama.generate))


class _Stream:
    """The tokens of one generated text as they arrive, and their times.

    The compiled program of `generate` calls this object with the next token. A model has one
    object for all texts, because a new object would compile the program again.
    """

    def __init__(self) -> None:
        self._lock = Lock()

    def listen(
        self, tokenizer: Any, stop: Sequence[int], on_text: Callable[[str], None] | None
    ) -> "_Stream":
        """Begin a new text, and return this object as a context manager for it.

        First wait until the text of another thread is complete. `on_text` is called with each new
        piece of the text. `stop` has the tokens that end it.
        """
        self._lock.acquire()
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._tokens: list[int] = []
        self._times = [time.perf_counter()]
        self._shown = ""
        self._is_complete = False
        return self

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def __call__(self, column: Any) -> None:
        token = int(column[0])
        self._times.append(time.perf_counter())
        if token in self._stop:
            self._is_complete = True
            return
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if self._on_text is not None and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            # A token can end within a character, which the next token completes.
            self._on_text(text[len(self._shown) :])
            self._shown = text

    def result(self, prompt_tokens: int) -> Generation:
        """Return the whole text.

        First call `on_text` with the rest of the text: bytes of an incomplete character at its end.
        """
        text = self._tokenizer.decode(self._tokens)
        if self._on_text is not None and text != self._shown:
            self._on_text(text[len(self._shown) :])
        start, first, *_ = self._times
        steps, seconds = len(self._times) - 2, self._times[-1] - first
        return Generation(
            text,
            self._tokens,
            prompt_tokens,
            self._is_complete,
            first - start,
            steps / seconds if steps else None,
        )


def quantized_cache(
    config: llama.LlamaConfig, room: int, qtype: str, batch: int = 1
) -> llama.KeyValueCache:
    """Return an empty cache of quantized keys and values, with one scale per token and head.

    **Arguments:**

    - `config`: the sizes of the model.
    - `room`: the largest number of tokens per text.
    - `qtype`: the number format, such as "int8".
    - `batch`: the number of texts.
    """
    shape = batch * config.num_key_value_heads, room, config.head_dim
    empty: Callable[[], Any] = lambda: tuple(
        zeros(shape, qtype=qtype, channelwise_axes=(0, 1)) for _ in range(config.num_hidden_layers)
    )
    return llama.KeyValueCache(empty(), empty())


# Loading.


def load(path: str | Path, format: str | None = None) -> LanguageModel:
    """Load a Llama, Mistral, Qwen2, Qwen3 or SmolLM from a GGUF file or a Hugging Face folder.

    Quantized weights stay packed.

    **Arguments:**

    - `path`: a GGUF file, or a folder with `config.json`, `tokenizer.json` and safetensors, as
      Hugging Face, `veneer quantize` and `veneer convert` write it.
    - `format`: the number format to quantize a dense model to, such as "int8" or "nf4". None
      keeps the weights as stored.

    **Returns:** a `LanguageModel`.

    **Raises:**

    - `FileNotFoundError` if a file is missing.
    - `ValueError` if the model has another architecture, if a file is damaged, or if `format` is
      given for a model that is already quantized.
    - `ImportError` if `tokenizers` or `jinja2` is not installed.
    """
    path = Path(path)
    with open_checkpoint(path, names="huggingface") as source:
        read = _read_gguf if isinstance(source, GgufFile) else _read_folder
        model = read(path, source)
        dense = source.dense_avals()
        names = list(source)
    if "model.embed_tokens.weight" not in names:
        raise ValueError(
            f"{path} has no tensor model.embed_tokens.weight, which Hugging Face's Llama has. It "
            f"has {names[0]} and others"
        )
    params = load_arrays(path, names="huggingface")
    if format is not None:
        weights = {name: aval for name, aval in dense.items() if len(aval.shape) == 2}
        if len(weights) < sum(len(params[name].shape) == 2 for name in names):
            raise ValueError(f"{path} is already quantized, so it cannot be quantized to {format}")
        for name, rule in plan(weights, [Selector(WEIGHTS, format, "default", -1)]).items():
            params[name] = rule.quantize(params[name])
    if format is not None or "formats" not in model:
        model["formats"] = _by_frequency([_format_of(x) for x in params.values()])
    return LanguageModel(params, **model)


def _by_frequency(names: Sequence[str]) -> tuple[str, ...]:
    """Return each name once, sorted by how often it occurs, the most frequent first."""
    return tuple(sorted(set(names), key=lambda name: (-names.count(name), name)))


def _format_of(x: Any) -> str:
    return x.qtype if isinstance(x, QArray) else str(x.dtype)


def _read_gguf(path: Path, file: GgufFile) -> dict[str, Any]:
    """Return keyword arguments of `LanguageModel` from the metadata of a GGUF file."""
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ids = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "unknown", "padding")
    }
    ends = [int(i) for i in (ids["eos"], ids["eot"]) if i is not None]
    return {
        "config": llama.LlamaConfig.from_dict(file.config),
        "tokenizer": tokenizer(metadata),
        "stop": tuple(dict.fromkeys(ends)),
        "template": metadata.get("tokenizer.chat_template", _PLAIN_TEMPLATE),
        "special_tokens": {
            f"{name}_token": str(tokens[int(i)]) for name, i in ids.items() if i is not None
        },
        "formats": _by_frequency(list(file.types().values())),
    }


def _read_folder(path: Path, source: Any) -> dict[str, Any]:
    """Return keyword arguments of `LanguageModel` from the JSON files of a folder.

    Not included are the parameters and their formats.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"a tokenizer needs tokenizers: {install_command('demo')}") from error

    folder = path if path.is_dir() else path.parent
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}, which a language model needs")
    config = _read_json(folder / "config.json")
    settings = _read_json(folder / "tokenizer_config.json")
    ends = _read_json(folder / "generation_config.json").get(
        "eos_token_id", config.get("eos_token_id")
    )
    template = settings.get("chat_template", _PLAIN_TEMPLATE)
    if isinstance(template, list):  # several templates, each with a name
        template = next(
            (x["template"] for x in template if x["name"] == "default"), _PLAIN_TEMPLATE
        )
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    token_text = lambda x: x["content"] if isinstance(x, dict) else x
    return {
        "config": llama.LlamaConfig.from_dict(config),
        "tokenizer": Tokenizer.from_file(str(folder / "tokenizer.json")),
        "stop": tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        "template": template,
        "special_tokens": {
            name: token_text(x) for name, x in settings.items() if name.endswith("_token") and x
        },
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty dict if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def _render(template: str, messages: Sequence[Message], special_tokens: Mapping[str, str]) -> str:
    """Return the text of a chat: the result of the chat template of a checkpoint.

    The template runs in a sandbox, because checkpoints are not trusted.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(f"a chat template needs jinja2: {install_command('demo')}") from error

    def reject(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = json.dumps
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "raise_exception": reject,
        "strftime_now": lambda form: time.strftime(form),
    }
    try:
        return environment.from_string(template).render(**special_tokens, **variables)
    except TemplateError as error:
        raise ValueError(f"the chat template rejects the messages: {error}") from error
