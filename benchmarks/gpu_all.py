"""Measure products, dequantization and models on one GPU, within a time budget.

    python benchmarks/gpu_all.py --seconds 800 --out DIR
    python benchmarks/gpu_all.py --small --seconds 240 --out DIR   # tiny sizes, on any device
    python benchmarks/gpu_all.py --parts 3 --only int4.*columns --rows 1 16 --out DIR
    python benchmarks/gpu_all.py --summary --out DIR               # print the tables of a run
    python benchmarks/gpu_all.py --summary --write --out DIR       # write them into docs/gpu.md

Parts: 1 device, 2 correctness, 3 products, 4 XLA options, 5 decoding, 6 a LoRA step, 7 attention
to a quantized cache, 8 dequantization. Each measurement is written immediately, as a line of JSON
in `DIR/partN.jsonl`. DIR may hold files of several runs: a result in a later file replaces an
earlier one.

The measurements run in a worker process. XLA can abort a process, and a faulty kernel can leave
CUDA unusable. Then a new worker continues. It repeats no measurement, compiles programs that were
in progress one at a time, and skips programs that failed twice. `DIR/journal.jsonl` has the steps.
"""

import argparse
import collections
import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_models
import gpu_tables
import jax
import jax.numpy as jnp
import numpy as np
from gpu_tables import BY_XLA, DENSE, LAYOUTS, VENEER, Format, problem_of, quantized
from gpu_worker import (
    FP8,
    INT4,
    INT8,
    MXFP4,
    NF4,
    QUICK,
    UINT4,
    Job,
    Program,
    Sizes,
    Worker,
    device_seconds,
    stored_bytes,
)
from jax import lax
from report import write

import veneer as vn
from veneer import kernels
from veneer.kernels.gpu import cuda_program, hopper
from veneer.kernels.gpu import matmul as gpu_matmul

#: The parts in the order in which they run, and the seconds of each in a budget of 800. Later parts
#: get the time that a part does not use. Compiling the programs of part 6 takes minutes, so it
#: begins at the start.
SHARES = {1: 10, 2: 60, 3: 350, 8: 20, 6: 150, 5: 110, 7: 60, 4: 40}


_ERROR = 0.02  # the largest allowed error, relative to the f32 product with the dequantized weight
_RESTARTS = 6

#: XLA options that can be set per program, and the methods that they can affect.
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "subchannel fusion": (
        {"xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True},
        ("scale inside",),
    ),
    "fusion v2": ({"xla_gpu_experimental_gemm_fusion_v2": True}, (BY_XLA,)),
    "no cuBLAS": ({"xla_gpu_cublas_fallback": False}, (BY_XLA, "bitcast to int4")),
}


# Define the methods.


class Method(NamedTuple):
    """A method of computing a product with a quantized weight.

    **Arguments:**

    - `compute`: the function of activations `[M, K]` and the stored weight. It returns `[M, N]`.
    - `weight`: the function that converts a `QArray` to the stored weight.
    - `context`: returns a context manager, which is entered while the program is traced.
    - `limit`: the largest allowed relative error.
    - `rows`: the smallest and the largest M.
    - `options`: XLA options for compiling the program.
    """

    name: str
    compute: Callable[[jax.Array, Any], jax.Array]
    weight: Callable[[Any], Any] = lambda q: q
    context: Callable[[], Any] = contextlib.nullcontext
    limit: float = _ERROR
    rows: tuple[int, int] = (1, 1 << 30)
    options: dict[str, Any] | None = None

    @property
    def is_general(self) -> bool:
        """Return whether part 2 checks this method with batches and derivatives."""
        return self.name in (VENEER, BY_XLA)


