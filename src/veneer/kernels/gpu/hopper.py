"""Multiply many rows of activations by a packed weight on a Hopper GPU.

The kernel is in `hopper_kernel.py`. It is imported on use, because importing Pallas is slow.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from .hopper_config import HopperConfig, Sizes, config_for, fits
from .matmul import compute_capabilities

_INT4 = (*map(float, range(8)), *map(float, range(-8, 0)))
#: The oldest JAX version that the kernel was tested with.
LEAST_JAX = (0, 11)


def can_compute(codes: Codes, shape: MatmulShape) -> bool:
    """Return whether the kernel supports the sizes and codes of a product."""
    if _kind_of(codes) is None or shape.activations != "bfloat16" or not isinstance(shape.m, int):
        return False
    if not isinstance(shape.batch, int) or shape.batch != 1:
        return False
    if shape.scale_columns not in (None, 1, shape.n) or shape.m * max(shape.k, shape.n) >= 2**31:
        return False
    sizes = Sizes(shape.m, shape.k, shape.n, codes.bits, shape.tile)
    return shape.k * shape.n < 2**31 and config_for(sizes) is not None


def _kind_of(codes: Codes) -> str | None:
    """Return the dtype that the kernel loads codes as, or None if it cannot decode them."""
    if codes.values == _INT4:
        return "int4"
    return codes.dtype if codes.dtype in ("int8", "float8_e4m3fn") else None


@functools.cache
def is_hopper() -> bool:
    """Return whether all GPUs of this process have compute capability 9.0."""
    return compute_capabilities() == {"9.0"}


def has_jax() -> bool:
    """Return whether this JAX version is new enough for the kernel."""
    return jax.__version_info__ >= LEAST_JAX


def compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Lower the kernel for one product, to check that this is possible.

    **Raises:** any error of Pallas.
    """
    _compile(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands), problem)


@functools.lru_cache(maxsize=1024)
def _compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    compute = jax.jit(functools.partial(product, problem=problem))
    compute.trace(operands).lower(lowering_platforms=("cuda",))


def product(
    operands: MatmulOperands, problem: MatmulProblem, config: HopperConfig | None = None
) -> jax.Array:
    """Multiply activations by a packed weight, without the terms of zero points and minima.

    **Arguments:**

    - `operands`: `x` is bf16 `[1, M, K]`. Scales are per channel, per tile, or a single one.
    - `config`: the block sizes. The default is `config_for`.

    **Returns:** `[1, M, N]`. The dtype is f32 if the caller must still add zero points or minima.

    **Raises:** `ValueError` if the product does not fit `config`.
    """
    from . import hopper_kernel

    shape, kind = problem.shape(operands), _kind_of(problem.codes)
    m, k, n, tile = shape.m, shape.k, shape.n, shape.tile
    sizes = Sizes(m, k, n, problem.codes.bits, tile)
    config = config or config_for(sizes)
    is_supported = can_compute(problem.codes, shape)
    if kind is None or config is None or not is_supported or not fits(sizes, config):
        raise ValueError(
            f"the kernel for Hopper GPUs does not support this product: codes {problem.codes}, "
            f"sizes {shape}, block sizes {config}. Check can_compute first, and pass no config"
        )
    is_rows = problem.contracting == "rows"
    x, codes, scale = operands.x[0], operands.packed[0], operands.scale[0]
    if codes.dtype != jnp.dtype(kind):
        codes = lax.bitcast_convert_type(codes, kind).reshape((k, n) if is_rows else (n, k))
    scale = (scale if is_rows else scale.T).astype(jnp.float32)
    scale = jnp.broadcast_to(scale, (k // tile, n))
    rows = -(-m // config.tile_m) * config.tile_m
    if rows != m:
        x = jnp.pad(x, ((0, rows - m), (0, 0)))
    is_complete = operands.zero_point is None and operands.minimum is None
    out_dtype = jnp.dtype(problem.out_dtype if is_complete else "float32")
    multiply = hopper_kernel.kernel_for(sizes._replace(m=rows), kind, is_rows, out_dtype, config)
    return multiply(x, codes, scale)[None, :m]


def takes_zero_points(operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return False: this kernel never subtracts zero points, so the caller must."""
    return False
