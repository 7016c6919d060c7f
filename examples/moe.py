"""A decoder with experts in plain JAX, shaped as gpt-oss: each token uses 4 of many experts.

The parameters are a flat dict with the names of gpt-oss's checkpoint, and random values. Matrices
are `[out, in]`, and experts are stacks `[experts, in, out]`, which `jax.lax.ragged_dot` multiplies
with groups of tokens. Attention sees a window in every second layer, and has a sink. Three
functions are those of `veneer.models.llama`, which is plain JAX too. If the experts are quantized,
a step reads only the packed experts in use. In f32 that needs the loop `row_by_row`.

    python examples/moe.py              # 32 experts of half gpt-oss's width: 2 GB in f32; a minute
    python examples/moe.py --quick      # small sizes, to see that it runs
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from veneer.models.llama import apply_rope, linear, norm

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """The fields of gpt-oss's `config.json`, with half of its sizes."""

    vocab_size: int = 8192
    hidden_size: int = 1440
    intermediate_size: int = 1440
    num_hidden_layers: int = 2
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 64
    num_local_experts: int = 32
    num_experts_per_tok: int = 4
    sliding_window: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    swiglu_limit: float = 7.0


SMALL = Config(512, 256, 256, 2, 8, 2, 32, num_local_experts=8, num_experts_per_tok=2)


class Cache(NamedTuple):
    """Keys and values of a layer, `[batch, heads, room, width of a head]`."""

    keys: Array
    values: Array


def empty_cache(config: Config, batch: int, room: int) -> list[Cache]:
    """Return a cache with room for `room` tokens per text, for each layer."""
    shape = batch, config.num_key_value_heads, room, config.head_dim
    return [Cache(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_hidden_layers)]


# The model.


def logits(
    params: Params,
    config: Config,
    tokens: Array,
    cache: list[Cache],
    start: Array | int = 0,
    product: Callable[..., Array] = lax.ragged_dot,
) -> tuple[Array, list[Cache]]:
    """Return the logits of the next token, `[batch, vocabulary]`, and the cache.

    **Arguments:**

    - `tokens`: `[batch, length]`.
    - `cache`: holds the tokens before. The returned cache also holds the new tokens.
    - `start`: the position of the first new token.
    - `product`: as for `experts`.
    """
    x, kept = params["model.embed_tokens.weight"][tokens], []
    for i, of_layer in enumerate(cache):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        window = config.sliding_window if i % 2 == 0 else None
        y = norm(layer["input_layernorm.weight"], x, config)
        attended, of_layer = attention(layer, config, y, of_layer, start, window)
        x = x + attended
        y = norm(layer["post_attention_layernorm.weight"], x, config)
        x = x + experts(layer, config, y, product)
        kept.append(of_layer)
    x = norm(params["model.norm.weight"], x[:, -1], config)
    return x @ params["lm_head.weight"].T, kept


def attention(
    layer: Params, config: Config, x: Array, cache: Cache, start: Array | int, window: int | None
) -> tuple[Array, Cache]:
    """Return the attention of `x`, `[batch, length, width]`, to itself and to the cache."""
    batch, length, _ = x.shape
    positions = start + jnp.arange(length)
    half = config.head_dim // 2
    angles = positions[:, None] * config.rope_theta ** (-jnp.arange(half) / half)

    def heads(name: str) -> Array:  # [batch, heads, length, width of a head]
        y = linear(layer, f"self_attn.{name}_proj", x)
        return y.reshape(batch, length, -1, config.head_dim).swapaxes(1, 2)

    query, key, value = apply_rope(heads("q"), angles), apply_rope(heads("k"), angles), heads("v")
    write = lambda kept, new: lax.dynamic_update_slice(kept, new, (0, 0, start, 0))
    cache = Cache(write(cache.keys, key), write(cache.values, value))
    query = query.reshape(*key.shape[:2], -1, length, config.head_dim)
    scores = jnp.einsum("bgrlh,bgmh->bgrlm", query, cache.keys) * config.head_dim**-0.5
    distance = positions[:, None] - jnp.arange(cache.keys.shape[2])
    is_seen = (distance >= 0) & (distance < (window or math.inf))
    # A sink takes part of the attention, and contributes nothing.
    sinks = layer["self_attn.sinks"].reshape(1, *query.shape[1:3], 1, 1)
    scores = jnp.where(is_seen, scores, -jnp.inf)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores)[..., :-1]
    mixed = jnp.einsum("bgrlm,bgmh->blgrh", weights, cache.values)
    return linear(layer, "self_attn.o_proj", mixed.reshape(batch, length, -1)), cache


