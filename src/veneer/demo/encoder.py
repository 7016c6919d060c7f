"""A BERT sentence encoder from a Hugging Face folder: its parameters, tokenizer and batches."""

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

from .fetch import program

BATCH = 64
_MAX_TOKENS = 128  # per sentence: all-MiniLM-L6-v2 was trained on no more
_LENGTH_STEP = 32  # lengths of batches are multiples of this, so that few shapes are compiled

# The only supported values of these entries of `config.json`, and their defaults.
_EXPECTED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
)

# Older checkpoints prefix all names with "bert.", and name the parameters of norms as TensorFlow.
_RENAMED = (
    (re.compile(r"^bert\."), ""),
    (re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"),
)


class Batch(NamedTuple):
    """A batch of sentences: token ids, and a mask that is False for padding."""

    ids: np.ndarray  # int32 [batch, length]
    mask: np.ndarray  # bool [batch, length]


@dataclass(frozen=True)
class BertEncoder:
    """A BERT sentence encoder. The program `examples/sentence_encoder.py` runs it.

    **Arguments:**

    - `params`: a dict from the names in PyTorch to dense f32 arrays.
    - `config`: a `Config` of `examples/sentence_encoder.py`.
    - `tokenizer`: a tokenizer that truncates sentences to `max_tokens`.
    - `contracted`: the sizes of the axes that matmuls of the model contract, which tiles must
      divide.
    - `max_tokens`: the maximum number of tokens of a sentence.
    """

    params: dict[str, np.ndarray]
    config: Any
    tokenizer: Tokenizer
    contracted: tuple[int, ...]
    max_tokens: int

    def batches(self, sentences: Sequence[str]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield pairs: the indices of some sentences, `int[n]`, and the padded batch of them.

        A batch has up to 64 sentences, and the shortest sentences come first. The last batch is
        filled up with empty sentences, so that all batches have the same size.
        """
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        shortest_first = np.argsort([len(ids) for ids in tokens], kind="stable")
        size = min(BATCH, len(tokens))
        for start in range(0, len(tokens), size):
            rows = shortest_first[start : start + size]
            length = -(-len(tokens[rows[-1]]) // _LENGTH_STEP) * _LENGTH_STEP
            ids = np.zeros((size, min(length, self.max_tokens)), np.int32)
            mask = np.zeros(ids.shape, bool)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = tokens[row]
                mask[i, : len(tokens[row])] = True
            yield rows, Batch(ids, mask)

    def unpadded_batches(self, sentences: Sequence[str]) -> list[Batch]:
        """Return batches without padding, for calibration.

        Sentences are cut to multiples of 8 tokens. A batch has up to 256 sentences of one length.
        """
        by_length: dict[int, list[list[int]]] = {}
        for encoding in self.tokenizer.encode_batch(list(sentences)):
            if length := len(encoding.ids) // 8 * 8:
                by_length.setdefault(length, []).append(encoding.ids[:length])
        batches = []
        for _, rows in sorted(by_length.items()):
            ids = np.array(rows, np.int32)
            parts = [ids[i : i + 256] for i in range(0, len(ids), 256)]
            batches += [Batch(part, np.ones(part.shape, bool)) for part in parts]
        return batches


def load(folder: Path) -> BertEncoder:
    """Load an encoder from `config.json`, `tokenizer.json` and the safetensors files of a folder.

    **Raises:**

    - `FileNotFoundError` if the folder or one of its files is missing.
    - `ValueError` if a file is broken, or if the model is not a dense BERT encoder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder; --model takes a Hugging Face BERT folder."
        )
    config = _read_config(_check_exists(folder / "config.json"))
    max_tokens = min(_MAX_TOKENS, config["max_position_embeddings"])
    encoder = BertEncoder(
        params=_read_params(folder),
        config=program("sentence_encoder").Config.from_json(json.dumps(config)),
        tokenizer=_read_tokenizer(_check_exists(folder / "tokenizer.json"), max_tokens),
        contracted=(config["hidden_size"], config["intermediate_size"]),
        max_tokens=max_tokens,
    )
    _check_shapes(encoder, folder)
    return encoder


def _check_exists(file: Path) -> Path:
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


def _read_tokenizer(file: Path, max_tokens: int) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    return tokenizer


def _read_params(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / "model.safetensors.index.json").is_file():
        _check_exists(folder / "model.safetensors")
    params = {}
    for name, value in vn.load(folder).items():
        if isinstance(value, vn.ImplicitArray):
            raise ValueError(
                f"{folder} is already quantized ({name}); the demo starts from dense weights."
            )
        if jnp.issubdtype(value.dtype, jnp.floating):  # other arrays are buffers of positions
            params[name_in_program(name)] = np.asarray(value, np.float32)
    return params


def name_in_program(name: str) -> str:
    """Convert the name of a tensor in a BERT checkpoint to its name in the example program.

    The program is `examples/sentence_encoder.py`.

    >>> from veneer.demo.encoder import name_in_program
    >>> name_in_program("bert.embeddings.LayerNorm.gamma")
    'embeddings.LayerNorm.weight'
    """
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _check_shapes(encoder: BertEncoder, folder: Path) -> None:
    """Raise a `ValueError` if the example program cannot run an encoder, such as for wrong shapes.

    Trace the program on abstract arrays. `folder` is the folder of the model, for the error.
    """
    [(_, batch)] = encoder.batches(["A trial."])
    encode = program("sentence_encoder").encode
    try:
        jax.eval_shape(lambda params: encode(params, encoder.config, *batch), encoder.params)
    except KeyError as error:
        raise ValueError(f"{folder} holds no tensor {error}, which a BERT encoder has.") from error
    except (TypeError, ValueError) as error:  # the errors of jax.numpy for wrong shapes
        raise ValueError(f"The tensors of {folder} do not fit its config.json: {error}") from error
