"""Select the block sizes of the kernel for Hopper GPUs."""

from typing import NamedTuple

#: The warpgroups per block that compute. Another warpgroup loads.
WARPGROUPS = 2
#: The most bytes of shared memory that a block can have.
_SHARED_MEMORY = 227 * 1024


class HopperConfig(NamedTuple):
    """Block sizes of the kernel.

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
    def block_n(self) -> int:
        """The number of result columns per block."""
        return self.tile_n * WARPGROUPS


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
    """Return the bytes of shared memory that a block needs."""
    c = config
    per_stage = c.tile_m * c.tile_k * 2 + c.block_n * c.tile_k * bits // 8
    scales = c.block_n * 4 * (c.stages if is_tiled else 1)
    out = WARPGROUPS * 2 * c.tile_n * c.out_rows * 2
    return per_stage * c.stages + scales + out + 1024
