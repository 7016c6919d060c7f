"""Weights of a checkpoint, rounded by the activations that a text gives rise to.

For models that a program of `examples/` runs: BERT's sentence encoders, and Llamas.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from .. import quant
from .._core.value import materialise
from ..files.load_save import load
from ..quant.models.rules import Rule
from ..quant.ptq.report import CalibrationReport
from . import language_model, model
from .programs import program

_WINDOW = 512  # tokens of a batch of a decoder


class TextModel(NamedTuple):
    """A model that is run on text.

    **Arguments:**

    - `params`: dense, by the names of the program.
    - `call`: the program, of these and a batch.
    - `batches`: of a text.
    - `name`: what the program calls a tensor of the checkpoint.
    """

    params: Mapping[str, Any]
    call: Callable
    batches: Callable[[str], Sequence[Any]]
    name: Callable[[str], str]


def calibrated(
    source: Path, text: Path, rules: Mapping[str, Rule], method: str, *, progress: bool = False
) -> tuple[dict[str, Any], CalibrationReport]:
    """Quantises the weights of a checkpoint by `vn.quant.calibrate`.

    **Arguments:**

    - `source`: a Hugging Face folder with its `config.json` and `tokenizer.json`, or a GGUF file.
    - `text`: a file, in UTF-8; of an encoder, a sentence a line.
    - `rules`: by the name of each tensor that is quantised.
    - `method`, `progress`: as of `calibrate`.

    **Returns:** the quantised weights by name, and what each lost.

    **Raises:** `FileNotFoundError` where a file is missing; `ValueError` for a model that no
    program here runs, for a text that is too short, and what `calibrate` raises.
    """
    found = text_model(source)
    names = {found.name(name): name for name in rules}
    chosen = [
        dataclasses.replace(rules[name], path_regex=re.escape(inside))
        for inside, name in names.items()
    ]
    batches = found.batches(text.read_text(encoding="utf-8"))
    if not batches:
        raise ValueError(f"{text} is too short to calibrate with: it has no full batch")
    calibration = quant.calibrate(
        found.call, chosen, params=found.params, method=method, progress=progress
    )
    small = calibration(batches)
    return {name: small[inside] for inside, name in names.items()}, calibration.report


def text_model(source: Path) -> TextModel:
    """Returns the model of a checkpoint.

    **Raises:** `FileNotFoundError`, `ValueError`, as `calibrated`.
    """
    if source.suffix == ".gguf":
        llama = language_model.load(source)
        return _decoder(llama.params, llama.config, llama.tokenizer)
    config = source / "config.json"
    if not config.is_file():
        raise FileNotFoundError(
            f"{source} has no config.json: calibration needs a Hugging Face folder with "
            "config.json and tokenizer.json, or a GGUF file"
        )
    said = json.loads(config.read_text(encoding="utf-8"))
    if said.get("model_type", "bert") == "bert":
        return _encoder(model.load(source))
    try:
        of_llama = program("llama").Config.of(said)
    except ValueError as error:
        raise ValueError(
            f"{config}: {error}, and BERT encoders. For other models, use vn.quant.calibrate."
        ) from None
    if not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{source} has no tokenizer.json, which calibration needs")
    return _decoder(load(source), of_llama, Tokenizer.from_file(str(source / "tokenizer.json")))


def _encoder(bert: model.Model) -> TextModel:
    encode = jax.jit(program("sentence_encoder").encode, static_argnums=1)
    return TextModel(
        {name: jnp.asarray(x) for name, x in bert.params.items()},
        lambda params, ids, mask: encode(params, bert.config, ids, mask),
        lambda text: [tuple(batch) for batch in bert.unpadded(text.splitlines())],
        model.name_in_program,
    )


def _decoder(params: Mapping[str, Any], config: Any, tokenizer: Tokenizer) -> TextModel:
    losses = jax.jit(program("llama").losses, static_argnums=1)

    def batches(text: str) -> list[np.ndarray]:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        count = len(tokens) // _WINDOW
        if not count:
            raise ValueError(f"the text has {len(tokens)} tokens, but {_WINDOW} are needed")
        return [*np.reshape(tokens[: count * _WINDOW], (count, 1, _WINDOW)).astype(np.int32)]

    dense = {name: jnp.asarray(materialise(x), jnp.float32) for name, x in params.items()}
    return TextModel(
        dense, lambda params, tokens: losses(params, config, tokens), batches, lambda name: name
    )
