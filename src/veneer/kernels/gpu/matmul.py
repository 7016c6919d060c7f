"""Multiply a few rows of activations by a packed weight on an NVIDIA GPU.

NVRTC compiles `matmul.cu` for the sizes of a product when JAX lowers a program. The program
contains the PTX. Therefore a cached or saved program includes the kernel, and needs no library.

Products of the same activations with several weights become one launch (`kernels/common/calls.py`).
A launch with a small weight takes 2 to 3 microseconds, however little it reads.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..common import calls
from ..common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from . import nvrtc

#: The dtypes of activations, results and scales. Their index is their number in `matmul.cu`.
FLOATS = ("float32", "bfloat16", "float16")
SCALES = (*FLOATS, "uint8")  # uint8 is for the bits of float8_e8m0fnu
#: The most bytes of shared memory that a block can have without an opt-in.
_SHARED_BYTES = 48 * 1024
#: The dtypes of zero points. Their index is their number in `matmul.cu`. "" means none.
ZERO_POINTS = ("", "int8", "uint8")
#: The length along K of the units of work that are divided among warps.
_UNIT = 128
#: All integers up to these are exact.
_MOST_EXACT = {"bfloat16": 256, "float16": 2048}
#: The most rows of activations that are split into digits. With more rows, bf16 is faster.
MOST_DIGIT_ROWS = 2
#: The most products in one launch.
MOST_PRODUCTS = 4

_TARGET = "__gpu$xla.gpu.ptx"  # XLA's custom call that launches PTX


class Config(NamedTuple):
    """A configuration of the kernel.

    **Arguments:**

    - `n_tiles`: the number of tiles of 16 result columns per warp. For `[K, N]`: 4 or 8.
    - `m_tiles`: the number of tiles of 8 result rows per warp.
    - `k_warps`: the number of warps per block, which split K. A power of two.
    - `stages`: the number of stages in the ring buffer of a warp. 0 means as many as fit.
    - `by_digits`: whether activations are split into three 8-bit digits, to multiply integers.
      Otherwise the kernel multiplies bf16 or f16.
    """

    n_tiles: int
    m_tiles: int
    k_warps: int
    stages: int = 0
    by_digits: bool = False


class ProductSizes(NamedTuple):
    """The sizes, dtypes and layout of products of the same x, for which a kernel is compiled.

    **Arguments:**

    - `codes`: the codes of the weights.
    - `is_rows`: whether a weight is stored as `[K, N]`. Otherwise it is `[N, K]`.
    - `m`, `k`: the sizes of the activations, `[m, k]`.
    - `ns`: the N of each weight.
    - `tile`: the number of codes along K that share a scale.
    - `has_one_scale`: whether all columns share scales and zero points.
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


def can_compute(codes: Codes, shape: MatmulShape) -> bool:
    """Return whether the kernel supports the sizes and codes of a product.

    >>> from veneer.kernels.gpu.matmul import can_compute
    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> shape = MatmulShape("rows", "bfloat16", m=1, k=4096, n=4096, tile=4096)
    >>> can_compute(Codes(8, "int8"), shape)
    True
    """
    m, batch = shape.m, shape.batch
    if not isinstance(m, int) or not isinstance(batch, int) or m * batch == 0 or batch > 65535:
        return False
    if codes.bits not in (4, 8) or shape.activations not in ("bfloat16", "float16"):
        return False
    if shape.scale_columns not in (None, 1, shape.n) or shape.k * shape.n >= 2**31:
        return False
    if shape.k >= 2**26:  # the kernel has 32-bit offsets into 24 rows of activations
        return False
    if form_of(codes, shape.activations) is None:
        return False
    codes_in_16_bytes = 128 // codes.bits
    stage, tile = 4 * codes_in_16_bytes, shape.tile
    fits_stage = tile == shape.k or tile % stage == 0 or stage % tile == 0
    if shape.contracting == "rows":
        if codes.bits == 8 and not fits_stage:
            return False  # `x @ w.T` is traced as "rows", and lowered as "columns"
        return shape.n % codes_in_16_bytes == 0 and shape.k % 16 == 0 and tile % 16 == 0
    return shape.k % codes_in_16_bytes == 0 and tile % codes_in_16_bytes == 0 and fits_stage


