"""Quantize a checkpoint with calibration on a text, for `veneer quantize --calibrate`.

It runs BERT sentence encoders, by `examples/sentence_encoder.py`, and Llamas, by `models/llama.py`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import quant
from .._core.value import materialise
from ..models import LanguageModel, llama, load
from ..models.comparison import split_windows
from ..models.llama import UnsupportedModelError
from ..quant.models.rules import Rule
from ..quant.ptq.report import CalibrationReport
from . import encoder
from .fetch import program


class TextModel(NamedTuple):
    """A model that runs on text.

    **Arguments:**

    - `params`: a dict from names to dense arrays, the parameters of `call`.
    - `call`: a program of `examples/` that runs the model: a function of the parameters and the
      arrays of a batch.
    - `batches`: a function that splits a text into batches.
    - `name_in_program`: a function that maps the name of a tensor in the checkpoint to its name in
      `params`.
    """

    params: Mapping[str, Any]
    call: Callable
    batches: Callable[[str], Sequence[Any]]
    name_in_program: Callable[[str], str]


def calibrated(
    source: Path, text: Path, rules: Mapping[str, Rule], method: str, *, progress: bool = False
) -> tuple[dict[str, Any], CalibrationReport]:
    """Quantize the weights of a checkpoint with `vn.quant.calibrate`.

    **Arguments:**

    - `source`: a Hugging Face folder with `config.json` and `tokenizer.json`, or a GGUF file.
    - `text`: a text file in UTF-8. For an encoder, it has one sentence per line.
    - `rules`: a dict from the names in the checkpoint of the tensors to quantize to their rules.
    - `method`, `progress`: as in `vn.quant.calibrate`.

    **Returns:** a dict from names to quantized weights, and a report of their errors.

    **Raises:**

    - `FileNotFoundError` if a file is missing.
    - `ValueError` if no program here runs the model, or the text is too short.
    - The errors of `vn.quant.calibrate`.
    """
    model = load_text_model(source)
    names = {model.name_in_program(name): name for name in rules}
    renamed = [
        dataclasses.replace(rules[name], path_regex=re.escape(in_program))
        for in_program, name in names.items()
    ]
    batches = model.batches(text.read_text(encoding="utf-8"))
    if not batches:
        raise ValueError(f"{text} is too short to calibrate with: it has no full batch")
    calibration = quant.calibrate(
        model.call, renamed, params=model.params, method=method, progress=progress
    )
    params = calibration(batches)
    return {name: params[in_program] for in_program, name in names.items()}, calibration.report


def load_text_model(source: Path) -> TextModel:
    """Load the model of a Hugging Face folder or a GGUF file. Raises the errors of `calibrated`."""
    if source.suffix == ".gguf":
        return _decoder(load(source))
    config = source / "config.json"
    if not config.is_file():
        raise FileNotFoundError(
            f"{source} has no config.json: calibration needs a Hugging Face folder with "
            "config.json and tokenizer.json, or a GGUF file"
        )
    entries = json.loads(config.read_text(encoding="utf-8"))
    if entries.get("model_type", "bert") == "bert":
        bert = encoder.load(source)
        encode = jax.jit(program("sentence_encoder").encode, static_argnums=1)
        return TextModel(
            {name: jnp.asarray(x) for name, x in bert.params.items()},
            lambda params, ids, mask: encode(params, bert.config, ids, mask),
            lambda text: [tuple(batch) for batch in bert.unpadded_batches(text.splitlines())],
            encoder.name_in_program,
        )
    try:
        model = load(source)
    except UnsupportedModelError as error:
        raise ValueError(
            f"{config}: {error}, and BERT encoders. For other models, use vn.quant.calibrate."
        ) from None
    return _decoder(model)


def _decoder(model: LanguageModel) -> TextModel:
    losses = jax.jit(llama.losses, static_argnums=1)
    dense = {name: jnp.asarray(materialise(x), jnp.float32) for name, x in model.params.items()}
    return TextModel(
        dense,
        lambda params, tokens: losses(params, model.config, tokens),
        lambda text: list(split_windows(model.tokenizer, text)[:, None]),
        lambda name: name,
    )
