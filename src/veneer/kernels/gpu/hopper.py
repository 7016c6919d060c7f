"""Multiply many rows of activations by a packed weight on a Hopper GPU.

This module selects the block sizes of the kernel, checks products, and calls the kernel. The kernel
is in `hopper_kernel.py`, which is imported on use, because importing Pallas is slow.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape
from . import matmul

_INT4 = (*map(float, range(8)), *map(float, range(-8, 0)))
#: The oldest JAX version that the kernel was tested with.
LEAST_JAX = (0, 11)


#: The most bytes of shared memory that a block can have.
_SHARED_MEMORY = 227 * 1024


class HopperConfig(NamedTuple):
    """Block sizes of the kernel for Hopper GPUs.

    **Arguments:**

    - `tile_m`: the number of result rows per block.
    - `tile_n`: the number of result columns per warpgroup.
    - `tile_k`: the number of codes along K per pipeline step.
    - `stages`: the number of pipeline steps in shared memory.
    - `chunk`: the number of codes along K that are converted at a time.
    - `cluster`: the number of blocks that share their loads of `x`. They are neighbors along N.
    - `out_rows`: the number of result rows that are copied to global memory at a time.
    - `overlap`: whether a chunk is converted while `wgmma` multiplies the previous chunk. This
      needs two chunks per pipeline step. Each block then computes a single tile.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    chunk: int = 64
    cluster: int = 1
    out_rows: int = 64
    overlap: bool = False

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups per block that compute. One more warpgroup loads."""
        return 2

    @property
    def block_n(self) -> int:
        """The number of result columns per block."""
        return self.tile_n * self.warpgroups


#: The fastest config for each range of M on an H200 in November 2026. A key is the largest M of its
#: range. `FALLBACKS` are the configs for products that the fastest config does not fit.
CONFIGS = {
    64: HopperConfig(64, 64, 128, stages=4, out_rows=32, overlap=True),
    128: HopperConfig(128, 64, 128, stages=4, out_rows=32, overlap=True),
    1 << 31: HopperConfig(256, 64, 64, stages=4, chunk=32, cluster=2, overlap=True),
}
FALLBACKS = (HopperConfig(256, 64, 128, stages=2, out_rows=32), CONFIGS[128], CONFIGS[64])


class Sizes(NamedTuple):
    """The sizes of a product `[m, k] x [k, n]`.

    **Arguments:**

    - `bits`: the bits per code.
    - `tile`: the number of codes along K that share a scale. It is `k` for per-channel scales.
    """

    m: int
    k: int
    n: int
    bits: int
    tile: int


def config_for(sizes: Sizes) -> HopperConfig | None:
    """Return the fastest config that fits a product, or None if none fits.

    >>> from veneer.kernels.gpu.hopper import Sizes, config_for
    >>> [config_for(Sizes(m, 4096, 4096, bits=4, tile=128)).tile_m for m in (100, 1000)]
    [128, 256]
    """
    fastest = next(config for most_rows, config in CONFIGS.items() if sizes.m <= most_rows)
    return next((config for config in (fastest, *FALLBACKS) if fits(sizes, config)), None)


def fits(sizes: Sizes, config: HopperConfig) -> bool:
    """Return whether the kernel can compute a product of these sizes with these block sizes."""
    m, k, n, bits, tile = sizes
    is_tiled = tile != k
    return (
        bits in (4, 8)
        and m >= 1
        and config.tile_k % config.chunk == 0
        and config.tile_m % config.out_rows == 0
        # With one chunk per step, ptxas of CUDA 13 overwrites operands that the previous product
        # still reads.
        and (not config.overlap or (config.tile_k == 2 * config.chunk and config.stages > 2))
        and k % config.tile_k == 0
        and k // config.tile_k >= config.stages
        and n % (config.block_n * config.cluster) == 0
        and (not is_tiled or (tile % config.tile_k == 0 and k % tile == 0))
        and _shared_memory(bits, is_tiled, config) <= _SHARED_MEMORY
    )


def _shared_memory(bits: int, is_tiled: bool, config: HopperConfig) -> int:
    """Return the bytes of shared memory that a block of threads needs.

    `bits` are the bits per code. `is_tiled` is whether codes along K have several scales.
    """
    c = config
    per_stage = c.tile_m * c.tile_k * 2 + c.block_n * c.tile_k * bits // 8
    scales = c.block_n * 4 * (c.stages if is_tiled else 1)
    out = c.warpgroups * 2 * c.tile_n * c.out_rows * 2
    return per_stage * c.stages + scales + out + 1024


# Products.


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
    """Return whether this process has GPUs, and all have compute capability 9.0 (Hopper)."""
    return matmul.compute_capabilities() == {"9.0"}


def has_jax() -> bool:
    """Return whether this JAX version is new enough for the kernel."""
    return jax.__version_info__ >= LEAST_JAX


def is_available() -> bool:
    """Return whether JAX is new enough, and the process has a Hopper GPU or no GPU at all."""
    return has_jax() and (is_hopper() or matmul.compute_capability() is None)


def has_device() -> bool:
    """Return whether this process has GPUs, and all of them are Hopper GPUs."""
    return is_hopper()


def compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Lower the kernel for one product, to check that this is possible. Nothing is returned.

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
