"""Time products of quantized operands, in veneer and in Qwix, computed by XLA.

    python benchmarks/quantized_products.py            # for docs/benchmarks.md; half an hour
    python benchmarks/quantized_products.py --small    # small sizes, to see that it runs

A product is one program under `jax.jit`, with the operands as arguments. The activation is dense,
or the program quantizes it to int8 with one scale per row (w8a8), so that int8 is multiplied by
int8. The ratio is the time of Qwix over ours. Above 1, veneer is faster.
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

# The sizes that are timed, and the sizes for `--small`.
FULL = {"width": 2048, "experts": (8, 64), "expert width": 512, "image": 32, "features": 64}
SMALL = {"width": 256, "experts": (8,), "expert width": 128, "image": 8, "features": 16}
ROWS = (1, 8, 256)
LAYOUT = ("NHWC", "HWIO", "NHWC")
LIBRARIES = {
    "veneer": (vn.quant, lambda x, qtype, **tiling: vn.quant.quantize(x, qtype, **tiling)),
    "Qwix": (qwix, lambda x, qtype, **tiling: qwix.quantize(x, QWIX_NAMES[qtype], **tiling)),
}
Product = Callable[[Any, Any, Any], jax.Array]


@dataclass(frozen=True)
class Case:
    """A product, its dense operands, and how they are quantized.

    **Arguments:**

    - `product`: takes the functions of a library, the activation and the weight.
    - `tiling`: the axes arguments of `quantize` for the weight.
    - `rows`: the axes of the activation with their own scales. None leaves the activation dense.
    """

    name: str
    product: Product
    activation: np.ndarray
    weight: np.ndarray
    qtype: str
    tiling: Mapping[str, Any]
    rows: tuple[int, ...] | None = None

    def side(self, library: str) -> Side:
        """Quantize the weight, compile the product in a library, and return it as a side."""
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
    """Time a case on its own, so that the operands of other cases need no memory."""
    ours = case.side("veneer")
    try:
        theirs = case.side("Qwix")
        jax.block_until_ready(theirs.run())
    except Exception as error:  # docs/qwix.md lists the missing operations
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
    options.add_argument("--only", default="", help="only cases whose names contain this")
    arguments = options.parse_args()
    main(rounds=arguments.rounds, small=arguments.small, only=arguments.only)
