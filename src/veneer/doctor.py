"""Report how this machine computes products: its kernels, their speed, and missing packages."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import quant
from ._core.errors import install_command
from ._core.surface.implicit import implicit
from ._core.value import materialise
from .kernels import Codes, MatmulOperands, MatmulProblem, select
from .kernels.cpu import build
from .kernels.gpu import hopper
from .native import cache

#: The weight formats, tile sizes and activation formats of the products that are timed.
_TIMED = (("int8", None, None), ("int4", 128, None), ("int4", 128, "int8"))
_ROUNDS = 15
#: The largest allowed relative error of a product, by activation format.
_ERRORS = {None: 1e-5, "int8": 0.03, "bf16": 0.01}
#: The weight formats with tile sizes, and the numbers of rows, that are timed on a GPU.
_TIMED_ON_GPU = (("int8", None), ("int4", 128))
_ROWS_ON_GPU = (1, 256)
#: The number of products per timed GPU program. Together, their weights exceed the L2 cache.
_PRODUCTS_ON_GPU = 8
#: The extras whose missing packages are reported.
_EXTRAS = ("cli", "demo", "numba", "units", "pytensor")


class Finding(NamedTuple):
    """A line of the report of `veneer doctor`: a fact about this machine.

    - `name`: the subject, such as "CPU" or the name of a product.
    - `text`: the fact.
    - `is_well`: False if the fact is a problem, such as a wrong result.
    """

    name: str
    text: str
    is_well: bool = True


def findings(size: int = 4096) -> Iterator[Finding]:
    """Report how this machine computes products with quantized weights.

    Yield findings one at a time: versions, devices, kernels, the times of products, and missing
    packages. The products have weights `[size, size]`, and are compared with XLA's dense product,
    in f32 on CPU and bf16 on GPU. Kernels that are not in the cache are compiled before they are
    timed.

    >>> from veneer import doctor
    >>> [finding.name for finding in doctor.findings(256)][:3]
    ['versions', 'devices', 'CPU']
    """
    libraries = ("veneer", "jax", "jaxlib", "numpy", "numba")
    versions = [f"{name} {version}" for name in libraries if (version := _version(name))]
    yield Finding("versions", ", ".join([*versions, f"Python {platform.python_version()}"]))
    yield Finding("devices", ", ".join(map(str, jax.devices())))
    cpu_info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", cpu_info.read_text()) if cpu_info.exists() else []
    model = models[0] if models else platform.processor() or platform.machine()
    yield Finding("CPU", f"{model}, {os.cpu_count()} threads")
    if jax.default_backend() == "gpu":
        yield from _on_gpu(size)
    else:
        yield (kernels := _kernels())
        yield Finding("cache", _cache())
        if kernels.is_well:
            yield from _timed(size)
    for extra in _EXTRAS:
        if missing := _missing(extra):
            names = ", ".join(missing)
            yield Finding(f"[{extra}]", f"not installed: {names} ({install_command(extra)})")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _kernels() -> Finding:
    if jax.default_backend() != "cpu":
        if select.current_choice() == "experimental":
            return Finding("kernels", "an experimental kernel, never measured")
        text = "XLA computes all products; VENEER_KERNELS=experimental tries a kernel on a TPU"
        return Finding("kernels", text)
    if reason := build.unavailable_reason():
        return Finding("kernels", f"none, so XLA computes all products: {reason}", False)
    if select.current_choice() == "xla":
        return Finding("kernels", "none: VENEER_KERNELS is set to xla", False)
    try:
        from .native import simd
    except ValueError as error:
        return Finding("kernels", str(error), False)
    if os.environ.get("VENEER_KERNELS_ISA"):
        why = "set by VENEER_KERNELS_ISA"
    elif simd.available_isas()[0] != simd.ISA:
        why = "the fastest on this machine, as measured"
    else:
        others = ", ".join(simd.available_isas()[1:])
        why = "the most capable of this CPU"
        if others:
            why += f"; it also has {others}: compare them with veneer doctor --choose"
    return Finding("kernels", f"{simd.ISA} ({why})")


def _cache() -> str:
    root = cache.root()
    files = [file for file in root.rglob("*.o") if file.is_file()]
    text = f"{root}: {len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB"
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        text += ", cannot be written: each process compiles its kernels again"
    return text


def _timed(size: int) -> Iterator[Finding]:
    """Check and time the CPU's product of a row with each quantized weight of `_TIMED`.

    The weights are `[size, size]`. The calls alternate with XLA's product with the same weight in
    f32. Yield a finding per weight.
    """
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((size, size), np.float32))
    x = jnp.asarray(rng.standard_normal((1, size), np.float32))
    multiply = jax.jit(implicit(jnp.matmul))
    for (name, _, activations), weight in zip(_TIMED, _quantize_for_timing(w), strict=True):
        wrong = _check(multiply(x, weight), x @ materialise(weight), _ERRORS[activations])
        ours, theirs = _median_seconds(partial(multiply, x, weight), partial(multiply, x, w))
        text = f"{ours * 1e3:.2f} ms, {theirs / ours:.1f} times as fast as XLA in f32{wrong}"
        yield Finding(f"{name} x {activations or 'f32'}, {size} x {size}", text, not wrong)


def _quantize_for_timing(w: jax.Array) -> list[Any]:
    """Return the weight `w` quantized in each of the formats of `_TIMED`, in order."""
    rules = [quant.Rule(".*", name, tile_size=tile, act_qtype=acts) for name, tile, acts in _TIMED]
    return [rule.with_activations(rule.quantize(w)) for rule in rules]


def _check(product: jax.Array, expected: jax.Array, limit: float) -> str:
    """Compare a product with its expected value. Return a warning if it is wrong, else "".

    It is wrong if the relative error is not below `limit`. The warning is the end of a sentence.
    """
    error = np.linalg.norm(np.asarray(product, np.float32) - np.asarray(expected))
    error /= np.linalg.norm(expected)
    if error < limit:
        return ""
    return f", and WRONG by {error:.0e}: set VENEER_KERNELS=xla to use XLA instead"


def _on_gpu(size: int) -> Iterator[Finding]:
    """Report the GPU and its kernels, and time products with quantized weights `[size, size]`."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    yield Finding("GPU", f"{device.device_kind}, compute capability {capability}")
    if select.current_choice() == "xla":
        yield Finding("kernels", "none: VENEER_KERNELS is set to xla", False)
        return
    yield _gpu_kernel("kernel for few rows", 1)
    yield _gpu_kernel("kernel for many rows", 256)
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((size, size), np.float32) / size**0.5
    w = jnp.asarray(dense, jnp.bfloat16)
    for name, tile in _TIMED_ON_GPU:
        weight = quant.Rule(".*", name, tile_size=tile).quantize(w)
        for m in _ROWS_ON_GPU:
            x = jnp.asarray(rng.standard_normal((m, size), np.float32), jnp.bfloat16)
            yield _timed_on_gpu(f"{name} x bf16, M = {m}, {size} x {size}", x, weight, w)