@functools.cache
def form_of(codes: Codes, x_dtype: str) -> dict[str, int] | None:
    """Return the macros for decoding codes in `matmul.cu`, or None if it cannot decode them."""
    if codes.dtype.startswith("float8"):
        return {"FORM": 2 if codes.dtype == "float8_e4m3fn" else 3, "FLIP": 0, "LESS": 0}
    values = codes.values
    if not values:
        values = tuple(
            float(i if codes.dtype == "uint8" or i < 128 else i - 256) for i in range(256)
        )
    for flip in (0, len(values) // 2):
        less = flip - values[0]
        is_in_order = values == tuple((i ^ flip) - less for i in range(len(values)))
        if (
            is_in_order
            and less == int(less)
            and abs(_start(codes, x_dtype) + less) <= _MOST_EXACT[x_dtype]
        ):
            return {"FORM": 0, "FLIP": flip, "LESS": int(less)}
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
    """Return the float that the kernel makes of a code equal to FLIP, before subtracting LESS."""
    return 1024 if x_dtype == "float16" else 128 if codes.bits == 4 else -128


def can_multiply_digits(layout: ProductSizes) -> bool:
    """Return whether the kernel can multiply integers: few rows, and consecutive codes."""
    form = form_of(layout.codes, layout.x_dtype)
    is_in_order = form is not None and form["FORM"] == 0
    fits_tile = layout.tile % 32 == 0 or layout.tile == layout.k
    return is_in_order and layout.m <= MOST_DIGIT_ROWS and fits_tile


#: The most stages in a ring buffer. More stages do not help.
_MOST_STAGES = 6


def config_for(layout: ProductSizes) -> Config:
    """Return the configuration for a product.

    Wide warps need fewer instructions per code. Many warps keep more bytes in flight. Therefore
    choose the widest warps with which there are about ten warps per multiprocessor. An H100 or H200
    has 132 multiprocessors. The numbers are from benchmarks/gpu_all.py on an H200.
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
            config = _with_most_stages(
                layout, Config(n_tiles, m_tiles, k_warps, by_digits=by_digits)
            )
            if config is None or k_warps > max(counts[0], units):
                continue
            if _column_blocks(layout, config) * k_warps >= least_warps:
                return config
            fitting.append(config)
    if not fitting:
        raise nvrtc.CompileError(f"no configuration fits {_SHARED_BYTES} bytes of shared memory")
    return max(fitting, key=lambda config: config.k_warps / config.n_tiles)


def _column_blocks(layout: ProductSizes, config: Config) -> int:
    """Return the number of blocks along N of all weights."""
    return sum(-(-n // (16 * config.n_tiles)) for n in layout.ns)


def _with_most_stages(layout: ProductSizes, config: Config) -> Config | None:
    """Return a configuration with as many stages as fit in shared memory, or None if two do not."""
    for stages in range(_MOST_STAGES, 1, -1):
        if shared_bytes(layout, config._replace(stages=stages)) <= _SHARED_BYTES:
            return config._replace(stages=stages)
    return None


def macros(layout: ProductSizes, config: Config) -> dict[str, int | str]:
    """Return the macros for compiling `matmul.cu`."""
    form = form_of(layout.codes, layout.x_dtype)
    assert form is not None
    start = _start(layout.codes, layout.x_dtype) if form["FORM"] == 0 else 0
    is_float = form["FORM"] == 0 and not config.by_digits
    # A 4-bit code can also become the float -start - (15 - code).
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
        "STAGES": config.stages,
        "KS": _steps(layout, config),
    }


def _are_exact(layout: ProductSizes, less: int) -> bool:
    """Return whether `less` plus any zero point is an integer that `x_dtype` represents exactly."""
    zero_points = np.iinfo(layout.zero_dtype) if layout.zero_dtype else None
    least, most = (zero_points.min, zero_points.max) if zero_points else (0, 0)
    less -= layout.zero_offset
    return max(abs(less + least), abs(less + most)) <= _MOST_EXACT[layout.x_dtype]


def _steps(layout: ProductSizes, config: Config) -> int:
    """Return the number of 16-row groups per stage. A stage has at least 1 KiB."""
    if not layout.is_rows:
        return 1
    return max(2 if config.by_digits else 1, 8 // (config.n_tiles * layout.codes.bits // 4))


def shared_bytes(layout: ProductSizes, config: Config) -> int:
    """Return the bytes of shared memory that a block needs."""
    warps = config.k_warps
    columns = 16 * config.n_tiles
    stage = columns * 64
    if layout.is_rows:
        stage = 16 * _steps(layout, config) * columns * layout.codes.bits // 8
    sums = config.n_tiles * config.m_tiles * 4 * 128
    digits = 3 * layout.m * (_UNIT + 32) + -(-layout.m * 4 // 16) * 16
    return (warps * digits if config.by_digits else 0) + max(
        warps * config.stages * stage, max(1, warps // 2) * sums
    )


def product(
    operands: MatmulOperands, problem: MatmulProblem, config: Config | None = None
) -> jax.Array:
    """Multiply activations by a packed weight, without the term of minima.

    **Arguments:**

    - `operands`: `x` is bf16 or f16 `[B, M, K]`.
    - `config`: the configuration. The default is `config_for`.

    **Returns:** `[B, M, N]`. The dtype is f32 if the caller must still add minima, or zero points
    that the kernel does not subtract (see `takes_zero_points`).

    **Raises:** `nvrtc.CompileError` if the kernel cannot be compiled.
    """
    layout = layout_of(operands, problem)
    config = _checked(layout, config)
    call = jax.ffi.ffi_call(
        _TARGET,
        [
            jax.ShapeDtypeStruct((operands.x.shape[0], layout.m, n), jnp.dtype(layout.out_dtype))
            for n in layout.ns
        ],
        custom_call_api_version=2,
        legacy_backend_config=_call_config(layout, config, operands.x.shape[0]),
    )
    (out,) = call(operands.x, *_stored_arrays(operands, layout))
    return out


def shared_product(operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
    """Return the same as `product`, in a program that is lowered for one device.

    Products of the same x with weights that differ only in N are computed by one launch.
    """
    layout = layout_of(operands, problem)
    shape = operands.x.shape[0], layout.m, *layout.ns
    arrays = _stored_arrays(operands, layout)
    return calls.call(Kernel(layout), [operands.x], arrays, shape, layout.out_dtype)


class Kernel(NamedTuple):
    """A kernel for products with weights that differ only in N, for `kernels/common/calls.py`.

    **Arguments:**

    - `layout`: the sizes of one of the products.
    """

    layout: ProductSizes

    @property
    def most_products(self) -> int:
        """The most products in one launch."""
        return MOST_PRODUCTS

    def is_called_by(self, operation: Any) -> bool:
        """Return whether a custom call launches this kernel, with weights of any N."""
        if calls.attribute(operation, "call_target_name") != _TARGET:
            return False
        layout = self._with_sizes([out.type.shape for out in operation.results])
        start = f'{{name = "{name_of(layout, config_for(layout))}"'
        return calls.attribute(operation, "backend_config").startswith(start)

    def emit(self, ctx: Any, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        """Write a launch into the program that is lowered."""
        layout = self._with_sizes(shapes)
        config = _call_config(layout, _checked(layout, None), shapes[0][0])
        emit = jax.ffi.ffi_lowering(_TARGET, backend_config=config, api_version=2)
        return emit(ctx, *operands)

    def _with_sizes(self, shapes: Sequence[Sequence[int]]) -> ProductSizes:
        return self.layout._replace(ns=tuple(shape[-1] for shape in shapes))


def _stored_arrays(operands: MatmulOperands, layout: ProductSizes) -> list[jax.Array]:
    """Return codes, scales and perhaps zero points as the kernel reads them."""
    packed, scale = operands.packed, operands.scale
    if packed.dtype != jnp.uint8:
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    if not layout.zero_dtype:
        return [packed, scale]
    assert operands.zero_point is not None
    return [packed, scale, operands.zero_point]


def takes_zero_points(operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return whether the kernel subtracts the zero points of a product."""
    zero_point = operands.zero_point
    if zero_point is None or operands.minimum is not None or not problem.codes.is_integer:
        return False
    form = form_of(problem.codes, operands.x.dtype.name)
    is_known = zero_point.dtype.name in ZERO_POINTS and zero_point.shape == operands.scale.shape
    return is_known and form is not None and form["FORM"] == 0


def compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Compile the kernel for a product, to check that this is possible.

    **Raises:** `nvrtc.CompileError` if it is impossible.
    """
    layout = layout_of(operands, problem)
    ptx(layout, _checked(layout, None), _capability(layout))


def layout_of(operands: MatmulOperands, problem: MatmulProblem) -> ProductSizes:
    """Return the sizes and options that select the kernel for a product. Arrays may be avals."""
    shape = problem.shape(operands)
    subtracts = takes_zero_points(operands, problem)
    is_added = operands.minimum is not None or (operands.zero_point is not None and not subtracts)
    scale_dtype = operands.scale.dtype.name
    assert shape.scale_columns is not None
    return ProductSizes(
        problem.codes,
        shape.contracting == "rows",
        *(shape.m, shape.k, (shape.n,), shape.tile, shape.scale_columns == 1),
        operands.x.dtype.name,
        "uint8" if scale_dtype == "float8_e8m0fnu" else scale_dtype,
        "float32" if is_added else problem.out_dtype,
        *((operands.zero_point.dtype.name, problem.offset) if subtracts else ()),
    )


def _checked(layout: ProductSizes, config: Config | None) -> Config:
    """Return a configuration with all fields set. The default is `config_for(layout)`.

    **Raises:** `nvrtc.CompileError` if it needs too much shared memory.
    """
    config = config or config_for(layout)
    if config.stages == 0:
        config = _with_most_stages(layout, config) or config
    if config.stages == 0 or shared_bytes(layout, config) > _SHARED_BYTES:
        raise nvrtc.CompileError(f"{config} needs more than {_SHARED_BYTES} bytes of shared memory")
    return config


def _capability(layout: ProductSizes) -> int:
    """Return the compute capability to compile for.

    **Raises:** `nvrtc.CompileError` if there is no GPU that the kernel can run on.
    """
    capability, least = compute_capability(), 89 if layout.codes.dtype.startswith("float8") else 80
    if capability is None or capability < least:
        found = (
            "there is no NVIDIA GPU" if capability is None else f"this GPU has {capability / 10}"
        )
        raise nvrtc.CompileError(f"the kernel needs compute capability {least / 10}, but {found}")
    return capability


@functools.cache
def compute_capability() -> int | None:
    """Return the lowest compute capability of this process's GPUs: 90 for 9.0 and all newer ones.

    Return None if there is no NVIDIA GPU.
    """
    found = []
    for text in compute_capabilities():
        major, _, minor = text.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):  # a GPU of another manufacturer
            return None
        found.append(10 * int(major) + int(minor))
    return min(90, *found) if found else None


def compute_capabilities() -> set[str]:
    """Return the compute capabilities of this process's GPUs, such as "9.0"."""
    try:
        devices = jax.devices("gpu")
    except RuntimeError:  # JAX has no GPU platform
        return set()
    return {str(getattr(device, "compute_capability", "")) for device in devices}


@functools.lru_cache(maxsize=1024)
def ptx(layout: ProductSizes, config: Config, capability: int) -> str:
    """Return the PTX of the kernel for a product."""
    source = Path(__file__).with_name("matmul.cu").read_text("utf-8")
    defined = [
        f"-D{name}={value}{'u' if isinstance(value, int) and value >= 2**31 else ''}"
        for name, value in macros(layout, config).items()
    ]
    defined.append(f"-DNAME={name_of(layout, config)}")
    return nvrtc.compile_ptx(
        source, [*defined, f"--gpu-architecture=compute_{capability}", "--std=c++17"]
    )


def name_of(layout: ProductSizes, config: Config) -> str:
    """Return the name of a kernel, as profiles show it.

    It ends with a hash of the macros, because XLA may take kernels of the same name for the same.
    """
    side = "rows" if layout.is_rows else "columns"
    sizes = f"{layout.m}x{'_'.join(map(str, layout.ns))}x{layout.k}"
    divided = "_".join(str(int(size)) for size in config)
    digest = hashlib.sha256(json.dumps(macros(layout, config)).encode()).hexdigest()[:8]
    return f"veneer_{side}_{layout.codes.kind}_{sizes}_{divided}_{digest}"


def _call_config(layout: ProductSizes, config: Config, batch: int) -> str:
    """Return XLA's launch configuration for a kernel, an MLIR dictionary."""
    m_blocks = 1 if config.by_digits else -(-layout.m // (8 * config.m_tiles))
    grid = _column_blocks(layout, config) * m_blocks, 1, batch
    numbers: Mapping[str, int] = {
        **{f"grid_{axis}": size for axis, size in zip("xyz", grid, strict=True)},
        **{"block_x": 32 * config.k_warps, "block_y": 1, "block_z": 1, "shared_mem_bytes": 0},
    }
    kernel = ptx(layout, config, _capability(layout))
    texts = {"name": name_of(layout, config), "kernel_type": "ptx", "kernel_data": kernel}
    entries = [f"{name} = {json.dumps(text)}" for name, text in texts.items()]
    entries += [f"{name} = {number} : i32" for name, number in numbers.items()]
    products = len(layout.ns)
    first = 1 + (3 if layout.zero_dtype else 2) * products
    results = ", ".join(f"{i} : i32" for i in range(first, first + products))
    return "{" + ", ".join([*entries, f"output_indices = [{results}]"]) + "}"
