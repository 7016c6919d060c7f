"""Language models: load a checkpoint, generate text with it, and compare two models.

    llama       the model in plain JAX: Llama, Mistral, Qwen2, Qwen3 and SmolLM
    comparison  `compare`: perplexity, KL divergence and agreement of two models

The functions here load a `LanguageModel` and generate text.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import install_command
from .._core.surface.implicit import implicit
from ..files.checkpoint import open_checkpoint
from ..files.gguf import GgufFile, tokenizer
from ..files.gguf_tokenizer import begins_with_bos, special_tokens
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
    - `first_token_seconds`: the time to read the prompt and to choose the first token. The first
      call of a model includes the time to compile it.
    - `tokens_per_second`: the speed after the first token. None if there is only one.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    is_complete: bool
    first_token_seconds: float
    tokens_per_second: float | None


@dataclass(frozen=True, eq=False)
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

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters, as stored."""
        return sum(x.nbytes for x in jax.tree.leaves(self.params))

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Return the tokens of a chat, up to the place where the model's answer begins.

        **Arguments:**

        - `messages`: a question, or a list of `{"role": "user", "content": text}`. Roles are
          "system", "user" and "assistant".

        **Raises:** `TypeError` for messages of another form. `ValueError` if the chat template
        rejects them, or if the chat has no tokens, more tokens than the model was trained on, or
        tokens that the model does not have.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        is_message = lambda x: isinstance(x, Mapping) and isinstance(x.get("content"), str)
        if not isinstance(messages, list | tuple) or not all(map(is_message, messages)):
            raise TypeError(
                'messages must be a string or a list of {"role": "user", "content": text}, not '
                f"{messages!r}"
            )
        text = _render(self.template, messages, self.special_tokens)
        # A chat template writes the special tokens itself.
        is_plain = self.template == _PLAIN_TEMPLATE
        tokens = self.tokenizer.encode(text, add_special_tokens=is_plain).ids
        longest = self.config.max_position_embeddings
        if not tokens or (longest is not None and len(tokens) >= longest):
            raise ValueError(
                f"the chat has {len(tokens)} tokens; the model needs at least 1"
                + ("" if longest is None else f" and fewer than {longest}")
            )
        rows = len(self.params["model.embed_tokens.weight"])
        if max(tokens) >= rows:
            raise ValueError(
                f"the tokenizer gives token {max(tokens)}, but the model has only {rows} tokens"
            )
        return tokens

    def generate(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int = 256,
        temperature: int | float = 0.0,
        top_k: int | None = None,
        top_p: int | float = 1.0,
        seed: int = 0,
        cache_format: str | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Generate the answer to a chat.

        The program is compiled for each power of two of prompt tokens, and for other values of
        `max_tokens`, `temperature`, `top_k`, `top_p` and `cache_format`.

        **Arguments:**

        - `messages`: a question or a list of messages, as for `encode_chat`.
        - `max_tokens`: the largest number of tokens of the answer.
        - `temperature`: 0 chooses the most likely token. Larger values draw tokens at random.
        - `top_k`, `top_p`: draw only among the `top_k` most likely tokens, and among the fewest
          tokens that have a total probability of `top_p`.
        - `seed`: the seed of the random numbers.
        - `cache_format`: the number format of the cache of keys and values, such as "int8", or a
          dtype such as "bfloat16". None is the dtype of the model.
        - `on_text`: a function that is called with each new piece of the text. If it raises an
          error, the text ends, and `generate` raises this error.

        **Returns:** a `Generation`.

        **Raises:** `ValueError` for an argument that is out of range, or for the errors of
        `encode_chat`. `RuntimeError` if `on_text` calls `generate`.
        """
        is_valid = max_tokens >= 1 and 0 < top_p <= 1 and (top_k is None or top_k >= 1)
        if not is_valid or not (temperature == 0 or 0.01 <= temperature < math.inf):
            raise ValueError(
                "max_tokens and top_k must be 1 or more, temperature 0 or at least 0.01, and top_p "
                f"more than 0 and at most 1, not {max_tokens=}, {top_k=}, {temperature=}, {top_p=}"
            )
        if top_k is not None:
            top_k = min(top_k, self.config.vocab_size)
        tokens = self.encode_chat(messages)
        if self.config.max_position_embeddings is not None:
            max_tokens = min(max_tokens, self.config.max_position_embeddings - len(tokens))
        padded = max(_SHORTEST_PROMPT, 1 << (len(tokens) - 1).bit_length())
        cache = None
        if cache_format is not None:
            cache = make_cache(self.config, padded + max_tokens, cache_format)
        with _current_stream(_Stream(self.tokenizer, self.stop, on_text)) as stream:
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
                show=_receive,
            )
            jax.block_until_ready(out)
            jax.effects_barrier()
        return stream.result(len(tokens))


@cache
def _generate() -> Callable:
    return llama.compile_generate(implicit(llama.generate))


class _Stream:
    """The tokens of one generated text as they arrive, and their times.

    `on_text` is called with each new piece of the text. `stop` has the tokens that end it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[int], on_text: Callable[[str], None] | None):
        self._tokenizer, self._stop, self._on_text = tokenizer, stop, on_text
        self._tokens: list[int] = []
        self._times = [time.perf_counter()]
        self._shown = ""
        self._is_complete = False
        self._error: BaseException | None = None

    def receive(self, token: int) -> bool:
        """Add a token. Return whether the text must end, because `on_text` raised an error."""
        self._times.append(time.perf_counter())
        if token in self._stop:
            self._is_complete = True
            return False
        self._tokens.append(token)
        try:
            text = self._tokenizer.decode(self._tokens)
            if self._on_text is not None and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                # A token can end within a character, which the next token completes.
                self._on_text(text[len(self._shown) :])
                self._shown = text
        except BaseException as error:  # Ctrl-C, too: XLA would report it as an internal error
            self._error = error
        return self._error is not None

    def result(self, prompt_tokens: int) -> Generation:
        """Return the whole text, or raise the error of `on_text`.

        First call `on_text` with the rest of the text: bytes of an incomplete character at its end.
        """
        if self._error is not None:
            raise self._error
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


