"""A product as Pallas kernels see it: in entries of what is stored, cut into blocks.

Codes that share a byte are fields of it. A kernel takes a tile of bytes, and of that the tile of
each field in turn, so that nothing is moved from lane to lane. Where rows are summed, the fields of
a byte belong to neighbouring columns of the result. Where columns are summed, they meet
neighbouring columns of the activations, which are cut into as many arrays before.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from ..problem import Codes, MatmulShape, row_bytes

#: The least size of a block: what tensor cores multiply.
LEAST = 16


@dataclasses.dataclass(frozen=True)
class StoredLayout:
    """The sizes of a product `[m, k] x [k, n]`, in entries of what is stored, and its tiles.

    **Arguments:**

    - `sums_rows`: whether the stored matrix is `[k, n]`, and else it is `[n, k]`.
    - `fields`: how many codes there are in an entry: along n where rows are summed, else along k.
    - `tile`: how many codes along k share a scale.
    - `tiles`: how many tiles there are along k.
    - `columns`: how many columns the result has.
    """

    sums_rows: bool
    fields: int
    m: int
    n: int
    k: int
    tile: int
    tiles: int
    columns: int

    @property
    def out_fields(self) -> int:
        """How many columns of the result an entry is for."""
        return self.fields if self.sums_rows else 1

    @property
    def k_fields(self) -> int:
        """How many codes along k an entry has."""
        return 1 if self.sums_rows else self.fields

    @property
    def entries(self) -> int:
        """How many entries along k share a scale: at least one, of each field."""
        return max(1, self.tile // self.k_fields)

    def block_k(self, wanted: int) -> int | None:
        """Returns a block along k that has whole tiles, or whole blocks in a tile; or None.

        **Arguments:**

        - `wanted`: the largest, a power of two.
        """
        if self.tiles == 1 or wanted % self.entries == 0:
            return wanted
        block = math.gcd(self.entries, wanted)
        return block if block >= LEAST else None


def layout_of(codes: Codes, shape: MatmulShape) -> StoredLayout | None:
    """Returns a product as kernels see it, or None where a tile ends within a byte.

    >>> from veneer.kernels.pallas.layout import layout_of
    >>> from veneer.kernels.problem import Codes, MatmulShape
    >>> int4 = Codes(4, values=(*map(float, range(8)), *map(float, range(-8, 0))))
    >>> layout_of(int4, MatmulShape("columns", "float", m=1, k=256, n=64, tile=32))
    StoredLayout(sums_rows=False, fields=2, m=1, n=64, k=128, tile=32, tiles=8, columns=64)
    """
    fields, sums_rows = 8 // codes.bits, shape.contracting == "rows"
    tiles = shape.k // shape.tile
    if not sums_rows and tiles > 1 and shape.tile % fields and fields % shape.tile:
        return None
    n, k = (
        (row_bytes(shape.n, codes.bits), shape.k)
        if sums_rows
        else (shape.n, row_bytes(shape.k, codes.bits))
    )
    return StoredLayout(sums_rows, fields, shape.m, n, k, shape.tile, tiles, shape.n)


def by_field(x: jax.Array, layout: StoredLayout) -> jax.Array:
    """Returns activations `[B, M, K]` as `[F, B, M, k]`: what each field of an entry meets."""
    if layout.sums_rows or layout.fields == 1:
        return x[None]
    batch, m, k = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, layout.k * layout.fields - k)))
    return jnp.moveaxis(x.reshape(batch, m, layout.k, layout.fields), 3, 0)