def methods(format: Format, layout: str) -> Iterator[Method]:
    """Yield the methods for a format and layout. The first one is the baseline."""
    is_rows = layout == "rows"
    numbers = ((1,), (0 if is_rows else 1,)), ((), ())
    dot = functools.partial(
        lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32
    )
    multiply = lambda x, w: x @ (w if is_rows else w.mT)

    yield Method(DENSE, multiply, _dense)
    for name, choice in ((VENEER, "auto"), (BY_XLA, "xla")):
        yield Method(name, vn.implicit(multiply), context=functools.partial(kernels.use, choice))
    if format.tile is None:

        def outside(x: jax.Array, q: Any) -> jax.Array:
            total = dot(x, q.codes().astype(x.dtype))
            return (total * q.scale.reshape(1, -1).astype(jnp.float32)).astype(x.dtype)

        yield Method("scale outside", outside)
        stored = functools.partial(
            vn.quant.ActivationQuantized,
            qtype=format.qtype,
            contracting=(-2 if is_rows else -1,),
        )
        name = f"veneer, {format.qtype} x {format.qtype}"
        yield Method(name, vn.implicit(multiply), stored, limit=0.05)
    if format.qtype in ("int4", "int8", "float8_e4m3fn"):
        inside = lambda x, q: dot(x, _scaled(q.codes(), q.scale, x.dtype, is_rows)).astype(x.dtype)
        yield Method("scale inside", inside)
    if format.qtype == "int4":

        def bitcast(x: jax.Array, q: Any) -> jax.Array:
            codes = lax.bitcast_convert_type(q.packed, jnp.int4).reshape(q.shape)
            return dot(x, _scaled(codes, q.scale, x.dtype, is_rows)).astype(x.dtype)

        yield Method("bitcast to int4", bitcast)
    if jax.default_backend() == "gpu":
        yield from kernel_methods(format, layout)


