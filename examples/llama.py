"""Llama in plain JAX: it reads a prompt, and writes on. It does not import veneer.

Any Hugging Face folder of a Llama, Mistral, Qwen2 or Qwen3 runs: parameters are a flat dict by the
names of the checkpoint, of matrices `[out, in]`. Grouped-query attention, rotary positions,
RMSNorm, SwiGLU, a cache of keys and values; and one compiled loop that reads and writes.

    python examples/llama.py MODEL_DIR "What is gravity?"
"""

import argparse
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = Mapping[str, Any]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Config:
    """What `config.json` says, by its names. Hashable, so that `jit` can take it as static."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # of queries
    num_key_value_heads: int  # each of which serves several of queries
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: tuple[float, float, float, float] | None = None  # of Llama 3.1, see `angles`
    sliding_window: int | None = None  # how many tokens a token sees

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Config":
        """Reads a `config.json`, parsed.

        **Raises:** `ValueError` for another architecture, and for rotary positions of other kinds.
        """
        if said.get("model_type") not in ARCHITECTURES:
            names = ", ".join(ARCHITECTURES)
            raise ValueError(f"a {said.get('model_type')!r} model; this program runs {names}")
        if said.get("hidden_act", "silu") != "silu":
            raise ValueError(f"activations are {said['hidden_act']!r}; this program has 'silu'")
        heads = said["num_attention_heads"]
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        return cls(
            **{name: said[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
            num_hidden_layers=said["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=said.get("num_key_value_heads") or heads,
            head_dim=said.get("head_dim") or said["hidden_size"] // heads,
            rms_norm_eps=said.get("rms_norm_eps", 1e-6),
            rope_theta=said.get("rope_theta") or rope.get("rope_theta", 10_000.0),
            rope_scaling=_scaling(rope),
            sliding_window=_window(said),
        )


def _window(said: Mapping[str, Any]) -> int | None:
    """How many tokens a token sees, in all layers; None where it sees all before it."""
    window, layers = said.get("sliding_window"), said["num_hidden_layers"]
    is_qwen = said["model_type"].startswith("qwen")
    if window is None or (is_qwen and not said.get("use_sliding_window", False)):
        return None
    see_all = min(said.get("max_window_layers", 28), layers) if is_qwen else 0
    if said.get("layer_types"):
        see_all = said["layer_types"].count("full_attention")
    if 0 < see_all < layers:
        raise ValueError(
            f"{see_all} of {layers} layers have no sliding window; this program has one kind"
        )
    return None if see_all else window


def _scaling(rope: Mapping[str, Any]) -> tuple[float, float, float, float] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rotary positions are scaled as {kind!r}; this program has 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, before = (float(rope[name]) for name in names)
    return factor, low, high, before


class Cache(NamedTuple):
    """What the layers keep of the tokens read, an array for each layer.

    Its first axis is all heads of a batch; and a product takes keys by their features and values
    by their tokens. So each lies as it is multiplied, and XLA writes in it without making a copy.
    """

    keys: tuple[Array, ...]  # [batch * heads, width of a head, room]
    values: tuple[Array, ...]  # [batch * heads, room, width of a head]


def empty_cache(config: Config, batch: int, room: int, dtype: Any = jnp.float32) -> Cache:
    """Room for so many tokens of each of a batch of texts."""
    heads, width = batch * config.num_key_value_heads, config.head_dim
    zeros = lambda *shape: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
    return Cache(zeros(heads, width, room), zeros(heads, room, width))


# The model.


def logits(params: Params, x: Array) -> Array:
    """What speaks for each token of the vocabulary to come next, of what `hidden` returns."""
    tied = params["model.embed_tokens.weight"]
    return x @ params.get("lm_head.weight", tied).T


def hidden(
    params: Params, config: Config, tokens: Array, cache: Cache, start: Array | int = 0
) -> tuple[Array, Cache]:
    """What the model makes of tokens, `[batch, length, width]`, and the cache with these read.

    **Arguments:**

    - `tokens`: `[batch, length]`, of which the first is number `start` of its text.
    - `cache`: holds those before.
    """
    x = params["model.embed_tokens.weight"][tokens]
    keys, values = [], []
    # The layers are written out: in a scan over stacked ones, XLA cuts dense weights of each layer
    # from the stack in each step.
    for i, kept in enumerate(zip(cache.keys, cache.values, strict=True)):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        y = norm(layer["input_layernorm.weight"], x, config)
        attended, key, value = attention(layer, config, y, *kept, start)
        x = x + attended
        x = x + swiglu(layer, norm(layer["post_attention_layernorm.weight"], x, config))
        keys.append(key)
        values.append(value)
    return norm(params["model.norm.weight"], x, config), Cache(tuple(keys), tuple(values))


def linear(layer: Params, name: str, x: Array) -> Array:
    """A product with a matrix `[out, in]`, and with the bias that some models have."""
    y = x @ layer[f"{name}.weight"].T
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def attention(
    layer: Params, config: Config, x: Array, keys: Array, values: Array, start: Array | int
) -> tuple[Array, Array, Array]:
    """Attention of `x`, `[batch, length, width]`, to itself and to all that came before it."""
    batch, length, _ = x.shape
    room, width = keys.shape[2], config.head_dim
    positions = start + jnp.arange(length)

    def heads(name: str, count: int) -> Array:  # [batch, heads, length, width of a head]
        y = linear(layer, f"self_attn.{name}_proj", x).reshape(batch, length, count, width)
        scale = layer.get(f"self_attn.{name}_norm.weight")  # which Qwen3 has
        y = y if scale is None else norm(scale, y, config)
        return y.swapaxes(1, 2)

    turn = functools.partial(rotated, angles=angles(config, positions))
    query = turn(heads("q", config.num_attention_heads))
    key = turn(heads("k", config.num_key_value_heads))
    value = heads("v", config.num_key_value_heads)
    key, value = (y.reshape(-1, length, width) for y in (key, value))
    keys = lax.dynamic_update_slice(keys, key.swapaxes(1, 2).astype(keys.dtype), (0, 0, start))
    values = lax.dynamic_update_slice(values, value.astype(values.dtype), (0, start, 0))

    # The queries that share a head of keys are neighbours: they are rows of the same product.
    query = query.reshape(len(keys), -1, width)
    scores = (query @ keys).reshape(-1, length, room) * width**-0.5
    distance = positions[:, None] - jnp.arange(room)
    is_seen = distance >= 0
    if config.sliding_window is not None:
        is_seen &= distance < config.sliding_window
    scores = jnp.where(is_seen, scores, -jnp.inf)  # of no row is all masked: a token sees itself
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
    mixed = weights.reshape(len(values), -1, room) @ values
    mixed = mixed.reshape(batch, -1, length, width).swapaxes(1, 2).reshape(batch, length, -1)
    return linear(layer, "self_attn.o_proj", mixed), keys, values


def angles(config: Config, positions: Array) -> Array:
    """By how much pairs of features are turned, `[length, width of a head / 2]`.

    Llama 3.1 turns slow ones, whose wave is longer than what it was trained with at first, slower
    still by a factor, and those between `low` and `high` waves of it by something in between.
    """
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half) / half)
    if config.rope_scaling is not None:
        factor, low, high, before = config.rope_scaling
        waves = before * frequency / (2 * math.pi)
        share = jnp.clip((waves - low) / (high - low), 0, 1)
        frequency = share * frequency + (1 - share) * frequency / factor
    return positions[:, None] * frequency


def rotated(x: Array, angles: Array) -> Array:
    """RoPE (Su et al., 2021): pairs `(x[i], x[i + half])` turned by their position's angles."""
    half = x.shape[-1] // 2
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def swiglu(layer: Params, x: Array) -> Array:
    """A wide layer whose activations are gated (Shazeer, 2020)."""
    gate, up = linear(layer, "mlp.gate_proj", x), linear(layer, "mlp.up_proj", x)
    return linear(layer, "mlp.down_proj", jax.nn.silu(gate) * up)


