"""Tiles: the groups of values that share a scale.

A scale array has the rank of the values. Each axis has one entry per tile of the same axis of the
values: one entry if all values along the axis share a scale, and one per index if the axis is
channelwise.
"""

import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.sharding import join_axes, split_axes

Shape = tuple[int, ...]
Leaf = jax.Array | np.ndarray


def tile_counts(
    shape: Shape, channelwise_axes: Sequence[int], tiled_axes: Mapping[int, int]
) -> Shape:
    """Return the number of tiles along each axis of values, which is the shape of the scale.

    `channelwise_axes` have one scale per index. `tiled_axes` maps axes to tile sizes.

    **Raises:** `ValueError` if an axis does not exist or is named twice, or if a tile size does not
    divide its axis.
    """
    tile_sizes = [(axis, 1) for axis in channelwise_axes] + list(tiled_axes.items())
    counts = [1] * len(shape)
    seen: set[int] = set()
    for axis, tile in tile_sizes:
        from_front = normalize_axis(axis, shape)
        if from_front in seen:
            raise ValueError(
                f"axis {axis} of shape {shape} is named twice. An axis is either channelwise or "
                f"tiled: channelwise_axes={tuple(channelwise_axes)}, tiled_axes={dict(tiled_axes)}"
            )
        seen.add(from_front)
        size, tile = shape[from_front], operator.index(tile)
        if tile < 1 or size % tile:
            raise ValueError(
                f"a tile of {tile} does not divide axis {from_front} (size {size}) of shape "
                f"{shape}; sizes that do: {', '.join(map(str, dividing_tiles(size, tile)))}"
            )
        counts[from_front] = size // tile
    return tuple(counts)


def normalize_axis(axis: int, shape: Shape) -> int:
    """Return an axis counted from the front, so -1 becomes `len(shape) - 1`.

    **Raises:** `ValueError` if the axis is out of range.
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is out of range for an array of shape {shape}")
    return axis % len(shape)


def dividing_tiles(size: int, tile: int) -> list[int]:
    """Return the divisors of `size` nearest to `tile` by ratio, at most six, in ascending order.

    For size 384 and tile 100: 32, 48, 64, 96, 128 and 192. Error messages suggest these sizes.
    """
    tile = max(tile, 1)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return sorted(sorted(divisors, key=lambda d: max(d / tile, tile / d))[:6])


def can_tile(scale_shape: Shape, shape: Shape) -> bool:
    """Return whether a scale has the rank of `shape`, and each of its sizes divides that axis."""
    return len(scale_shape) == len(shape) and all(
        size == count or (count > 0 and size % count == 0)
        for size, count in zip(shape, scale_shape, strict=True)
    )


def tile_shape(shape: Shape, scale_shape: Shape) -> Shape:
    """Return the number of values per tile along each axis. `shape` is the shape of the values."""
    # The scale of an axis of size 0 can have size 0.
    return tuple(size // max(count, 1) for size, count in zip(shape, scale_shape, strict=True))


def split_tiles(x: jax.Array, scale_shape: Shape) -> jax.Array:
    """Split every axis of `x` into two axes: the tiles, and the values within a tile.

    For example, values `[64, 8]` with a scale `[2, 8]` become `[2, 32, 8, 1]`.
    """
    return split_axes(x, list(zip(scale_shape, tile_shape(x.shape, scale_shape), strict=True)))


def over_tiles(op: Callable, x: jax.Array, scale: Leaf) -> jax.Array:
    """Return the elementwise `op(x, scale)`, with each scale broadcast over its tile of `x`."""
    # Split an axis into tiles only if it has several tiles of several values. Others broadcast.
    split_sizes = [
        ((size,), (count,)) if count in (1, size) else ((count, size // count), (count, 1))
        for size, count in zip(x.shape, scale.shape, strict=True)
    ]
    split_x = split_axes(x, [x_sizes for x_sizes, _ in split_sizes])
    split_scale = split_axes(jnp.asarray(scale), [scale_sizes for _, scale_sizes in split_sizes])
    return join_axes(op(split_x, split_scale), x)
