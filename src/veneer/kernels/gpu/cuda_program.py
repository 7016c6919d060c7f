"""The CUDA program for few rows: its block sizes, its macros, and its compilation to PTX.

NVRTC compiles the program, `matmul.cu`. `jax[cuda12]` and `jax[cuda13]` install NVRTC.
"""

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..common.problem import Codes

#: The dtypes of activations, results and scales. Their index is their number in `matmul.cu`.
FLOATS = ("float32", "bfloat16", "float16")
SCALES = (*FLOATS, "uint8")  # uint8 is for the bits of float8_e8m0fnu
#: The dtypes of zero points. Their index is their number in `matmul.cu`. "" means none.
ZERO_POINTS = ("", "int8", "uint8")
#: The most rows of activations that are split into digits. With more rows, bf16 is faster.
MOST_DIGIT_ROWS = 2
#: The most bytes of shared memory that a block can have without an opt-in.
_SHARED_BYTES = 48 * 1024
#: The most stages in a ring buffer. More stages do not help.
_MOST_STAGES = 6
#: The length along K of the units of work that are divided among warps.
_UNIT = 128
#: All integers up to these are exact.
_MOST_EXACT = {"bfloat16": 256, "float16": 2048}


class CompileError(RuntimeError):
    """An error because the CUDA kernel cannot be compiled, for example because NVRTC is missing."""


class Config(NamedTuple):
    """Block sizes of the CUDA kernel.

    **Arguments:**

    - `n_tiles`: the number of tiles of 16 result columns per warp. It is 4 or 8 if weights are
      stored
      as `[K, N]`.
    - `m_tiles`: the number of tiles of 8 result rows per warp.
    - `k_warps`: the number of warps per block, which split K. A power of two.
    - `by_digits`: whether activations are split into three 8-bit digits, to multiply integers.
      Otherwise the kernel multiplies bf16 or f16.
    """

    n_tiles: int
    m_tiles: int
    k_warps: int
    by_digits: bool = False


class ProductSizes(NamedTuple):
    """The sizes, dtypes and layout of products of the same x, for which a kernel is compiled.

    **Arguments:**

    - `codes`: the codes of the weights.
    - `is_rows`: whether a weight is stored as `[K, N]`. Otherwise it is `[N, K]`.
    - `m`, `k`: the sizes of the activations, `[m, k]`.
    - `ns`: the N of each weight.
    - `tile`: the number of codes along K that share a scale.
    - `has_one_scale`: whether all result columns share scales and zero points.
    - `x_dtype`, `scale_dtype`, `out_dtype`: the dtypes of activations, scales and result.
    - `zero_dtype`: the dtype of zero points, which have the shape of the scales. "" means none.
    - `zero_offset`: the offset of zero points. The kernel subtracts it from each zero point.
    """

    codes: Codes
    is_rows: bool
    m: int
    k: int
    ns: tuple[int, ...]
    tile: int
    has_one_scale: bool
    x_dtype: str
    scale_dtype: str
    out_dtype: str
    zero_dtype: str = ""
    zero_offset: int = 0


