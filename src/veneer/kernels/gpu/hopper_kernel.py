"""Multiply many rows by a packed weight on Hopper GPUs, with Pallas Mosaic GPU.

The kernel computes transposed tiles `out.T[n, m] = W[n, k] @ x.T[k, m]` with `wgmma`. Operand A is
the weight: each warpgroup loads codes from shared memory and converts them in registers. Operand B
is the activations, which `wgmma` reads from shared memory. The kernel transposes each tile before
it writes the tile to `out[M, N]`.

The kernel was run with JAX 0.11.2, and compiled with JAX 0.11.2 and 0.12.0.1.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

if TYPE_CHECKING:
    from .hopper import HopperConfig, Sizes

Layout = plgpu.Layout
#: The number of streaming multiprocessors of an H100 or H200 (SXM).
_MULTIPROCESSORS = 132
_load: Any = plgpu.load  # untyped, because JAX 0.12 removed an argument


def _transforms(columns: int, bits: int) -> tuple[Any, Any]:
    """Return the tiling and swizzle of a buffer in shared memory, as `wgmma` expects them.

    The buffer has at least `columns` contiguous entries of `bits` bits.
    """
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def _load_codes(ref: Any, kind: str, is_rows: bool) -> jax.Array:
    """Load codes from shared memory as `[n, k]`, in a register layout that needs few instructions.

    `kind` is the dtype of the codes, such as "int4". They are stored as `[k, n]` if `is_rows`,
    otherwise as `[n, k]`.
    """
    if is_rows:
        return _load(ref.transpose((1, 0)), layout=Layout.WGMMA_TRANSPOSED, optimized=False)
    is_int4 = kind == "int4"
    return _load(ref, layout=Layout.WGMMA_UPCAST_4X if is_int4 else Layout.WGMMA_UPCAST_2X)


def _convert(codes: jax.Array, kind: str, is_rows: bool) -> jax.Array:
    """Convert the codes that `_load_codes` returned to bf16, in the layout of operand A of `wgmma`.

    `kind` and `is_rows` are the same arguments as for `_load_codes`.
    """
    if not is_rows:
        codes = plgpu.layout_cast(codes, Layout.WGMMA)
    if kind == "float8_e4m3fn":
        codes = codes.astype(jnp.float32)
    return plgpu.layout_cast(codes.astype(jnp.bfloat16), Layout.WGMMA)


class _HopperKernel(NamedTuple):
    """The arguments of `kernel_for`, and properties that are computed from them."""

    sizes: "Sizes"
    kind: str
    is_rows: bool
    out_dtype: np.dtype
    config: "HopperConfig"

    @property
    def is_tiled(self) -> bool:
        """True if codes along K have several scales. Then each pipeline step loads its scales."""
        return self.sizes.tile != self.sizes.k

    @property
    def grid(self) -> tuple[int, int]:
        """The number of tiles of the result along M, and of clusters of tiles along N."""
        c = self.config
        return self.sizes.m // c.tile_m, self.sizes.n // (c.block_n * c.cluster)


@functools.lru_cache(maxsize=256)
def kernel_for(
    sizes: "Sizes", kind: str, is_rows: bool, out_dtype: np.dtype, config: "HopperConfig"
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return the kernel for a product, as a function of `x`, codes and scales.

    `kind` is the dtype of the codes: "int4", "int8" or "float8_e4m3fn". `x` is bf16 `[m, k]`, where
    `m` is a multiple of `config.tile_m`. The codes are `[k, n]` if `is_rows`, otherwise `[n, k]`.
    The scales are f32 `[k / tile, n]`. The result is `[m, n]`.
    """
    kernel = _HopperKernel(sizes, kind, is_rows, out_dtype, config)
    m_tiles, n_tiles = kernel.grid
    blocks = m_tiles * n_tiles
    if not config.overlap:
        # Let a block compute several tiles. With `overlap`, it computes only one: because of
        # `delay_release`, the pipeline of JAX 0.11.2 does not wait for its last step, and loading
        # another tile would overwrite operands that `wgmma` still reads.
        blocks = min(_MULTIPROCESSORS // config.cluster, blocks)
    # Each warpgroup has two slots for rows of the result, and copies one while it fills the other.
    out_smem = plgpu.SMEM(
        (config.warpgroups, 2, config.out_rows, config.tile_n),
        out_dtype,
        transforms=_transforms(config.tile_n, 8 * out_dtype.itemsize),
    )

    def body(x_ref: Any, w_ref: Any, scale_ref: Any, out_ref: Any, out_smem: Any) -> None:
        _compute_tiles(kernel, x_ref, w_ref, scale_ref, out_ref, out_smem)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((sizes.m, sizes.n), out_dtype),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=config.warpgroups + 1,
        thread_name="wg",
        scratch_types={"out_smem": out_smem},
    )


