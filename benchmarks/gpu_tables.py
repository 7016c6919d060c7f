"""Make the tables of docs/gpu.md from the results of `gpu_all.py`.

In a table of products, a cell is the time of the kernel that `veneer` selects for the product now.
The results contain all configurations, so a change of the selection needs no new measurement.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from measure import markdown_table

import veneer as vn
from veneer.kernels import MatmulOperands, MatmulProblem, select
from veneer.kernels.common.table import TABLE
from veneer.kernels.gpu import cuda_program, hopper
from veneer.kernels.gpu import matmul as gpu_matmul
from veneer.quant.ops.by_kernel import codes_of

#: The names of methods in the results.
DENSE, VENEER, BY_XLA = "XLA bf16", "veneer", "veneer, by XLA"
#: The name of each layout of a weight in the results, and its shape on the page.
LAYOUTS = {"columns": "`[N, K]`", "rows": "`[K, N]`"}
MISSING = "–"

Line = dict[str, Any]


class Format(NamedTuple):
    """A weight format and its tile size along K. The tile is None for per-channel scales."""

    qtype: str
    tile: int | None = None

    def __str__(self) -> str:
        return self.qtype if self.tile is None else f"{self.qtype}, tile {self.tile}"


def format_of(text: str) -> Format:
    """Parse the text of a `Format`.

    >>> format_of("int4, tile 128")
    Format(qtype='int4', tile=128)
    """
    qtype, _, tile = text.partition(", tile ")
    return Format(qtype, int(tile) if tile else None)


def quantized(key: Any, shape: tuple[int, ...], format: Format, layout: str) -> Any:
    """Quantize random weights.

    Their shape is `[..., K, N]` if `layout` is "rows", otherwise `[..., N, K]`.
    """
    contracted = len(shape) - (2 if layout == "rows" else 1)
    dense = jax.random.normal(key, shape, jnp.bfloat16) / shape[contracted] ** 0.5
    channels = [axis for axis in range(len(shape)) if axis != contracted]
    tiled = {} if format.tile is None else {contracted: format.tile}
    method = "minmax" if format.qtype == "uint4" else None
    return vn.quant.quantize(
        dense, format.qtype, channelwise_axes=channels, tiled_axes=tiled, calibration_method=method
    )


# Find the kernel for a product.


def problem_of(x: Any, q: Any, layout: str) -> tuple[MatmulOperands, MatmulProblem]:
    """Return the arguments of a kernel in `veneer.kernels.gpu` for a product."""
    codes, offset = codes_of(q.qtype, q.zero_point is not None)
    zero_point = None if q.zero_point is None else q.zero_point[None]
    operands = MatmulOperands(x[None], q.packed[None], q.scale[None], zero_point)
    return operands, MatmulProblem(codes, q.shape[-1], layout, "bfloat16", offset, print)


def few_rows_name(config: cuda_program.Config) -> str:
    """Return the name of a configuration of the kernel for few rows."""
    name = f"few rows, {config.n_tiles} tiles, {config.k_warps} warps"
    return f"{name}, digits" if config.by_digits else name


def many_rows_name(config: hopper.HopperConfig) -> str:
    """Return the name of a configuration of the kernel for many rows."""
    name = f"many rows, {config.tile_m}x{config.block_n}x{config.tile_k}, {config.stages} stages"
    return f"{name}, overlap" if config.overlap else name


def selected(format: Format, layout: str, m: int, k: int, n: int) -> str:
    """Return the name of the method that Veneer selects on a Hopper GPU with JAX 0.11.

    >>> selected(Format("int4", 128), "columns", 256, 4096, 11008)
    'many rows, 256x128x64, 4 stages, overlap'
    """
    shape = (k, n) if layout == "rows" else (n, k)
    q = jax.eval_shape(lambda key: quantized(key, shape, format, layout), jax.random.key(0))
    made: list[Any] = []

    def record(x: Any, q: Any) -> None:
        made.extend(problem_of(x, q, layout))

    jax.eval_shape(record, jax.ShapeDtypeStruct((m, k), jnp.bfloat16), q)
    operands, problem = made
    sizes = problem.shape(operands)
    # Do not call `select.find_kernel`, which depends on the GPU and JAX version of this process.
    rows = (row for row in TABLE if row.platform == "gpu")
    fits = lambda row: (
        row.computes(problem.codes, sizes)
        and select.device_kernel(row).can_compute(problem.codes, sizes)
    )
    kernel = next(filter(fits, rows), None)
    if kernel is None:
        return BY_XLA
    bits, tile = problem.codes.bits, format.tile or k
    if kernel.module == "gpu.hopper":
        config = hopper.config_for(hopper.Sizes(m, k, n, bits, tile))
        assert config is not None
        return many_rows_name(config)
    return few_rows_name(cuda_program.config_for(gpu_matmul.layout_of(operands, problem)))


# Read the results.


def read(folder: Path) -> dict[str, Line]:
    """Return the last result of each key in all files, or its error if no attempt succeeded."""
    by_key: dict[str, Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if path.name == "journal.jsonl":
            continue
        for text in path.read_text("utf-8").splitlines():
            line = json.loads(text)
            if "error" not in line or line["key"] not in by_key:
                by_key[line["key"]] = line
    # Two methods can be the same program. It is measured once.
    return {key: by_key.get(line.get("same_as", key), line) for key, line in by_key.items()}


class Products(NamedTuple):
    """The results of part 3.

    **Arguments:**

    - `cells`: the results by method, for each (K, N, format, layout, M).
    - `dense`: the microseconds of XLA's bf16 product, for each (K, N, layout, M).
    """

    cells: dict[tuple[int, int, str, str, int], dict[str, Line]]
    dense: dict[tuple[int, int, str, int], float]


def products_of(by_key: dict[str, Line]) -> Products:
    cells: dict[Any, dict[str, Line]] = {}
    dense: dict[Any, list[float]] = {}
    for key, line in by_key.items():
        if not key.startswith("3/") or "us" not in line:
            continue
        _, size, format, layout, m, name = key.split("/", 5)
        k, n = map(int, size.split("x"))
        cells.setdefault((k, n, format, layout, int(m)), {})[name] = line
        if name == DENSE:
            dense.setdefault((k, n, layout, int(m)), []).append(line["us"])
    return Products(cells, {key: median(times) for key, times in dense.items()})


#: The custom call of each kernel of Veneer, by the first words of its method names.
_KERNELS = {"few rows": "xla.gpu.ptx", "many rows": "mosaic_gpu"}


def line_of(by_name: dict[str, Line], name: str) -> Line | None:
    """Return the result of a method.

    If the method has no result, return the result of `veneer` if that ran the same kernel.
    """
    line, wanted = by_name.get(VENEER), [kind for kind in _KERNELS if name.startswith(kind)]
    if name in by_name or line is None or not (wanted or name == BY_XLA):
        return by_name.get(name)
    ran = line.get("kernels") or ""
    return line if [kind for kind, word in _KERNELS.items() if word in ran] == wanted else None


# Make the tables.

_FORMATS = ("int4", "int8", "float8_e4m3fn", "uint4", "nf4", "mxfp4")


def _order(text: str) -> int:
    """Return the position in the tables of a label that begins with a format."""
    qtype = text.partition(",")[0]
    return _FORMATS.index(qtype) if qtype in _FORMATS else len(_FORMATS)


def tables(by_key: dict[str, Line]) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each place in docs/gpu.md. Skip parts without results."""
    for place, make in PLACES.items():
        if text := make(by_key):
            yield place, text