@functools.cache
def form_of(codes: Codes, x_dtype: str) -> dict[str, int] | None:
    """Return the macros that make `matmul.cu` decode codes, or None if it cannot decode them.

    FORM is 0 if codes are consecutive integers, 1 if 4-bit codes are looked up in a table, 2 for
    float8_e4m3fn and 3 for float8_e5m2. In form 0, the value of a code is `(code ^ FLIP) - LESS`.
    `x_dtype` is the dtype of activations, which codes are decoded to.
    """
    if codes.dtype.startswith("float8"):
        return {"FORM": 2 if codes.dtype == "float8_e4m3fn" else 3, "FLIP": 0, "LESS": 0}
    values = codes.values
    if not values:  # int8 or uint8
        values = tuple(np.arange(256).astype(codes.dtype).astype(float).tolist())
    for flip in (0, len(values) // 2):  # consecutive integers, unsigned or signed
        offset = flip - values[0]
        is_in_order = values == tuple((i ^ flip) - offset for i in range(len(values)))
        subtracted = _start(codes, x_dtype) + offset
        is_exact = offset == int(offset) and abs(subtracted) <= _MOST_EXACT[x_dtype]
        if is_in_order and is_exact:
            return {"FORM": 0, "FLIP": flip, "LESS": int(offset)}
    if codes.bits != 4:
        return None
    bits = np.asarray(values, np.float32).astype(jnp.dtype(x_dtype)).view(np.uint16).tolist()
    low, high = (
        np.asarray([word >> shift & 0xFF for word in bits], np.uint8).view("<u4")
        for shift in (0, 8)
    )
    tables = {f"LOW{i}": int(word) for i, word in enumerate(low)}
    tables |= {f"HIGH{i}": int(word) for i, word in enumerate(high)}
    return {"FORM": 1, "FLIP": 0, "LESS": 0, **tables}


def _start(codes: Codes, x_dtype: str) -> int:
    """Return the number `start` that the kernel adds to integer codes to make them floats.

    The kernel writes the bits of a code into the bits of the float `start + (code ^ FLIP)`. Then it
    subtracts `start + LESS`. `form_of` returns the macros FLIP and LESS.
    """
    return 1024 if x_dtype == "float16" else 128 if codes.bits == 4 else -128


def can_multiply_digits(layout: ProductSizes) -> bool:
    """Return whether the kernel can multiply integers: codes by the 8-bit digits of activations.

    This needs few rows, codes that are consecutive integers, and one tile or tiles of a multiple of
    32 codes.
    """
    form = form_of(layout.codes, layout.x_dtype)
    is_in_order = form is not None and form["FORM"] == 0  # consecutive integers
    # One instruction adds the products of 32 codes (mma.m16n8k32), and they must share a scale.
    fits_tile = layout.tile % 32 == 0 or layout.tile == layout.k
    return is_in_order and layout.m <= MOST_DIGIT_ROWS and fits_tile


def config_for(layout: ProductSizes) -> Config:
    """Return the block sizes with which the kernel is fastest for a product.

    Wide warps need fewer instructions per code. Many warps keep more bytes in flight. Therefore
    choose the widest warps with which there are about ten warps per multiprocessor. An H100 or H200
    has 132 multiprocessors. The numbers are from benchmarks/gpu_all.py on an H200.

    **Raises:** `CompileError` if no configuration fits into shared memory.
    """
    by_digits, is_byte = can_multiply_digits(layout), layout.codes.bits == 8
    m_tiles = 1 if layout.m <= 8 else 2 if layout.m <= 16 else 4
    widths = (4,) if layout.is_rows else (4, 2, 1) if by_digits else (2, 1)
    counts: tuple[int, ...] = (4, 8, 16) if by_digits else (4, 8)
    least_warps = 1300
    if by_digits and layout.is_rows == is_byte:  # int8 `[K, N]` or int4 `[N, K]`
        least_warps = 600 if is_byte else 1700
    if m_tiles > 1:  # narrow warps would read the activations too often
        widths = widths[:1]
    if m_tiles == 4:
        counts = (8,) if is_byte and layout.is_rows else (4,)
    elif is_byte and not by_digits and not layout.is_rows:
        counts = (8,)
    units = -(-layout.k // _UNIT)
    fitting = []
    for n_tiles in widths:
        for k_warps in counts:
            config = Config(n_tiles, m_tiles, k_warps, by_digits)
            if k_warps > max(counts[0], units) or _stages(layout, config) < 2:
                continue
            if column_blocks(layout, config) * k_warps >= least_warps:
                return config
            fitting.append(config)
    if not fitting:
        raise CompileError(f"no configuration fits {_SHARED_BYTES} bytes of shared memory")
    return max(fitting, key=lambda config: config.k_warps / config.n_tiles)


def column_blocks(layout: ProductSizes, config: Config) -> int:
    """Return the number of thread blocks along N, summed over all weights."""
    return sum(-(-n // (16 * config.n_tiles)) for n in layout.ns)


def macros(layout: ProductSizes, config: Config) -> dict[str, int | str]:
    """Return the names and values of the macros with which `matmul.cu` is compiled.

    **Raises:** `CompileError` if the configuration does not fit into shared memory.
    """
    form = form_of(layout.codes, layout.x_dtype)
    assert form is not None
    stages = _stages(layout, config)
    if stages < 2:
        raise CompileError(f"{config} needs more than {_SHARED_BYTES} bytes of shared memory")
    start = _start(layout.codes, layout.x_dtype) if form["FORM"] == 0 else 0
    is_float = form["FORM"] == 0 and not config.by_digits
    # If subtracting from these floats is inexact, a 4-bit code can also become a negative float,
    # -start - (15 - code).
    negative_start = -start - 15
    is_negative = (
        is_float
        and layout.codes.bits == 4
        and not _are_exact(layout, start + form["LESS"])
        and _are_exact(layout, negative_start + form["LESS"])
    )
    if is_negative:
        start, form = negative_start, {**form, "FLIP": form["FLIP"] ^ 15}
    return {
        **form,
        "NEGATIVE": int(is_negative),
        "ZERO": ZERO_POINTS.index(layout.zero_dtype),
        "INTEGER": int(config.by_digits),
        "LESS": form["LESS"] - layout.zero_offset + (0 if config.by_digits else start),
        "BITS": layout.codes.bits,
        "ROWS": int(layout.is_rows),
        "F16": int(layout.x_dtype == "float16"),
        "M": layout.m,
        "K": layout.k,
        "SIZES": ",".join(map(str, layout.ns)),
        "PRODUCTS": len(layout.ns),
        "WHOLE": int(all(n % (16 * config.n_tiles) == 0 for n in layout.ns)),
        "TILE": layout.tile,
        "SCALE": SCALES.index(layout.scale_dtype),
        "ONE_SCALE": int(layout.has_one_scale),
        "OUT": FLOATS.index(layout.out_dtype),
        "MT": config.n_tiles,
        "NT": config.m_tiles,
        "WK": config.k_warps,
        "STAGES": stages,
        "KS": _steps(layout, config),
    }


def _are_exact(layout: ProductSizes, offset: int) -> bool:
    """Return whether `x_dtype` represents `offset` plus any zero point exactly.

    A zero point is any number that `zero_dtype` can store, minus `zero_offset`. Without zero
    points, only `offset` must be exact.
    """
    zero_points = np.iinfo(layout.zero_dtype) if layout.zero_dtype else None
    least, most = (zero_points.min, zero_points.max) if zero_points else (0, 0)
    offset -= layout.zero_offset
    return max(abs(offset + least), abs(offset + most)) <= _MOST_EXACT[layout.x_dtype]


def _steps(layout: ProductSizes, config: Config) -> int:
    """Return the number of groups of 16 rows of a weight `[K, N]` per stage, or 1 for `[N, K]`.

    A stage is a slot of a warp's ring buffer in shared memory. It has at least 1 KiB.
    """
    if not layout.is_rows:
        return 1
    return max(2 if config.by_digits else 1, 8 // (config.n_tiles * layout.codes.bits // 4))


def _stages(layout: ProductSizes, config: Config) -> int:
    """Return how many stages fit into shared memory, or 0 if the kernel does not fit.

    A stage is a slot of the ring buffer that each warp loads codes into.
    """
    warps = config.k_warps
    columns = 16 * config.n_tiles
    stage = columns * 64
    if layout.is_rows:
        stage = 16 * _steps(layout, config) * columns * layout.codes.bits // 8
    sums = max(1, warps // 2) * config.n_tiles * config.m_tiles * 4 * 128
    available = _SHARED_BYTES
    if config.by_digits:
        digits = 3 * layout.m * (_UNIT + 32) + -(-layout.m * 4 // 16) * 16
        available -= warps * digits
    # The sums use the same memory as the stages, after the last stage.
    return min(_MOST_STAGES, available // (warps * stage)) if sums <= available else 0


# Compilation.

#: The PTX version that the kernel needs. NVRTC writes a newer one, which older drivers reject.
PTX_VERSION = "8.1"


@functools.lru_cache(maxsize=1024)
def ptx(layout: ProductSizes, config: Config, capability: int) -> str:
    """Return the PTX of the kernel for a product.

    `capability` is the compute capability to compile for, such as 90 for 9.0.
    """
    source = Path(__file__).with_name("matmul.cu").read_text("utf-8")
    defined = [
        f"-D{name}={value}{'u' if isinstance(value, int) and value >= 2**31 else ''}"
        for name, value in macros(layout, config).items()
    ]
    defined.append(f"-DNAME={name_of(layout, config)}")
    return compile_ptx(
        source, [*defined, f"--gpu-architecture=compute_{capability}", "--std=c++17"]
    )


def name_of(layout: ProductSizes, config: Config) -> str:
    """Return the name of a kernel, as profiles show it.

    It ends with a hash of the macros, because XLA may confuse different kernels of the same name.
    """
    side = "rows" if layout.is_rows else "columns"
    sizes = f"{layout.m}x{'_'.join(map(str, layout.ns))}x{layout.k}"
    divided = "_".join(str(int(size)) for size in config)
    digest = hashlib.sha256(json.dumps(macros(layout, config)).encode()).hexdigest()[:8]
    return f"veneer_{side}_{layout.codes.kind}_{sizes}_{divided}_{digest}"


def compile_ptx(source: str, options: Sequence[str]) -> str:
    """Return the PTX of a CUDA C++ program.

    **Raises:** `CompileError` with NVRTC's log.
    """
    library = load_nvrtc()
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"veneer.cu", 0, None, None
        ),
    )
    try:
        encoded = [option.encode() for option in options]
        result = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        if result:
            raise CompileError(_text(library, program, "ProgramLog"))
        ptx = _text(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return set_version(ptx)


def set_version(ptx: str) -> str:
    """Return PTX whose version line is replaced by `PTX_VERSION`, so that older drivers accept it.

    **Raises:** `CompileError` if the text has no version.
    """
    ptx, count = re.subn(r"^\.version .*$", f".version {PTX_VERSION}", ptx, count=1, flags=re.M)
    if count != 1:
        raise CompileError("NVRTC returned PTX without a version")
    return ptx


@functools.cache
def load_nvrtc() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's Python packages, or else from the system.

    **Raises:** `CompileError` if neither has it.
    """
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("NVRTC is missing: install jax with its CUDA packages, jax[cuda13]")


def _candidates() -> Iterator[str]:
    """Yield paths and names of the NVRTC library to try to load, in the order of preference."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for place in ("cu*/lib", "cuda_nvrtc/lib"):
            yield from sorted(
                map(str, Path(folder).glob(f"{place}/libnvrtc.so.*[0-9]")), reverse=True
            )
    if found := ctypes.util.find_library("nvrtc"):
        yield found
    yield from sorted(map(str, Path("/usr/local/cuda/lib64").glob("libnvrtc.so*")), reverse=True)


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, text))
    return text.value.decode()
