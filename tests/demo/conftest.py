"""A small Hugging Face BERT folder with random weights."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.optional import missing_libraries

collect_ignore_glob = ["test_*.py"] if missing_libraries("demo") else []

CONFIG = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 80,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "is", "of", "and", "to", "in", "statement"]


def bert_params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), hidden),
        "embeddings.position_embeddings.weight": (CONFIG["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    dense = {}
    norms = ["embeddings.LayerNorm"]
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            dense[f"{layer}.attention.{part}"] = (hidden, hidden)
        dense[f"{layer}.intermediate.dense"] = (wide, hidden)
        dense[f"{layer}.output.dense"] = (hidden, wide)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, shape in dense.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_folder(folder: Path, params: dict[str, np.ndarray], **config: object) -> Path:
    # pytest imports this file even if the libraries of the demo are missing.
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    folder.mkdir()
    save_file(params, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def params() -> dict[str, np.ndarray]:
    """The tensors of a BERT with two layers, four heads and twelve words."""
    return bert_params()


@pytest.fixture
def write_bert(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model folder. Keywords replace entries of its config.json."""
    return partial(write_folder, tmp_path / "bert")


@pytest.fixture
def bert_folder(write_bert: Callable[..., Path], params: dict[str, np.ndarray]) -> Path:
    return write_bert(params)
