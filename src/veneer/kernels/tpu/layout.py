"""Sizes and blocks of a product in the TPU kernel.

An entry is one byte. Its codes are called fields. The kernel decodes one field of a block at a
time, so values stay in their lanes. If rows are contracted, the fields of an entry contribute to
neighboring columns of the result. If columns are contracted, they are multiplied by neighboring
columns of the activations. `split_fields` splits the activations into one array per field.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..common.problem import Codes, MatmulShape, row_bytes

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
    def k_fields(self) -> int:
        """The number of codes along K in one entry."""
        return 1 if self.contracts_rows else self.fields

    @property
    def entries(self) -> int:
        """The number of entries along K that share a scale, at least 1."""
        return max(1, self.tile // self.k_fields)


class BlockSizes(NamedTuple):
    """The sizes of a block, in entries."""

    m: int
    n: int
    k: int


def layout_of(codes: Codes, shape: MatmulShape) -> StoredLayout | None:
    """Return the sizes of a product in entries, or None if a tile ends within a byte.

    >>> from veneer.kernels.common.problem import Codes, MatmulShape
    >>> from veneer.kernels.tpu.layout import layout_of
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
    """Return the block sizes for a product, or None if its scales do not fit into VMEM.

    >>> from veneer.kernels.tpu.layout import StoredLayout, blocks_of
    >>> blocks_of(StoredLayout(True, 2, m=1, n=2048, k=4096, tile=128, tiles=32, columns=4096))
    BlockSizes(m=1, n=512, k=512)
    """
    if layout.entries > 1 and layout.tiles > _MOST_TILES:
        return None
    return BlockSizes(min(layout.m, _M), min(layout.n, _N), min(layout.k, _K))


def split_fields(x: jax.Array, layout: StoredLayout) -> jax.Array:
    """Split activations `[B, M, K]` into one array per field of an entry: `[F, B, M, k]`."""
    if layout.contracts_rows or layout.fields == 1:
        return x[None]
    batch, m, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, layout.k * layout.fields - k)))
    return jnp.moveaxis(x.reshape(batch, m, layout.k, layout.fields), 3, 0)