def device_text(by_key: dict[str, Line]) -> str:
    versions, copy, peak = (by_key.get(f"1/{name}", {}) for name in ("versions", "copy", "peak"))
    if not versions or "GB/s" not in copy or "TFLOP/s" not in peak:
        return ""
    driver = f", driver {versions['driver']}" if versions.get("driver") else ""
    return (
        f"{versions['device']}, JAX {versions['jax']}{driver}, {versions['date'][:10]}. A copy "
        f"moves {copy['GB/s']:,.0f} GB/s. XLA's product of two bf16 matrices of 8192 x 8192 "
        f"computes {peak['TFLOP/s']:,.0f} TFLOP/s."
    )


def product_tables(by_key: dict[str, Line]) -> str:
    """Return a table per weight with several M, and one table for all other weights."""
    products, large, small = products_of(by_key), [], []
    for k, n in dict.fromkeys(cell[:2] for cell in products.cells):
        rows = sorted({m for *size, _, _, m in products.cells if tuple(size) == (k, n)})
        if len(rows) > 1:
            large.append(_product_table(products, k, n, rows))
        else:
            small += _small_rows(products, k, n)
    if small:
        large.append(markdown_table(["M = 1", DENSE + ", µs", "µs", "×"], small))
    return "\n\n".join(large)


