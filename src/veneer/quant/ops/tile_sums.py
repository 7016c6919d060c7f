"""Sums that are computed tile by tile, with one tile's part of the output in memory at a time.

If both operands have tiles of different sizes along a contracted axis, the sum is cut at the
borders of both.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.primitives.dimension_numbers import DotDimensionNumbers
from ..arrays.qarray import QArray
from ..formats.tiles import Leaf, Shape
from .operands import unpack_codes


def common_tiles(lhs: QArray, rhs: QArray, numbers: DotDimensionNumbers) -> Shape:
    """Return the tile sizes, along contracted axes, in which no scale or zero point varies.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer._core.primitives.dimension_numbers import DotDimensionNumbers
    >>> from veneer.quant.ops.tile_sums import common_tiles
    >>> w = jnp.ones((1, 12))
    >>> q, r = (vn.quant.quantize(w, "int8", tiled_axes={1: tile}) for tile in (6, 4))
    >>> common_tiles(q, r, DotDimensionNumbers.of((([1], [1]), ([], []))))
    (2,)
    """
    tiles = []
    for pair in zip(*numbers.contracting, strict=True):
        size = lhs.shape[pair[0]]
        counts = [
            leaf.shape[axis]
            for q, axis in zip((lhs, rhs), pair, strict=True)
            for leaf in (q.scale, q.zero_point)
            if leaf is not None
        ]
        sizes = {size // count for count in counts}
        # Symbolic sizes, in programs for export, are equal or have no common tile.
        are_known = all(isinstance(tile, int) for tile in sizes)
        tiles.append(math.gcd(*sizes) if are_known else sizes.pop() if len(sizes) == 1 else 1)
    return tuple(tiles)


def sum_over_tiles(
    multiply: Callable[[QArray, QArray], jax.Array],
    lhs: QArray,
    rhs: QArray,
    numbers: DotDimensionNumbers,
    tiles: Shape,
) -> jax.Array:
    """Return the sum of `multiply(lhs_tile, rhs_tile)` over the tiles of the contracted axes.

    **Arguments:**

    - `multiply`: a function of two QArrays, which have size `tiles` along the contracted axes and
      scales that do not vary along them. It returns a float array.
    """
    axes = numbers.contracting
    counts = [lhs.shape[axis] // size for axis, size in zip(axes[0], tiles, strict=True)]
    operands = [
        unpack_codes(q) if q.packing and q.packing.axis + q.ndim in a else q
        for q, a in zip((lhs, rhs), axes, strict=True)
    ]
    scales = [
        tuple(
            None if leaf is None else _move_tiles_first(leaf, a, counts)
            for leaf in (q.scales(), q.zero_points())
        )
        for q, a in zip(operands, axes, strict=True)
    ]

    # A derivative by the scales computes each tile again. Otherwise the products of all tiles would
    # be kept for it.
    @jax.checkpoint
    def multiply_tile(step: tuple) -> jax.Array:
        number, leaves = step
        index: list[jax.Array] = []
        for count in reversed(counts):
            index.insert(0, number % count)
            number = number // count
        pairs = zip(operands, axes, leaves, strict=True)
        return multiply(*(_slice_tile(q, a, index, tiles, *leaf) for q, a, leaf in pairs))

    def add(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        return total + multiply_tile(step), None

    steps = jnp.arange(math.prod(counts), dtype=jnp.int32), scales
    # The first tile determines the type of the sum, with its sharding.
    first = multiply_tile(jax.tree.map(lambda x: x[0], steps))
    return lax.scan(add, first, jax.tree.map(lambda x: x[1:], steps))[0]


def _move_tiles_first(scale: Leaf, axes: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Return a scale as `[tiles, ...]`, with size 1 along `axes`.

    Along these axes it had `counts` entries, or a number that divides `counts`.
    """
    leaf = jnp.asarray(scale)
    for axis, count in zip(axes, counts, strict=True):
        leaf = jnp.repeat(leaf, count // leaf.shape[axis], axis, total_repeat_length=count)
    kept = [1 if axis in axes else size for axis, size in enumerate(leaf.shape)]
    leaf = jnp.moveaxis(leaf, axes, range(len(axes)))
    return leaf.reshape(math.prod(counts), *kept)


def _slice_tile(
    q: QArray,
    axes: Sequence[int],
    index: Sequence[jax.Array],
    tiles: Shape,
    scale: jax.Array,
    zero_point: jax.Array | None,
) -> QArray:
    """Return one tile of an operand, given its index and its scale and zero point."""
    packed = jnp.asarray(q.packed)
    if not jnp.issubdtype(packed.dtype, jnp.integer):
        # As bytes, because XLA for CPUs converts a float8 array to f16 before it is sliced.
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    for axis, i, size in zip(axes, index, tiles, strict=True):
        packed = lax.dynamic_slice_in_dim(packed, i * size, size, axis)
    packed = lax.bitcast_convert_type(packed, q.packed.dtype)
    return q.replace(packed=packed, scale=scale, zero_point=zero_point)
