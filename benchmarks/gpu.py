"""Products of bf16 activations with quantised weights on a GPU, beside XLA's in bf16; and a Llama.

    python benchmarks/gpu.py --write     # on a machine with a GPU: into docs/gpu.md
    python benchmarks/gpu.py --small     # small sizes, on any device, to see that it runs

A product is timed as one of many in a compiled program, each with a weight and activations of its
own, so that weights come from memory and not from a cache, and no time of Python's is in it. The
figure is the median of runs, by turns with the others. Beside XLA in bf16 there are: our way by
XLA, our kernels (VENEER_KERNELS=pallas), and other forms in which the product can be written for
XLA. Every result is compared with one in f32 first. A form that is wrong, or does not run, has no
figures, and is named below its table.

*Bandwidth* is what a copy reads and writes in a second; *peak*, what XLA's bf16 product computes.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from measure import Side, markdown_table, medians, parser
from report import write

import veneer as vn
from veneer import kernels

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import llama

DENSE, BY_XLA, BY_KERNEL = "XLA bf16", "ours, by XLA", "ours, by kernels"
_ERROR = 0.02  # relative to the result in f32: bf16 has eight bits


class Format(NamedTuple):
    """A format of weights, and how many values along the sum share a scale; None for all."""

    qtype: str
    tile: int | None = None

    def __str__(self) -> str:
        return self.qtype if self.tile is None else f"{self.qtype}, tile {self.tile}"


FORMATS = (
    Format("int8"),
    Format("int4", 128),
    Format("int4", 64),
    Format("int4"),
    Format("nf4", 64),
    Format("float8_e4m3fn"),
    Format("mxfp4", 32),
)


@dataclass(frozen=True)
class Sizes:
    """What is timed, and how much of it."""

    rows: Sequence[int] = (1, 4, 16, 64, 256, 1024, 4096)  # M
    weights: Sequence[tuple[int, int]] = ((4096, 4096), (4096, 11008), (8192, 28672))  # K, N
    rotated: int = 256_000_000  # bytes of weights in a program
    most: int = 32  # weights in a program
    copied: int = 1 << 30  # bytes
    peak: int = 8192  # M, K and N
    # Of a Llama, as its config.json says: that of 1.2 billion parameters.
    llama: Sequence[int] = (128256, 2048, 8192, 16, 32, 8, 64)
    tokens: int = 128


SMALL = Sizes((1, 4), ((256, 128),), 1, 2, 1 << 16, 64, (64, 128, 256, 1, 2, 1, 64), 4)

# The forms of a product: from activations and arrays to the result.


class Form(NamedTuple):
    """A way to write a product: what it takes for a weight, and what it computes."""

    name: str
    weight: Any
    compute: Callable[[jax.Array, Any], jax.Array]
    within: Callable[[], Any] = contextlib.nullcontext  # as it is compiled


def forms(dense: jax.Array, format: Format) -> Iterator[Form]:
    """Yields the forms of a product with a weight `[K, N]`, ours first."""
    tiled = {} if format.tile is None else {0: format.tile}
    q = vn.quant.quantize(dense, format.qtype, channelwise_axes=[1], tiled_axes=tiled)
    multiply = vn.implicit(jnp.matmul)
    yield Form(BY_XLA, q, multiply, functools.partial(kernels.use, "xla"))
    yield Form(BY_KERNEL, q, multiply, functools.partial(kernels.use, "pallas"))
    if q.format.codebook is not None:
        return
    codes = q.codes()
    if format.qtype == "int4":
        codes = codes.astype(jnp.int4)
    by_hand = {"scale inside": _inside, "scale outside": _outside, "convert in the dot": _mixed}
    if format.tile is not None:
        del by_hand["convert in the dot"]
    stored = f", {codes.dtype.name}" if format.qtype == "int4" else ""
    for name, compute in by_hand.items():
        yield Form(name + stored, (codes, q.scale), compute)


def _inside(x: jax.Array, weight: Any) -> jax.Array:
    codes, scale = weight
    tiles = codes.astype(x.dtype).reshape(scale.shape[0], -1, codes.shape[1])
    return x @ (tiles * scale[:, None].astype(x.dtype)).reshape(codes.shape)


def _outside(x: jax.Array, weight: Any) -> jax.Array:
    codes, scale = weight
    tiles = codes.astype(x.dtype).reshape(scale.shape[0], -1, codes.shape[1])
    parts = x.reshape(x.shape[0], *tiles.shape[:2])
    sums = jnp.einsum("mtk,tkn->tmn", parts, tiles, preferred_element_type=jnp.float32)
    return (sums * scale[:, None]).sum(0).astype(x.dtype)


def _mixed(x: jax.Array, weight: Any) -> jax.Array:
    codes, scale = weight
    numbers = ((1,), (0,)), ((), ())
    sums = jax.lax.dot_general(x, codes, numbers, preferred_element_type=jnp.float32)
    return (sums * scale).astype(x.dtype)


# What is measured.


def products(k: int, n: int, sizes: Sizes, chosen: Sequence[Format], rounds: int) -> str:
    """The tables for weights `[k, n]`: the time of a product, and how much of the device it is."""
    bandwidth, peak = device_rates(sizes, rounds)
    dense = jax.random.normal(jax.random.key(0), (k, n), jnp.bfloat16) / k**0.5
    failed: list[str] = []
    dense_form = Form(DENSE, dense, jnp.matmul)
    base = seconds_by_rows([dense_form], dense, sizes, rounds, failed)[DENSE]
    times, shares = [_row(DENSE, base, base)], [_share(DENSE, dense, base, bandwidth, peak, k, n)]
    for format in chosen:
        some = [form._replace(name=f"{format}: {form.name}") for form in forms(dense, format)]
        found = seconds_by_rows(some, some[0].weight.dequantize(), sizes, rounds, failed)
        times += [_row(form.name, found[form.name], base) for form in some]
        shares += [
            _share(form.name, form.weight, found[form.name], bandwidth, peak, k, n) for form in some
        ]
    header = [f"{k} x {n}, µs and times as fast as {DENSE}", *(f"M = {m}" for m in sizes.rows)]
    most = sizes.rows[-1]
    return "\n\n".join(
        [
            markdown_table(header, times),
            markdown_table(
                ["", "bytes", f"of bandwidth, M = {sizes.rows[0]}", f"of peak, M = {most}"], shares
            ),
            *failed,
        ]
    )


def seconds_by_rows(
    some: Sequence[Form], expected: jax.Array, sizes: Sizes, rounds: int, failed: list[str]
) -> dict[str, dict[int, float]]:
    """The median seconds of a product of each form, by M; why one has none is added to `failed`."""
    found: dict[str, dict[int, float]] = {form.name: {} for form in some}
    for m in sizes.rows:
        sides, counts = [], {}
        for form in some:
            count = max(2, min(sizes.most, sizes.rotated // nbytes(form.weight) + 1))
            count = min(count, max(2, sizes.most * 64 // m))
            try:
                run = program(form, m, expected, count)
            except Exception as error:  # of XLA, Pallas or Triton; or it is wrong
                reason = str(error).strip().partition("\n")[0][:200]
                failed.append(f"{form.name}, M = {m}: {type(error).__name__}: {reason}")
                continue
            sides.append(Side(form.name, run))
            counts[form.name] = count
        for name, seconds in medians(sides, rounds=rounds).items():
            found[name][m] = seconds / counts[name]
    return found


def program(form: Form, m: int, expected: jax.Array, count: int) -> Callable[[], Any]:
    """A compiled program of so many products, found right; each has a weight of its own.

    **Raises:** `AssertionError` where it is wrong.
    """
    weights = [jax.tree.map(jnp.copy, form.weight) for _ in range(count)]
    xs = list(jax.random.normal(jax.random.key(m), (count, m, len(expected)), jnp.bfloat16))
    with form.within():
        every = lambda xs, ws: [form.compute(x, w) for x, w in zip(xs, ws, strict=True)]
        run = jax.jit(every).lower(xs, weights).compile()
    result, x = run(xs, weights)[-1].astype(jnp.float32), xs[-1].astype(jnp.float32)
    right = jnp.matmul(x, expected.astype(jnp.float32), precision="highest")
    error = float(jnp.linalg.norm(result - right) / jnp.linalg.norm(right))
    assert error < _ERROR, f"wrong by {error:.3g}"
    return functools.partial(run, xs, weights)


@functools.cache
def device_rates(sizes: Sizes, rounds: int) -> tuple[float, float]:
    """Bytes a second of a copy, read and written, and operations a second of XLA's bf16 product."""
    memory = jnp.zeros(sizes.copied // 4, jnp.float32)
    square = jnp.ones((sizes.peak, sizes.peak), jnp.bfloat16)
    copy, multiply = jax.jit(lambda x: x + 1), jax.jit(jnp.matmul)
    sides = [
        Side("copy", lambda: copy(memory)),
        Side("product", lambda: multiply(square, square)),
    ]
    seconds = medians(sides, rounds=rounds)
    return 2 * memory.nbytes / seconds["copy"], 2 * sizes.peak**3 / seconds["product"]


def nbytes(tree: Any) -> int:
    """The bytes of arrays as they are stored: two int4 are one."""
    size = lambda x: x.nbytes // 2 if x.dtype == jnp.int4 else x.nbytes
    return sum(size(x) for x in jax.tree.leaves(tree))


def _row(name: str, seconds: dict[int, float], base: dict[int, float]) -> list[str]:
    return [
        name,
        *(
            f"{seconds[m] * 1e6:.1f}, **{base[m] / seconds[m]:.2f}**" if m in seconds else "–"
            for m in base
        ),
    ]


def _share(
    name: str, weight: Any, seconds: dict[int, float], bandwidth: float, peak: float, k: int, n: int
) -> list[str]:
    if not seconds:
        return [name, f"{nbytes(weight):,}", "–", "–"]
    few, many = min(seconds), max(seconds)
    read = nbytes(weight) / seconds[few] / bandwidth
    return [
        name,
        f"{nbytes(weight):,}",
        f"{read:.0%}",
        f"{2 * many * k * n / seconds[many] / peak:.0%}",
    ]


# A model.


def decoding(sizes: Sizes, rounds: int) -> str:
    """The table of tokens a second of examples/llama.py, at batch 1, and of what is in memory."""
    config = llama.Config(*sizes.llama)
    dense = jax.tree.map(lambda x: x.astype(jnp.bfloat16), llama.init(jax.random.key(0), config))
    packed: dict[str, Any] = {"bf16": dense}
    for qtype, tile in (("int8", None), ("int4", 128)):
        matrices = r".*(_proj|lm_head)\.weight"
        rule = vn.quant.Rule(matrices, qtype, tile_size=tile, tile_axis=-1)
        packed[qtype] = vn.quant.quantize_tree(dense, [rule])
    write_text = functools.partial(
        llama.generate,
        config=config,
        prompt=jnp.ones((1, 8), jnp.int32),
        length=8,
        key=jax.random.key(0),
        count=sizes.tokens,
    )
    sides: list[Side] = []
    peaks: dict[str, str] = {}
    for name, params in packed.items():
        choices = {"xla": "XLA"} if name == "bf16" else {"xla": "XLA", "pallas": "kernels"}
        for choice, by in choices.items():
            label = f"{name}, by {by}"
            with kernels.use(choice):
                compiled = jax.jit(vn.implicit(write_text)).lower(params).compile()
            peaks[label] = _memory(compiled)
            sides.append(Side(label, functools.partial(compiled, params)))
    seconds = medians(sides, rounds=rounds)
    base = seconds["bf16, by XLA"]
    rows = [
        [
            label,
            f"{nbytes(packed[label.partition(',')[0]]):,}",
            peaks[label],
            f"{sizes.tokens / took:.1f}",
            f"**{base / took:.2f}**",
        ]
        for label, took in seconds.items()
    ]
    return markdown_table(
        ["a Llama, batch of 1", "bytes", "and temporary", "tokens a second", "×"], rows
    )


def _memory(compiled: Any) -> str:
    """What a program needs beside its arguments, in bytes, where XLA says it."""
    analysis = compiled.memory_analysis()
    return "" if analysis is None else f"{analysis.temp_size_in_bytes:,}"


# The page.


def made_with(sizes: Sizes, rounds: int) -> str:
    """The device and the versions, and what the device is found to be capable of."""
    bandwidth, peak = device_rates(sizes, rounds)
    return (
        f"JAX {jax.__version__}; {jax.devices()[0].device_kind}: a copy moves "
        f"{bandwidth / 1e9:,.0f} GB/s, XLA's product in bf16 computes {peak / 1e12:,.1f} TFLOP/s."
    )


def tables(sizes: Sizes, chosen: Sequence[Format], rounds: int) -> Iterator[str]:
    yield made_with(sizes, rounds)
    for k, n in sizes.weights:
        yield products(k, n, sizes, chosen, rounds)
    yield decoding(sizes, rounds)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--small", action="store_true", help="small sizes, on any device")
    options.add_argument("--write", action="store_true", help="put the tables into docs/gpu.md")
    options.add_argument("--only", nargs="+", help="of the formats, those of these names")
    arguments = options.parse_args()
    if arguments.write and jax.default_backend() != "gpu":
        options.error(f"docs/gpu.md is of a GPU, and this is a {jax.default_backend()}")
    names = arguments.only or [format.qtype for format in FORMATS]
    chosen = [format for format in FORMATS if format.qtype in names]
    printed = []
    for text in tables(SMALL if arguments.small else Sizes(), chosen, arguments.rounds):
        print(text, end="\n\n", flush=True)
        printed.append(text)
    if arguments.write:
        write("gpu", "gpu.py", "\n\n".join(printed))


if __name__ == "__main__":
    main()
