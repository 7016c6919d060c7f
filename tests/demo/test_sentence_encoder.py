"""`examples/sentence_encoder.py` is plain JAX, and computes BERT."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from veneer.demo.fetch import program

EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence_encoder.py"
example = program("sentence_encoder")
config = example.Config(num_layers=2, num_heads=4, layer_norm_eps=1e-12)
encode = jax.jit(example.encode, static_argnums=1)


def reference(params: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """BERT on one sentence without padding, head by head, in float64."""
    p = {name: value.astype(np.float64) for name, value in params.items()}
    erf = np.vectorize(math.erf)

    def dense(name, x):
        return np.einsum("li,oi->lo", x, p[f"{name}.weight"]) + p[f"{name}.bias"]

    def norm(name, x):
        mean, std = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return (x - mean) / std * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = p["embeddings.word_embeddings.weight"][ids]
    x = x + p["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm("embeddings.LayerNorm", x + p["embeddings.token_type_embeddings.weight"][0])
    width = x.shape[1] // config.num_heads
    for i in range(config.num_layers):
        layer = f"encoder.layer.{i}"
        query, key, value = (
            dense(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value")
        )
        heads = []
        for h in range(config.num_heads):
            part = slice(h * width, (h + 1) * width)
            scores = np.exp(query[:, part] @ key[:, part].T / math.sqrt(width))
            heads.append(scores / scores.sum(-1, keepdims=True) @ value[:, part])
        mixed = dense(f"{layer}.attention.output.dense", np.concatenate(heads, -1))
        x = norm(f"{layer}.attention.output.LayerNorm", x + mixed)
        wide = dense(f"{layer}.intermediate.dense", x)
        wide = wide * (1 + erf(wide / math.sqrt(2))) / 2
        x = norm(f"{layer}.output.LayerNorm", x + dense(f"{layer}.output.dense", wide))
    pooled = x.mean(0)
    return pooled / np.linalg.norm(pooled)


def padded(sentences: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    # Padding has the id of a real token, so that a leak would change the result.
    ids = np.full((len(sentences), length), 7, np.int32)
    mask = np.zeros(ids.shape, bool)
    for i, sentence in enumerate(sentences):
        ids[i, : len(sentence)] = sentence
        mask[i, : len(sentence)] = True
    return ids, mask


@pytest.mark.parametrize("length", [6, 9])
def test_the_program_agrees_with_numpy_with_any_padding(params, length):
    sentences = [[2, 4, 5, 3], [2, 6, 7, 8, 9, 3], [2, 3]]
    found = encode(params, config, *padded(sentences, length))
    expected = np.stack([reference(params, sentence) for sentence in sentences])
    np.testing.assert_allclose(found, expected, atol=2e-6)  # f32, two layers


def test_an_empty_sentence_is_the_zero_vector(params):
    found = encode(params, config, *padded([[], [2, 3]], 6))
    np.testing.assert_array_equal(found[0], 0)
    assert np.linalg.norm(found[1]) == pytest.approx(1)


def test_the_program_does_not_import_veneer():
    imported = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"jax", "safetensors", "tokenizers"}


def test_the_program_runs_as_a_script(bert_folder):
    command = [sys.executable, str(EXAMPLE), str(bert_folder), "the statement", "the statement"]
    cosines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first = np.fromstring(cosines.replace("[", "").replace("]", ""), sep=" ")
    np.testing.assert_allclose(first, 1, atol=1e-5)
