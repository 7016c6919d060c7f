"""What a device needs, and is sent, where a model lies in parts on 8 of them; no time is measured.

The first table is of `examples/fsdp.py`: a step of QLoRA, with everything whole on each device and
in parts. *held*: weights, updates and moments; *at a time*: what the compiled step needs besides,
too, by `memory_analysis`. The second is of collectives under `shard_map`: the bytes that a device
receives of a weight in int4, in tiles of 128, beside one in f32.
"""

import re
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import veneer as vn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import fsdp

AXIS = "devices"

SENT: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda x: lax.all_gather(x, AXIS, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
}
_COLLECTIVE = r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
_BYTES = {"f32": 4, "u8": 1}


def bytes_received(run: Any, x: Any) -> int:
    """The bytes of what collectives give, in the compiled program."""
    results = " ".join(re.findall(_COLLECTIVE, run.lower(x).compile().as_text()))
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", results)
    return sum(_BYTES[t] * int(np.prod([*map(int, shape.split(","))])) for t, shape in arrays)


def of_collectives() -> Iterator[str]:
    """The rows of the second table."""
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


def of_training(config: fsdp.Config) -> Iterator[str]:
    """The rows of the first table."""
    yield "| weights | held | at a time |"
    yield "|---|---:|---:|"
    for way in fsdp.ways(config, fsdp.text(config)):
        yield f"| {way.name} | {way.held / 1e6:.1f} MB | {fsdp.peak(way.compiled) / 1e6:.1f} MB |"


def main() -> None:
    """Prints both tables."""
    jax.config.update("jax_num_cpu_devices", 8)
    config = fsdp.SMALL if "--quick" in sys.argv else fsdp.Config()
    for line in chain(of_collectives(), [""], of_training(config)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