def _compute_tiles(
    kernel: _HopperKernel, x_ref: Any, w_ref: Any, scale_ref: Any, out_ref: Any, out_smem: Any
) -> None:
    """Compute the tiles of the result that belong to a block of threads.

    All warpgroups of the block run this function. The `_ref` arguments are arrays in global memory,
    and `out_smem` has buffers in shared memory for the result.
    """
    c = kernel.config
    warpgroup = lax.axis_index("wg")
    own_n = pl.ds(warpgroup * c.tile_n, c.tile_n)  # the columns of this warpgroup in its block

    def multiply_step(_: Any, x_smem: Any, w_smem: Any, *rest: Any) -> Any:
        *scale_smem, acc = rest
        return _multiply_step(kernel, own_n, x_smem, w_smem, scale_smem, acc)

    def run_pipelines(allocations: Any) -> None:
        # The pipelines of all tiles use the same shared memory.

        @plgpu.nd_loop((kernel.grid[0] * kernel.grid[1],), collective_axes="block")
        def compute_tile(info: Any) -> None:
            # Compute eight tiles along M after each other. They share the weight in cache.
            i, j = plgpu.planar_snake(info.index[0], kernel.grid, 0, 8)
            j = j * c.cluster + lax.axis_index("cluster")
            m_span, n_span = pl.ds(i * c.tile_m, c.tile_m), pl.ds(j * c.block_n, c.block_n)

            def compute_and_write(evaluate: Callable[[Any], None], acc_ref: Any) -> None:
                evaluate(acc_ref)
                acc = acc_ref[...]
                if not kernel.is_tiled:
                    acc = acc * _load_scales(scale_ref.at[0, n_span].at[own_n], acc.shape)
                slots = [out_smem.at[warpgroup, slot] for slot in range(2)]
                _write_tile(kernel, acc, slots, out_ref.at[m_span, n_span].at[:, own_n])

            def compute(evaluate: Callable[[Any], None]) -> None:
                # `evaluate` runs all steps. The accumulator is in registers.
                accumulator = plgpu.ACC((c.tile_n, c.tile_m), jnp.float32)
                pl.run_scoped(functools.partial(compute_and_write, evaluate), accumulator)

            operands = [
                x_ref.at[m_span],
                w_ref.at[:, n_span] if kernel.is_rows else w_ref.at[n_span],
            ]
            operands += [scale_ref.at[:, n_span]] * kernel.is_tiled
            _pipeline(kernel, multiply_step, compute)(*operands, allocations=allocations)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    refs = [x_ref, w_ref] + [scale_ref] * kernel.is_tiled
    allocations = _pipeline(kernel, multiply_step, lambda *_: None).get_allocations(*refs)
    pl.run_scoped(run_pipelines, allocations, collective_axes="wg")


def _pipeline(kernel: _HopperKernel, step: Callable[..., Any], compute: Callable[..., None]) -> Any:
    """Return a pipeline along K. One warpgroup loads blocks, and the others run `step` on them.

    The other warpgroups call `compute(evaluate)`. It calls `evaluate(accumulator)`, which runs all
    steps and adds their products to the accumulator.
    """
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(kernel.sizes.k // kernel.config.tile_k,),
        memory_registers=40,
        in_specs=_block_specs(kernel),
        wg_axis="wg",
        num_compute_wgs=kernel.config.warpgroups,
        max_concurrent_steps=kernel.config.stages,
        compute_context=compute,
    )


