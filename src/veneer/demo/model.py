"""A Hugging Face BERT folder: its parameters, its tokenizer, and the program that runs it."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import veneer as vn

from .programs import program

BATCH = 64
_LONGEST = 128  # tokens of a sentence: all-MiniLM-L6-v2 was trained on no more
_LENGTH_STEP = 32  # batches are padded to multiples of this many tokens, so that few shapes compile

# What the encoder is written for; a configuration that leaves one out means this value.
_EXPECTED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
)

# Older checkpoints prefix every name with the model's, and name a norm's parameters as TensorFlow.
_RENAMED = (
    (re.compile(r"^bert\."), ""),
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)


class Batch(NamedTuple):
    """Sentences as the encoder takes them."""

    ids: np.ndarray  # int32 [batch, length]
    mask: np.ndarray  # bool [batch, length], false where ids holds padding


@dataclass(frozen=True)
class Model:
    """A BERT encoder: dense f32 parameters under torch's names, and what is needed to run them.

    **Arguments:**

    - `params`: by name.
    - `config`: the encoder's own.
    - `tokenizer`: truncates to `longest`.
    - `contracted`: the sizes of the axes that its matmuls contract.
    - `longest`: the most tokens of a sentence.
    """

    params: dict[str, np.ndarray]
    config: Any
    tokenizer: Tokenizer
    contracted: tuple[int, ...]
    longest: int

    def unpadded(self, sentences: Sequence[str]) -> list[Batch]:
        """Returns batches of sentences of as many tokens, cut to multiples of 8, at most 256 each.

        For calibration, which would count the activations of padding.
        """
        by_length: dict[int, list[list[int]]] = {}
        for encoding in self.tokenizer.encode_batch(list(sentences)):
            length = len(encoding.ids) // 8 * 8
            by_length.setdefault(length, []).append(encoding.ids[:length])
        batches = []
        for length in sorted(length for length in by_length if length):
            ids = np.array(by_length[length], np.int32)
            parts = [ids[i : i + 256] for i in range(0, len(ids), 256)]
            batches += [Batch(part, np.ones(part.shape, bool)) for part in parts]
        return batches

    def batches(self, sentences: Sequence[str]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yields the sentences in batches of 64 (of 1 if there is but one), shortest first.

        With each batch come the indices of its sentences. A last batch that is not full ends in
        empty rows, so that it needs no compilation of its own.
        """
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        shortest_first = np.argsort([len(ids) for ids in tokens], kind="stable")
        size = min(BATCH, len(tokens))
        for start in range(0, len(tokens), size):
            rows = shortest_first[start : start + size]
            length = -(-len(tokens[rows[-1]]) // _LENGTH_STEP) * _LENGTH_STEP
            ids = np.zeros((size, min(length, self.longest)), np.int32)
            mask = np.zeros(ids.shape, bool)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = tokens[row]
                mask[i, : len(tokens[row])] = True
            yield rows, Batch(ids, mask)


def load(folder: Path) -> Model:
    """Loads the model of a Hugging Face folder: `config.json`, `tokenizer.json` and safetensors.

    **Raises:** `FileNotFoundError` where the folder or one of its files is missing. `ValueError`
    where a file is broken, or the model is not a dense BERT encoder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; --model takes a Hugging Face BERT folder."
        )
    config = _read_config(_existing(folder / "config.json"))
    longest = min(_LONGEST, config["max_position_embeddings"])
    model = Model(
        params=_read_params(folder),
        config=program("sentence_encoder").Config.from_json(json.dumps(config)),
        tokenizer=_read_tokenizer(_existing(folder / "tokenizer.json"), longest),
        contracted=(config["hidden_size"], config["intermediate_size"]),
        longest=longest,
    )
    _check_fits(model, folder)
    return model


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file.parent} has no {file.name}. A model folder for the demo holds config.json, "
            "tokenizer.json, and model.safetensors or its shards with model.safetensors.index.json."
        )
    return file


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = _EXPECTED | json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON object: {error}") from error
    for key, expected in _EXPECTED.items():
        if config[key] != expected:
            raise ValueError(
                f"{file} has {key} {config[key]!r}; the demo's encoder takes {expected!r}."
            )
    if missing := [key for key in _REQUIRED if key not in config]:
        raise ValueError(f"{file} has no {', '.join(missing)}.")
    return config


def _read_tokenizer(file: Path, longest: int) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    return tokenizer


def _read_params(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / "model.safetensors.index.json").is_file():
        _existing(folder / "model.safetensors")
    params = {}
    for name, value in vn.load(folder).items():
        if isinstance(value, vn.ImplicitArray):
            raise ValueError(
                f"{folder} is already quantized ({name}); the demo starts from dense weights."
            )
        if jnp.issubdtype(value.dtype, jnp.floating):  # the rest are buffers, such as position_ids
            params[name_in_program(name)] = np.asarray(value, np.float32)
    return params


def name_in_program(name: str) -> str:
    """Returns what the encoder calls a tensor of a checkpoint.

    >>> from veneer.demo.model import name_in_program
    >>> name_in_program("bert.embeddings.LayerNorm.gamma")
    'embeddings.LayerNorm.weight'
    """
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _check_fits(model: Model, folder: Path) -> None:
    """Traces the encoder, so that a model that it cannot run is refused before the work begins."""
    [(_, batch)] = model.batches(["A trial."])
    encode = program("sentence_encoder").encode
    try:
        jax.eval_shape(lambda params: encode(params, model.config, *batch), model.params)
    except KeyError as error:
        raise ValueError(f"{folder} holds no tensor {error}, which a BERT encoder has.") from error
    except (TypeError, ValueError) as error:  # how jax.numpy refuses shapes
        raise ValueError(f"The tensors of {folder} do not fit its config.json: {error}") from error
