"""Time whole models with quantized weights on a CPU, compared with f32.

    python benchmarks/cpu_models.py            # the tables of docs/performance.md, in 30 minutes
    python benchmarks/cpu_models.py --quick    # small models, to see that it runs

Prints five tables:

- the sentence encoder of the demo, MiniLM
- a decoding step of `examples/decoder.py` with random weights
- layers in a `lax.scan`, compared with the same layers written out
- products with the same x, which run in one kernel call, compared with one call per product
- a call of a small product, compared with a call of a dense program

The variants of a model run in one process, in a new random order in each round. × is the median
time of f32 over the median time of the variant.
"""

import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from measure import Claim, Side, markdown_table, measure, medians, parser, results_table

import veneer as vn
from veneer.demo import encoder
from veneer.demo import encoder_demo as demo
from veneer.demo.fetch import ENCODER, fetch, sentences

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import decoder
import decoder_speed

TOKENS = 8  # tokens to decode per round
DECODING_TARGETS = {"int4": 3.0}  # times as many tokens per second as f32
SCANNED_TARGET = 1.05  # time, relative to layers that are written out
SAME_X_TARGET = 0.95  # time, relative to one call per product
LAYERS, WIDTH = 16, 2048
OF_SAME_X, COLUMNS = 120, 768  # too large for a CPU cache, with the columns of a small model


def encoder_table(rounds: int) -> str:
    """Return the milliseconds of MiniLM for one sentence and for a batch."""
    bert = encoder.load(fetch(ENCODER))
    encode = demo.compile_encoder(bert)
    _, batch = next(bert.batches(sentences()))
    batches = {1: encoder.Batch(batch.ids[:1], batch.mask[:1]), len(batch.ids): batch}
    variants = [v for v in demo.VARIANTS if not v.rotate][:4]
    params = {str(variant): demo.quantize(bert, variant) for variant in variants}
    seconds = {}
    for size, given in batches.items():
        sides = [Side(name, partial(encode, p, given)) for name, p in params.items()]
        for side in sides:
            jax.block_until_ready(side.run())  # compiles
        seconds[size] = medians(sides, rounds=rounds * (10 if size == 1 else 1))

    def cells(name: str) -> Iterator[str]:
        for found in seconds.values():
            yield f"{found[name] * 1e3:.1f}"
            yield f"**{found['f32'] / found[name]:.2f}**"

    heading = [f"MiniLM, {batch.ids.shape[1]} tokens"]
    for size in seconds:
        heading += [f"batch of {size}, ms", "×"]
    rows = ([name, f"{vn.summary(p).nbytes:,}", *cells(name)] for name, p in params.items())
    return markdown_table([heading[0], "bytes", *heading[1:]], rows)


def decoding_table(config: decoder.Config, rounds: int) -> str:
    """Return the tokens per second of the decoder, and the bytes of its parameters."""
    results = decoder_speed.compare(config, decoder_speed.VARIANTS, rounds=rounds, count=TOKENS)
    dense = results[0]

    def row(found: decoder_speed.Result) -> list[str]:
        name, faster = found.variant.name, found.tokens_per_second / dense.tokens_per_second
        target = f"≥ {DECODING_TARGETS[name]:g}" if name in DECODING_TARGETS else ""
        share = f"{found.nbytes / dense.nbytes:.3f}"
        return [
            name,
            f"{found.nbytes:,}",
            share,
            f"{found.tokens_per_second:.1f}",
            f"**{faster:.2f}**",
            target,
        ]

    heading = ["decoder", "bytes", "of f32", "tokens a second", "×", "target"]
    return markdown_table(heading, map(row, results))


def layers_table(layers: int, width: int, rounds: int) -> str:
    """Return the milliseconds of layers in a scan and written out, with M = 1."""
    x = jnp.ones((1, width))
    stack = jax.random.normal(jax.random.key(0), (layers, width, width)) / width**0.5
    layer: Callable[[Any, Any], Any] = lambda x, w: jnp.tanh(x @ w)
    scanned = jax.jit(vn.implicit(lambda x, ws: jax.lax.scan(_step(layer), x, ws)[0]))
    written = jax.jit(vn.implicit(lambda x, ws: reduce(layer, ws, x)))
    claims = []
    for variant in decoder_speed.VARIANTS:
        if variant.name in ("f32", "int8", "int4", "w4a8"):
            name = variant.name
            stored = _quantized({"head": stack}, variant)["head"]
            each = [_quantized({"head": w}, variant)["head"] for w in stack]
            ours = Side(f"{name}, in a scan", partial(scanned, x, stored))
            theirs = Side("written out", partial(written, x, each))
            claims.append(Claim(ours, theirs, None if name == "f32" else SCANNED_TARGET))
    return results_table(measure(claims, rounds=rounds, batches=3, calls=5), "ms")