def _block_specs(kernel: _HopperKernel) -> list[Any]:
    """Return the Pallas block specs of a pipeline step.

    There is one for x, one for codes and, if codes along K have several scales, one for scales.
    """
    c, bits, tile = kernel.config, kernel.sizes.bits, kernel.sizes.tile
    block_spec = functools.partial(plgpu.BlockSpec, delay_release=int(c.overlap))
    shared: dict[str, Any] = {"collective_axes": ("cluster",)} if c.cluster > 1 else {}
    at_k = lambda i: (0, i)
    x_spec = block_spec((c.tile_m, c.tile_k), at_k, transforms=_transforms(c.chunk, 16), **shared)
    if kernel.is_rows:
        transforms = _transforms(c.tile_n, bits)
        w_spec = block_spec((c.tile_k, c.block_n), lambda i: (i, 0), transforms=transforms)
    else:
        w_spec = block_spec((c.block_n, c.tile_k), at_k, transforms=_transforms(c.tile_k, bits))
    if not kernel.is_tiled:
        return [x_spec, w_spec]
    return [x_spec, w_spec, block_spec((1, c.block_n), lambda i: (i * c.tile_k // tile, 0))]


def _multiply_step(
    kernel: _HopperKernel, own_n: Any, x_smem: Any, w_smem: Any, scale_smem: Sequence[Any], acc: Any
) -> Any:
    """Add the product of one pipeline step to the accumulator, chunk by chunk. Return it.

    `acc` is the accumulator. `own_n` are the columns of this warpgroup in its block. `x_smem` and
    `w_smem` are the activations and codes of the step in shared memory. `scale_smem` has the scales
    of the step, or is empty if all codes along K share a scale.
    """
    c = kernel.config
    if kernel.is_tiled:
        shape = (c.tile_n, c.chunk)
        scales = _load_scales(scale_smem[0].at[0, own_n], shape, jnp.bfloat16)
    if not kernel.is_rows:
        # Load the whole step at once, so that shared memory can use a wide swizzle.
        codes = _load_codes(w_smem.at[own_n], kernel.kind, kernel.is_rows)
    for start in range(0, c.tile_k, c.chunk):
        span = pl.ds(start, c.chunk)
        if kernel.is_rows:
            chunk = _load_codes(w_smem.at[span, own_n], kernel.kind, kernel.is_rows)
        else:
            chunk = codes[:, start : start + c.chunk]
        chunk = _convert(chunk, kernel.kind, kernel.is_rows)
        if kernel.is_tiled:
            chunk = chunk * scales
        plgpu.wgmma(acc, chunk, x_smem.at[:, span].transpose((1, 0)))
        if c.overlap:
            plgpu.wgmma_wait(1)  # convert the next chunk during this product
    if not c.overlap:
        plgpu.wgmma_wait(0)
    return acc


def _load_scales(ref: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Load one scale for each row of an array of this shape, and broadcast each along its row."""
    scales = _load(ref, layout=Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(scales.astype(dtype), shape, (0,))


def _write_tile(kernel: _HopperKernel, acc: jax.Array, slots: Sequence[Any], out: Any) -> None:
    """Write an accumulator `[tile_n, tile_m]` to its tile of the result, transposed.

    A few rows at a time are copied through `slots`, two buffers in shared memory, to the tile `out`
    in global memory.
    """
    rows = kernel.config.out_rows
    result = plgpu.layout_cast(acc.astype(kernel.out_dtype), Layout.WGMMA_TRANSPOSED)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part in range(kernel.config.tile_m // rows):
        slot = slots[part % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy from this slot has ended
        slot.transpose((1, 0))[...] = result[:, part * rows : (part + 1) * rows]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, out.at[pl.ds(part * rows, rows)])
