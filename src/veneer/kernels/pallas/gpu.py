"""A product on a GPU: a Pallas kernel that Triton compiles.

A program computes a block of the result, `[m, n]`, over a part of the sum. It walks along k: a
block of bytes is loaded, decoded in registers, and multiplied by tensor cores, so that no dense
weight is anywhere in memory. Codes are summed before they are scaled where a block has one scale
for each column; else they are scaled first. Few rows have few blocks, so that the sum is cut in
parts, which are added up at the end.

No figure here was measured: `benchmarks/gpu.py` is what they are to be chosen by.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..problem import Codes
from .decode import decoder, fields_of, scales_of
from .layout import LEAST, StoredLayout, by_field


class Config(NamedTuple):
    """What a kernel is compiled with, for products of at most so many rows.

    **Arguments:**

    - `rows`: the most rows of activations that it is for.
    - `m`, `n`, `k`: the sizes of a block, in codes.
    """

    rows: float
    m: int
    n: int
    k: int
    warps: int
    stages: int


CONFIGS = (
    Config(16, 16, 64, 128, warps=4, stages=4),
    Config(64, 64, 128, 64, warps=4, stages=4),
    Config(math.inf, 128, 128, 64, warps=8, stages=3),
)

#: Programs to have at least: a few for each of the 132 multiprocessors of an H100.
_PROGRAMS = 512
#: Blocks along k that a part of the sum has at least.
_LEAST_BLOCKS = 4
#: What offsets of 32 bits reach, in entries.
_MOST_ENTRIES = 2**31


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a product is cut: blocks in entries, and parts of the sum."""

    m: int
    n: int
    k: int
    parts: int
    config: Config


