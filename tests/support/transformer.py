"""A small transformer in plain JAX, for tests and benchmarks of implicit weights.

It uses its matrices only as `x @ w`, so they can be implicit. The same model written by hand for
low-rank updates passes another product as `matmul`. This module does not import veneer, so the
benchmarks of other libraries can use it.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]
# The matrices of one layer.
MATRICES = ("q", "k", "v", "o", "up", "down")


def init(
    key: jax.Array, *, layers: int = 12, d: int = 64, hidden: int = 256, vocabulary: int = 100
) -> Params:
    keys = iter(jax.random.split(key, 6 * layers + 2))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    shapes = dict.fromkeys("qkvo", (d, d)) | {"up": (d, hidden), "down": (hidden, d)}

    def layer() -> Params:
        matrices = {name: normal(*shapes[name]) for name in MATRICES}
        return {"norm1": jnp.ones(d), "norm2": jnp.ones(d), **matrices}

    return {
        "embedding": normal(vocabulary, d),
        "layers": [layer() for _ in range(layers)],
        "out": normal(d, vocabulary),
    }


def forward(
    params: Params, ids: jax.Array, *, heads: int = 4, matmul: Callable = operator.matmul
) -> jax.Array:
    """Return the logits `[batch, time, vocabulary]` of token ids `[batch, time]`."""
    x = params["embedding"][ids]
    for layer in params["layers"]:
        x = x + _attention(layer, _norm(x, layer["norm1"]), heads, matmul)
        hidden = jax.nn.gelu(matmul(_norm(x, layer["norm2"]), layer["up"]))
        x = x + matmul(hidden, layer["down"])
    return x @ params["out"]


def _attention(layer: Params, x: jax.Array, heads: int, matmul: Callable) -> jax.Array:
    batch, time, d = x.shape
    q, k, v = (matmul(x, layer[n]).reshape(batch, time, heads, d // heads) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (d // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return matmul(mixed.reshape(batch, time, d), layer["o"])


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale


class LowRank(NamedTuple):
    """The leaves of a weight with a low-rank update, `w + a @ b`."""

    w: jax.Array  # [in, out]
    a: jax.Array  # [in, rank]
    b: jax.Array  # [rank, out]


def low_rank(key: jax.Array, w: jax.Array, rank: int = 4) -> LowRank:
    key_a, key_b = jax.random.split(key)
    rows, columns = w.shape
    a = jax.random.normal(key_a, (rows, rank))
    return LowRank(w, a, 0.02 * jax.random.normal(key_b, (rank, columns)))


def by_hand(x: jax.Array, w: jax.Array | LowRank) -> jax.Array:
    """Return `x @ w` without computing `w + a @ b`, as a person would write it by hand."""
    return x @ w.w + (x @ w.a) @ w.b if isinstance(w, LowRank) else x @ w


def dot_general(x: Any, w: Any, *, dimension_numbers: Any, **params: Any) -> jax.Array:
    """Multiply x by a weight with the fields of `LowRank`: a rule for `dot_general`."""
    (_, w_contracting), batch = dimension_numbers
    if w_contracting != (0,) or batch != ((), ()):
        raise NotImplementedError(f"dot_general with {dimension_numbers}")
    dot = lambda x, w: lax.dot_general(x, w, dimension_numbers, **params)
    out, low = dot(x, w.w), dot(x, w.a)
    last = ((low.ndim - 1,), (0,)), batch
    return out + lax.dot_general(low, w.b, last, **params)


def with_low_rank(
    params: Params,
    make: Callable[..., Any] = LowRank,
    *,
    layers: int | None = None,
    matrices: tuple[str, ...] = MATRICES,
) -> Params:
    """Replace matrices by `make(w, a, b)`, in the first `layers` layers or in all of them."""

    def updated(i: int, layer: Params) -> Params:
        key = jax.random.key(i)
        return layer | {name: make(*low_rank(key, layer[name])) for name in matrices}

    changed = [updated(i, layer) for i, layer in enumerate(params["layers"][:layers])]
    return params | {"layers": changed + params["layers"][len(changed) :]}
