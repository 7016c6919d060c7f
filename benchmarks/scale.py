"""Measure memory and communication of models that are divided over 8 devices.

    python benchmarks/scale.py            # the tables of docs/scale.md, in 15 minutes
    python benchmarks/scale.py --quick    # small models, to see that it runs

The devices are virtual devices of the CPU. Prints five tables:

- the bytes that collectives send of an int4 weight and of an f32 weight
- data parallelism with quantized gradients: the bytes per step, and the loss on unseen text
- `examples/fsdp.py`: the memory of a QLoRA step, with replicated and with sharded weights
- `examples/offload.py`: the memory and time of a step with layers in host memory
- `examples/moe.py`: the bytes and time of a layer with 32 experts, 4 per token

*held* is the bytes of weights, adapters and optimizer state. *at a time* also includes the
temporary memory of the compiled step, by `memory_analysis`. Times are medians, measured
alternately.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from measure import ROOT
from support.data_parallel import AXIS, GRADIENTS, bytes_received, data_parallel

import veneer as vn

sys.path.append(str(ROOT / "examples"))
import fsdp
import moe
import offload

SENT: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
}


def of_collectives() -> Iterator[str]:
    """Yield the rows of the first table."""
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


def of_gradients(steps: int) -> Iterator[str]:
    """Train with each way to send gradients, and yield the rows of the second table."""
    yield f"| gradients | received | of f32 | loss after {steps} steps | of f32 |"
    yield "|---|---:|---:|---:|---:|"
    exact, dense = data_parallel("f32", steps)
    for how in GRADIENTS:
        loss, received = data_parallel(how, steps)
        of = f"{received:,} | {received / dense:.3f} | {loss:.4f} | {loss / exact - 1:+.2%}"
        yield f"| {how} | {of} |"


def of_training(config: fsdp.Config) -> Iterator[str]:
    """Yield the rows of the third table."""
    yield "| weights | held | at a time |"
    yield "|---|---:|---:|"
    for way in fsdp.setups(config, fsdp.make_tokens(config)):
        peak = fsdp.peak_bytes(way.compiled)
        yield f"| {way.name} | {way.held / 1e6:.1f} MB | {peak / 1e6:.1f} MB |"


def of_offload(config: fsdp.Config, rounds: int = 5) -> Iterator[str]:
    """Yield the rows of the fourth table."""
    tokens = fsdp.make_tokens(config)
    ways = list(offload.setups(config, tokens))
    args, times = [way.args for way in ways], [list[float]() for _ in ways]
    for _ in range(rounds + 1):  # the first round does not count
        for i, way in enumerate(ways):
            start = time.perf_counter()
            updates, state, _ = jax.block_until_ready(way.compiled(*args[i], tokens))
            times[i].append(time.perf_counter() - start)
            args[i] = updates, state, args[i][2]
    yield "| weights | on the host | on the device, at a time | time of a step |"
    yield "|---|---:|---:|---:|"
    medians = [statistics.median(taken[1:]) for taken in times]
    for i, way in enumerate(ways):
        one = medians[i] / medians[i - i % 2]  # the variant on the device comes first
        sizes = f"{way.on_host / 1e6:.1f} MB | {way.on_device / 1e6:.1f} MB"
        yield f"| {way.name} | {sizes} | {one:.2f} |"


#: The product for each format. In f32 it also reads only the experts in use.
EXPERTS: dict[str, Callable[..., jax.Array]] = {
    "f32": moe.row_by_row,
    "int4": lax.ragged_dot,
    "mxfp4": lax.ragged_dot,
}


def of_experts(config: moe.Config, rounds: int = 15) -> Iterator[str]:
    """Yield the rows of the fifth table."""
    config = replace(config, vocab_size=64, num_hidden_layers=1)
    params = moe.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (1, 1, config.hidden_size))
    programs, times = {}, {format: [] for format in EXPERTS}
    for format, product in EXPERTS.items():
        stored = params if format == "f32" else moe.quantize(params, format)
        layer = {k.removeprefix("model.layers.0."): v for k, v in stored.items() if ".mlp." in k}
        run = jax.jit(vn.implicit(partial(moe.experts, config=config, product=product)))
        programs[format] = run.lower(layer, x=x).compile(), layer
    for _ in range(rounds + 1):  # the first round does not count
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
