"""Multiply a few rows of activations by a packed weight on an NVIDIA GPU.

NVRTC compiles `matmul.cu` for the sizes of a product when JAX lowers a program. The program
contains the PTX. Therefore a cached or saved program includes the kernel, and needs no library.

Products of the same activations with several weights become one launch (`kernels/common/calls.py`).
A launch with a small weight takes 2 to 3 microseconds, however little it reads.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..common import calls
from ..common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from .cuda_program import (
    ZERO_POINTS,
    CompileError,
    Config,
    ProductSizes,
    column_blocks,
    config_for,
    form_of,
    name_of,
    ptx,
)

#: The most products in one launch.
MOST_PRODUCTS = 4

_TARGET = "__gpu$xla.gpu.ptx"  # XLA's custom call that launches PTX


def can_compute(codes: Codes, shape: MatmulShape) -> bool:
    """Return whether the kernel supports the sizes and codes of a product."""
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


def product(operands: MatmulOperands, problem: MatmulProblem) -> jax.Array:
    """Multiply activations by a packed weight, in a program that is lowered for one device.

    One launch computes several products of the same x, if their weights have the same encoding,
    dtypes, layout and sizes. Only N, the number of result columns, may differ.

    **Arguments:**

    - `operands`: `x` is bf16 or f16 `[B, M, K]`.

    **Returns:** `[B, M, N]`, without the term of minima. The dtype is f32 if the caller must still
    add minima, or zero points that the kernel does not subtract (see `takes_zero_points`).

    **Raises:** `CompileError` if the kernel cannot be compiled.
    """
    layout = layout_of(operands, problem)
    shape = operands.x.shape[0], layout.m, *layout.ns
    arrays = _stored_arrays(operands, layout)
    return calls.call(Kernel(layout), [operands.x], arrays, shape, layout.out_dtype)


def separate_product(
    operands: MatmulOperands, problem: MatmulProblem, config: Config | None = None
) -> jax.Array:
    """Return the same as `product`, by a launch that no other product joins.

    Tests and benchmarks call it outside of a lowering. `config` are the block sizes. By default,
    `config_for` chooses them.
    """
    layout, batch = layout_of(operands, problem), operands.x.shape[0]
    shape, dtype = (batch, layout.m, *layout.ns), jnp.dtype(layout.out_dtype)
    call = jax.ffi.ffi_call(
        _TARGET,
        [jax.ShapeDtypeStruct(shape, dtype)],
        custom_call_api_version=2,
        legacy_backend_config=_call_config(layout, config or config_for(layout), batch),
    )
    (out,) = call(operands.x, *_stored_arrays(operands, layout))
    return out


class Kernel(NamedTuple):
    """The kernel for few rows, in the form that `kernels/common/calls.py` needs.

    One launch multiplies the same activations by several weights. The weights have the same
    encoding, dtypes, layout and sizes. Only N, the number of result columns, may differ.

    **Arguments:**

    - `layout`: the sizes, dtypes and layout of one of the products.
    """

    layout: ProductSizes

    @property
    def most_products(self) -> int:
        """The largest number of products that one launch can compute."""
        return MOST_PRODUCTS

    def is_called_by(self, operation: Any) -> bool:
        """Return whether an MLIR custom call launches this kernel. N of its weights may differ."""
        if calls.attribute(operation, "call_target_name") != _TARGET:
            return False
        layout = self._with_sizes([out.type.shape for out in operation.results])
        start = f'{{name = "{name_of(layout, config_for(layout))}"'
        return calls.attribute(operation, "backend_config").startswith(start)

    def emit(self, ctx: Any, operands: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        """Write a launch of the kernel into the program, and return its results.

        **Arguments:**

        - `ctx`: JAX's lowering context. `ctx.avals_out` has the shapes and the dtype of the
          results.
        - `operands`: MLIR values: the activations, then the stored arrays of each weight.
        - `shapes`: the shape of each result, `[B, M, N]`.
        """
        layout = self._with_sizes(shapes)
        config = _call_config(layout, config_for(layout), shapes[0][0])
        emit = jax.ffi.ffi_lowering(_TARGET, backend_config=config, api_version=2)
        return emit(ctx, *operands)

    def _with_sizes(self, shapes: Sequence[Sequence[int]]) -> ProductSizes:
        return self.layout._replace(ns=tuple(shape[-1] for shape in shapes))


def _stored_arrays(operands: MatmulOperands, layout: ProductSizes) -> list[jax.Array]:
    """Return the codes and scales that the kernel reads, and the zero points if it subtracts them.

    Codes, and scales of dtype float8_e8m0fnu, are reinterpreted as uint8.
    """
    packed, scale = operands.packed, operands.scale
    if packed.dtype != jnp.uint8:
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    return [packed, scale, operands.zero_point] if layout.zero_dtype else [packed, scale]


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

    **Raises:** `CompileError` if it is impossible.
    """
    layout = layout_of(operands, problem)
    ptx(layout, config_for(layout), _capability(layout))


