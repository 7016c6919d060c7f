"""A sum cut in tiles: each is summed by itself, and they are added up one after the other.

Where both operands are tiled along an axis that is summed, by tiles of different sizes, the sum is
cut where either of them is. One tile's part of the output is there at a time.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..arrays.qarray import QArray
from ..formats.tiles import Leaf, Shape
from .product import DotParams


def common_tiles(lhs: QArray, rhs: QArray, params: DotParams) -> Shape:
    """Returns the sizes, along the contracting axes, in which no scale and zero point varies.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer._core.primitives.dimension_numbers import DotDimensionNumbers
    >>> from veneer.quant.ops.product import DotParams
    >>> from veneer.quant.ops.tile_sums import common_tiles
    >>> w = jnp.ones((1, 12))
    >>> q, r = (vn.quant.quantize(w, "int8", tiled_axes={1: tile}) for tile in (6, 4))
    >>> common_tiles(q, r, DotParams(DotDimensionNumbers.of((([1], [1]), ([], [])))))
    (2,)
    """
    tiles = []
    for pair in zip(*params.dimension_numbers.contracting, strict=True):
        size = lhs.shape[pair[0]]
        counts = [
            leaf.shape[axis]
            for q, axis in zip((lhs, rhs), pair, strict=True)
            for leaf in (q.scale, q.zero_point)
            if leaf is not None
        ]
        sizes = {size // count for count in counts}
        # Sizes that are symbolic, for export, are the same or have no common tile.
        known = all(isinstance(tile, int) for tile in sizes)
        tiles.append(math.gcd(*sizes) if known else sizes.pop() if len(sizes) == 1 else 1)
    return tuple(tiles)


def sum_over_tiles(
    product: Callable[[QArray, QArray], jax.Array],
    lhs: QArray,
    rhs: QArray,
    params: DotParams,
    tiles: Shape,
) -> jax.Array:
    """Returns the sum of `product(lhs_tile, rhs_tile)` over the tiles that the sum is cut into.

    **Arguments:**

    - `product`: of two QArrays whose scales do not vary along the contracting axes, as large along
      these as `tiles` says; a float array.
    """
    axes = params.dimension_numbers.contracting
    counts = [lhs.shape[axis] // size for axis, size in zip(axes[0], tiles, strict=True)]
    operands = [_unpacked_along(q, a) for q, a in zip((lhs, rhs), axes, strict=True)]
    scales = [
        tuple(
            None if leaf is None else _tiles_first(leaf, a, counts)
            for leaf in (q.scales(), q.zero_points())
        )
        for q, a in zip(operands, axes, strict=True)
    ]

    # A tile is computed a second time for a derivative, by the scales; or else the products of all
    # tiles would be kept for it.
    @jax.checkpoint
    def part(step: tuple) -> jax.Array:
        number, leaves = step
        at = _unravel(number, counts)
        pairs = zip(operands, axes, leaves, strict=True)
        return product(*(_tile(q, a, at, tiles, *leaf) for q, a, leaf in pairs))

    def add(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        return total + part(step), None

    steps = jnp.arange(math.prod(counts), dtype=jnp.int32), scales
    # The first tile gives the sum its type, with its sharding.
    first = part(jax.tree.map(lambda x: x[0], steps))
    return lax.scan(add, first, jax.tree.map(lambda x: x[1:], steps))[0]


def _unpacked_along(q: QArray, axes: Sequence[int]) -> QArray:
    """Returns `q` with a code a byte where it is packed along one of `axes`."""
    if q.packing is None or q.packing.axis + q.ndim not in axes:
        return q
    return q.replace(packed=q.format.to_fields(q.codes()), packing=None)


def _tiles_first(scale: Leaf, axes: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Returns a scale as `[tiles, ...]`, with size 1 along `axes`, which had up to `counts`."""
    leaf = jnp.asarray(scale)
    for axis, count in zip(axes, counts, strict=True):
        leaf = jnp.repeat(leaf, count // leaf.shape[axis], axis, total_repeat_length=count)
    kept = [1 if axis in axes else size for axis, size in enumerate(leaf.shape)]
    leaf = jnp.moveaxis(leaf, axes, range(len(axes)))
    return leaf.reshape(math.prod(counts), *kept)


def _unravel(number: jax.Array, counts: Sequence[int]) -> list[jax.Array]:
    at = []
    for count in reversed(counts):
        at.append(number % count)
        number = number // count
    return at[::-1]


def _tile(
    q: QArray,
    axes: Sequence[int],
    at: Sequence[jax.Array],
    tiles: Shape,
    scale: jax.Array,
    zero_point: jax.Array | None,
) -> QArray:
    packed = jnp.asarray(q.packed)
    if not jnp.issubdtype(packed.dtype, jnp.integer):
        # As bytes: of all float8 from which tiles are sliced XLA for a CPU would make f16.
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    for axis, index, size in zip(axes, at, tiles, strict=True):
        packed = lax.dynamic_slice_in_dim(packed, index * size, size, axis)
    packed = lax.bitcast_convert_type(packed, q.packed.dtype)
    return q.replace(packed=packed, scale=scale, zero_point=zero_point)
