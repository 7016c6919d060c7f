"""A sentence encoder in plain JAX: any Hugging Face BERT with mean pooling.

The parameters are the tensors of the checkpoint: a flat dict with the names and layouts of torch
(`[out, in]` for a matmul). Nothing is converted.

`veneer demo` runs this program with quantized weights. Alone, it prints the cosines of sentences:

    python examples/sentence_encoder.py MODEL_DIR "a sentence" "and another one"
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """The settings that shapes do not contain. Hashable, so that `jit` can take it as static."""

    num_layers: int
    num_heads: int
    layer_norm_eps: float

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Parse the text of a checkpoint's `config.json`."""
        fields = json.loads(text)
        return cls(
            num_layers=fields["num_hidden_layers"],
            num_heads=fields["num_attention_heads"],
            layer_norm_eps=fields["layer_norm_eps"],
        )


def dense(params: Params, name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: Array, eps: float) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(variance + eps)
    return normed * params[f"{name}.weight"] + params[f"{name}.bias"]


def attention(params: Params, name: str, x: Array, mask: Array, num_heads: int) -> Array:
    def heads(projection: str) -> Array:  # [batch, length, heads, width of a head]
        y = dense(params, f"{name}.{projection}", x)
        return y.reshape(*y.shape[:2], num_heads, -1)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    # The lowest finite number rather than -inf: an empty sentence must not become NaN.
    scores = jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return mixed.reshape(x.shape)


def layer(params: Params, name: str, config: Config, x: Array, mask: Array) -> Array:
    norm = partial(layer_norm, params, eps=config.layer_norm_eps)
    attended = attention(params, f"{name}.attention.self", x, mask, config.num_heads)
    x = norm(
        f"{name}.attention.output.LayerNorm",
        x + dense(params, f"{name}.attention.output.dense", attended),
    )
    wide = jax.nn.gelu(dense(params, f"{name}.intermediate.dense", x), approximate=False)
    return norm(f"{name}.output.LayerNorm", x + dense(params, f"{name}.output.dense", wide))


def embed(params: Params, config: Config, ids: Array) -> Array:
    x = (
        params["embeddings.word_embeddings.weight"][ids]
        + params["embeddings.position_embeddings.weight"][: ids.shape[1]]
        + params["embeddings.token_type_embeddings.weight"][0]
    )
    return layer_norm(params, "embeddings.LayerNorm", x, config.layer_norm_eps)


def encode(params: Params, config: Config, ids: Array, mask: Array) -> Array:
    """Return a unit vector per sentence, `[batch, hidden]`.

    **Arguments:**

    - `ids`: token ids, `[batch, length]`.
    - `mask`: `[batch, length]`, true for tokens and false for padding.
    """
    x = embed(params, config, ids)
    for i in range(config.num_layers):
        x = layer(params, f"encoder.layer.{i}", config, x, mask)
    total = jnp.where(mask[..., None], x, 0).sum(1)
    mean = total / jnp.maximum(mask.sum(1, keepdims=True), 1)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def main(folder: str, *sentences: str) -> None:
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    params = load_file(Path(folder, "model.safetensors"))
    config = Config.from_json(Path(folder, "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    ids = jnp.array([e.ids for e in encoded])
    mask = jnp.array([e.attention_mask for e in encoded], bool)
    embeddings = jax.jit(encode, static_argnums=1)(params, config, ids, mask)
    print(embeddings @ embeddings.T)  # the cosine similarity of each pair


if __name__ == "__main__":
    main(*sys.argv[1:])