def kernel_methods(format: Format, layout: str) -> Iterator[Method]:
    """Yield a method for each kernel and each configuration to try."""
    is_rows = layout == "rows"

    def few(config: Any) -> Callable[[jax.Array, Any], jax.Array]:
        def compute(x: jax.Array, q: Any) -> jax.Array:
            return gpu_matmul.separate_product(*problem_of(x, q, layout), config)[0]

        return compute

    def many(config: Any) -> Callable[[jax.Array, Any], jax.Array]:
        return lambda x, q: hopper.product(*problem_of(x, q, layout), config)[0]

    # Try these numbers of tiles along N and of warps along K.
    digits = ((4, 4), (4, 8), (8, 4)) if is_rows else ((4, 4), (2, 4), (2, 8), (1, 16))
    floats = ((4, 4), (4, 8)) if is_rows else ((2, 4), (2, 8), (1, 8))
    plan = [(1, (1, 8), False), (2, (9, 16), False), (4, (17, 64), False)]
    if format.qtype in ("int4", "int8", "uint4"):
        plan.insert(0, (1, (1, cuda_program.MOST_DIGIT_ROWS), True))
    for m_tiles, rows, by_digits in plan:
        for n_tiles, k_warps in digits if by_digits else floats:
            config = cuda_program.Config(n_tiles, m_tiles, k_warps, by_digits=by_digits)
            yield Method(gpu_tables.few_rows_name(config), few(config), rows=rows)
    if format in (INT4, INT8, FP8):
        for config in dict.fromkeys((*hopper.CONFIGS.values(), *hopper.FALLBACKS)):
            rows = (config.tile_m // 2, 2 * config.tile_m if config.tile_m < 256 else 1 << 30)
            yield Method(gpu_tables.many_rows_name(config), many(config), rows=rows)


def _dense(q: Any) -> jax.Array:
    return q.dequantize()


def _scaled(codes: jax.Array, scale: jax.Array, dtype: Any, is_rows: bool) -> jax.Array:
    """Multiply codes by the scales of their tiles along K, in `dtype`."""
    axis = 0 if is_rows else 1
    shape = list(codes.shape)
    shape[axis : axis + 1] = [scale.shape[axis], -1]
    tiles = codes.astype(dtype).reshape(shape)
    return (tiles * jnp.expand_dims(scale.astype(dtype), axis + 1)).reshape(codes.shape)


# Part 1: the device.


def measure_device(worker: Worker) -> None:
    """Record versions, the bandwidth of a copy, the bf16 peak and the time of a launch."""
    device, sizes = jax.devices()[0], worker.sizes
    versions = {"jax": jax.__version__, "python": platform.python_version()}
    machine = {"device": device.device_kind, "backend": device.platform, "cpus": os.cpu_count()}
    worker.record(
        "1/versions", **versions, driver=_driver(), **machine, date=time.strftime("%F %T")
    )
    memory = jnp.zeros(sizes.copied // 4, jnp.float32)
    square = jax.random.normal(jax.random.key(0), (sizes.peak, sizes.peak), jnp.bfloat16)
    arguments = {"1/copy": (memory,), "1/peak": (square, square), "1/launch": (jnp.zeros(8),)}
    functions = {"1/copy": lambda x: x + 1, "1/peak": jnp.matmul, "1/launch": lambda x: x + 1}
    programs = worker.compile([Job(k, functions[k], arguments[k]) for k in functions])
    runs = {k: functools.partial(programs[k].run, *arguments[k]) for k in programs}
    for key, took in worker.time(runs).items():
        seconds = statistics.median(took)
        rate = {"1/copy": 2 * memory.nbytes / 1e9, "1/peak": 2 * sizes.peak**3 / 1e12}.get(key)
        unit = {"1/copy": "GB/s", "1/peak": "TFLOP/s"}.get(key, "")
        facts = {} if rate is None else {unit: rate / seconds}
        worker.record(key, us=seconds * 1e6, **facts, **programs[key].facts)


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):
        return None


# Part 2: correctness.


def check(worker: Worker) -> None:
    """Compare `veneer`, by kernels and by XLA, with dense products in f32."""
    made = {}
    for format in worker.sizes.checked_formats:
        for layout in LAYOUTS:
            made[format, layout] = worker.pool.submit(_checked_arrays, worker.sizes, format, layout)
    jobs, details = [], {}
    for (format, layout), future in made.items():
        with worker.attempt(f"2/{format}/{layout}", "make"):
            arrays, expected = future.result(max(0.1, worker.time_left()))
            for method in methods(format, layout):
                key = f"2/{format}/{layout}/{method.name}"
                is_wanted = re.search(worker.options.methods or "", method.name)
                if method.is_general and is_wanted and key not in worker.done:
                    run = functools.partial(_checked_results, method.compute)
                    jobs.append(Job(key, run, arrays, method.context, QUICK))
                    details[key] = arrays, expected, method.limit
    for key, program in worker.compile(jobs).items():
        if time.time() > worker.until:
            return
        arrays, expected, limit = details[key]
        with worker.attempt(key, "run"):
            result = jax.block_until_ready(program.run(*arrays))
            errors = {name: _relative_error(result[name], expected[name]) for name in result}
            wrong = {name: round(e, 4) for name, e in errors.items() if not e < limit}
            worker.record(
                key, worst=max(errors.values()), wrong=wrong, kernels=program.facts["kernels"]
            )


def _relative_error(result: Any, expected: np.ndarray) -> float:
    result = np.asarray(result).astype(np.float32)
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


def _checked_arrays(sizes: Sizes, format: Format, layout: str) -> tuple[Any, dict[str, Any]]:
    """Return arguments for `_checked_results`, and the expected results in f32, from NumPy."""
    (k, n), (_, odd) = sizes.checked
    shape = lambda n, *batch: (*batch, k, n) if layout == "rows" else (*batch, n, k)

    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape, np.float32), jnp.bfloat16)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def make(key: Any) -> Any:
        weights = [quantized(key, s, format, layout) for s in (shape(n), shape(odd), shape(n, 4))]
        return weights, [w.dequantize().astype(jnp.float32) for w in weights]

    xs = {m: normal(m, k) for m in sizes.checked_rows}
    weights, dense = make(jax.random.key(0))
    arrays = xs, normal(4, 3, k), normal(sizes.checked_rows[-1], n), *weights
    dense = [np.asarray(w) for w in dense]
    dense = dense if layout == "rows" else [w.swapaxes(-1, -2) for w in dense]
    wide = lambda x: np.asarray(x).astype(np.float32)
    expected = {f"M = {m}": wide(x) @ dense[0] for m, x in xs.items()}
    expected |= {f"odd, M = {m}": wide(x) @ dense[1] for m, x in xs.items()}
    expected["batch"] = expected["vmap of both"] = wide(arrays[1]) @ dense[2]
    expected["vmap of x"] = wide(arrays[1]) @ dense[0]
    expected["derivative by x"] = wide(arrays[2]) @ dense[0].T
    return arrays, expected


