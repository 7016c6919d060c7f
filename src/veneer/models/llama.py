"""Llama in plain JAX: a program that does not import veneer, and runs with dense arrays.

It runs Llama, Mistral, Qwen2, Qwen3 and SmolLM. The parameters are a flat dict with Hugging Face's
names and matrices `[out, in]`. The model has grouped-query attention, rotary positions, RMSNorm,
SwiGLU, and a cache in any format that the caller provides. One program reads a batch of prompts
with different lengths in chunks, and then samples tokens until each text has stopped, as a server
does. With quantized parameters, wrap its functions in `vn.implicit`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

Params = Mapping[str, Any]
Array = Any  # a JAX array, a NumPy array or an implicit array

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class UnsupportedModelError(ValueError):
    """The error for a model that this program does not run."""


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of `config.json` that the model uses. Hashable, so it can be static in `jit`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # of queries
    num_key_value_heads: int  # each is shared by several heads of queries
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, float] | None = None  # Llama 3.1, see `rope_angles`
    sliding_window: int | None = None  # the number of tokens that a token attends to
    max_position_embeddings: int | None = None  # the number of tokens that the model was trained on

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> "LlamaConfig":
        """Return the configuration of a parsed `config.json`.

        **Raises:** `UnsupportedModelError` for another architecture, or for rotary positions,
        activations or sliding windows that the program does not have.
        """
        if entries.get("model_type") not in ARCHITECTURES:
            names = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(
                f"a {entries.get('model_type')!r} model; this program runs {names}"
            )
        if entries.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"activations are {entries['hidden_act']!r}; this program has 'silu'"
            )
        needed = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"
        for name in (*needed, "num_attention_heads"):
            if not isinstance(entries.get(name), int) or entries[name] < 1:
                raise UnsupportedModelError(f"{name} must be a number, not {entries.get(name)!r}")
        heads = entries["num_attention_heads"]
        rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
        return cls(
            **{name: entries[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
            num_hidden_layers=entries["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=entries.get("num_key_value_heads") or heads,
            head_dim=entries.get("head_dim") or entries["hidden_size"] // heads,
            rms_norm_eps=entries.get("rms_norm_eps", 1e-6),
            rope_theta=entries.get("rope_theta") or rope.get("rope_theta", 10_000.0),
            rope_scaling=_scaling(rope),
            sliding_window=_window(entries),
            max_position_embeddings=entries.get("max_position_embeddings"),
        )


def _window(entries: Mapping[str, Any]) -> int | None:
    """Return how many tokens a token attends to, or None if it attends to all before it.

    **Raises:** `UnsupportedModelError` if only some of the layers have a sliding window.
    """
    window, layers = entries.get("sliding_window"), entries["num_hidden_layers"]
    is_qwen = entries["model_type"].startswith("qwen")
    if window is None or (is_qwen and not entries.get("use_sliding_window", False)):
        return None
    without_window = min(entries.get("max_window_layers", 28), layers) if is_qwen else 0
    if entries.get("layer_types"):
        without_window = entries["layer_types"].count("full_attention")
    if 0 < without_window < layers:
        raise UnsupportedModelError(
            f"{without_window} of {layers} layers have no sliding window; this program needs the "
            "same in all layers"
        )
    return None if without_window else window


def _scaling(rope: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(
            f"rotary positions are scaled as {kind!r}; this program has 'llama3'"
        )
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [name for name in names if name not in rope]:
        raise UnsupportedModelError(f"the rotary positions of llama3 need {missing[0]}")
    factor, low, high, before = (float(rope[name]) for name in names)
    return factor, low, high, before


class KeyValueCache(NamedTuple):
    """The keys and values of the tokens read, with an array for each layer.

    An array has the shape `[batch * heads, room, width of a head]`, where `room` is the largest
    number of tokens. A row is one token of a head, so each new token is written as whole rows,
    which can have their own scales. Products read the matrix of a head without a copy.
    """

    keys: tuple[Array, ...]  # [batch * heads, room, width of a head]
    values: tuple[Array, ...]  # the same


def empty_cache(
    config: LlamaConfig, batch: int, room: int, dtype: Any = jnp.float32
) -> KeyValueCache:
    """Return a cache of zeros with room for `room` tokens per text, for `batch` texts."""
    shape = batch * config.num_key_value_heads, room, config.head_dim
    zeros = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
    return KeyValueCache(zeros(), zeros())


# The model.


def logits(params: Params, x: Array) -> Array:
    """Return the logits of the next token, `[..., vocabulary]`.

    `x` is the hidden state that `hidden` returns, `[..., width]`.
    """
    return x @ params.get("lm_head.weight", params["model.embed_tokens.weight"]).T


def hidden(
    params: Params,
    config: LlamaConfig,
    tokens: Array,
    cache: KeyValueCache,
    start: Any = 0,
    first: Any = 0,
) -> tuple[Array, KeyValueCache]:
    """Run the layers on new tokens, which attend to the tokens in the cache and to each other.

    **Arguments:**

    - `tokens`: the new tokens, `[batch, length]`.
    - `cache`: the keys and values of the previous tokens.
    - `start`: the position of the first new token in the cache.
    - `first`: the position in the cache at which each text begins, a number or `[batch]`. Texts
      with different lengths begin at different positions and end at the same one. Positions
      before `first` are masked.

    **Returns:** the hidden state of each new token, `[batch, length, width]`, and the cache with
    the new tokens.
    """
    x = params["model.embed_tokens.weight"][tokens]
    written = []
    # The layers are written out. In a scan, XLA would copy the dense weights of each layer in each
    # step.
    for i, layer_cache in enumerate(zip(cache.keys, cache.values, strict=True)):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        y = norm(layer["input_layernorm.weight"], x, config)
        attended, keys, values = attention(layer, config, y, layer_cache, start, first)
        x = x + attended
        x = x + swiglu(layer, norm(layer["post_attention_layernorm.weight"], x, config))
        written.append((keys, values))
    cache = KeyValueCache(*zip(*written, strict=True))
    return norm(params["model.norm.weight"], x, config), cache


def linear(layer: Params, name: str, x: Array) -> Array:
    """Multiply `x` by the matrix `[out, in]` called `name` of a layer, and add its bias, if any."""
    y = x @ layer[f"{name}.weight"].T
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def attention(
    layer: Params, config: LlamaConfig, x: Array, cache: Sequence[Array], start: Any, first: Any
) -> tuple[Array, Array, Array]:
    """Compute the attention of the new tokens `x`, `[batch, length, width]`, to all tokens so far.

    `start` and `first` are as in `hidden`. Return an array like `x`, and the keys and values of
    the cache of this layer with the new tokens.
    """
    (keys, values), (batch, length, _) = cache, x.shape
    room, width = keys.shape[1:]
    places = start + jnp.arange(length)
    first = jnp.reshape(first, (-1, 1, 1))  # [batch or 1, heads, places]

    def heads(name: str, count: int) -> Array:  # [batch, heads, length, width of a head]
        y = linear(layer, f"self_attn.{name}_proj", x).reshape(batch, length, count, width)
        scale = layer.get(f"self_attn.{name}_norm.weight")  # only Qwen3
        y = y if scale is None else norm(scale, y, config)
        return y.swapaxes(1, 2)

    rotate = functools.partial(apply_rope, angles=rope_angles(config, places - first))
    query = rotate(heads("q", config.num_attention_heads))
    key = rotate(heads("k", config.num_key_value_heads))
    value = heads("v", config.num_key_value_heads)

    key, value = (y.reshape(-1, length, width).astype(keys.dtype) for y in (key, value))
    keys = lax.dynamic_update_slice(keys, key, (0, start, 0))
    values = lax.dynamic_update_slice(values, value, (0, start, 0))

    # The queries that share a head of keys are adjacent, so they are rows of the same product.
    query = query.reshape(len(keys), -1, width)
    scores = jnp.einsum("hqd,hsd->hqs", query, keys).reshape(batch, -1, length, room)
    distance = places[:, None] - jnp.arange(room)
    is_seen = (distance >= 0) & (jnp.arange(room) >= first[..., None])
    if config.sliding_window is not None:
        is_seen &= distance < config.sliding_window
    is_seen |= distance == 0  # a padding token attends to itself, so no row is masked completely
    scores = jnp.where(is_seen, scores * width**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    mixed = weights.reshape(len(values), -1, room) @ values
    mixed = mixed.reshape(batch, -1, length, width).swapaxes(1, 2).reshape(batch, length, -1)
    return linear(layer, "self_attn.o_proj", mixed), keys, values


def rope_angles(config: LlamaConfig, positions: Array) -> Array:
    """Return the rotation angles of the pairs of features that RoPE rotates.

    They are `[..., width of a head / 2]` for `positions` `[...]`. Llama 3.1 scales them by
    `config.rope_scaling = (factor, low, high, context)`. The angle of a pair that needs more than
    `context / low` positions for one turn is divided by `factor`. A pair that needs fewer than
    `context / high` positions is unchanged. Between these limits, the frequency is interpolated.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half) / half)
    if config.rope_scaling is not None:
        factor, low, high, before = config.rope_scaling
        waves = before * frequency / (2 * math.pi)
        share = jnp.clip((waves - low) / (high - low), 0, 1)
        frequency = share * frequency + (1 - share) * frequency / factor
    return positions[..., None] * frequency