# Compiled programs call `_receive`, one function for all texts, so only one text is generated at a
# time. Programs with a function for each text would be compiled for each text.
_lock = Lock()
_streams: list[_Stream] = []  # the text that is generated, if any
_thread: int | None = None  # the thread in which `_receive` runs, if it does


def _receive(column: Any) -> bool:
    global _thread
    _thread = get_ident()
    try:
        return _streams[-1].receive(int(column[0]))
    finally:
        _thread = None


@contextmanager
def _current_stream(stream: _Stream) -> Iterator[_Stream]:
    """Let `_receive` pass tokens to `stream`. Wait while another thread generates a text."""
    if _thread == get_ident():
        raise RuntimeError("on_text cannot call generate: it is called while a text is generated")
    with _lock:
        _streams.append(stream)
        try:
            yield stream
        finally:
            _streams.pop()


def make_cache(
    config: llama.LlamaConfig, room: int, format: str, batch: int = 1
) -> llama.KeyValueCache:
    """Return an empty cache of keys and values in a number format.

    **Arguments:**

    - `config`: the sizes of the model.
    - `room`: the largest number of tokens per text.
    - `format`: a quantized format, such as "int8", with one scale per token and head. Or a dtype:
      "float32", "float16" or "bfloat16".
    - `batch`: the number of texts.
    """
    if format in ("float32", "float16", "bfloat16"):
        return llama.empty_cache(config, batch, room, jnp.dtype(format))
    shape = batch * config.num_key_value_heads, room, config.head_dim
    empty: Callable[[], Any] = lambda: tuple(
        zeros(shape, qtype=format, channelwise_axes=(0, 1)) for _ in range(config.num_hidden_layers)
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
    layers = model["config"].num_hidden_layers
    last = f"model.layers.{layers - 1}.input_layernorm.weight"
    for name in ("model.embed_tokens.weight", "model.norm.weight", last):
        if name not in names:
            raise ValueError(
                f"{path} has no tensor {name}, which a Llama with {layers} layers has. It has "
                f"{', '.join(names[:2])}, ..."
            )
    if f"model.layers.{layers}.input_layernorm.weight" in names:
        raise ValueError(f"{path} has more layers than config.json, which states {layers}")
    rules: Mapping[str, Any] = {}
    if format is not None:
        if len(dense) < len(names):
            raise ValueError(f"{path} is already quantized, so it cannot be quantized to {format}")
        weights = {name: aval for name, aval in dense.items() if len(aval.shape) == 2}
        rules = plan(weights, [Selector(WEIGHTS, format, "default", -1)])
    params = load_arrays(path, names="huggingface")
    expected = jax.eval_shape(partial(llama.init, config=model["config"]), jax.random.key(0))
    for name in sorted(params.keys() & expected.keys()):
        shape, stated = list(params[name].shape), list(expected[name].shape)
        is_vocabulary = name.startswith(("model.embed_tokens", "lm_head"))  # may be padded
        if shape[is_vocabulary:] != stated[is_vocabulary:]:
            raise ValueError(f"{name} in {path} has the shape {shape}, not {stated} of config.json")
    for name, rule in rules.items():
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
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    template = metadata.get("tokenizer.chat_template")
    if template is None:
        template = ("{{ bos_token }}" if begins_with_bos(metadata) else "") + _PLAIN_TEMPLATE
    return {
        "config": llama.LlamaConfig.from_dict(file.config),
        "tokenizer": tokenizer(metadata),
        "stop": tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        "template": template,
        "special_tokens": special_tokens(metadata),
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
    ends = _read_json(folder / "generation_config.json").get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    template = settings.get("chat_template") or _PLAIN_TEMPLATE
    if isinstance(template, list):  # several templates, each with a name
        by_name = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = by_name.get("default") or _PLAIN_TEMPLATE
    if not isinstance(template, str):
        raise ValueError(f"the chat_template in {folder / 'tokenizer_config.json'} is no text")
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    texts = {
        name: x.get("content") if isinstance(x, dict) else x
        for name, x in settings.items()
        if name.endswith("_token")
    }
    try:
        words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises no narrower class
        raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
    words.no_truncation()  # settings of a training script, which cut and pad the texts
    words.no_padding()
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) for end in ends):
        raise ValueError(f"eos_token_id must be an integer or a list of integers, not {ends}")
    return {
        "config": llama.LlamaConfig.from_dict(config),
        "tokenizer": words,
        "stop": tuple(ends),
        "template": template,
        "special_tokens": {name: text for name, text in texts.items() if isinstance(text, str)},
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
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(f"a chat template needs jinja2: {install_command('demo')}") from error

    def reject(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": True,
        "raise_exception": reject,
        "strftime_now": lambda form: time.strftime(form),
    }
    try:
        return environment.from_string(template).render(**special_tokens, **variables)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not supported: {error}") from error
    except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the chat template rejects the messages: {error}") from error