def _checked_results(
    compute: Any, xs: Any, batch: Any, cotangent: Any, w: Any, odd: Any, stack: Any
) -> dict[str, Any]:
    last = xs[max(xs)]
    results = {f"M = {m}": compute(x, w) for m, x in xs.items()}
    results |= {f"odd, M = {m}": compute(x, odd) for m, x in xs.items() if m in (1, 3, 16)}
    results["batch"] = compute(batch, stack)
    results["vmap of both"] = jax.vmap(compute)(batch, stack)
    results["vmap of x"] = jax.vmap(lambda x: compute(x, w))(batch)
    results["derivative by x"] = jax.vjp(lambda x: compute(x, w), last)[1](cotangent)[0]
    return results


# Part 3: products.


class Cell(NamedTuple):
    """The products of one weight, in one format and layout, with several M."""

    prefix: str
    sizes: tuple[int, int]  # K, N
    format: Format
    layout: str
    rows: Sequence[int]
    methods: Sequence[Method]


def measure_products(worker: Worker) -> None:
    """Measure the table of products. Begin with the most important cells."""
    sizes, options = worker.sizes, worker.options
    small, large = sizes.weights
    plan = [(small, f, layout, sizes.rows) for f in (INT4, INT8) for layout in LAYOUTS]
    plan += [(large, f, layout, sizes.rows_large) for f in (INT4, INT8) for layout in LAYOUTS]
    plan += [(shape, INT4, "columns", (1,)) for shape in sizes.decoded]
    others = [(f, layout) for f in (FP8, UINT4, NF4, MXFP4) for layout in LAYOUTS]
    plan += [(small, *other, sizes.rows_others) for other in others]
    cells = []
    for (k, n), format, layout, rows in plan:
        name = f"{k}x{n}/{format}/{layout}"
        if options.only and not any(re.search(pattern, name) for pattern in options.only):
            continue
        rows = [m for m in rows if not options.rows or m in options.rows]
        cells.append(Cell(f"3/{name}", (k, n), format, layout, rows, [*methods(format, layout)]))
    measure_cells(worker, cells)


def measure_cells(worker: Worker, cells: Sequence[Cell]) -> None:
    """Compile the programs of all cells, then measure them cell by cell.

    A program is one product. It runs with several equal weights in turn. Together, the weights are
    larger than the L2 cache.
    """
    jobs: list[Job] = []
    known: dict[str, tuple[int, Method, int]] = {}
    pattern = worker.options.methods
    for cell in cells:
        key_aval = jax.eval_shape(lambda: jax.random.key(0))
        for m, method in itertools.product(cell.rows, cell.methods):
            key = f"{cell.prefix}/{m}/{method.name}"
            is_wanted = method.name == DENSE or not pattern or re.search(pattern, method.name)
            fits = method.rows[0] <= m <= method.rows[1]
            if key in worker.done or not fits or not is_wanted:
                continue
            with worker.attempt(key, "trace"):
                make = functools.partial(weight_of, cell)
                stored = jax.eval_shape(lambda k, f=method.weight, g=make: f(g(k)), key_aval)
                x = jax.ShapeDtypeStruct((m, cell.sizes[0]), jnp.bfloat16)
                jobs.append(Job(key, method.compute, (x, stored), method.context, method.options))
                known[key] = m, method, stored_bytes(stored)
    share = 0.5 * worker.time_left()
    worker.deadline, until = worker.deadline - share, worker.deadline
    programs = worker.compile(jobs)
    print(f"{len(programs)} of {len(jobs)} programs are compiled", flush=True)
    worker.deadline = until
    for cell in cells:
        if worker.time_left() > 0:
            some = {k: x for k, x in programs.items() if k.startswith(f"{cell.prefix}/")}
            with worker.attempt(f"{cell.prefix}/cell", "run"):
                _measure_cell(worker, cell, some, known)


def weight_of(cell: Cell, key: Any) -> Any:
    k, n = cell.sizes
    shape = (k, n) if cell.layout == "rows" else (n, k)
    return quantized(key, shape, cell.format, cell.layout)


