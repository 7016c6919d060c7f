"""A decoder in plain JAX with the architecture of Llama.

It has grouped-query attention with rotary positions, SwiGLU, RMSNorm, and a cache of keys and
values, so that a step reads only new tokens. The parameters are a tree of kernels `[in, out]`. This
file is not a script: `decoder_speed.py` measures the decoder in several formats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Any]
Step = Callable[..., Any]  # the function `step` below, or its compiled version


@dataclass(frozen=True)
class Config:
    """The sizes: TinyLlama with fewer layers. Hashable, so that `jit` can take it as static."""

    vocabulary: int = 32_000
    width: int = 2048
    num_layers: int = 8
    num_heads: int = 32  # of queries
    num_groups: int = 8  # heads of keys and values, each shared by several heads of queries
    wide: int = 5632
    longest: int = 512  # the most tokens in the cache
    rotary_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """The features of a head."""
        return self.width // self.num_heads


class Cache(NamedTuple):
    """The keys and values of the tokens read, with an array for each layer.

    The first axis is all heads of a batch. A product contracts the features of the keys and the
    tokens of the values. With these layouts XLA multiplies the cache and writes to it without a
    copy.
    """

    keys: tuple[Array, ...]  # [batch * groups, width of a head, longest]
    values: tuple[Array, ...]  # [batch * groups, longest, width of a head]


def init(key: Array, config: Config) -> Params:
    """Return random f32 parameters, scaled so that products keep the size of their operand."""
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
        matrices: Params = {name: kernel(shape) for name, shape in kernels.items()}
        return matrices | {"attention_norm": jnp.ones(c.width), "wide_norm": jnp.ones(c.width)}

    return {
        "embedding": jax.random.normal(next(keys), (c.vocabulary, c.width)),
        "layers": [layer() for _ in range(c.num_layers)],
        "norm": jnp.ones(c.width),
        "head": kernel((c.width, c.vocabulary)),
    }


def empty_cache(config: Config, batch: int, dtype: Any = jnp.float32) -> Cache:
    """Return a cache with room for `config.longest` tokens per text."""
    heads, size = batch * config.num_groups, (config.longest, config.head_width)
    room = lambda *shape: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
    return Cache(room(heads, *reversed(size)), room(heads, *size))


def logits(
    params: Params, config: Config, tokens: Array, cache: Cache, start: Array | int = 0
) -> tuple[Array, Cache]:
    """Return the logits of the next token, and the cache with the new tokens.

    **Arguments:**

    - `tokens`: `[batch, length]`.
    - `cache`: holds the tokens before.
    - `start`: the position of the first new token.

    **Returns:** logits `[batch, length, vocabulary]`, and the cache.
    """
    x = params["embedding"][tokens]
    keys, values = [], []
    # The layers are written out. In a scan, XLA would copy the dense weights of each layer.
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
    """Return the attention of `x`, `[batch, length, width]`, to itself and to the cache."""
    batch, length, _ = x.shape
    positions = start + jnp.arange(length)

    def heads(name: str, count: int) -> Array:  # [batch * heads, length, width of a head]
        y = (x @ p[name]).reshape(batch, length, count, -1).swapaxes(1, 2)
        return y.reshape(batch * count, length, -1)

    rotate = partial(apply_rope, positions=positions, base=config.rotary_base)
    query, key = rotate(heads("query", config.num_heads)), rotate(heads("key", config.num_groups))
    value = heads("value", config.num_groups)
    keys = jax.lax.dynamic_update_slice(keys, key.swapaxes(1, 2), (0, 0, start))
    values = jax.lax.dynamic_update_slice(values, value, (0, start, 0))

    # The queries of a group are adjacent, so they are rows of the same product.
    query = query.reshape(len(keys), -1, config.head_width)
    scores = (query @ keys).reshape(-1, length, config.longest) * config.head_width**-0.5
    is_before = jnp.arange(config.longest) <= positions[:, None]
    scores = jnp.where(is_before, scores, -jnp.inf)  # a token sees itself
    mixed = jax.nn.softmax(scores).reshape(len(values), -1, config.longest) @ values
    mixed = mixed.reshape(batch, config.num_heads, length, -1).swapaxes(1, 2)
    return mixed.reshape(x.shape) @ p["mixed"], keys, values


def apply_rope(x: Array, positions: Array, base: float) -> Array:
    """Apply RoPE (Su et al., 2021): rotate pairs `(x[i], x[i + half])` by their position."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def swiglu(p: Params, x: Array) -> Array:
    """Return a wide layer with gated activations (Shazeer, 2020)."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def norm(scale: Array, x: Array) -> Array:
    """Return RMSNorm (Zhang and Sennrich, 2019), computed in f32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return scale * normed.astype(x.dtype)


def step(
    params: Params, config: Config, tokens: Array, cache: Cache, start: Array | int
) -> tuple[Array, Cache]:
    """Read tokens `[batch, length]`. Return the next tokens `[batch, 1]`, and the cache."""
    found, cache = logits(params, config, tokens, cache, start)
    return found[:, -1:].argmax(-1).astype(tokens.dtype), cache


def compile_step(step: Step = step) -> Step:
    """Compile the step. It writes in the cache that it is given, which cannot be used again."""
    return jax.jit(step, static_argnums=1, donate_argnums=3)


def decode(step: Step, params: Params, config: Config, prompt: Array, *, count: int) -> Array:
    """Continue prompts `[batch, length]` greedily by `count` tokens, with a compiled step.

    The prompt is read in one step, and each new token in another one.
    """
    cache = empty_cache(config, len(prompt), params["norm"].dtype)
    token, cache = step(params, config, prompt, cache, 0)
    written = [token]
    for position in range(prompt.shape[1], prompt.shape[1] + count - 1):
        token, cache = step(params, config, token, cache, position)
        written.append(token)
    return jnp.concatenate(written, 1)