def _gpu_kernel(name: str, m: int) -> Finding:
    """Report which GPU kernel computes an int8 product with `m` rows, or why none does.

    `name` is the name of the finding.
    """
    k = n = 4096
    operands = MatmulOperands(
        jax.ShapeDtypeStruct((1, m, k), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, k, n), jnp.int8),
        jax.ShapeDtypeStruct((1, 1, n), jnp.float32),
    )
    by_xla = lambda operands, problem: operands.x  # never called
    problem = MatmulProblem(Codes(8, "int8"), n, "rows", "bfloat16", 0, by_xla)
    kernel = select.find_kernel("gpu", problem.codes, problem.shape(operands))
    if kernel is None or not select.device_kernel(kernel).has_device():
        why = "none for this GPU"
        if hopper.is_hopper() and not hopper.has_jax():
            why = f"none before JAX {'.'.join(map(str, hopper.LEAST_JAX))}"
        return Finding(name, f"{why}: XLA computes these products")
    try:
        select.device_kernel(kernel).compile(operands, problem)
    except Exception as error:  # NVRTC and Pallas raise errors of many types
        summary = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return Finding(name, f"none, so XLA computes these products: {summary}", False)
    return Finding(name, f"{kernel.name}_{problem.codes.kind}")


def _timed_on_gpu(name: str, x: jax.Array, weight: Any, dense: jax.Array) -> Finding:
    """Check and time the product of `x` with a quantized weight on GPU.

    **Arguments:**

    - `name`: the name of the finding.
    - `x`: activations `[M, size]`.
    - `weight`: a quantized weight `[size, size]`.
    - `dense`: the same weight in bf16. The calls alternate with XLA's product with it.
    """
    exact = partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32)
    product = jax.jit(implicit(jnp.matmul))(x, weight)
    wrong = _check(product, exact(x, materialise(weight)), _ERRORS["bf16"])

    def multiply_all(x: jax.Array, weights: list[Any]) -> jax.Array:
        for weight in weights:
            x = jnp.matmul(x, weight)
        return x

    # Time several products as one program, because a launch takes as long as a product.
    run = jax.jit(implicit(multiply_all))
    copies = [[jax.tree.map(jnp.copy, w) for _ in range(_PRODUCTS_ON_GPU)] for w in (weight, dense)]
    sides = [partial(run, x, weights) for weights in copies]
    for side in sides:
        jax.block_until_ready(side())  # compile before timing
    ours, theirs = _median_seconds(*sides)
    microseconds = ours / _PRODUCTS_ON_GPU * 1e6
    text = f"{microseconds:.1f} µs, {theirs / ours:.1f} times as fast as XLA in bf16{wrong}"
    return Finding(name, text, not wrong)


