"""A decoder in plain JAX, shaped as Llama: it reads tokens, and says what may come next.

Grouped-query attention with rotary positions, SwiGLU, RMSNorm, and a cache of keys and values, so
that a step reads new tokens alone. Its parameters are a tree of kernels `[in, out]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Any]
Step = Callable[..., Any]  # `step`, below, as it is or compiled


@dataclass(frozen=True)
class Config:
    """The sizes; TinyLlama's, but for the layers. Hashable, so that `jit` can take it as static."""

    vocabulary: int = 32_000
    width: int = 2048
    num_layers: int = 8
    num_heads: int = 32  # of queries
    num_groups: int = 8  # heads of keys and values, each of which serves several of queries
    wide: int = 5632
    longest: int = 512  # tokens that the cache has room for
    rotary_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """The features of a head."""
        return self.width // self.num_heads


class Cache(NamedTuple):
    """What the layers keep of the tokens read, an array for each layer.

    Its first axis is all heads of a batch; and a product takes keys by their features and values
    by their tokens. So each lies as it is multiplied, and XLA writes in it without making a copy.
    """

    keys: tuple[Array, ...]  # [batch * groups, width of a head, longest]
    values: tuple[Array, ...]  # [batch * groups, longest, width of a head]


def init(key: Array, config: Config) -> Params:
    """Random parameters in f32; products keep the size of what they take."""
    c, grouped = config, config.num_groups * config.head_width
    kernels = {
        "query": (c.width, c.width),
        "key": (c.width, grouped),
        "value": (c.width, grouped),
        "mixed": (c.width, c.width),
        "gate": (c.width, c.wide),
        "up": (c.width, c.wide),
        "down": (c.wide, c.width),
    }
    keys = iter(jax.random.split(key, 2 + c.num_layers * len(kernels)))

    def kernel(shape: tuple[int, int]) -> Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer() -> Params:
        made: Params = {name: kernel(shape) for name, shape in kernels.items()}
        return made | {"attention_norm": jnp.ones(c.width), "wide_norm": jnp.ones(c.width)}

    return {
        "embedding": jax.random.normal(next(keys), (c.vocabulary, c.width)),
        "layers": [layer() for _ in range(c.num_layers)],
        "norm": jnp.ones(c.width),
        "head": kernel((c.width, c.vocabulary)),
    }


def empty_cache(config: Config, batch: int, dtype: Any = jnp.float32) -> Cache:
    """Room for `config.longest` tokens of each of a batch of texts."""
    heads, size = batch * config.num_groups, (config.longest, config.head_width)
    room = lambda *shape: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return Cache(room(heads, *reversed(size)), room(heads, *size))


def logits(
    params: Params, config: Config, tokens: Array, cache: Cache, start: Array | int = 0
) -> tuple[Array, Cache]:
    """What speaks for each token of the vocabulary to come next, and the cache with these read.

    `tokens` are `[batch, length]`, the first of them number `start` of its text; the cache holds
    those before. Returns `[batch, length, vocabulary]`.
    """
    x = params["embedding"][tokens]
    keys, values = [], []
    # The layers are written out: of dense weights, XLA would copy those of each from a stack.
    for p, *kept in zip(params["layers"], cache.keys, cache.values, strict=True):
        attended, key, value = attention(p, config, norm(p["attention_norm"], x), *kept, start)
        x = x + attended
        x = x + swiglu(p, norm(p["wide_norm"], x))
        keys.append(key)
        values.append(value)
    return norm(params["norm"], x) @ params["head"], Cache(tuple(keys), tuple(values))


def attention(
    p: Params, config: Config, x: Array, keys: Array, values: Array, start: Array | int
) -> tuple[Array, Array, Array]:
    """Attention of `x`, `[batch, length, width]`, to itself and to all that came before it."""
    batch, length, _ = x.shape
    positions = start + jnp.arange(length)

    def heads(name: str, count: int) -> Array:  # [batch * heads, length, width of a head]
        y = (x @ p[name]).reshape(batch, length, count, -1).swapaxes(1, 2)
        return y.reshape(batch * count, length, -1)

    turn = partial(rotated, positions=positions, base=config.rotary_base)
    query, key = turn(heads("query", config.num_heads)), turn(heads("key", config.num_groups))
    value = heads("value", config.num_groups)
    keys = jax.lax.dynamic_update_slice(keys, key.swapaxes(1, 2), (0, 0, start))
    values = jax.lax.dynamic_update_slice(values, value, (0, start, 0))

    # The queries of a group are neighbors: they are rows of the same product.
    query = query.reshape(len(keys), -1, config.head_width)
    scores = (query @ keys).reshape(-1, length, config.longest) * config.head_width**-0.5
    is_before = jnp.arange(config.longest) <= positions[:, None]
    scores = jnp.where(is_before, scores, -jnp.inf)  # of no row is all masked: it sees itself
    mixed = jax.nn.softmax(scores).reshape(len(values), -1, config.longest) @ values
    mixed = mixed.reshape(batch, config.num_heads, length, -1).swapaxes(1, 2)
    return mixed.reshape(x.shape) @ p["mixed"], keys, values


def rotated(x: Array, positions: Array, base: float) -> Array:
    """RoPE (Su et al., 2021): pairs `(x[i], x[i + half])` turned by their position's angles."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def swiglu(p: Params, x: Array) -> Array:
    """A wide layer whose activations are gated (Shazeer, 2020)."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def norm(scale: Array, x: Array) -> Array:
    """RMSNorm (Zhang and Sennrich, 2019), in f32 whatever the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return scale * normed.astype(x.dtype)


def step(
    params: Params, config: Config, tokens: Array, cache: Cache, start: Array | int
) -> tuple[Array, Cache]:
    """Reads tokens `[batch, length]`, and says which is the most likely to follow: `[batch, 1]`."""
    found, cache = logits(params, config, tokens, cache, start)
    return found[:, -1:].argmax(-1).astype(tokens.dtype), cache


def compiled(step: Step = step) -> Step:
    """The step, compiled; it writes in the cache that it is given, which is then gone."""
    return jax.jit(step, static_argnums=1, donate_argnums=3)


def decode(step: Step, params: Params, config: Config, prompt: Array, *, count: int) -> Array:
    """Continues prompts `[batch, length]` greedily: `[batch, count]` tokens, by a compiled step.

    The prompt is read in one step, and then each token that is written.
    """
    cache = empty_cache(config, len(prompt), params["norm"].dtype)
    token, cache = step(params, config, prompt, cache, 0)
    written = [token]
    for position in range(prompt.shape[1], prompt.shape[1] + count - 1):
        token, cache = step(params, config, token, cache, position)
        written.append(token)
    return jnp.concatenate(written, 1)
