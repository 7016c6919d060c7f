"""A product on a TPU: a Pallas kernel that Mosaic compiles.

A step of the grid has a block of the stored matrix in fast memory, decodes it, multiplies it by its
scales and then by activations, and adds to a block of the result, which stays there while k is
walked along. The scales of tiles are spread over a block by a product with ones and zeros, which
moves no lane by itself; that is exact.

It has run on no TPU, and no figure here was measured.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from ..problem import Codes
from .decode import by_selection, decoder, fields_of, scales_of
from .layout import StoredLayout, by_field

#: Sizes of blocks, in entries; an axis that is shorter is one block.
_M, _N, _K = 256, 512, 512
#: Scales along k of which fast memory has room, for a block of columns.
_MOST_TILES = 1024


class BlockSizes(NamedTuple):
    """The sizes of a block, in entries."""

    m: int
    n: int
    k: int


def blocks_of(layout: StoredLayout) -> BlockSizes | None:
    """Returns how a product is cut, or None where there is no room for its scales.

    >>> from veneer.kernels.pallas.layout import StoredLayout
    >>> from veneer.kernels.pallas.tpu import blocks_of
    >>> blocks_of(StoredLayout(True, 2, m=1, n=2048, k=4096, tile=128, tiles=32, columns=4096))
    BlockSizes(m=1, n=512, k=512)
    """
    if layout.entries > 1 and layout.tiles > _MOST_TILES:
        return None
    return BlockSizes(min(layout.m, _M), min(layout.n, _N), min(layout.k, _K))


def product(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    codes: Codes,
    layout: StoredLayout,
    out_dtype: Any,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns a product of activations with a stored matrix: as that for a GPU, of the same name.

    **Raises:** `ValueError` where there is no kernel for a product of this size.
    """
    batch, m, _ = x.shape
    blocks = blocks_of(layout)
    if blocks is None:
        raise ValueError(f"the kernel has no room for the scales of {layout}")
    scale = _by_field(scales_of(scale, scale.dtype == jnp.uint8), layout)
    x = by_field(x, layout)
    along_k = layout.tiles > 1 and layout.entries == 1  # there is a scale for each entry
    of_scale = blocks.k if along_k else layout.tiles

    def spec(fields: int, axes: str) -> pl.BlockSpec:
        """Of blocks `[fields, batch, ...]`, whose last axes are named."""
        size = {"m": blocks.m, "n": blocks.n, "k": blocks.k, "t": of_scale}
        shape = (fields, None, *(size[axis] for axis in axes))

        def place(batch: Any, m: Any, n: Any, k: Any) -> tuple[Any, ...]:
            at = {"m": m, "n": n, "k": k, "t": k if along_k else 0}
            return (0, batch, *(at[axis] for axis in axes))

        return pl.BlockSpec(shape, place)

    matrix, scales = ("kn", "tn") if layout.sums_rows else ("nk", "nt")
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
        name=f"veneer_{'rows' if layout.sums_rows else 'columns'}_{codes.kind}",
    )(x, packed[None], scale)
    out = jnp.moveaxis(out, 0, 3).reshape(batch, m, -1)
    return out[..., : layout.columns].astype(out_dtype)


def _by_field(scale: jax.Array, layout: StoredLayout) -> jax.Array:
    """Scales as blocks have them, f32: a row a tile and a column an entry, or the other way.

    **Returns:** `[F, B, T, n]` where rows are summed, else `[F, B, n, T]`; F is 1 where all fields
    of an entry have the same scales.
    """
    column_axis = 2 if layout.sums_rows else 1
    n_tile = layout.columns // scale.shape[column_axis]
    scale = jnp.repeat(scale, n_tile, column_axis, total_repeat_length=layout.columns)
    if not layout.sums_rows and layout.tiles > 1 and layout.tile < layout.fields:
        terms = layout.tile * layout.tiles
        scale = jnp.repeat(scale, layout.tile, 2, total_repeat_length=terms)
        last = layout.k
    elif layout.sums_rows:
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
    decode = decoder(codes, functools.partial(by_selection, codes))
    packed = packed_ref[0]
    k_axis = 0 if layout.sums_rows else 1
    # What lies behind the end of k may be anything.
    in_w = first + lax.broadcasted_iota(jnp.int32, packed.shape, k_axis) < layout.k
    in_x = first + lax.broadcasted_iota(jnp.int32, (blocks.m, blocks.k), 1) < layout.k

    @pl.when(first == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    for place in range(layout.fields):
        of_x, of_out = (0, place) if layout.sums_rows else (place, 0)
        scale = scale_ref[place if scale_ref.shape[0] > 1 else 0]
        scale = _spread(scale, first, layout, blocks)
        w = decode(fields_of(packed, codes.bits, place)) * scale
        x = x_ref[of_x]
        w = jnp.where(in_w, w, 0).astype(x.dtype)
        out_ref[of_out] += _dot(jnp.where(in_x, x, jnp.zeros_like(x)), w, k_axis)


def _spread(scale: jax.Array, first: Any, layout: StoredLayout, blocks: BlockSizes) -> jax.Array:
    """The scale of each entry of a block, or what broadcasts to that."""
    if layout.tiles == 1 or layout.entries == 1:
        return scale
    shape = (blocks.k, layout.tiles) if layout.sums_rows else (layout.tiles, blocks.k)
    of_k, of_t = (0, 1) if layout.sums_rows else (1, 0)
    tile = (first + lax.broadcasted_iota(jnp.int32, shape, of_k)) // layout.entries
    ones = (tile == lax.broadcasted_iota(jnp.int32, shape, of_t)).astype(jnp.float32)
    return _dot(ones, scale, 0) if layout.sums_rows else _dot(scale, ones, 0)


def _dot(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """The product that sums the columns of x and an axis of w, in f32."""
    is_wide = x.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT
    return lax.dot_general(
        x, w, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