def same_x_table(layers: int, columns: int, rounds: int) -> str:
    """Return the milliseconds of layers with three products of the same x, with M = 1."""

    def layer(x: Any, weights: Any, each: Callable[[Any], Any] = lambda x: x) -> Any:
        query, key, value = (each(x) @ w for w in weights)
        return jnp.tanh(query + jnp.tile(key * value, 3))

    apart = partial(layer, each=jax.lax.optimization_barrier)  # hides that the operand is the same
    joined, one_by_one = (
        jax.jit(vn.implicit(lambda x, ws, layer=layer: reduce(layer, ws, x)))
        for layer in (layer, apart)
    )
    key, shapes = jax.random.key(0), ((columns, columns), *2 * ((columns, columns // 3),))
    dense = [jax.random.normal(key, shape) / columns**0.5 for shape in shapes]
    claims = []
    for variant in decoder_speed.VARIANTS:
        if variant.qtype is not None and variant.act_qtype is None:
            stored = [_quantized({"head": w}, variant)["head"] for w in dense]
            weights = [jax.tree.map(jnp.copy, stored) for _ in range(layers)]
            ours, theirs = (
                partial(f, jnp.ones((1, columns)), weights) for f in (joined, one_by_one)
            )
            sides = Side(f"{variant.name}, of the same x", ours), Side("one by one", theirs)
            claims.append(Claim(*sides, SAME_X_TARGET))
    return results_table(measure(claims, rounds=rounds, batches=3, calls=5), "ms")


def _step(layer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, w: (layer(x, w), None)


def _quantized(params: Any, variant: decoder_speed.Variant) -> Any:
    if variant.qtype is None:
        return params
    of_products = vn.quant.Rule(
        "head", variant.qtype, tile_size=variant.tile_size, act_qtype=variant.act_qtype
    )
    return vn.quant.quantize_tree(params, [of_products])


def call_table(rounds: int) -> str:
    """Return the microseconds of a call, with the smallest weight that has a kernel."""
    x, w = jnp.ones((1, 128)), jnp.ones((128, 128))
    product: Callable[[Any, Any], Any] = lambda x, w: x @ w
    plain = Side("`jax.jit(f)`, dense", partial(jax.jit(product), x, w))
    weights: Mapping[str, Any] = {"dense": w} | {
        qtype: vn.quant.quantize(w, qtype, channelwise_axes=[1]) for qtype in ("int8", "int4")
    }
    sides = [
        Side(
            f"`jax.jit(vn.implicit(f))`, {name}", partial(jax.jit(vn.implicit(product)), x, weight)
        )
        for name, weight in weights.items()
    ]
    results = measure([Claim(side, plain) for side in sides], rounds=rounds, batches=5, calls=200)
    base = statistics.median(result.seconds[1] for result in results) * 1e6
    rows = [[plain.name, f"{base:.1f}", "", ""]]
    for result in results:
        ours, theirs = (seconds * 1e6 for seconds in result.seconds)
        rows.append([result.claim.ours.name, f"{ours:.1f}", f"**{ours - theirs:+.1f}**", "≤ +15"])
    return markdown_table(["a call", "µs", "more", "target"], rows)


def main(*, rounds: int, quick: bool) -> None:
    # Fail if XLA would compute the products that are shown as ours.
    warnings.filterwarnings("error", "products with quantized weights are computed by XLA")
    config = decoder_speed.SMALL if quick else decoder.Config()
    tables = {
        "encoder": lambda: encoder_table(rounds),
        "decoder": lambda: decoding_table(config, rounds),
        "layers": lambda: layers_table(*((2, 256) if quick else (LAYERS, WIDTH)), rounds),
        "same x": lambda: same_x_table(*((2, 384) if quick else (OF_SAME_X, COLUMNS)), rounds),
        "call": lambda: call_table(rounds),
    }
    for name, table in tables.items():
        print(name, file=sys.stderr, flush=True)
        print(table(), end="\n\n")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="a small decoder")
    arguments = options.parse_args()
    main(rounds=arguments.rounds, quick=arguments.quick)