def layout_of(operands: MatmulOperands, problem: MatmulProblem) -> ProductSizes:
    """Return the sizes, dtypes and layout that select the kernel for a product.

    The operands may be avals.
    """
    shape = problem.shape(operands)
    subtracts = takes_zero_points(operands, problem)
    # The caller adds these terms to the result in f32.
    is_added = operands.minimum is not None or (operands.zero_point is not None and not subtracts)
    scale_dtype = operands.scale.dtype.name
    assert shape.scale_columns is not None
    return ProductSizes(
        codes=problem.codes,
        is_rows=shape.contracting == "rows",
        m=shape.m,
        k=shape.k,
        ns=(shape.n,),
        tile=shape.tile,
        has_one_scale=shape.scale_columns == 1,
        x_dtype=operands.x.dtype.name,
        scale_dtype="uint8" if scale_dtype == "float8_e8m0fnu" else scale_dtype,
        out_dtype="float32" if is_added else problem.out_dtype,
        zero_dtype=operands.zero_point.dtype.name if subtracts else "",
        zero_offset=problem.offset if subtracts else 0,
    )


def _capability(layout: ProductSizes) -> int:
    """Return the compute capability to compile for, such as 90 for 9.0.

    **Raises:** `CompileError` if there is no GPU that the kernel can run on.
    """
    capability, least = compute_capability(), 89 if layout.codes.dtype.startswith("float8") else 80
    if capability is None or capability < least:
        reason = (
            "there is no NVIDIA GPU" if capability is None else f"this GPU has {capability / 10}"
        )
        raise CompileError(f"the kernel needs compute capability {least / 10}, but {reason}")
    return capability


def is_available() -> bool:
    """Return True: programs for a GPU can be traced in every process."""
    return True


def has_device() -> bool:
    """Return whether this process has NVIDIA GPUs."""
    return compute_capability() is not None


@functools.cache
def compute_capability() -> int | None:
    """Return the lowest compute capability of this process's GPUs, as an integer: 80 means 8.0.

    Return 90 for all capabilities above 9.0. Return None if a GPU is not from NVIDIA, or if there
    is no GPU.
    """
    capabilities = []
    for text in compute_capabilities():
        major, _, minor = text.partition(".")
        if not (major.isdecimal() and minor.isdecimal()):  # a GPU of another manufacturer
            return None
        capabilities.append(10 * int(major) + int(minor))
    return min(90, *capabilities) if capabilities else None


def compute_capabilities() -> set[str]:
    """Return the compute capabilities of this process's GPUs, such as "9.0"."""
    try:
        devices = jax.devices("gpu")
    except RuntimeError:  # JAX has no GPU platform
        return set()
    return {str(getattr(device, "compute_capability", "")) for device in devices}


def _call_config(layout: ProductSizes, config: Config, batch: int) -> str:
    """Return XLA's launch configuration for a kernel, as the text of an MLIR dictionary."""
    m_blocks = 1 if config.by_digits else -(-layout.m // (8 * config.m_tiles))
    grid = column_blocks(layout, config) * m_blocks, 1, batch
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
