"""Time the attention of one new token to a quantized cache, and to one in f32, on a CPU.

    python benchmarks/cache.py            # the tables of docs/cache.md, in ten minutes
    python benchmarks/cache.py --quick    # a short context, to see that it runs

There are 8 layers of 8 heads with 64 features each. 1 or 4 queries share a head. Each layer writes
a key and a value in place, and attends to 4,096 tokens. In f32, the caches take 134 MB.

Each row is one layout of the keys. `by features` is `[heads, width, tokens]`. `by tokens` is
`[heads, tokens, width]`, as in `veneer.models.llama`, with one scale per token. `by channel` has
one scale per channel and block of 32 tokens. `in tiles` is the layout with the smallest loss
(`perplexity.py --caches`). `within tokens` is `[batch, tokens, heads, width]`, as in
`jax.nn.dot_product_attention`.

A cell is the median time, and how many times as fast it is as f32.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from measure import Side, markdown_table, medians, parser

import veneer as vn

LAYERS, HEADS, WIDTH = 8, 8, 64
FORMATS = ("float32", "int8", "fp8", "int4")
TARGETS = {"int8": 1.5, "int4": 1.8}
CONTEXT = 4096  # the targets are for this length


def by_features(keys: Any, values: Any, new: Any, at: Any) -> Any:
    """Run a layer whose keys are `[heads, width, tokens]`."""
    query, key, value = new
    keys = lax.dynamic_update_slice(keys, key.swapaxes(1, 2), (0, 0, at))
    values = lax.dynamic_update_slice(values, value, (0, at, 0))
    return keys, values, _mixed(query @ keys, values, at)


def by_tokens(keys: Any, values: Any, new: Any, at: Any) -> Any:
    """Run a layer whose keys are `[heads, tokens, width]`."""
    query, key, value = new
    keys = lax.dynamic_update_slice(keys, key, (0, at, 0))
    values = lax.dynamic_update_slice(values, value, (0, at, 0))
    return keys, values, _mixed(jnp.einsum("hqd,hsd->hqs", query, keys), values, at)


def by_channel(keys: Any, values: Any, new: Any, at: Any) -> Any:
    """Run `by_tokens`. The keys have one scale per channel and block of tokens."""
    return by_tokens(keys, values, new, at)


def in_tiles(keys: Any, values: Any, new: Any, at: Any) -> Any:
    """Run `by_tokens`. The keys and values have one scale per tile."""
    return by_tokens(keys, values, new, at)


def within_tokens(keys: Any, values: Any, new: Any, at: Any) -> Any:
    """Run a layer whose keys and values are `[batch, tokens, heads, width]`."""
    query, key, value = (x.swapaxes(0, 1)[None] for x in new)
    query = query.swapaxes(1, 2).reshape(1, 1, -1, WIDTH)  # the queries of a head are adjacent
    keys = lax.dynamic_update_slice(keys, key, (0, at, 0, 0))
    values = lax.dynamic_update_slice(values, value, (0, at, 0, 0))
    is_seen = jnp.arange(keys.shape[1]) <= at
    mixed = jax.nn.dot_product_attention(query, keys, values, mask=is_seen[None, None, None])
    return keys, values, mixed.reshape(HEADS, -1, WIDTH)


def _mixed(scores: Any, values: Any, at: Any) -> Any:
    is_seen = jnp.arange(scores.shape[-1]) <= at
    return jax.nn.softmax(jnp.where(is_seen, scores * WIDTH**-0.5, -jnp.inf)) @ values


#: The shapes of keys and values for a number of tokens.
SHAPES: dict[Callable[..., Any], Callable[[int], tuple[Any, Any]]] = {
    by_features: lambda room: ((HEADS, WIDTH, room), (HEADS, room, WIDTH)),
    by_tokens: lambda room: ((HEADS, room, WIDTH), (HEADS, room, WIDTH)),
    by_channel: lambda room: ((HEADS, room, WIDTH), (HEADS, room, WIDTH)),
    in_tiles: lambda room: ((HEADS, room, WIDTH), (HEADS, room, WIDTH)),
    within_tokens: lambda room: ((1, room, HEADS, WIDTH), (1, room, HEADS, WIDTH)),
}


def step(layer: Callable[..., Any], caches: Any, new: Any, at: Any) -> Any:
    """Run all layers. Each one takes the output of the one before as its queries."""
    query, *rest = new
    written = []
    for cache in caches:
        *cache, query = layer(*cache, (query, *rest), at)
        written.append(tuple(cache))
    return written, query


def side(name: str, layer: Callable[..., Any], qtype: str, room: int, queries: int) -> Side:
    """Return the step with caches of a format. The caches are kept from call to call."""

    def zeros(shape: tuple[int, ...], is_key: bool) -> Any:
        if qtype == "float32":
            return jnp.zeros(shape)
        axes = tuple(axis for axis, size in enumerate(shape) if size != WIDTH)
        blocks: Any = {"channelwise_axes": (0, 2), "tiled_axes": {1: 32}, "block_axis": 1}
        if layer is by_channel and is_key:
            return vn.quant.zeros(shape, qtype, **blocks)
        if layer is not in_tiles:
            return vn.quant.zeros(shape, qtype, channelwise_axes=axes)
        f16: Any = {"scale_dtype": "float16"}
        if qtype == "int4" and is_key:
            return vn.quant.zeros(shape, "uint4", calibration_method="minmax", **blocks, **f16)
        stored, tile = ("nf4", 16) if qtype == "int4" else (qtype, 32)
        return vn.quant.zeros(shape, stored, channelwise_axes=axes, tiled_axes={2: tile}, **f16)

    @jax.jit
    @vn.implicit
    def filled(cache: Any, key: Any) -> Any:
        numbers = jax.random.normal(key, cache.shape)
        return lax.dynamic_update_slice(cache, numbers, (0,) * cache.ndim)

    shapes = SHAPES[layer](room)
    caches = [
        tuple(filled(zeros(shape, i == 0), jax.random.key(i)) for i, shape in enumerate(shapes))
        for _ in range(LAYERS)
    ]
    rows = (queries, 1, 1)
    new = tuple(jax.random.normal(jax.random.key(n), (HEADS, n, WIDTH)) for n in rows)
    run = jax.jit(vn.implicit(partial(step, layer)), donate_argnums=0)
    state = [caches]

    def once() -> Any:
        state[0], out = run(state[0], new, room - 1)
        return out

    return Side(name, once)


def rows(room: int, rounds: int) -> Iterator[list[str]]:
    """Measure and yield a row for each layout and number of queries."""
    for layer in SHAPES:
        for queries in (1, 4):
            sides = [side(qtype, layer, qtype, room, queries) for qtype in FORMATS]
            found = medians(sides, rounds=rounds)
            dense = found["float32"]
            cells = [f"{found[q] * 1e3:.1f} (**{dense / found[q]:.2f}**)" for q in FORMATS[1:]]
            layout = layer.__name__.replace("_", " ")
            yield [f"{room:,} tokens, keys {layout}", str(queries), f"{dense * 1e3:.1f}", *cells]


def main(*, rounds: int, quick: bool) -> None:
    print("attention to a cache", file=sys.stderr, flush=True)
    targets = [f"{q}, ms (×{f' ≥ {TARGETS[q]:g}' if q in TARGETS else ''})" for q in FORMATS[1:]]
    heading = ["attention", "queries a head", "f32, ms", *targets]
    room = 512 if quick else CONTEXT
    print(markdown_table(heading, []), flush=True)
    for row in rows(room, rounds):
        print(markdown_table(row, []).partition("\n")[0], flush=True)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="only a short context")
    arguments = options.parse_args()
    main(rounds=arguments.rounds, quick=arguments.quick)