def norm(scale: Array, x: Array, config: Config) -> Array:
    """RMSNorm (Zhang and Sennrich, 2019), in f32 whatever the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + config.rms_norm_eps)
    return scale * normed.astype(x.dtype)


# Writing.


def next_token(found: Array, key: Array, temperature: float) -> Array:
    """The most likely token at a temperature of 0, or else one that is drawn; of `[batch, ...]`."""
    if temperature == 0:
        return found.argmax(-1).astype(jnp.int32)
    return jax.random.categorical(key, found.astype(jnp.float32) / temperature).astype(jnp.int32)


def generate(
    params: Params,
    config: Config,
    prompt: Array,
    length: Array | int,
    key: Array,
    *,
    count: int,
    temperature: float = 0.0,
    stop: Sequence[int] = (),
    show: Callable[[Any], None] | None = None,
    empty: Callable[..., Cache] = empty_cache,
) -> Array:
    """Continues prompts: `[batch, count]` tokens, in one loop that is compiled.

    **Arguments:**

    - `prompt`: `[batch, padded]`, of which the first `length` tokens count; so a prompt of another
      length needs no other program.
    - `key`: of what is drawn, at temperatures above 0.
    - `stop`: tokens that end a text, and are repeated after it.
    - `show`: is called with each column of tokens, `[batch]`, while the loop goes on.
    - `empty`: makes the cache, of what `empty_cache` takes.
    """
    batch, padded = prompt.shape
    dtype = params["model.norm.weight"].dtype
    cache = empty(config, batch, padded + count, dtype)
    ends = jnp.array([*stop], jnp.int32)

    def write(step: Any, x: Array, state: Any) -> Any:
        written, done, key = state
        key, draw = jax.random.split(key)
        token = next_token(logits(params, x), draw, temperature)
        token = jnp.where(done, ends[0] if stop else 0, token)
        if show is not None:
            jax.debug.callback(show, token, ordered=True)
        done |= (token[:, None] == ends).any(1)
        return written.at[:, step].set(token), done, key

    def more(state: Any) -> Array:
        step, (_, done, _), _ = state
        return (step < count) & ~done.all()

    def body(state: Any) -> Any:
        step, (written, done, key), cache = state
        last = lax.dynamic_index_in_dim(written, step - 1, 1)
        x, cache = hidden(params, config, last, cache, length + step - 1)
        return step + 1, write(step, x[:, -1], (written, done, key)), cache

    x, cache = hidden(params, config, prompt, cache)
    x = lax.dynamic_index_in_dim(x, length - 1, 1, keepdims=False)
    state = jnp.full((batch, count), ends[0] if stop else 0), jnp.zeros(batch, bool), key
    first = write(0, x, state)
    return lax.while_loop(more, body, (jnp.int32(1), first, cache))[1][0]


def compiled(generate: Callable = generate) -> Callable:
    """`generate`, compiled: once for each size of prompt and of what is written."""
    static = ("config", "count", "temperature", "stop", "show", "empty")
    return jax.jit(generate, static_argnames=static)


def losses(
    params: Params, config: Config, tokens: Array, empty: Callable[..., Cache] = empty_cache
) -> Array:
    """How unlikely each token but the first was: `-log p`, `[batch, length - 1]`, in f32."""
    cache = empty(config, *tokens.shape, params["model.norm.weight"].dtype)
    x, _ = hidden(params, config, tokens, cache)
    found = jax.nn.log_softmax(logits(params, x[:, :-1]).astype(jnp.float32))
    return -jnp.take_along_axis(found, tokens[:, 1:, None], -1)[..., 0]


def init(key: Array, config: Config) -> dict[str, Array]:
    """Random parameters in f32; products keep the size of what they take."""
    c = config
    grouped, heads = c.num_key_value_heads * c.head_dim, c.num_attention_heads * c.head_dim
    matrices = {
        "self_attn.q_proj": (heads, c.hidden_size),
        "self_attn.k_proj": (grouped, c.hidden_size),
        "self_attn.v_proj": (grouped, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, heads),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size),
    }
    shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    shapes |= {"lm_head.weight": (c.vocab_size, c.hidden_size)}
    norms = ["model.norm.weight"]
    for i in range(c.num_hidden_layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
        norms += [f"{prefix}{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")]
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(k, shape) * shape[1] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {name: jnp.ones(c.hidden_size) for name in norms}


# By itself.


def main(folder: Path, question: str, count: int) -> None:
    """Answers a question with the model of a Hugging Face folder, in the dtype that it has."""
    from safetensors.flax import load_file  # which makes JAX arrays
    from tokenizers import Tokenizer

    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    params: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        params |= load_file(file)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(question).ids
    padded = -(-len(tokens) // 64) * 64
    prompt = jnp.array([tokens + [0] * (padded - len(tokens))])
    ends = said.get("eos_token_id")
    stop = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    show = lambda token: print(tokenizer.decode([int(token[0])]), end="", flush=True)
    key = jax.random.key(0)
    options = {"count": count, "stop": stop, "show": show}
    compiled()(params, Config.of(said), prompt, len(tokens), key, **options).block_until_ready()
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Continues a text with a Llama, by greedy choice.")
    parser.add_argument("folder", type=Path, help="config.json, tokenizer.json, *.safetensors")
    parser.add_argument("text")
    parser.add_argument("--count", type=int, default=64, help="how many tokens to write")
    options = parser.parse_args()
    main(options.folder, options.text, options.count)