def _measure_cell(
    worker: Worker,
    cell: Cell,
    programs: dict[str, Program],
    known: dict[str, tuple[int, Method, int]],
) -> None:
    sizes, (k, n) = worker.sizes, cell.sizes
    q = jax.jit(functools.partial(weight_of, cell), compiler_options=QUICK)(jax.random.key(1))
    dense = jax.jit(lambda q: q.dequantize().astype(jnp.float32), compiler_options=QUICK)(q)
    xs = {m: jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16) for m in cell.rows}
    expected = {m: _expected(x[:64], dense, is_rows=cell.layout == "rows") for m, x in xs.items()}
    stored: dict[Any, list[Any]] = {}
    runs: dict[str, list[Callable[[], Any]]] = {}
    errors: dict[str, float] = {}
    for key, program in programs.items():
        m, method, size = known[key]
        with worker.attempt(key, "run"):
            if method.weight not in stored:
                count = max(sizes.least, min(sizes.most, -(-sizes.rotated // size)))
                first = method.weight(q)
                stored[method.weight] = [jax.tree.map(jnp.copy, first) for _ in range(count)]
            calls = [functools.partial(program.run, xs[m], w) for w in stored[method.weight]]
            errors[key] = float(_relative(calls[0]()[:64], expected[m]))
            if not errors[key] < method.limit:
                worker.record(key, error=f"wrong by {errors[key]:.3g}", **program.facts)
                continue
            runs[key] = calls
    took = device_seconds(runs)
    for key, seconds in took.items():
        m, _, size = known[key]
        base = took.get(f"{cell.prefix}/{m}/{DENSE}")
        worker.record(
            key,
            us=round(seconds * 1e6, 2),
            ratio=None if base is None else round(base / seconds, 3),
            gbs=round(size / seconds / 1e9),
            tflops=round(2 * m * k * n / seconds / 1e12, 1),
            relative_error=round(errors[key], 5),
            **programs[key].facts,
        )


@jax.jit
def _relative(result: jax.Array, expected: jax.Array) -> jax.Array:
    difference = result.astype(jnp.float32) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)


@functools.partial(jax.jit, static_argnames="is_rows", compiler_options=QUICK)
def _expected(x: jax.Array, dense: jax.Array, is_rows: bool) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), dense if is_rows else dense.T, precision="highest")


# Part 4: XLA options.


def measure_options(worker: Worker) -> None:
    """Measure products with XLA options that can affect them."""
    k, n = worker.sizes.weights[0]
    rows = [m for m in (1, 16, 128) if m in worker.sizes.rows]
    cells = []
    for format in (INT4, INT8):
        first, *rest = methods(format, "columns")
        changed = [
            method._replace(name=f"{method.name}; {label}", options=options)
            for label, (options, names) in OPTIONS.items()
            for method in rest
            if method.name in names
        ]
        prefix = f"4/{k}x{n}/{format}/columns"
        cells.append(Cell(prefix, (k, n), format, "columns", rows, [first, *changed]))
    measure_cells(worker, cells)


# Part 8: dequantization.


