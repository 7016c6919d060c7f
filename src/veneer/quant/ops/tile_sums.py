"""Products that are computed tile by tile along the contracted axes, and added up.

Only one product of tiles is in memory at a time. If the operands have tiles of different sizes
along a contracted axis, the greatest common divisor is used as the tile size.
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
    """Return the size, along each contracted axis, of the largest tiles with constant scales.

    Within such a tile, no scale or zero point of either operand varies along the contracted axes.

    >>> import jax.numpy as jnp, veneer as vn
    >>> from veneer._core.primitives.dimension_numbers import DotDimensionNumbers
    >>> from veneer.quant.ops.tile_sums import common_tiles
    >>> w = jnp.ones((1, 12))
    >>> q, r = (vn.quant.quantize(w, "int8", tiled_axes={1: tile}) for tile in (6, 4))
    >>> common_tiles(q, r, DotDimensionNumbers.of((([1], [1]), ([], []))))
    (2,)
    """
    common_sizes = []
    for axes in zip(*numbers.contracting, strict=True):
        tile_sizes = {
            q.shape[axis] // leaf.shape[axis]
            for q, axis in zip((lhs, rhs), axes, strict=True)
            for leaf in (q.scale, q.zero_point)
            if leaf is not None
        }
        if all(isinstance(size, int) for size in tile_sizes):
            common_sizes.append(math.gcd(*tile_sizes))
        else:  # in programs for export, sizes can be symbolic, which have no gcd
            common_sizes.append(tile_sizes.pop() if len(tile_sizes) == 1 else 1)
    return tuple(common_sizes)


def sum_over_tiles(
    multiply: Callable[[QArray, QArray], jax.Array],
    lhs: QArray,
    rhs: QArray,
    numbers: DotDimensionNumbers,
    tiles: Shape,
) -> jax.Array:
    """Return the sum of `multiply(lhs_tile, rhs_tile)` over the tiles of the contracted axes.

    **Arguments:**

    - `multiply`: a function of two QArrays that returns a float array. Along the contracted axes,
      the QArrays have size `tiles` and one scale.
    - `tiles`: the size of a tile along each contracted axis.
    """
    lhs_axes, rhs_axes = numbers.contracting
    counts = [lhs.shape[axis] // size for axis, size in zip(lhs_axes, tiles, strict=True)]

    # Codes that are packed along a contracted axis cannot be sliced.
    operands, scales = [], []
    for q, axes in ((lhs, lhs_axes), (rhs, rhs_axes)):
        operands.append(unpack_codes(q) if q.packing and q.packing.axis + q.ndim in axes else q)
        scale, zero_point = _move_tiles_first(q.scales(), axes, counts), q.zero_points()
        if zero_point is not None:
            zero_point = _move_tiles_first(zero_point, axes, counts)
        scales.append((scale, zero_point))

    # A derivative by the scales computes each tile again. Otherwise the products of all tiles would
    # be kept for it.
    @jax.checkpoint
    def multiply_tile(step: tuple) -> jax.Array:
        number, tile_scales = step  # for lhs and for rhs, a scale and a zero point of the tile
        # Convert the number to an index of the tile along each contracted axis, last axis first.
        index: list[jax.Array] = []
        for count in reversed(counts):
            index.insert(0, number % count)
            number = number // count
        sides = zip(operands, numbers.contracting, tile_scales, strict=True)
        return multiply(*(_slice_tile(q, axes, index, tiles, *pair) for q, axes, pair in sides))

    def add(total: jax.Array, step: tuple) -> tuple[jax.Array, None]:
        return total + multiply_tile(step), None

    steps = jnp.arange(math.prod(counts), dtype=jnp.int32), scales
    # The loop starts with the product of the first tile, because its type includes the sharding.
    first = multiply_tile(jax.tree.map(lambda x: x[0], steps))
    return lax.scan(add, first, jax.tree.map(lambda x: x[1:], steps))[0]


def _move_tiles_first(scale: Leaf, axes: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Return a scale or zero point with a new first axis: the tiles of a product, in order.

    `counts` has the number of tiles along each of the contracted axes `axes`, which have size 1 in
    the result. The size of `scale` along these axes divides the number of tiles.
    """
    leaf = jnp.asarray(scale)
    for axis, count in zip(axes, counts, strict=True):
        leaf = jnp.repeat(leaf, count // leaf.shape[axis], axis, total_repeat_length=count)
    tile_shape = [1 if axis in axes else size for axis, size in enumerate(leaf.shape)]
    leaf = jnp.moveaxis(leaf, axes, range(len(axes)))
    return leaf.reshape(math.prod(counts), *tile_shape)


def _slice_tile(
    q: QArray,
    axes: Sequence[int],
    index: Sequence[jax.Array],
    tiles: Shape,
    scale: jax.Array,
    zero_point: jax.Array | None,
) -> QArray:
    """Return one tile of an operand, with its scale and zero point.

    `index` and `tiles` have the index of the tile and the size of a tile along each of `axes`.
    """
    packed = jnp.asarray(q.packed)
    if not jnp.issubdtype(packed.dtype, jnp.integer):
        # Slice bytes, because XLA for CPUs converts a float8 array to f16 before it slices.
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    for axis, tile_index, size in zip(axes, index, tiles, strict=True):
        packed = lax.dynamic_slice_in_dim(packed, tile_index * size, size, axis)
    packed = lax.bitcast_convert_type(packed, q.packed.dtype)
    return q.replace(packed=packed, scale=scale, zero_point=zero_point)
