"""A small transformer in plain JAX that classifies images, which it reads row by row.

It does not import veneer. This file is not a script: `low_precision_training.py` trains it.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def init(
    key: jax.Array, *, rows: int = 8, pixels: int = 8, width: int = 32, layers: int = 2
) -> Params:
    """Return random parameters, with the layers stacked."""
    keys = iter(jax.random.split(key, 7))

    def kernel(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[-2] ** -0.5

    return {
        "embedding": kernel(pixels, width),
        "positions": kernel(rows, width),
        "layers": {
            "qkv": kernel(layers, width, 3 * width),
            "mixed": kernel(layers, width, width),
            "up": kernel(layers, width, 4 * width),
            "down": kernel(layers, 4 * width, width),
            "scales": jnp.ones((layers, 2, width)),
        },
        "out": kernel(width, 10),
    }


def logits(params: Params, images: jax.Array, heads: int = 4) -> jax.Array:
    """Return logits `[batch, 10]` of the digits in images `[batch, rows, pixels]`."""

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        qkv = p["scales"][0] * normed(x) @ p["qkv"]
        q, k, v = (part.reshape(*x.shape[:-1], heads, -1) for part in jnp.split(qkv, 3, -1))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["mixed"]
        return x + jax.nn.gelu(p["scales"][1] * normed(x) @ p["up"]) @ p["down"], None

    x = images @ params["embedding"] + params["positions"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return normed(x.mean(1)) @ params["out"]


def normed(x: jax.Array) -> jax.Array:
    """Return x divided by its root mean square."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
