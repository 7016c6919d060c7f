"""What quantizing a weight costs, in time and in memory: against reading it once.

A weight of 4096 x 11008 in f32 is 180 MB. Nothing that quantizes it can be faster than a program
that reads it, which is what the ratio is to; temporaries are what XLA allocates beside input and
output.

    python benchmarks/quantize.py
    python benchmarks/quantize.py --rows 512  # a smaller weight
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from measure import Claim, Side, markdown_table, measure, parser

from veneer.quant import FORMATS, quantize

COLUMNS = 11008
TILE = 128


def cases() -> dict[str, tuple[str, dict]]:
    """Formats and where their tiles are."""
    tilings = {
        "tiles along axis 0": {"channelwise_axes": [1], "tiled_axes": {0: TILE}},
        "tiles along axis 1": {"channelwise_axes": [0], "tiled_axes": {1: TILE}},
        "channelwise": {"channelwise_axes": [1]},
    }
    free = {
        f"{qtype}, {name}": (qtype, how)
        for qtype in ("int8", "int4", "nf4")
        for name, how in tilings.items()
    }
    tile = FORMATS["mxfp4"].tile_size
    return free | {
        f"mxfp4, tiles along axis {axis}": (
            "mxfp4",
            {"channelwise_axes": [1 - axis], "tiled_axes": {axis: tile}},
        )
        for axis in (0, 1)
    }


def temporaries(qtype: str, how: dict, weight: jax.Array) -> int:
    """The bytes that XLA allocates beside input and output."""
    program = jax.jit(lambda weight: quantize(weight, qtype, **how)).lower(weight).compile()
    return program.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Prints the table."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=4096, help="of the weight (default 4096)")
    arguments = options.parse_args()
    values = np.random.default_rng(0).normal(size=(arguments.rows, COLUMNS))
    weight = jnp.asarray(values, jnp.float32)
    read = jax.jit(functools.partial(jnp.max, axis=1))
    reading = Side("reading it", lambda: read(weight))
    table = []
    for name, (qtype, how) in cases().items():
        ours = Side(name, lambda qtype=qtype, how=how: quantize(weight, qtype, **how))
        (result,) = measure([Claim(ours, reading)], rounds=arguments.rounds)
        mine, other = (f"{seconds * 1e3:.1f}" for seconds in result.seconds)
        memory = f"{temporaries(qtype, how, weight) / 1e6:.1f}"
        table.append([name, mine, other, f"**{result.ratio:.1f}**", memory])
    print(f"A weight of {arguments.rows} x {COLUMNS} in f32, {weight.nbytes / 1e6:.0f} MB\n")
    print(markdown_table(["", "ms", "reading, ms", "ratio", "temporaries, MB"], table))


if __name__ == "__main__":
    main()
