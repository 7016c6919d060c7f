"""Products of quantized operands through XLA, ours against Qwix's.

Each is one program under `jax.jit`, with the operands as arguments. Weight-only is a dense
activation and a quantized weight; in w8a8 the activation is quantized in the program, a scale to
each row, and int8 meets int8. The ratio is Qwix's time over ours: above 1, ours is faster.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from measure import Claim, Side, markdown_table, measure, parser
from support.qwix_arrays import QWIX_NAMES

import veneer as vn

# Sizes of what is timed, and of a trial that only shows that it runs.
FULL = {"width": 2048, "experts": (8, 64), "expert width": 512, "image": 32, "features": 64}
SMALL = {"width": 256, "experts": (8,), "expert width": 128, "image": 8, "features": 16}
ROWS = (1, 8, 256)
LAYOUT = ("NHWC", "HWIO", "NHWC")
LIBRARIES = {
    "veneer": (vn.quant, lambda x, qtype, **tiling: vn.quant.quantize(x, qtype, **tiling)),
    "Qwix": (qwix, lambda x, qtype, **tiling: qwix.quantize(x, QWIX_NAMES[qtype], **tiling)),
}
Product = Callable[[Any, Any, Any], jax.Array]  # of a library's functions, activation and weight


@dataclass(frozen=True)
class Case:
    """A product, what it is called, its dense operands, and how they are quantized."""

    name: str
    product: Product
    activation: np.ndarray
    weight: np.ndarray
    qtype: str
    tiling: Mapping[str, Any]
    rows: tuple[int, ...] | None = None  # the axes with scales of their own; None leaves it dense

    def side(self, library: str) -> Side:
        """The product by one library, compiled, with the weight quantized."""
        functions, quantize = LIBRARIES[library]

        @jax.jit
        def run(x: Any, w: Any) -> jax.Array:
            if self.rows is not None:
                x = quantize(x, "int8", channelwise_axes=self.rows)
            return self.product(functions, x, w)

        w = quantize(jnp.asarray(self.weight), self.qtype, **self.tiling)
        return Side(self.name, partial(run, jnp.asarray(self.activation), w))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def matmuls(width: int) -> Iterator[Case]:
    product: Product = lambda lib, x, w: lib.dot_general(x, w, (((1,), (0,)), ((), ())))
    columns = {"channelwise_axes": [1]}
    weight = normal(width, width)
    for rows in ROWS:
        x = normal(rows, width)
        make = partial(Case, product=product, activation=x, weight=weight)
        yield make(f"int8, M = {rows}", qtype="int8", tiling=columns)
        tiled = columns | {"tiled_axes": {0: 128}}
        yield make(f"int4 in tiles of 128, M = {rows}", qtype="int4", tiling=tiled)
        tiled = columns | {"tiled_axes": {0: 64}}
        yield make(f"nf4 in tiles of 64, M = {rows}", qtype="nf4", tiling=tiled)
        yield make(f"w8a8, M = {rows}", qtype="int8", tiling=columns, rows=(0,))


def convolutions(image: int, features: int) -> Iterator[Case]:
    product: Product = lambda lib, x, w: lib.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=LAYOUT
    )
    x, weight = normal(8, image, image, features), normal(3, 3, features, features)
    make = partial(Case, product=product, activation=x, weight=weight)
    columns = {"channelwise_axes": [3]}
    yield make("conv, int8", qtype="int8", tiling=columns)
    yield make("conv, int4", qtype="int4", tiling=columns)
    yield make("conv, w8a8", qtype="int8", tiling=columns, rows=(0,))


def mixtures(experts: int, width: int) -> Iterator[Case]:
    rows = 256
    sizes = np.full(experts, rows // experts, np.int32)
    product: Product = lambda lib, x, w: lib.ragged_dot(x, w, jnp.asarray(sizes))
    make = partial(
        Case, product=product, activation=normal(rows, width), weight=normal(experts, width, width)
    )
    columns = {"channelwise_axes": [0, 2]}
    name = f"ragged_dot of {experts} experts"
    yield make(f"{name}, int8", qtype="int8", tiling=columns)
    tiled = columns | {"tiled_axes": {1: 128}}
    yield make(f"{name}, int4 in tiles of 128", qtype="int4", tiling=tiled)
    yield make(f"{name}, w8a8", qtype="int8", tiling=columns, rows=(0,))


def cases(sizes: Mapping[str, Any]) -> Iterator[Case]:
    yield from matmuls(sizes["width"])
    yield from convolutions(sizes["image"], sizes["features"])
    for experts in sizes["experts"]:
        yield from mixtures(experts, sizes["expert width"])


def row(case: Case, rounds: int, batches: int) -> list[str]:
    """Measures a case, each by itself: its operands need not be kept for the next one."""
    ours = case.side("veneer")
    try:
        theirs = case.side("Qwix")
        jax.block_until_ready(theirs.run())
    except Exception as error:  # what Qwix does not have is in docs/qwix.md
        return [case.name, "", "", type(error).__name__]
    jax.block_until_ready(ours.run())
    [result] = measure([Claim(ours, theirs)], rounds=rounds, batches=batches)
    ours_ms, theirs_ms = (f"{seconds * 1e3:.2f}" for seconds in result.seconds)
    return [case.name, ours_ms, theirs_ms, f"**{1 / result.ratio:.2f}**"]


def main(*, rounds: int, small: bool, only: str) -> None:
    rows = []
    for case in cases(SMALL if small else FULL):
        if only in case.name:
            rows.append(row(case, rounds, batches=3))
            print(rows[-1], file=sys.stderr, flush=True)
    print(markdown_table(["", "ours, ms", "Qwix, ms", "Qwix / ours"], rows))


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--small", action="store_true", help="small sizes, to see that it runs")
    options.add_argument("--only", default="", help="the cases with this in their names")
    arguments = options.parse_args()
    main(rounds=arguments.rounds, small=arguments.small, only=arguments.only)
