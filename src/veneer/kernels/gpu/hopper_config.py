"""The block sizes of the kernel for Hopper GPUs, and which products they fit."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

#: Warpgroups of a block that compute. Another one loads.
WARPGROUPS = 2
#: The shared memory of a streaming multiprocessor that one block can have.
_SHARED_MEMORY = 227 * 1024
#: The kinds of codes: their bits and their dtype.
CODES: dict[str, tuple[int, np.dtype]] = {
    "int8": (8, jnp.dtype(jnp.int8)),
    "int4": (4, jnp.dtype(jnp.int4)),
    "float8_e4m3fn": (8, jnp.dtype(jnp.float8_e4m3fn)),
}


class HopperConfig(NamedTuple):
    """Block sizes of the kernel.

    **Arguments:**

    - `tile_m`: the rows of `x` that a block computes.
    - `tile_n`: the channels that one of its warpgroups computes.
    - `tile_k`: the codes along K per pipeline step.
    - `stages`: the number of pipeline steps in shared memory.
    - `chunk`: the codes along K that are converted at a time.
    - `cluster`: the number of blocks that share their loads of `x`. They are neighbors along the
      channels.
    - `out_rows`: the rows of the output that are copied to global memory at a time.
    - `overlap`: convert a chunk while the product of the previous chunk runs. This needs two
      chunks per step. Each block then computes one tile alone.
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
    def block_n(self) -> int:
        """The channels that one block computes."""
        return self.tile_n * WARPGROUPS


#: By the most rows of `x` that a config is for: the fastest one on an H200 in November 2026, and
#: the configs for products that it does not fit.
CONFIGS = {
    64: HopperConfig(64, 64, 128, stages=4, out_rows=32, overlap=True),
    128: HopperConfig(128, 64, 128, stages=4, out_rows=32, overlap=True),
    1 << 31: HopperConfig(256, 64, 64, stages=4, chunk=32, cluster=2, overlap=True),
}
FALLBACKS = (HopperConfig(256, 64, 128, stages=2, out_rows=32), CONFIGS[128], CONFIGS[64])


class Sizes(NamedTuple):
    """The sizes of a product `[m, k] x [k, n]`.

    **Arguments:**

    - `bits`: the bits of a code.
    - `tile`: the codes along k that share a scale; k if there is one scale per channel.
    """

    m: int
    k: int
    n: int
    bits: int
    tile: int


def config_for(sizes: Sizes) -> HopperConfig | None:
    """Return the fastest config that fits a product, or None if none fits.

    >>> from veneer.kernels.gpu.hopper_config import Sizes, config_for
    >>> [config_for(Sizes(m, 4096, 4096, bits=4, tile=128)).tile_m for m in (100, 1000)]
    [128, 256]
    """
    fastest = next(config for most_rows, config in CONFIGS.items() if sizes.m <= most_rows)
    return next((config for config in (fastest, *FALLBACKS) if fits(sizes, config)), None)


def fits(sizes: Sizes, config: HopperConfig) -> bool:
    """Return whether the kernel can compute a product with a config."""
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
    """Return the bytes of shared memory of a block."""
    c = config
    per_stage = c.tile_m * c.tile_k * 2 + c.block_n * c.tile_k * bits // 8
    scales = c.block_n * 4 * (c.stages if is_tiled else 1)
    out = WARPGROUPS * 2 * c.tile_n * c.out_rows * 2
    return per_stage * c.stages + scales + out + 1024
