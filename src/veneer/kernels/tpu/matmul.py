"""Multiply activations by a packed weight on a TPU: check a product, and arrange its operands.

The kernel is in `kernel.py`. It is imported on use, because importing Pallas is slow.

An entry is one byte. Its codes are called fields. The kernel decodes one field of a block at a
time, so values stay in their lanes. If rows are contracted, the fields of an entry contribute to
neighboring columns of the result. If columns are contracted, they are multiplied by neighboring
columns of the activations. Therefore activations are split into one array per field.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..common.problem import Codes, MatmulOperands, MatmulProblem, MatmulShape, row_bytes

#: The sizes of a block, in entries. An axis that is shorter is a single block.
_M, _N, _K = 256, 512, 512
#: The most scales along K that fit into VMEM for a block of columns.
_MOST_TILES = 1024


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """The sizes of a product `[m, k] x [k, n]`, in entries, and of its tiles.

    **Arguments:**

    - `contracts_rows`: whether the stored matrix is `[k, n]`. Otherwise it is `[n, k]`.
    - `fields`: the number of codes per entry: along N if rows are contracted, otherwise along K.
    - `tile`: the number of codes along K that share a scale.
    - `tiles`: the number of tiles along K.
    - `columns`: the number of result columns.
    """

    contracts_rows: bool
    fields: int
    m: int
    n: int
    k: int
    tile: int
    tiles: int
    columns: int

    @property
    def out_fields(self) -> int:
        """The number of result columns that one entry contributes to."""
        return self.fields if self.contracts_rows else 1

    @property
    def entries(self) -> int:
        """The number of entries along K that share a scale, at least 1."""
        return self.tile if self.contracts_rows else max(1, self.tile // self.fields)


class BlockSizes(NamedTuple):
    """The sizes of a block, in entries."""

    m: int
    n: int
    k: int


def layout_of(codes: Codes, shape: MatmulShape) -> StoredLayout | None:
    """Return the sizes of a product in entries, which are stored bytes of `fields` codes.

    Return None if a tile along the columns of W is neither whole bytes nor an equal share of one.

    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> from veneer.kernels.tpu.matmul import layout_of
    >>> int4 = Codes(4, values=(*map(float, range(8)), *map(float, range(-8, 0))))
    >>> layout = layout_of(int4, MatmulShape("columns", "float", m=1, k=256, n=64, tile=32))
    >>> layout.fields, layout.k, layout.tiles
    (2, 128, 8)
    """
    fields, contracts_rows = 8 // codes.bits, shape.contracting == "rows"
    tiles = shape.k // shape.tile
    if not contracts_rows and tiles > 1 and shape.tile % fields and fields % shape.tile:
        return None
    n, k = shape.n, shape.k
    if contracts_rows:
        n = row_bytes(n, codes.bits)
    else:
        k = row_bytes(k, codes.bits)
    return StoredLayout(contracts_rows, fields, shape.m, n, k, shape.tile, tiles, shape.n)


def blocks_of(layout: StoredLayout) -> BlockSizes | None:
    """Return the block sizes for a product, or None if its scales do not fit into VMEM."""
    if layout.entries > 1 and layout.tiles > _MOST_TILES:
        return None
    return BlockSizes(min(layout.m, _M), min(layout.n, _N), min(layout.k, _K))


def can_compute(codes: Codes, shape: MatmulShape) -> bool:
    """Return whether the kernel supports the sizes and codes of a product."""
    if not isinstance(shape.m, int) or shape.m == 0:  # m is symbolic in programs for export
        return False
    layout = layout_of(codes, shape)
    return layout is not None and blocks_of(layout) is not None


def compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    """Lower the kernel for one product, to check that this JAX version can.

    **Raises:** any error of Pallas.
    """
    _compile(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands), problem)


@functools.cache
def _compile(operands: MatmulOperands, problem: MatmulProblem) -> None:
    compute = jax.jit(functools.partial(product, problem=problem))
    compute.trace(operands).lower(lowering_platforms=("tpu",))


def product(
    operands: MatmulOperands, problem: MatmulProblem, *, interpret: bool = False
) -> jax.Array:
    """Multiply activations by a packed weight, without the terms of zero points and minima.

    The product must be one that the kernel supports (`can_compute`).

    **Arguments:**

    - `operands`: `x` is f32, bf16 or f16 `[B, M, K]`.
    - `interpret`: run the kernel in Pallas's interpreter, on any device.

    **Returns:** `[B, M, N]`. The dtype is f32 if the caller must still add zero points or minima.
    """
    from . import kernel

    layout = layout_of(problem.codes, problem.shape(operands))
    assert layout is not None
    blocks = blocks_of(layout)
    assert blocks is not None
    packed, scale = operands.packed, operands.scale
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = _decode_exponents(lax.bitcast_convert_type(scale, jnp.uint8))
    out = kernel.multiply(
        _split_fields(operands.x, layout),
        lax.bitcast_convert_type(packed, jnp.uint8),
        _split_scales(scale.astype(jnp.float32), layout),
        problem.codes,
        layout,
        blocks,
        interpret=interpret,
    )
    is_complete = operands.zero_point is None and operands.minimum is None
    out = jnp.moveaxis(out, 0, 3).reshape(*out.shape[1:3], -1)[..., : layout.columns]
    return out.astype(problem.out_dtype if is_complete else "float32")


def _decode_exponents(bits: jax.Array) -> jax.Array:
    """Decode float8_e8m0fnu scales, stored as uint8, to f32."""
    bits = bits.astype(jnp.int32)
    scale = lax.bitcast_convert_type(bits << 23, jnp.float32)
    scale = jnp.where(bits == 0, jnp.float32(2.0**-127), scale)
    return jnp.where(bits == 255, jnp.nan, scale)


def _split_fields(x: jax.Array, layout: StoredLayout) -> jax.Array:
    """Split activations `[B, M, K]` into one array per field of an entry: `[F, B, M, k]`."""
    if layout.contracts_rows or layout.fields == 1:
        return x[None]
    batch, m, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, layout.k * layout.fields - k)))
    return jnp.moveaxis(x.reshape(batch, m, layout.k, layout.fields), 3, 0)


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


def takes_zero_points(operands: MatmulOperands, problem: MatmulProblem) -> bool:
    """Return False: this kernel never subtracts zero points, so the caller must."""
    return False