def apply_rope(x: Array, angles: Array) -> Array:
    """Apply RoPE (Su et al., 2021): rotate pairs `(x[i], x[i + half])` by their angles."""
    half = x.shape[-1] // 2
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def swiglu(layer: Params, x: Array) -> Array:
    """Apply the feed-forward block of a layer, whose activations are gated (Shazeer, 2020)."""
    gate, up = linear(layer, "mlp.gate_proj", x), linear(layer, "mlp.up_proj", x)
    return linear(layer, "mlp.down_proj", jax.nn.silu(gate) * up)


def norm(scale: Array, x: Array, config: Any) -> Array:
    """Apply RMSNorm (Zhang and Sennrich, 2019) along the last axis of `x`, computed in f32."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + config.rms_norm_eps)
    return scale * normed.astype(x.dtype)


# Sampling.


def most_likely(found: Array) -> Array:
    """Return the most likely token of each text, from the logits `found` `[batch, vocabulary]`.

    It calls `lax.top_k`, which XLA computes faster than argmax on CPU.
    """
    return lax.top_k(found, 1)[1][..., 0].astype(jnp.int32)


def next_token(
    found: Array, keys: Array, temperature: int | float, top_k: Any, top_p: float
) -> Array:
    """Choose the next token of each text, from its logits and its random key.

    At a temperature of 0, it is the most likely token. Otherwise it is sampled from the `top_k`
    most likely tokens (None is all), and among them only from the fewest most likely tokens
    whose probabilities sum to at least `top_p`.

    **Arguments:**

    - `found`: the logits, `[batch, vocabulary]`.
    - `keys`: a random key per text, `[batch]`.
    """
    if temperature == 0:
        return most_likely(found)
    found = found.astype(jnp.float32) / temperature
    if top_k is not None or top_p < 1:
        likely, _ = lax.top_k(found, top_k or found.shape[-1])
        chance = jax.nn.softmax(likely)
        is_kept = jnp.cumsum(chance, -1) - chance < top_p  # by the probability of the tokens before
        is_kept = is_kept.at[..., 0].set(True)
        least = likely.min(-1, keepdims=True, initial=jnp.inf, where=is_kept)
        found = jnp.where(found >= least, found, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, found).astype(jnp.int32)


def read(
    params: Params,
    config: LlamaConfig,
    tokens: Array,
    cache: KeyValueCache,
    first: Array,
    chunk: int,
) -> tuple[Array, KeyValueCache]:
    """Run the layers on prompts, `chunk` tokens at a time.

    `tokens` `[batch, padded]` are padded on the left: each prompt begins at position `first`
    `[batch]`. Chunks that have only padding are skipped. The first chunk may overlap the second.

    **Returns:** the hidden state of the last token of each prompt, `[batch, width]`, and the cache
    with the prompts.
    """
    dtype, size = params["model.norm.weight"].dtype, tokens.shape[1]
    chunks = -((first.min() - size) // chunk)

    def body(i: Array, state: tuple[Array, KeyValueCache]) -> tuple[Array, KeyValueCache]:
        start = jnp.maximum(size - (chunks - i) * chunk, 0)
        part = lax.dynamic_slice_in_dim(tokens, start, chunk, 1)
        x, cache = hidden(params, config, part, state[1], start, first)
        return x[:, -1].astype(dtype), cache

    nothing = jnp.zeros((len(tokens), config.hidden_size), dtype)
    return lax.fori_loop(0, chunks, body, (nothing, cache))


def generate(
    params: Params,
    config: LlamaConfig,
    prompt: Array,
    length: Array | int,
    key: Array,
    cache: KeyValueCache | None = None,
    *,
    count: int,
    temperature: int | float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    show: Callable[[Any], None] | None = None,
    chunk: int = 128,
) -> Array:
    """Continue prompts by `count` tokens, in one compiled program.

    **Arguments:**

    - `prompt`: `[batch, padded]`. Only the first `length` tokens count.
    - `length`: a number, or a length per text, `[batch]`. It is traced, so other lengths need no
      compilation.
    - `key`: the random key for sampling. The first text of a batch samples the same tokens as it
      would alone.
    - `count`: the number of new tokens per text.
    - `temperature`, `top_k`, `top_p`: how to choose each token, as in `next_token`.
    - `cache`: an empty cache with room for `padded + count` tokens, in any format. None makes a
      dense cache.
    - `stop`: tokens that end a text. The first one of them fills the result after the end.
    - `show`: called with each column of tokens, `[batch]`, while the loop runs. A true result ends
      all texts.
    - `chunk`: how many tokens of each prompt are read at once.

    **Returns:** tokens `[batch, count]`.

    **Raises:** `ValueError` for a cache without enough room.
    """
    batch, padded = prompt.shape
    room = padded + count
    cache = cache or empty_cache(config, batch, room, params["model.norm.weight"].dtype)
    if cache.keys[0].shape[1] < room:
        raise ValueError(
            f"the cache has room for {cache.keys[0].shape[1]} tokens, but {room} are needed"
        )
    # Texts are moved so that they end together, and all write at the same position of the cache.
    first = padded - jnp.broadcast_to(jnp.asarray(length), batch)
    ends = jnp.array([*stop], jnp.int32)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(batch))

    def write(step: Any, x: Array, written: Array, done: Array) -> tuple[Array, Array]:
        draws = jax.vmap(lambda k: jax.random.fold_in(k, step))(keys)
        token = next_token(logits(params, x), draws, temperature, top_k, top_p)
        token = jnp.where(done, ends[0] if stop else 0, token)
        is_end = (token[:, None] == ends).any(1)
        if show is not None:
            result = jax.ShapeDtypeStruct((), jnp.bool_)
            is_end |= io_callback(lambda x: np.bool_(show(x)), result, token, ordered=True)
        return written.at[:, step].set(token), done | is_end

    def more(state: Any) -> Array:
        return (state[0] < count) & ~state[1][1].all()

    def body(state: Any) -> Any:
        step, (written, done), cache = state
        last = lax.dynamic_index_in_dim(written, step - 1, 1)
        x, cache = hidden(params, config, last, cache, padded + step - 1, first)
        return step + 1, write(step, x[:, -1], written, done), cache

    tokens = jnp.take_along_axis(prompt, jnp.maximum(jnp.arange(padded) - first[:, None], 0), 1)
    x, cache = read(params, config, tokens, cache, first, min(chunk, padded))
    filled = jnp.full((batch, count), ends[0] if stop else 0)
    written = write(0, x, filled, jnp.zeros(batch, bool))
    return lax.while_loop(more, body, (jnp.int32(1), written, cache))[1][0]


def compile_generate(generate: Callable = generate) -> Callable:
    """Return `generate` under `jax.jit`. It compiles once per padded length, `count` and options.

    To run quantized parameters, pass `vn.implicit(generate)`.
    """
    static = "config count temperature top_k top_p stop show chunk".split()
    return jax.jit(generate, static_argnames=static)


def losses(
    params: Params, config: LlamaConfig, tokens: Array, cache: KeyValueCache | None = None
) -> Array:
    """Return the loss `-log p` of each token after the first, `[batch, length - 1]`, in f32.

    `tokens` are `[batch, length]`. `cache` is an empty cache, or None for a dense one.
    """
    batch, length = tokens.shape
    cache = cache or empty_cache(config, batch, length, params["model.norm.weight"].dtype)
    x, _ = hidden(params, config, tokens, cache)
    found = jax.nn.log_softmax(logits(params, x[:, :-1]).astype(jnp.float32))
    return -jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]


def init(key: Array, config: LlamaConfig) -> dict[str, Array]:
    """Return random f32 parameters, for tests and benchmarks.

    The matrices are scaled so that products have values about as large as their operand.
    """
    c, names = config, ("model.embed_tokens.weight", "lm_head.weight")
    grouped, heads = c.num_key_value_heads * c.head_dim, c.num_attention_heads * c.head_dim
    matrices = {"self_attn.q": (heads, c.hidden_size), "self_attn.o": (c.hidden_size, heads)}
    matrices |= dict.fromkeys(("self_attn.k", "self_attn.v"), (grouped, c.hidden_size))
    matrices |= dict.fromkeys(("mlp.gate", "mlp.up"), (c.intermediate_size, c.hidden_size))
    matrices |= {"mlp.down": (c.hidden_size, c.intermediate_size)}
    shapes = dict.fromkeys(names, (c.vocab_size, c.hidden_size))
    norms = ["model.norm.weight"]
    for i in range(c.num_hidden_layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{name}_proj.weight": shape for name, shape in matrices.items()}
        norms += [f"{prefix}{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")]
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(k, shape) * shape[1] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {name: jnp.ones(c.hidden_size) for name in norms}
