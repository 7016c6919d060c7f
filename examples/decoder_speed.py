"""Measure how fast a transformer decodes with weights in f32, bf16, int8, int4 and nf4.

For users who choose a format for inference. The transformer is `decoder.py`, which does not use
veneer. Its weights are random, because speed and memory do not depend on their values. A token
reads all weights from memory once, so fewer bytes are faster.

    python examples/decoder_speed.py                    # two minutes on two cores; 5 GB of memory
    python examples/decoder_speed.py --quick            # small sizes, to see that it runs
    python examples/decoder_speed.py --only f32 int4    # only these formats
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import decoder
import jax
import jax.numpy as jnp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import veneer as vn

SMALL = decoder.Config(
    vocabulary=256, width=128, num_layers=2, num_heads=4, num_groups=2, wide=256, longest=64
)
KERNELS = r"layers\.\d+\.(query|key|value|mixed|gate|up|down)|head"


@dataclass(frozen=True)
class Variant:
    """The dtype or format of the weights, and the format of the activations."""

    name: str
    dtype: str = "float32"
    qtype: str | None = None
    tile_size: int | None = None
    act_qtype: str | None = None

    def store(self, params: decoder.Params) -> decoder.Params:
        """Return the parameters in this variant."""
        if self.qtype is None:
            return jax.tree.map(lambda x: x.astype(self.dtype), params)
        kernels = vn.quant.Rule(
            KERNELS, self.qtype, tile_size=self.tile_size, act_qtype=self.act_qtype
        )
        rows = vn.quant.Rule("embedding", self.qtype, tile_size=self.tile_size, tile_axis=-1)
        return vn.quant.quantize_tree(params, [kernels, rows])


VARIANTS = (
    Variant("f32"),
    Variant("bf16", "bfloat16"),
    Variant("int8", qtype="int8"),
    Variant("int4", qtype="int4", tile_size=128),
    Variant("nf4", qtype="nf4", tile_size=64),
    Variant("w4a8", qtype="int4", tile_size=128, act_qtype="int8"),
)


@dataclass(frozen=True)
class Result:
    """The tokens per second of a variant, and the bytes of its parameters."""

    variant: Variant
    tokens_per_second: float
    nbytes: int


def nbytes(params: decoder.Params) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(params))


class Decoding:
    """A text that is decoded with the parameters of a variant."""

    def __init__(self, params: decoder.Params, config: decoder.Config):
        # The only change from a dense model is `vn.implicit`.
        self.step = decoder.compile_step(vn.implicit(decoder.step))
        self.params, self.config = params, config
        self.token = jnp.array([[1]], jnp.int32)
        self.cache = decoder.empty_cache(config, 1, params["norm"].dtype)
        self.position = 0

    def write(self, count: int) -> float:
        """Decode `count` tokens. Return the seconds per token."""
        start = time.perf_counter()
        for _ in range(count):
            self.token, self.cache = self.step(
                self.params, self.config, self.token, self.cache, self.position
            )
            self.position += 1
        jax.block_until_ready(self.token)
        return (time.perf_counter() - start) / count


def compare(
    config: decoder.Config, variants: Sequence[Variant], *, rounds: int, count: int
) -> list[Result]:
    """Decode a few tokens with each variant alternately. Return the median speeds.

    Variants alternate, so that other programs slow all of them alike.
    """
    params = decoder.init(jax.random.key(0), config)
    texts = {variant: Decoding(variant.store(params), config) for variant in variants}
    del params
    for text in texts.values():
        text.write(2)  # compiles
    seconds: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, text in texts.items():
            seconds[variant].append(text.write(count))
    return [
        Result(variant, 1 / statistics.median(seconds[variant]), nbytes(text.params))
        for variant, text in texts.items()
    ]


def table(results: Sequence[Result]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("weights")
    for heading in ("tokens per second", "of f32", "bytes", "of f32"):
        table.add_column(heading, justify="right")
    first = results[0]
    for r in results:
        faster = f"{r.tokens_per_second / first.tokens_per_second:.1f}×"
        share = f"{r.nbytes / first.nbytes:.0%}"
        table.add_row(r.variant.name, f"{r.tokens_per_second:.1f}", faster, f"{r.nbytes:,}", share)
    return table


def main(only: Sequence[str] = (), *, quick: bool = False) -> list[Result]:
    """Decode with each variant, and print a table."""
    variants = [v for v in VARIANTS if not only or v.name in only]
    config = SMALL if quick else decoder.Config()
    results = compare(config, variants, rounds=3 if quick else 9, count=4 if quick else 8)
    Console().print(table(results))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    names = [v.name for v in VARIANTS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="of the formats")
    arguments = parser.parse_args()
    main(arguments.only, quick=arguments.quick)