def measure_dequantization(worker: Worker) -> None:
    """Measure `QArray.dequantize` by XLA, in bytes read and written per second."""
    k, n = worker.sizes.weights[0]
    jobs, moved, arrays = [], {}, {}
    for format, layout in itertools.product(worker.sizes.dequantized, LAYOUTS):
        key = f"8/{format}/{layout}"
        cell = Cell(key, (k, n), format, layout, (), ())
        q = jax.jit(functools.partial(weight_of, cell), compiler_options=QUICK)(jax.random.key(1))
        moved[key] = stored_bytes(q) + 2 * k * n
        count = max(worker.sizes.least, -(-worker.sizes.rotated // moved[key]))
        arrays[key] = [jax.tree.map(jnp.copy, q) for _ in range(count)]
        jobs.append(Job(key, lambda q: q.dequantize(), (q,)))
    programs = worker.compile(jobs)
    runs = {
        key: [functools.partial(program.run, q) for q in arrays[key]]
        for key, program in programs.items()
    }
    for key, seconds in device_seconds(runs).items():
        rate = round(moved[key] / seconds / 1e9)
        worker.record(key, us=round(seconds * 1e6, 2), gbs=rate, **programs[key].facts)


# Run the parts.

PARTS: dict[int, Callable[[Worker], None]] = {
    1: measure_device,
    2: check,
    3: measure_products,
    4: measure_options,
    5: gpu_models.measure_decoding,
    6: gpu_models.measure_qlora,
    7: gpu_models.measure_attention,
    8: measure_dequantization,
}


def run_parts(worker: Worker) -> None:
    """Run the parts. Divide the remaining time among them by their shares."""
    parts = [part for part in SHARES if part in worker.options.parts]
    has_started = False
    for i, part in enumerate(parts):
        if f"{part}/ends" in worker.done:
            continue
        if part != 1 and 6 in parts[i:] and not has_started:
            has_started, worker.deadline = True, worker.until
            worker.compile_early([step.job for step in gpu_models.training_steps(worker)])
        start = time.time()
        later = sum(SHARES[p] for p in parts[i:])
        worker.deadline = start + (worker.until - start) * SHARES[part] / later
        if worker.deadline - start < 1:
            continue
        print(f"--- part {part}: up to {worker.deadline - start:.0f} s", flush=True)
        with worker.attempt(f"{part}/part", "part"):
            PARTS[part](worker)
        jax.clear_caches()
        gc.collect()
        worker.record(f"{part}/ends", seconds=time.time() - start)


def print_summary(out: Path) -> None:
    """Print the tables, the fastest methods of each product, and the failures."""
    by_key = gpu_tables.read(out)
    for place, text in gpu_tables.tables(by_key):
        print(f"\n=== {place}\n\n{text}")
    checked = {key: x["wrong"] for key, x in by_key.items() if key[0] == "2" and "wrong" in x}
    print(f"\n=== correctness: {len(checked)} checked")
    for key, wrong in checked.items():
        if wrong:
            print(f"{key} is wrong: {wrong}")
    print("\n=== methods, µs")
    cells: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
    for key, line in by_key.items():
        if key[0] in "34" and "us" in line:
            prefix, _, name = key.rpartition("/")
            cells[prefix].append((line["us"], name))
    for prefix, times in cells.items():
        print(f"{prefix}:", "; ".join(f"{name} {us:.1f}" for us, name in sorted(times)[:6]))
    failed = {key: line["error"] for key, line in by_key.items() if "error" in line}
    print(f"\n=== {len(failed)} without a result")
    for key, error in failed.items():
        print(f"{key}: {error}"[:160])


def write_page(out: Path) -> None:
    """Write the tables into docs/gpu.md, between `<!-- gpu_all.py, PLACE -->` and `<!-- end -->`.

    **Raises:** `ValueError` if the results are not from a GPU.
    """
    by_key = gpu_tables.read(out)
    backend = by_key.get("1/versions", {}).get("backend")
    if backend != "gpu":
        raise ValueError(f"docs/gpu.md is for results from a GPU, not from {backend}")
    for place, text in gpu_tables.tables(by_key):
        write("gpu", f"gpu_all.py, {place}", text)


def supervise(options: argparse.Namespace) -> None:
    """Run workers until one finishes all parts or the time is over.

    **Raises:** `SystemExit` if no worker measured anything.
    """
    until, environment = time.time() + options.seconds, dict(os.environ)
    if options.small:  # Compile fast. The times of a `--small` run are not used.
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
    for _ in range(_RESTARTS):
        command = [sys.executable, __file__, *sys.argv[1:], "--until", str(until - 3)]
        worker = subprocess.Popen(command, env=environment)
        try:
            code = worker.wait(timeout=max(1, until + 10 - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()
            print("the worker was stopped at the end of the time", flush=True)
            break
        if code == 0 or until - time.time() < 20:
            break
        print(f"the worker ended with {code}; another continues", flush=True)
    if not any(Path(options.out).glob("part*.jsonl")):
        sys.exit("nothing was measured: the errors of the workers are above")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=800)
    parser.add_argument("--out", required=True, help="the folder of the results")
    parser.add_argument("--parts", type=int, nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--only", nargs="+", help="regexes of KxN/format/layout, for part 3")
    parser.add_argument("--rows", type=int, nargs="+", help="the M of part 3")
    parser.add_argument("--methods", help="a regex of the names of methods, for parts 3 and 4")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--summary", action="store_true", help="run nothing, print the results")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/gpu.md")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.summary and importlib.util.find_spec("optax") is None:
        parser.error("the training steps need optax: pip install '.[examples]'")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.until is not None:
        run_parts(Worker(options))
        sys.stdout.flush()
        os._exit(0)  # do not wait for threads that still compile
    if not options.summary:
        supervise(options)
    print_summary(Path(options.out))
    if options.write:
        write_page(Path(options.out))


if __name__ == "__main__":
    main()
