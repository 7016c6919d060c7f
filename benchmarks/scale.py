"""What a device needs, and is sent, where a model lies in parts on 8 of them; and one of experts.

The first table is of collectives under `shard_map`: the bytes that a device receives of a weight in
int4, in tiles of 128, beside one in f32. The second is of gradients that are sent quantized: a
small decoder, trained in full with its batch in parts. *received*: bytes of a step; *loss*: of text
that it has not seen. The third is of `examples/fsdp.py`: a step of QLoRA, with everything whole on
each device and in parts. *held*: weights, updates and moments; *at a time*: what the compiled step
needs besides, too, by `memory_analysis`. The fourth is of `examples/offload.py`: a step on one
device with layers in its memory, and in the host's. The last is of a layer of `examples/moe.py`, of
32 experts of which a token takes 4. Times are medians, by turns.
"""

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import veneer as vn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import fsdp
import moe
import offload

AXIS = "devices"

SENT: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
}
#: How many times its result a device receives, of 8: a sum comes in parts, and then whole.
_TIMES = {"all-gather": 1, "all-to-all": 1, "collective-permute": 1}
_TIMES |= {"reduce-scatter": 8, "all-reduce": 2}
_COLLECTIVE = rf"= (.*?) ({'|'.join(_TIMES)})(?:-start)?\("
_BYTES = {"f32": 4, "u8": 1, "s8": 1}


def bytes_received(run: Any, *args: Any) -> int:
    """The bytes that collectives give to a device, in the compiled program."""
    total = 0
    for results, name in re.findall(_COLLECTIVE, run.lower(*args).compile().as_text()):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            sizes = [int(size) for size in shape.split(",") if size]
            total += _TIMES[name] * _BYTES[dtype] * int(np.prod(sizes))
    return total


def of_collectives() -> Iterator[str]:
    """The rows of the first table."""
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    w = jax.random.normal(jax.random.key(0), (8192, 64))
    q = vn.quant.quantize(w, "int4", channelwise_axes=(-1,), tiled_axes={0: 128})
    yield "| collective | f32 | int4, tile 128 | of f32 |"
    yield "|---|---:|---:|---:|"
    for name, program in SENT.items():
        f = jax.shard_map(program, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        run = jax.jit(vn.implicit(f, on_materialise="error"))
        dense, packed = bytes_received(jax.jit(f), w), bytes_received(run, q)
        yield f"| `{name}` | {dense:,} | {packed:,} | {packed / dense:.3f} |"


# A decoder that each device has whole, which predicts a Markov chain.

SMALL = fsdp.Config(vocabulary=64, width=64, wide=128, num_layers=2, num_heads=4, batch=64)
OPTIMIZER = optax.adam(optax.cosine_decay_schedule(3e-3, 500))

#: How gradients are sent: a format, whether at random, and whether with what was lost before.
GRADIENTS: dict[str, tuple[str | None, bool, bool]] = {
    "f32": (None, False, False),
    "int8": ("int8", False, False),
    "int8, at random": ("int8", True, False),
    "float8_e4m3fn": ("float8_e4m3fn", False, False),
    "mxfp8": ("mxfp8", False, False),
    "int4": ("int4", False, False),
    "int4, with what was lost": ("int4", False, True),
}


def chain(key: jax.Array, config: fsdp.Config) -> jax.Array:
    """Sequences `[batch, length + 1]`, of which each token depends on the one before."""
    likely = 2 * jax.random.normal(jax.random.key(7), (config.vocabulary, config.vocabulary))
    start, *keys = jax.random.split(key, config.length + 1)
    first = jax.random.randint(start, (config.batch,), 0, config.vocabulary)

    def step(token: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jax.random.categorical(key, likely[token])
        return new, new

    return jnp.concatenate([first[:, None], lax.scan(step, first, jnp.stack(keys))[1].T], 1)


def surprise(weights: Any, tokens: jax.Array, config: fsdp.Config) -> jax.Array:
    """The mean loss at each next token, of a decoder whose weights are all dense."""
    layer = lambda x, p: (fsdp.layer(p, x, config.num_heads), None)
    x, _ = lax.scan(layer, weights["embedding"][tokens[:, :-1]], weights["layers"])
    logits = fsdp.normed(x) @ weights["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def data_parallel(how: str, steps: int, config: fsdp.Config = SMALL) -> tuple[float, int]:
    """The loss after training with gradients that are sent in a way; and the bytes of a step."""
    qtype, at_random, with_error = GRADIENTS[how]
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))

    def sums(grads: Any, errors: Any, key: jax.Array) -> tuple[Any, Any]:
        if qtype is None:
            return lax.psum(grads, AXIS), errors
        send = partial(vn.distributed.psum, axis_name=AXIS, qtype=qtype)
        key = key if at_random else None
        if not with_error:
            return send(grads, key=key), errors
        return send(grads, key=key, error=errors)

    def step(weights: Any, state: Any, errors: Any, key: jax.Array, tokens: jax.Array) -> Any:
        own = lax.pcast(weights, AXIS, to="varying")  # or JAX itself sums gradients, in f32
        grads = jax.grad(surprise)(own, tokens, config)
        grads, errors = sums(grads, jax.tree.map(lambda e: e[0], errors), key)
        changes, state = OPTIMIZER.update(jax.tree.map(lambda g: g / 8, grads), state)
        return optax.apply_updates(weights, changes), state, jax.tree.map(lambda e: e[None], errors)

    specs = P(), P(), P(AXIS)
    run = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P(), P(AXIS)), out_specs=specs)
    weights, _ = fsdp.init(jax.random.key(0), config)
    errors = jax.tree.map(lambda w: jnp.zeros((8, *w.shape)), weights)
    args = weights, OPTIMIZER.init(weights), errors

    @jax.jit
    def train(args: Any, keys: jax.Array) -> Any:
        return lax.scan(lambda args, key: (run(*args, key, chain(key, config)), None), args, keys)[
            0
        ]

    keys = jax.random.split(jax.random.key(1), steps)
    received = bytes_received(jax.jit(run), *args, keys[0], chain(keys[0], config))
    trained = train(args, keys)[0]
    unseen = chain(jax.random.key(2), replace(config, batch=1024))
    return float(jax.jit(surprise, static_argnums=2)(trained, unseen, config)), received