def _product_table(products: Products, k: int, n: int, rows: Sequence[int]) -> str:
    header = [f"K x N = {k} x {n}", *(f"M = {m}" for m in rows)]
    body = []
    for layout, shape in LAYOUTS.items():
        times = [products.dense.get((k, n, layout, m)) for m in rows]
        if any(times):
            told = (MISSING if us is None else f"{us:.1f}" for us in times)
            body.append([f"{DENSE}, {shape}", *told])
    formats = {cell[2] for cell in products.cells if cell[:2] == (k, n)}
    for text in sorted(formats, key=_order):
        format = format_of(text)
        by_integers = f"veneer, {format.qtype} x {format.qtype}"
        for layout, shape in LAYOUTS.items():
            names = [selected(format, layout, m, k, n) for m in rows]
            label = f"{text}, {shape}"
            body += _ratio_row(products, label, (k, n, text, layout), rows, names)
        for layout, shape in LAYOUTS.items():
            label = f"{text}, activations {format.qtype}, {shape}"
            names = [by_integers] * len(rows)
            body += _ratio_row(products, label, (k, n, text, layout), rows, names)
    return markdown_table(header, body)


def _ratio_row(
    products: Products, label: str, cell: tuple, rows: Sequence[int], names: Sequence[str]
) -> list[list[str]]:
    """Return a row of times and ratios. The list is empty if there is no time."""
    k, n, _, layout = cell
    texts = []
    for m, name in zip(rows, names, strict=True):
        line = line_of(products.cells.get((*cell, m), {}), name)
        dense = products.dense.get((k, n, layout, m))
        is_known = line is not None and dense is not None
        texts.append(f"{line['us']:.1f}, **{dense / line['us']:.2f}**" if is_known else MISSING)
    return [[label, *texts]] if set(texts) != {MISSING} else []


def _small_rows(products: Products, k: int, n: int) -> Iterator[list[str]]:
    for (*size, text, layout, m), by_name in products.cells.items():
        dense = products.dense.get((k, n, layout, m))
        line = line_of(by_name, selected(format_of(text), layout, m, k, n))
        if tuple(size) == (k, n) and dense is not None and line is not None:
            label = f"{k} x {n}, {text}, {LAYOUTS[layout]}"
            yield [label, f"{dense:.1f}", f"{line['us']:.1f}", f"**{dense / line['us']:.2f}**"]


def bandwidth_table(by_key: dict[str, Line]) -> str:
    """Return a table of the bytes of weights that are read per second at M = 1."""
    products, copy = products_of(by_key), by_key.get("1/copy", {}).get("GB/s")
    rows: dict[str, dict[str, str]] = {}
    for (k, n, text, layout, m), by_name in products.cells.items():
        is_small = not any(cell[:2] == (k, n) and cell[-1] > 1 for cell in products.cells)
        line = line_of(by_name, selected(format_of(text), layout, m, k, n))
        if m != 1 or is_small or copy is None or line is None:
            continue
        told = f"{line['gbs']:,} GB/s, **{line['gbs'] / copy:.0%}**"
        rows.setdefault(f"{text}, {LAYOUTS[layout]}", {})[f"{k} x {n}"] = told
    sizes = list(dict.fromkeys(size for row in rows.values() for size in row))
    names = sorted(rows, key=_order)
    body = [[name, *(rows[name].get(size, MISSING) for size in sizes)] for name in names]
    return markdown_table(["M = 1", *sizes], body) if body else ""