def blocks_of(layout: StoredLayout, batch: int = 1) -> Blocks | None:
    """Returns how a product is cut, or None where its tiles do not fit into blocks.

    >>> from veneer.kernels.pallas.gpu import blocks_of
    >>> from veneer.kernels.pallas.layout import StoredLayout
    >>> int4 = StoredLayout(True, fields=2, m=1, n=2048, k=4096, tile=128, tiles=32, columns=4096)
    >>> blocks = blocks_of(int4)
    >>> blocks.m, blocks.n, blocks.k, blocks.parts
    (16, 32, 128, 8)
    """
    config = next(config for config in CONFIGS if layout.m <= config.rows)
    of_n = max(LEAST, config.n // layout.out_fields)
    of_k = max(LEAST, config.k * layout.out_fields // layout.fields)
    k = layout.block_k(of_k)
    if k is None:
        return None
    programs = batch * pl.cdiv(layout.m, config.m) * pl.cdiv(layout.n, of_n)
    most = max(1, pl.cdiv(layout.k, k) // _LEAST_BLOCKS)
    return Blocks(config.m, of_n, k, min(most, pl.cdiv(_PROGRAMS, programs)), config)


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
    """Returns a product of activations with a stored matrix, `[B, M, N]`.

    **Arguments:**

    - `x`: `[B, M, K]`: f32, bf16 or f16.
    - `packed`: `[B, R, bytes]`, u8.
    - `scale`: `[B, R / tr, C / tc]`: f32, bf16, f16, or u8, the bytes of float8_e8m0fnu.
    - `interpret`: whether JAX runs the kernel, on whatever device, and no Triton.

    **Raises:** `ValueError` where there is no kernel for a product of this size.
    """
    batch, m, _ = x.shape
    blocks = blocks_of(layout, batch)
    if blocks is None or max(x.size, packed.size, batch * m * layout.columns) >= _MOST_ENTRIES:
        raise ValueError(f"the kernel has no blocks, or no offsets, for {layout}")
    x = by_field(x, layout)
    shapes = x.shape, packed.shape, scale.shape, (blocks.parts, batch, m, layout.columns)
    dtype = out_dtype if blocks.parts == 1 else jnp.float32
    out = pl.pallas_call(
        functools.partial(_kernel, codes=codes, layout=layout, blocks=blocks, shapes=shapes),
        out_shape=jax.ShapeDtypeStruct((math.prod(shapes[-1]),), dtype),
        grid=(pl.cdiv(m, blocks.m) * pl.cdiv(layout.n, blocks.n), blocks.parts, batch),
        interpret=interpret,
        compiler_params=triton.CompilerParams(
            num_warps=blocks.config.warps, num_stages=blocks.config.stages
        ),
        name=f"veneer_{'rows' if layout.sums_rows else 'columns'}_{codes.kind}",
    )(x.ravel(), packed.ravel(), scale.ravel(), jnp.asarray(codes.table, jnp.float32))
    out = out.reshape(shapes[-1])
    return (out[0] if blocks.parts == 1 else out.sum(0)).astype(out_dtype)


class _Array(NamedTuple):
    """An array in memory, `[..., rows, columns]`, of which blocks are read and written.

    It is flat for Pallas, which would find the place of each entry along each axis.
    """

    ref: Any
    shape: tuple[int, ...]

    def load(self, *at: Any) -> jax.Array:
        """Reads a block, with zeros where it goes beyond the last two axes."""
        ref, here = self._place(at)
        return triton.load(ref, mask=here, other=0)

    def store(self, block: jax.Array, *at: Any) -> None:
        """Writes what of a block is within the last two axes."""
        ref, here = self._place(at)
        triton.store(ref, block.astype(self.ref.dtype), mask=here)

    def _place(self, at: tuple[Any, ...]) -> tuple[Any, jax.Array]:
        *_, rows, columns = at
        offset: Any = 0
        for size, index in zip(self.shape, at, strict=True):
            offset = offset * size + index
        return self.ref.at[offset], (rows < self.shape[-2]) & (columns < self.shape[-1])


def _kernel(
    *refs: Any,
    codes: Codes,
    layout: StoredLayout,
    blocks: Blocks,
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    of_x, of_packed, of_scale, of_out = map(_Array, (*refs[:3], refs[4]), shapes)
    table_ref = refs[3]
    block, part, batch = (pl.program_id(axis) for axis in range(3))
    m_blocks = pl.cdiv(layout.m, blocks.m)
    n_block = _quotient(block, m_blocks)
    m = (block - n_block * m_blocks) * blocks.m + jnp.arange(blocks.m)
    n = n_block * blocks.n + jnp.arange(blocks.n)
    steps = pl.cdiv(pl.cdiv(layout.k, blocks.k), blocks.parts)
    tiles = max(1, blocks.k // layout.entries) if layout.tiles > 1 else 1  # of a block
    decode = decoder(codes, lambda fields: triton.load(table_ref.at[fields]))
    n_tile = layout.columns // of_scale.shape[2 if layout.sums_rows else 1]

    def scale_of(tile: jax.Array, place: int) -> jax.Array:
        """The scales of tiles for columns of the result, `[tiles, n]`; or else the other way."""
        column = _quotient(n * layout.out_fields + place, n_tile)
        pair = (tile, column) if layout.sums_rows else (column, tile)
        scale = of_scale.load(batch, pair[0][:, None], pair[1][None, :])
        return scales_of(scale, scale.dtype == jnp.uint8)

    def along_n(scale: jax.Array) -> jax.Array:
        """The scales of one tile, `[1, n]`."""
        return scale if layout.sums_rows else scale.T

    def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        k = index * blocks.k + jnp.arange(blocks.k)
        rows, columns = (k, n) if layout.sums_rows else (n, k)
        packed = of_packed.load(batch, rows[:, None], columns[None, :])
        xs = [of_x.load(place, batch, m[:, None], k[None, :]) for place in range(layout.k_fields)]
        added = list(sums)
        for place in range(layout.fields):
            at_k, at_n = (0, place) if layout.sums_rows else (place, 0)
            w = decode(fields_of(packed, codes.bits, place))
            if layout.tiles > 1:
                first = index * blocks.k + jnp.arange(tiles) * layout.entries
                tile = _quotient(first * layout.k_fields + at_k, layout.tile)
                scale = scale_of(tile, at_n)
            if tiles > 1:
                w *= _spread(scale, w.shape)
            out = _dot(xs[at_k], w.astype(xs[at_k].dtype), layout.sums_rows)
            if tiles == 1 and layout.tiles > 1:
                out *= along_n(scale)
            added[at_n] += out
        return tuple(added)

    zero = jnp.zeros((blocks.m, blocks.n), jnp.float32)
    last = jnp.minimum((part + 1) * steps, pl.cdiv(layout.k, blocks.k))
    sums = jax.lax.fori_loop(part * steps, last, step, (zero,) * layout.out_fields)
    for place, out in enumerate(sums):
        if layout.tiles == 1:
            out *= along_n(scale_of(jnp.zeros(1, jnp.int32), place))
        column = n * layout.out_fields + place
        of_out.store(out, part, batch, m[:, None], column[None, :])


def _quotient(x: jax.Array, by: int) -> jax.Array:
    """Divides what is not negative; in fewer steps than `//`, that hide how numbers follow."""
    return x if by == 1 else jax.lax.div(x, np.int32(by))


def _spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The scale of each entry of a block, from those of its tiles along one axis."""
    axis = 0 if scale.shape[0] != shape[0] else 1
    tile = shape[axis] // scale.shape[axis]
    wide = jnp.broadcast_to(
        jnp.expand_dims(scale, axis + 1), (*scale.shape[: axis + 1], tile, *scale.shape[axis + 1 :])
    )
    return wide.reshape(shape)


def _dot(x: jax.Array, w: jax.Array, sums_rows: bool) -> jax.Array:
    """`x @ w`, or `x @ w.T`, in f32; of f32 without rounding to TF32."""
    is_wide = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_wide else jax.lax.Precision.DEFAULT
    numbers = ((1,), (0 if sums_rows else 1,)), ((), ())
    return jax.lax.dot_general(
        x, w, numbers, precision=precision, preferred_element_type=jnp.float32
    )