def of_gradients(steps: int) -> Iterator[str]:
    """The rows of the second table."""
    yield f"| gradients | received | of f32 | loss after {steps} steps | of f32 |"
    yield "|---|---:|---:|---:|---:|"
    exact, dense = data_parallel("f32", steps)
    for how in GRADIENTS:
        loss, received = data_parallel(how, steps)
        of = f"{received:,} | {received / dense:.3f} | {loss:.4f} | {loss / exact - 1:+.2%}"
        yield f"| {how} | {of} |"


def of_training(config: fsdp.Config) -> Iterator[str]:
    """The rows of the third table."""
    yield "| weights | held | at a time |"
    yield "|---|---:|---:|"
    for way in fsdp.ways(config, fsdp.text(config)):
        yield f"| {way.name} | {way.held / 1e6:.1f} MB | {fsdp.peak(way.compiled) / 1e6:.1f} MB |"


def of_offload(config: fsdp.Config, rounds: int = 5) -> Iterator[str]:
    """The rows of the fourth table."""
    tokens = fsdp.text(config)
    ways = list(offload.ways(config, tokens))
    args, times = [way.args for way in ways], [list[float]() for _ in ways]
    for _ in range(rounds + 1):  # of which the first counts for nothing
        for i, way in enumerate(ways):
            start = time.perf_counter()
            updates, state, _ = jax.block_until_ready(way.compiled(*args[i], tokens))
            times[i].append(time.perf_counter() - start)
            args[i] = updates, state, args[i][2]
    yield "| weights | on the host | on the device, at a time | time of a step |"
    yield "|---|---:|---:|---:|"
    medians = [statistics.median(taken[1:]) for taken in times]
    for i, way in enumerate(ways):
        one = medians[i] / medians[i - i % 2]  # those on the device come first
        sizes = f"{way.on_host / 1e6:.1f} MB | {way.on_device / 1e6:.1f} MB"
        yield f"| {way.name} | {sizes} | {one:.2f} |"


#: Experts in a format, and how they are multiplied: in f32, too, reading those alone that are used.
EXPERTS: dict[str, Callable[..., jax.Array]] = {
    "f32": moe.row_by_row,
    "int4": lax.ragged_dot,
    "mxfp4": lax.ragged_dot,
}


def of_experts(config: moe.Config, rounds: int = 15) -> Iterator[str]:
    """The rows of the last table."""
    config = replace(config, vocab_size=64, num_hidden_layers=1)
    params = moe.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size))
    programs, times = {}, {format: [] for format in EXPERTS}
    for format, product in EXPERTS.items():
        stored = params if format == "f32" else moe.quantized(params, format)
        layer = {k.removeprefix("model.layers.0."): v for k, v in stored.items() if ".mlp." in k}
        run = jax.jit(vn.implicit(partial(moe.experts, config=config, product=product)))
        programs[format] = run.lower(layer, x=x).compile(), layer
    for _ in range(rounds + 1):  # of which the first counts for nothing
        for format, (run, layer) in programs.items():
            start = time.perf_counter()
            run(layer, x=x).block_until_ready()
            times[format].append(time.perf_counter() - start)
    of = {format: statistics.median(taken[1:]) for format, taken in times.items()}
    size = {
        format: run.memory_analysis().temp_size_in_bytes
        + sum(leaf.nbytes for leaf in jax.tree.leaves(layer))
        for format, (run, layer) in programs.items()
    }
    yield "| experts | bytes | of f32 | a token | times as fast |"
    yield "|---|---:|---:|---:|---:|"
    for format in EXPERTS:
        smaller, faster = size[format] / size["f32"], of["f32"] / of[format]
        numbers = f"{size[format] / 1e6:.0f} MB | {smaller:.3f} | {1e3 * of[format]:.2f} ms"
        yield f"| {format} | {numbers} | {faster:.1f} |"


def main() -> None:
    """Prints the tables."""
    jax.config.update("jax_num_cpu_devices", 8)
    quick = "--quick" in sys.argv
    config = fsdp.SMALL if quick else fsdp.Config()
    experts = moe.SMALL if quick else moe.Config()
    tables = of_collectives(), of_gradients(20 if quick else 500), of_training(config)
    tables += of_offload(config), of_experts(experts)
    for line in (line for table in tables for line in (*table, "")):
        print(line, flush=True)


if __name__ == "__main__":
    main()
