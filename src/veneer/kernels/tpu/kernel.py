"""Multiply activations by a packed weight in a Pallas kernel for TPUs.

A grid step loads a block of codes into VMEM, decodes and scales it, and multiplies activations by
it. The block of the result stays in VMEM and accumulates the steps along K. To expand the scales of
tiles to a block, the kernel multiplies them by a matrix of ones and zeros. This product is exact,
and needs no moves between lanes.

The kernel has never run on a TPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from ..common.problem import Codes
from .decode import decoder, fields_of, scales_of, select_value
from .layout import BlockSizes, StoredLayout, blocks_of, split_fields


def multiply(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    codes: Codes,
    layout: StoredLayout,
    out_dtype: Any,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Multiply activations by a packed weight. Return `[B, M, N]`.

    The unpacked weight is `[R, C]`: `[K, N]` if the layout contracts rows, otherwise `[N, K]`. A
    scale is for a tile of `[tile_rows, tile_columns]` values.

    **Arguments:**

    - `x`: f32, bf16 or f16 `[B, M, K]`.
    - `packed`: uint8 `[B, R, bytes]`.
    - `scale`: `[B, R / tile_rows, C / tile_columns]`, floats or float8_e8m0fnu stored as uint8.
    - `interpret`: run the kernel in Pallas's interpreter, on any device.

    **Raises:** `ValueError` if the scales do not fit into VMEM.
    """
    batch, m, _ = x.shape
    blocks = blocks_of(layout)
    if blocks is None:
        raise ValueError(f"the scales of {layout} do not fit into VMEM")
    scale = _split_scales(scales_of(scale, scale.dtype == jnp.uint8), layout)
    x = split_fields(x, layout)
    along_k = layout.tiles > 1 and layout.entries == 1  # each entry has its own scale
    of_scale = blocks.k if along_k else layout.tiles

    def spec(fields: int, axes: str) -> pl.BlockSpec:
        """Return the spec of blocks `[fields, batch, ...]` with the named last axes."""
        size = {"m": blocks.m, "n": blocks.n, "k": blocks.k, "t": of_scale}
        shape = (fields, None, *(size[axis] for axis in axes))

        def place(batch: Any, m: Any, n: Any, k: Any) -> tuple[Any, ...]:
            at = {"m": m, "n": n, "k": k, "t": k if along_k else 0}
            return (0, batch, *(at[axis] for axis in axes))

        return pl.BlockSpec(shape, place)

    matrix, scales = ("kn", "tn") if layout.contracts_rows else ("nk", "nt")
    grid = batch, pl.cdiv(m, blocks.m), pl.cdiv(layout.n, blocks.n), pl.cdiv(layout.k, blocks.k)
    shape = (layout.out_fields, batch, m, layout.n)
    out = pl.pallas_call(
        functools.partial(_kernel, codes=codes, layout=layout, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=grid,
        in_specs=[spec(len(x), "mk"), spec(1, matrix), spec(len(scale), scales)],
        out_specs=spec(layout.out_fields, "mn"),
        interpret=interpret,
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        name=f"veneer_{'rows' if layout.contracts_rows else 'columns'}_{codes.kind}",
    )(x, packed[None], scale)
    out = jnp.moveaxis(out, 0, 3).reshape(batch, m, -1)
    return out[..., : layout.columns].astype(out_dtype)


def _split_scales(scale: jax.Array, layout: StoredLayout) -> jax.Array:
    """Arrange f32 scales by field and entry.

    **Returns:** `[F, B, T, n]` if rows are contracted, otherwise `[F, B, n, T]`. T is the number of
    scales along K. F is the number of fields, or 1 if all fields of an entry share their scale.
    """
    column_axis = 2 if layout.contracts_rows else 1
    n_tile = layout.columns // scale.shape[column_axis]
    scale = jnp.repeat(scale, n_tile, column_axis, total_repeat_length=layout.columns)
    if not layout.contracts_rows and layout.tiles > 1 and layout.tile < layout.fields:
        terms = layout.tile * layout.tiles
        scale = jnp.repeat(scale, layout.tile, 2, total_repeat_length=terms)
        last = layout.k
    elif layout.contracts_rows:
        last = layout.n
    else:
        return scale[None]
    scale = jnp.pad(scale, ((0, 0), (0, 0), (0, last * layout.fields - scale.shape[2])))
    return jnp.moveaxis(scale.reshape(*scale.shape[:2], last, layout.fields), 3, 0)


def _kernel(
    x_ref: Any,
    packed_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    *,
    codes: Codes,
    layout: StoredLayout,
    blocks: BlockSizes,
) -> None:
    first = pl.program_id(3) * blocks.k
    decode = decoder(codes, functools.partial(select_value, codes))
    packed = packed_ref[0]
    k_axis = 0 if layout.contracts_rows else 1
    # Mask entries beyond the end of K. Their memory is undefined.
    in_w = first + lax.broadcasted_iota(jnp.int32, packed.shape, k_axis) < layout.k
    in_x = first + lax.broadcasted_iota(jnp.int32, (blocks.m, blocks.k), 1) < layout.k

    @pl.when(first == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    for place in range(layout.fields):
        of_x, of_out = (0, place) if layout.contracts_rows else (place, 0)
        scale = scale_ref[place if scale_ref.shape[0] > 1 else 0]
        scale = _spread(scale, first, layout, blocks)
        w = decode(fields_of(packed, codes.bits, place)) * scale
        x = x_ref[of_x]
        w = jnp.where(in_w, w, 0).astype(x.dtype)
        out_ref[of_out] += _dot(jnp.where(in_x, x, jnp.zeros_like(x)), w, k_axis)


def _spread(scale: jax.Array, first: Any, layout: StoredLayout, blocks: BlockSizes) -> jax.Array:
    """Expand scales to the entries of a block, or to a shape that broadcasts to the block."""
    if layout.tiles == 1 or layout.entries == 1:
        return scale
    shape = (blocks.k, layout.tiles) if layout.contracts_rows else (layout.tiles, blocks.k)
    of_k, of_t = (0, 1) if layout.contracts_rows else (1, 0)
    tile = (first + lax.broadcasted_iota(jnp.int32, shape, of_k)) // layout.entries
    ones = (tile == lax.broadcasted_iota(jnp.int32, shape, of_t)).astype(jnp.float32)
    return _dot(ones, scale, 0) if layout.contracts_rows else _dot(scale, ones, 0)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """Contract the columns of `x` with an axis of `w`, and accumulate in f32."""
    is_wide = x.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT
    return lax.dot_general(
        x, w, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