def experts(
    layer: Params, config: Config, x: Array, product: Callable[..., Array] = lax.ragged_dot
) -> Array:
    """Apply to each token of `x`, `[..., width]`, the experts that a router selects for it.

    Tokens are sorted by expert. `product(rows, stack, sizes)` multiplies each group of rows by a
    matrix of the stack.
    """
    rows, count = x.reshape(-1, x.shape[-1]), config.num_experts_per_tok
    best, chosen = lax.top_k(linear(layer, "mlp.router", rows), count)
    order = jnp.argsort(chosen.ravel())
    token, expert = order // count, chosen.ravel()[order]
    sizes = jnp.bincount(chosen.ravel(), length=config.num_local_experts)

    def of_experts(rows: Array, name: str) -> Array:
        y = product(rows, layer[f"mlp.experts.{name}"], sizes)
        return y + layer[f"mlp.experts.{name}_bias"][expert]

    wide = of_experts(rows[token], "gate_up_proj")
    gate = jnp.minimum(wide[:, ::2], config.swiglu_limit)
    up = jnp.clip(wide[:, 1::2], -config.swiglu_limit, config.swiglu_limit)
    out = of_experts((up + 1) * gate * jax.nn.sigmoid(1.702 * gate), "down_proj")
    share = jax.nn.softmax(best).ravel()[order]
    return jnp.zeros_like(rows).at[token].add(share[:, None] * out).reshape(x.shape)


def row_by_row(rows: Array, stack: Array, sizes: Array) -> Array:
    """Compute `lax.ragged_dot` by reading the matrix of each row, which suits few rows.

    XLA's own algorithm for CPUs multiplies each row by all matrices.
    """
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right")
    return lax.map(lambda pair: pair[0] @ stack[pair[1]], (rows, expert))


def init(key: Array, config: Config) -> dict[str, Array]:
    """Return random f32 parameters, scaled so that products keep the size of their operand."""
    c = config
    heads, grouped = (n * c.head_dim for n in (c.num_attention_heads, c.num_key_value_heads))
    matrices = {
        "self_attn.q_proj": (heads, c.hidden_size),
        "self_attn.k_proj": (grouped, c.hidden_size),
        "self_attn.v_proj": (grouped, c.hidden_size),
        "self_attn.o_proj": (c.hidden_size, heads),
        "mlp.router": (c.num_local_experts, c.hidden_size),
    }
    stacks = {
        "mlp.experts.gate_up_proj": (c.hidden_size, 2 * c.intermediate_size),
        "mlp.experts.down_proj": (c.intermediate_size, c.hidden_size),
    }
    made: dict[str, Array] = {"model.norm.weight": jnp.ones(c.hidden_size)}
    keys = iter(jax.random.split(key, 2 + c.num_hidden_layers * (len(matrices) + len(stacks))))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    for name in ("model.embed_tokens", "lm_head"):
        made[f"{name}.weight"] = normal(c.vocab_size, c.hidden_size) * c.hidden_size**-0.5
    for i in range(c.num_hidden_layers):
        prefix = f"model.layers.{i}."
        for name, (out, into) in matrices.items():
            made[f"{prefix}{name}.weight"] = normal(out, into) * into**-0.5
            made[f"{prefix}{name}.bias"] = jnp.zeros(out)
        for name, (into, out) in stacks.items():
            made[prefix + name] = normal(c.num_local_experts, into, out) * into**-0.5
            made[f"{prefix}{name}_bias"] = jnp.zeros((c.num_local_experts, out))
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}{name}.weight"] = jnp.ones(c.hidden_size)
        made[f"{prefix}self_attn.sinks"] = jnp.zeros(c.num_attention_heads)
    return made


# The program.


def quantize(params: Params, format: str) -> Params:
    """Quantize the experts in tiles of 32, and the other matrices except routers to int8."""
    import veneer as vn

    rules = [
        vn.quant.Rule(r".*experts\.\w+_proj", format, tile_size=32),
        vn.quant.Rule(r".*router.*|.*norm.*|.*bias", None),
        vn.quant.Rule(r".*weight", "int8", tile_axis=-1),
    ]
    return vn.quant.quantize_tree(params, rules)


def main() -> None:
    """Decode tokens with experts in f32, int4 and mxfp4, and print the speeds."""
    import veneer as vn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--count", type=int, default=32, help="how many tokens to write")
    arguments = parser.parse_args()
    config = SMALL if arguments.quick else Config()
    params = init(jax.random.key(0), config)
    step = jax.jit(vn.implicit(logits), static_argnums=(1, 5), donate_argnums=3)
    print("| experts | bytes | tokens per second |")
    print("|---|---:|---:|")
    for format in ("f32", "int4", "mxfp4"):
        is_dense = format == "f32"
        stored = params if is_dense else quantize(params, format)
        product = row_by_row if is_dense else lax.ragged_dot  # the faster product in f32
        cache, token = empty_cache(config, 1, arguments.count + 1), jnp.zeros((1, 1), jnp.int32)
        for i in range(arguments.count + 1):
            found, cache = step(stored, config, token, cache, i, product)
            token = found.argmax(-1, keepdims=True)
            if i == 0:  # compiles
                token.block_until_ready()
                start = time.perf_counter()
        token.block_until_ready()
        rate = arguments.count / (time.perf_counter() - start)
        size = sum(x.nbytes for x in jax.tree.leaves(stored))
        print(f"| {format} | {size:,} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