def _median_seconds(*calls: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each of several functions. Their calls alternate."""
    rounds = [list(map(_seconds, calls)) for _ in range(_ROUNDS)]
    return np.median(rounds, axis=0).tolist()


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


#: The numbers of rows and dtypes of activations with which instruction sets are compared.
_COMPARED = ((1, "float32"), (64, "float32"), (64, "bfloat16"))
#: Times within this factor count as equal, because of noise.
_NOISE = 1.03


def choices(size: int = 2048) -> list[Finding]:
    """Time products with each vector instruction set of this CPU, and choose one for the kernels.

    Each instruction set has its own process. The processes take turns to multiply weights
    `[size, size]`. Among the sets that are about as fast as the fastest, the most capable one is
    chosen. The choice is written to the cache. Later processes use it unless `VENEER_KERNELS_ISA`
    is set.

    **Returns:** a finding per instruction set, with its time relative to the fastest.

    **Raises:**

    - `ValueError` if kernels do not run, or if an environment variable selects the instructions.
    - `OSError` if the cache cannot be written.
    - `RuntimeError` if a process ends early.
    """
    for variable in ("VENEER_KERNELS_ISA", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        if os.environ.get(variable):
            raise ValueError(f"{variable} selects the instructions of the kernels: unset it first")
    if (backend := jax.default_backend()) != "cpu":
        raise ValueError(
            f"there are no CPU kernels to measure: JAX runs on {backend}. "
            "Set JAX_PLATFORMS=cpu to compare the instruction sets of the CPU."
        )
    if not (kernels := _kernels()).is_well:
        raise ValueError(f"there are no CPU kernels to measure: {kernels.text}")
    from .native.simd import available_isas

    cache.save_isa(cache.saved_isa())  # fail now if the cache cannot be written
    names = available_isas()
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(_measuring(name, size)) for name in names}
        for name, process in processes.items():
            stack.callback(process.kill)
            _round(name, process)  # compile everything before timing
        rounds = [[_round(*each) for each in processes.items()] for _ in range(_ROUNDS)]
    times = np.median(rounds, axis=0)  # seconds by instruction set and product
    logs = np.log(times / times.min(axis=0)).mean(axis=1)
    slower = dict(zip(names, np.exp(logs).tolist(), strict=True))
    fastest = min(slower.values())
    best = next(name for name in names if slower[name] <= _NOISE * fastest)
    cache.save_isa(best if best != names[0] else None)
    text = "{:.2f} times the time of the fastest{}"
    return [
        Finding(name, text.format(slower[name] / fastest, ", and chosen" if name == best else ""))
        for name in names
    ]


def _measuring(name: str, size: int) -> subprocess.Popen[bytes]:
    """Start a process that times products with one instruction set, whenever it reads a line.

    `name` is the instruction set, a value of `VENEER_KERNELS_ISA`. The weights are `[size, size]`.
    """
    command = [sys.executable, "-c", f"from veneer import doctor; doctor._answer({size})"]
    environment = os.environ | {"VENEER_KERNELS_ISA": name}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe)


def _round(name: str, process: subprocess.Popen[bytes]) -> list[float]:
    """Make a process of `_measuring` time its products. Return the seconds of each product.

    `name` is the instruction set of the process, for the error if the process has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), b"\n")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process for {name} ended with code {process.wait()}")
    return json.loads(line)


def _answer(size: int) -> None:
    """Time products with weights `[size, size]` once per line of standard input.

    For each line, print a JSON list of the seconds of each product. `_measuring` calls this
    function in a new process.
    """
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((size, size), np.float32))
    multiply = jax.jit(implicit(jnp.matmul))
    calls = [
        partial(multiply, jnp.ones((m, size), dtype), weight)
        for weight in _quantize_for_timing(w)
        for m, dtype in _COMPARED
    ]
    for call in calls:
        jax.block_until_ready(call())  # compile before timing
    for _ in sys.stdin:
        print(json.dumps(list(map(_seconds, calls))), flush=True)


def _missing(extra: str) -> list[str]:
    """Return the missing packages of an extra of Veneer, such as "demo"."""
    required = importlib.metadata.requires("veneer") or []
    of_extra = [text for text in required if re.search(rf"extra == ['\"]{extra}['\"]", text)]
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in of_extra]
    return [name for name in names if name != "veneer" and _version(name) is None]
