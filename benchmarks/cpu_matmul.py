"""Time products of a dense activation with a quantized weight on a CPU.

    python benchmarks/cpu_matmul.py            # the tables of docs/performance.md, in an hour
    python benchmarks/cpu_matmul.py --brief    # without Qwix and without kernels switched off
    python benchmarks/cpu_matmul.py --quick    # small sizes, to see that it runs

A product of M rows with a weight `[4096, N]` is one program under `jax.jit`, with the weight as an
argument. It is computed by our kernels, by XLA alone, by Qwix, and by ONNX Runtime if it is
installed. All programs run in one process, in a new random order in each round. Each call takes
another copy of the weight, from 300 MB of copies, so that weights are read from memory and not from
a CPU cache.

The tables show the median time, and how many times as fast it is as XLA in f32. Each result is
first compared with the product in f64.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_matmul
import qwix
from measure import Side, markdown_table, medians, parser
from support.qwix_arrays import QWIX_NAMES

import veneer as vn
from veneer import kernels
from veneer.kernels.cpu import build

K = 4096
DENSE, READING = "XLA f32", "reading memory"  # the baselines
Run = Callable[[Any, Any], Any]  # takes an activation and a weight


@dataclass(frozen=True)
class Sizes:
    """The shapes of the products, and the bytes of weights to rotate through."""

    k: int = K
    rows: Sequence[int] = (1, 8, 256)  # M
    columns: Sequence[int] = (4096, 11008)  # N
    rotated: int = 300_000_000  # bytes of the copies of a weight
    brief: bool = False  # without Qwix and without kernels switched off


@dataclass(frozen=True)
class Program:
    """A product computed by one library, and the copies of the weight to rotate through."""

    name: str
    compiled: Callable[[Any, Any], Run]  # compiles for these operands
    weights: Callable[[], Sequence[Any]]  # makes the copies once, on demand
    dense: Callable[[Any], Any]  # the dense weight
    error: float  # the largest allowed error, relative to f64
    activation: Callable[[np.ndarray], Any] = jnp.asarray
    every: int = 1  # run it only in every n-th round

    def side(self, x: np.ndarray) -> Side:
        """Compile the program, check its result, and return it as a side to time."""
        given, weights = self.activation(x), self.weights()
        run, turns = self.compiled(given, weights[0]), itertools.cycle(weights)
        self.check(x, run(given, next(turns)))
        return Side(self.name, lambda: run(given, next(turns)), self.every)

    def check(self, x: np.ndarray, found: Any) -> None:
        """Raise an `AssertionError` if a result differs too much from the product in f64."""
        expected = x.astype(np.float64) @ np.asarray(self.dense(self.weights()[0]), np.float64)
        error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
        if not error <= self.error:
            raise AssertionError(f"{self.name}: error {error:.1e} is more than {self.error:.0e}")


@dataclass(frozen=True)
class Format:
    """A format of weights and activations, with the speed targets of its products.

    **Arguments:**

    - `targets`: how many times as fast as XLA in f32, by M.
    - `share`: the share of the memory bandwidth at M = 1.
    - `dtype`: the dtype of activations and of the dequantized weight.
    """

    name: str
    qtype: str
    tile: int | None = None
    act_qtype: str | None = None
    targets: Mapping[int, float] = field(default_factory=dict)
    share: float | None = None
    dtype: str = "float32"

    @property
    def error(self) -> float:
        """The largest allowed relative error of a product."""
        if self.dtype == "bfloat16":
            return BF16
        return EXACT if self.act_qtype is None else ROUNDED

    def with_activations(self, weight: Any) -> Any:
        """Return the weight with the activation format of this row."""
        rule = vn.quant.Rule(".*", self.qtype, act_qtype=self.act_qtype)
        return rule.with_activations(weight)


# The allowed relative errors: with f32 activations, with int8 activations, and in bf16.
EXACT, ROUNDED, BF16 = 1e-5, 2e-2, 1e-2

_FOUR_BITS = {1: 4.5, 8: 4.0, 256: 1.0}
# CPUs with bf16 instructions.
_IN_BF16 = {256: 1.8} if build.has_bf16() else {}
FORMATS = (
    Format("int8", "int8", targets={1: 3.3, 8: 4.0, 256: 1.0}, share=0.8),
    Format("int4, tile 128", "int4", 128, targets=_FOUR_BITS, share=0.6),
    Format("int4, tile 64", "int4", 64, targets=_FOUR_BITS, share=0.6),
    Format("int4, tile 32", "int4", 32),
    Format("nf4, tile 64", "nf4", 64, targets=_FOUR_BITS, share=0.6),
    Format("int8, x in bf16", "int8", targets=_IN_BF16, dtype="bfloat16"),
    Format("int4, tile 128, x in bf16", "int4", 128, targets=_IN_BF16, dtype="bfloat16"),
    Format("w8a8", "int8", None, "int8", targets={1: 4.0, 8: 6.5, 256: 8.0}, share=0.8),
    Format("w4a8, tile 128", "int4", 128, "int8", targets={1: 6.0, 8: 6.0, 256: 5.0}, share=0.6),
)
W8A8, W4A8 = FORMATS[-2:]
OF_F32 = [form for form in FORMATS if form.dtype == "float32"]
OF_QWIX = (FORMATS[0], FORMATS[1], FORMATS[4], W8A8)
# Programs that are shown only for comparison are slow, so they run in every n-th round.
RECORD = 4


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def nbytes(weight: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weight))


def tiling(tile: int | None) -> dict[str, Any]:
    """Return the axes arguments of `quantize`, which veneer and Qwix share."""
    return {"channelwise_axes": [1], "tiled_axes": {0: tile} if tile else {}}


def count(weight: Any, rotated: int) -> int:
    """Return how many copies of a weight take `rotated` bytes. It is at least two."""
    return max(2, -(-rotated // nbytes(weight)))


def copies(weight: Any, rotated: int) -> list[Any]:
    return [jax.tree.map(jnp.copy, weight) for _ in range(count(weight, rotated))]


def by_xla(w: np.ndarray, sizes: Sizes) -> Iterator[Program]:
    """Yield the programs with dense weights."""
    compiled = lambda x, weight: jax.jit(matmul)
    for name, dtype, error in ((DENSE, jnp.float32, EXACT), ("XLA bf16", jnp.bfloat16, BF16)):
        given = partial(jnp.asarray, dtype=dtype)
        weights = cache(lambda given=given: copies(given(w), sizes.rotated))
        yield Program(name, compiled, weights, np.asarray, error, given)


def ours(w: np.ndarray, sizes: Sizes) -> Iterator[Program]:
    """Yield the programs of veneer: by kernels, and with the kernels switched off."""

    @cache
    def stored(qtype: str, tile: int | None, dtype: str) -> list[Any]:
        weight = vn.quant.quantize(jnp.asarray(w, dtype), qtype, **tiling(tile))
        return copies(weight, sizes.rotated)

    with_kernels = lambda x, weight: jax.jit(vn.implicit(matmul))
    ways = {"": (with_kernels, 1)}
    if not sizes.brief:
        ways[", kernels off"] = (without_kernels, RECORD)
    for off, (compiled, every) in ways.items():
        for form in FORMATS if not off else OF_F32:
            weights = cache(
                lambda form=form: [
                    form.with_activations(weight)
                    for weight in stored(form.qtype, form.tile, form.dtype)
                ]
            )
            name = f"{form.name}{off}"
            given = partial(jnp.asarray, dtype=form.dtype)
            yield Program(name, compiled, weights, vn.materialise, form.error, given, every=every)


def without_kernels(x: Any, weight: Any) -> Run:
    with kernels.use("xla"):
        return jax.jit(vn.implicit(matmul)).lower(x, weight).compile()


def by_qwix(w: np.ndarray, sizes: Sizes) -> Iterator[Program]:
    for form in OF_QWIX:

        @cache
        def weights(form: Format = form) -> list[Any]:
            qtype = QWIX_NAMES[form.qtype]
            return copies(qwix.quantize(jnp.asarray(w), qtype, **tiling(form.tile)), sizes.rotated)

        def product(x: Any, weight: Any, is_dense: bool = form.act_qtype is None) -> Any:
            x = x if is_dense else qwix.quantize(x, jnp.int8, channelwise_axes=[0])
            return qwix.dot_general(x, weight, (((1,), (0,)), ((), ())))

        compiled = lambda x, weight, product=product: jax.jit(product)
        name = f"Qwix {form.name}"
        yield Program(name, compiled, weights, qwix.dequantize, form.error, every=RECORD)


def by_onnx_runtime(w: np.ndarray, sizes: Sizes) -> Iterator[Program]:
    """Yield the programs of ONNX Runtime on two threads. A session has its own weight."""
    for form, make in ((W4A8, onnx_matmul.four_bits), (W8A8, onnx_matmul.eight_bits)):
        weight = cache(
            lambda form=form: vn.quant.quantize(jnp.asarray(w), form.qtype, **tiling(form.tile))
        )

        @cache
        def sessions(weight: Any = weight, make: Any = make) -> list[Any]:
            codes, scale = np.asarray(weight().codes(), np.int8), np.asarray(weight().scales())
            return [make(codes, scale) for _ in range(count(weight(), sizes.rotated))]

        compiled = lambda x, session: lambda x, session: session(x)
        dense = lambda session, weight=weight: weight().dequantize()
        yield Program(onnx_name(form), compiled, sessions, dense, ROUNDED, np.asarray)


def onnx_name(form: Format) -> str:
    return f"ONNX Runtime, {form.name}"


def programs(w: np.ndarray, sizes: Sizes) -> list[Program]:
    makers = [by_xla, ours] if sizes.brief else [by_xla, ours, by_qwix]
    if not onnx_matmul.missing():
        makers.append(by_onnx_runtime)
    return [program for make in makers for program in make(w, sizes)]


def reading(nbytes: int) -> Side:
    """Return a side that reads and sums `nbytes` bytes of memory in two threads.

    It reads at four places at a time, which is faster than one after the other.
    """
    from numba import njit

    @njit(nogil=True)
    def total(blocks: np.ndarray) -> int:  # blocks x places x lines of the cache x words
        found = 0
        for block in blocks:
            for line in range(block.shape[1]):
                for place in range(block.shape[0]):
                    for word in block[place, line]:
                        found += word
        return found

    shape = (max(1, nbytes // (2 * 4 * 512 * 64)), 4, 512, 8)
    halves = [np.ones(shape, np.int64) for _ in range(2)]
    pool = ThreadPoolExecutor(2)
    run = lambda: list(pool.map(total, halves))
    run()
    return Side(READING, run)


@dataclass(frozen=True)
class Measured:
    """The seconds by M and program, and the bytes by program, for a weight `[K, n]`."""

    n: int
    seconds: Mapping[int, Mapping[str, float]]
    nbytes: Mapping[str, int]


def measured(n: int, sizes: Sizes, *, rounds: int, only: str) -> Measured:
    normal = np.random.default_rng(0).normal
    w = (normal(size=(sizes.k, n)) * sizes.k**-0.5).astype(np.float32)
    chosen = [p for p in programs(w, sizes) if only in p.name or p.name == DENSE]
    seconds = {}
    for m in sizes.rows:
        print(f"M = {m}, N = {n}", file=sys.stderr, flush=True)
        x = normal(size=(m, sizes.k)).astype(np.float32)
        sides = [program.side(x) for program in chosen]
        seconds[m] = medians([*sides, reading(sizes.rotated)], rounds=rounds)
    stored = {form.name for form in FORMATS}
    return Measured(
        n, seconds, {p.name: nbytes(p.weights()[0]) for p in chosen if p.name in stored}
    )


def speed_table(found: Measured) -> str:
    """Return milliseconds, and how many times as fast as XLA in f32, by program and M."""
    targets = {form.name: form.targets for form in FORMATS}

    def cells(name: str, m: int) -> list[str]:
        seconds, wanted = found.seconds[m], targets.get(name, {}).get(m)
        target = "" if wanted is None else f"≥ {wanted:g}"
        return [f"{seconds[name] * 1e3:.2f}", f"**{seconds[DENSE] / seconds[name]:.2f}**", target]

    of_each_m = [[f"M = {m}, ms", "×", "target"] for m in found.seconds]
    names = [name for name in next(iter(found.seconds.values())) if name != READING]
    rows = ([name, *itertools.chain(*(cells(name, m) for m in found.seconds))] for name in names)
    return markdown_table([f"N = {found.n}", *itertools.chain(*of_each_m)], rows)


def bandwidth_table(found: Sequence[Measured], rotated: int) -> str:
    """Return the bytes of weights read per second at M = 1, and the share of the maximum."""
    most = [rotated / each.seconds[1][READING] for each in found]

    def cells(form: Format, each: Measured, most: float) -> list[str]:
        rate = each.nbytes[form.name] / each.seconds[1][form.name]
        target = "" if form.share is None else f"≥ {form.share:.0%}"
        return [f"{rate / 1e9:.1f}", f"**{rate / most:.0%}**", target]

    of_each_n = [[f"N = {each.n}, GB/s", "share", "target"] for each in found]
    rows = [[READING, *itertools.chain(*([f"{rate / 1e9:.1f}", "", ""] for rate in most))]]
    for form in OF_F32:
        if form.name in found[0].nbytes:
            row = map(cells, itertools.repeat(form), found, most)
            rows.append([form.name, *itertools.chain(*row)])
    return markdown_table(["M = 1", *itertools.chain(*of_each_n)], rows)


def onnx_table(found: Sequence[Measured]) -> str:
    """Return our milliseconds and those that ONNX Runtime takes for the same products."""

    def row(form: Format, n: int, m: int, seconds: Mapping[str, float]) -> list[str]:
        ours, theirs = seconds[form.name], seconds[onnx_name(form)]
        times = [f"{each * 1e3:.2f}" for each in (ours, theirs)]
        return [f"{form.name}, N = {n}, M = {m}", *times, f"**{theirs / ours:.2f}**", "≥ 1"]

    rows = [
        row(form, each.n, m, seconds)
        for form in (W4A8, W8A8)
        for each in found
        for m, seconds in each.seconds.items()
        if onnx_name(form) in seconds and form.name in seconds
    ]
    return markdown_table(["", "ours, ms", "ONNX Runtime, ms", "ratio", "target"], rows)


def main(sizes: Sizes, *, rounds: int, only: str) -> None:
    # Fail if XLA would compute the products that are shown as ours.
    warnings.filterwarnings("error", "products with quantized weights are computed by XLA")
    found = [measured(n, sizes, rounds=rounds, only=only) for n in sizes.columns]
    for each in found:
        print(speed_table(each), end="\n\n")
    if 1 in sizes.rows:
        print(bandwidth_table(found, sizes.rotated), end="\n\n")
    if missing := onnx_matmul.missing():
        print(f"ONNX Runtime is left out: no {', '.join(missing)} (pip install --group bench).")
    elif any(onnx_name(W4A8) in each for each in found[0].seconds.values()):
        print(onnx_table(found))


QUICK = Sizes(k=512, columns=(512,), rotated=10_000_000)

if __name__ == "__main__":
    options = parser(__doc__)
    options.set_defaults(rounds=41)
    options.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options.add_argument("--brief", action="store_true", help="without Qwix and kernels off")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8, 256], help="M")
    options.add_argument("--columns", type=int, nargs="+", default=[4096, 11008], help="N")
    options.add_argument("--only", default="", help="only programs whose names contain this")
    arguments = options.parse_args()
    sizes = Sizes(rows=arguments.rows, columns=arguments.columns, brief=arguments.brief)
    main(QUICK if arguments.quick else sizes, rounds=arguments.rounds, only=arguments.only)