def dequantization_table(by_key: dict[str, Line]) -> str:
    copy, body = by_key.get("1/copy", {}).get("GB/s"), []
    for key, line in by_key.items():
        if key.startswith("8/") and "gbs" in line:
            _, text, layout = key.split("/")
            share = MISSING if copy is None else f"**{line['gbs'] / copy:.0%}**"
            told = [f"{line['us']:.1f}", f"{line['gbs']:,.0f}", share]
            body.append([f"{text}, {LAYOUTS[layout]}", *told])
    return markdown_table(["to bf16", "µs", "GB/s", "of a copy"], body) if body else ""


_CHOICES = {"auto": "kernels", "xla": "XLA"}


def _label(name: str) -> str:
    """Return a row's label: "int8, by kernels" for "int8, auto"."""
    text, _, choice = name.rpartition(", ")
    return f"{text}, by {_CHOICES[choice]}" if choice in _CHOICES else name


def _ordered(lines: Iterable[tuple[str, Line]]) -> list[tuple[str, Line]]:
    """Sort the names: bf16 first, and kernels before XLA."""
    return sorted(lines, key=lambda pair: (not pair[0].startswith("bf16"), pair[0]))


def decoding_tables(by_key: dict[str, Line]) -> str:
    found: dict[str, dict[int, Line]] = {}
    for key, line in by_key.items():
        if key.startswith("5/") and "tokens_per_s" in line:
            _, name, batch = key.split("/")
            found.setdefault(name, {})[int(batch.removeprefix("batch "))] = line
    batches = sorted({batch for by_batch in found.values() for batch in by_batch})
    body = []
    for name, by_batch in _ordered(found.items()):
        row = [_label(name), f"{next(iter(by_batch.values()))['bytes'] / 1e6:,.0f}"]
        for line in map(by_batch.get, batches):
            row.append(_rate(line["tokens_per_s"], line.get("ratio")) if line else MISSING)
        body.append(row)
    header = ["", "weights, MB", *(f"batch {batch}, tokens/s" for batch in batches)]
    return markdown_table(header, body) if body else ""


def _rate(value: float, ratio: float | None) -> str:
    return f"{value:,.0f}" if ratio is None else f"{value:,.0f}, **{ratio:.2f}**"


def training_table(by_key: dict[str, Line]) -> str:
    lines = ((key[2:], line) for key, line in by_key.items() if key.startswith("6/"))
    body = [
        [f"LoRA, {name}", f"{line['ms']:.1f}", f"{line['peak_bytes'] / 1e9:.2f}"]
        for name, line in _ordered(lines)
        if "peak_bytes" in line
    ]
    return markdown_table(["one step", "ms", "memory, GB"], body) if body else ""


def cache_table(by_key: dict[str, Line]) -> str:
    found: dict[str, dict[str, Line]] = {}
    for key, line in by_key.items():
        if key.startswith("7/") and "us" in line:
            _, context, name = key.split("/")
            found.setdefault(name, {})[context] = line
    contexts = list(dict.fromkeys(c for by_context in found.values() for c in by_context))
    contexts.sort(key=lambda text: int(text.split()[0]))
    body = []
    for name, by_context in _ordered(found.items()):
        row = [_label(name)]
        for line in map(by_context.get, contexts):
            if line is None:
                row += [MISSING, MISSING]
                continue
            row += [_rate(line["us"], line.get("ratio")), f"{(line['temp_bytes'] or 0) / 1e6:,.0f}"]
        body.append(row)
    header = [text for c in contexts for text in (f"{c}, µs a layer", "temporary, MB")]
    return markdown_table(["cache", *header], body) if body else ""


#: The places in docs/gpu.md, and the functions that make their texts.
PLACES: dict[str, Callable[[dict[str, Line]], str]] = {
    "device": device_text,
    "products": product_tables,
    "bandwidth": bandwidth_table,
    "dequantization": dequantization_table,
    "decoding": decoding_tables,
    "training": training_table,
    "cache": cache_table,
}
