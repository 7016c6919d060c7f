"""Multiply many rows by a packed weight on Hopper GPUs, with Pallas Mosaic GPU.

The kernel computes transposed tiles `out.T[n, m] = W[n, k] @ x.T[k, m]` with `wgmma`. Operand A is
the weight: each warpgroup loads codes from shared memory and converts them in registers. Operand B
is the activations, which `wgmma` reads from shared memory. The kernel transposes each tile before
it writes the tile to `out[M, N]`.

The kernel was run with JAX 0.11.2, and compiled with JAX 0.11.2 and 0.12.0.1.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from .hopper_config import WARPGROUPS, HopperConfig, Sizes

Layout = plgpu.Layout
#: The number of streaming multiprocessors of an H100 or H200 (SXM).
_MULTIPROCESSORS = 132
_load: Any = plgpu.load  # untyped, because JAX 0.12 removed an argument


def _transforms(columns: int, bits: int) -> tuple[Any, Any]:
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def _load_codes(ref: Any, kind: str, is_rows: bool) -> jax.Array:
    """Load codes as `[n, k]`, in a register layout that needs few instructions."""
    if is_rows:
        return _load(ref.transpose((1, 0)), layout=Layout.WGMMA_TRANSPOSED, optimized=False)
    is_int4 = kind == "int4"
    return _load(ref, layout=Layout.WGMMA_UPCAST_4X if is_int4 else Layout.WGMMA_UPCAST_2X)


def _convert(codes: jax.Array, kind: str, is_rows: bool) -> jax.Array:
    """Convert codes to bf16, in the layout of operand A of `wgmma`."""
    if not is_rows:
        codes = plgpu.layout_cast(codes, Layout.WGMMA)
    if kind == "float8_e4m3fn":
        codes = codes.astype(jnp.float32)
    return plgpu.layout_cast(codes.astype(jnp.bfloat16), Layout.WGMMA)


@functools.lru_cache(maxsize=256)
def kernel_for(
    sizes: Sizes, kind: str, is_rows: bool, out_dtype: np.dtype, config: HopperConfig
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Return the kernel for a product, as a function of `x`, codes and scales.

    `x` is bf16 `[m, k]`, where `m` is a multiple of `config.tile_m`. The codes are `[k, n]` if
    `is_rows`, otherwise `[n, k]`. The scales are f32 `[k / tile, n]`. The result is `[m, n]`.
    """
    (m, k, n, bits, tile), c = sizes, config
    columns, tiled = not is_rows, tile != k
    m_tiles, n_tiles, steps = m // c.tile_m, n // (c.block_n * c.cluster), k // c.tile_k
    rows = c.out_rows

    block_spec = functools.partial(plgpu.BlockSpec, delay_release=int(c.overlap))
    shared: dict[str, Any] = {"collective_axes": ("cluster",)} if c.cluster > 1 else {}
    at_k = lambda i: (0, i)
    x_spec = block_spec((c.tile_m, c.tile_k), at_k, transforms=_transforms(c.chunk, 16), **shared)
    if columns:
        w_spec = block_spec((c.block_n, c.tile_k), at_k, transforms=_transforms(c.tile_k, bits))
    else:
        transforms = _transforms(c.tile_n, bits)
        w_spec = block_spec((c.tile_k, c.block_n), lambda i: (i, 0), transforms=transforms)
    specs = [x_spec, w_spec]
    if tiled:
        specs.append(block_spec((1, c.block_n), lambda i: (i * c.tile_k // tile, 0)))

    def body(x_ref: Any, w_ref: Any, scale_ref: Any, out_ref: Any, out_smem: Any) -> None:
        warpgroup = lax.axis_index("wg")
        own_n = pl.ds(warpgroup * c.tile_n, c.tile_n)

        def step(_: Any, x_smem: Any, w_smem: Any, *rest: Any) -> Any:
            acc = rest[-1]
            if tiled:
                factor = _load(rest[0].at[0, own_n], layout=Layout.WGMMA.reduce(1), optimized=False)
                factor = lax.broadcast_in_dim(
                    factor.astype(jnp.bfloat16), (c.tile_n, c.chunk), (0,)
                )
            if columns:
                # Load the whole step at once, so that shared memory can use a wide swizzle.
                codes = _load_codes(w_smem.at[own_n], kind, is_rows)
            for start in range(0, c.tile_k, c.chunk):
                span = pl.ds(start, c.chunk)
                if not columns:
                    codes = _load_codes(w_smem.at[span, own_n], kind, is_rows)
                fragment = codes[:, start : start + c.chunk] if columns else codes
                fragment = _convert(fragment, kind, is_rows)
                if tiled:
                    fragment = fragment * factor
                plgpu.wgmma(acc, fragment, x_smem.at[:, span].transpose((1, 0)))
                if c.overlap:
                    plgpu.wgmma_wait(1)
            if not c.overlap:
                plgpu.wgmma_wait(0)
            return acc

        def pipeline(compute: Callable[..., None]) -> Any:
            return plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(steps,),
                memory_registers=40,
                in_specs=specs,
                wg_axis="wg",
                num_compute_wgs=WARPGROUPS,
                max_concurrent_steps=c.stages,
                compute_context=compute,
            )

        refs = [x_ref, w_ref] + [scale_ref] * tiled
        ignore = lambda *_: None

        def run(allocations: Any) -> None:
            @plgpu.nd_loop((m_tiles * n_tiles,), collective_axes="block")
            def _(info: Any) -> None:
                # Compute eight tiles along M after each other. They share the weight in cache.
                i, j = plgpu.planar_snake(info.index[0], (m_tiles, n_tiles), 0, 8)
                j = j * c.cluster + lax.axis_index("cluster")
                m_span, n_span = pl.ds(i * c.tile_m, c.tile_m), pl.ds(j * c.block_n, c.block_n)

                def compute(evaluate: Callable[[Any], None]) -> None:
                    def with_accumulator(acc_ref: Any) -> None:
                        evaluate(acc_ref)
                        acc = acc_ref[...]
                        if not tiled:
                            own = scale_ref.at[0, n_span].at[own_n]
                            factor = _load(own, layout=Layout.WGMMA.reduce(1), optimized=False)
                            acc = acc * lax.broadcast_in_dim(factor, acc.shape, (0,))
                        result = plgpu.layout_cast(acc.astype(out_dtype), Layout.WGMMA_TRANSPOSED)
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for part in range(c.tile_m // rows):
                            slot = out_smem.at[warpgroup, part % 2]
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                            slot.transpose((1, 0))[...] = result[:, part * rows : (part + 1) * rows]
                            plgpu.commit_smem()
                            target = out_ref.at[m_span, n_span].at[:, own_n]
                            plgpu.copy_smem_to_gmem(slot, target.at[pl.ds(part * rows, rows)])

                    pl.run_scoped(with_accumulator, plgpu.ACC((c.tile_n, c.tile_m), jnp.float32))

                blocks = [x_ref.at[m_span], w_ref.at[n_span] if columns else w_ref.at[:, n_span]]
                blocks += [scale_ref.at[:, n_span]] * tiled
                pipeline(compute)(*blocks, allocations=allocations)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(run, pipeline(ignore).get_allocations(*refs), collective_axes="wg")

    shape = (WARPGROUPS, 2, rows, c.tile_n)
    out_smem = plgpu.SMEM(
        shape, out_dtype, transforms=_transforms(c.tile_n, 8 * out_dtype.itemsize)
    )
    blocks = m_tiles * n_tiles
    if not c.overlap:
        # Let a block compute several tiles. With `overlap`, it computes only one: because of
        # `delay_release`, the pipeline of JAX 0.11.2 does not wait for its last step, and loading
        # another tile would overwrite operands that `wgmma` still reads.
        blocks = min(_MULTIPROCESSORS // c.cluster, blocks)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(c.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        scratch_types={"out_smem": out_smem},
    )
