"""Tiles: the groups of values that share a scale.

A scale array has the rank of the values. Along each axis, its size is the number of equal tiles
into which the axis is cut: 1 if all values share a scale, and the size of the axis if each index
has its own (channelwise). Shapes of scale arrays are called `counts`.
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
    """Return the number of tiles along each axis, which is the shape of the scale.

    **Raises:** `ValueError` if an axis does not exist or is named twice, or if a tile does not
    divide its axis. The message lists tile sizes that do.
    """
    sizes = [(axis, 1) for axis in channelwise_axes] + list(tiled_axes.items())
    counts = [1] * len(shape)
    seen: set[int] = set()
    for named, tile in sizes:
        axis = normalize_axis(named, shape)
        if axis in seen:
            raise ValueError(
                f"axis {named} of shape {shape} is named twice. An axis is either channelwise or "
                f"tiled: channelwise_axes={tuple(channelwise_axes)}, tiled_axes={dict(tiled_axes)}"
            )
        seen.add(axis)
        size, tile = shape[axis], operator.index(tile)
        if tile < 1 or size % tile:
            raise ValueError(
                f"a tile of {tile} does not divide axis {axis} (size {size}) of shape {shape}; "
                f"sizes that do: {', '.join(map(str, dividing_tiles(size, tile)))}"
            )
        counts[axis] = size // tile
    return tuple(counts)


def normalize_axis(axis: int, shape: Shape) -> int:
    """Return an axis counted from the front.

    **Raises:** `ValueError` if it is out of range.
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is out of range for an array of shape {shape}")
    return axis % len(shape)


def dividing_tiles(size: int, tile: int) -> list[int]:
    """Return up to six tile sizes that divide an axis of `size`, in ascending order.

    They are the nearest to `tile`, by ratio: for 384 and 100, they are 32 to 192.
    """
    tile = max(tile, 1)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return sorted(sorted(divisors, key=lambda d: max(d / tile, tile / d))[:6])


def can_tile(counts: Shape, shape: Shape) -> bool:
    """Return whether a scale of shape `counts` fits values of `shape`."""
    return len(counts) == len(shape) and all(
        size == count or (count > 0 and size % count == 0)
        for size, count in zip(shape, counts, strict=True)
    )


def tile_shape(shape: Shape, counts: Shape) -> Shape:
    """Return the number of values per tile along each axis, for a scale of shape `counts`."""
    # The scale of an axis of size 0 can have size 0.
    return tuple(size // max(count, 1) for size, count in zip(shape, counts, strict=True))


def split_tiles(x: jax.Array, counts: Shape) -> jax.Array:
    """Split every axis in two: `[..., size, ...]` becomes `[..., count, tile, ...]`."""
    return split_axes(x, list(zip(counts, tile_shape(x.shape, counts), strict=True)))


def over_tiles(op: Callable, x: jax.Array, scale: Leaf) -> jax.Array:
    """Return `op(x, scale)`, with each entry of `scale` broadcast over its tile of `x`."""
    split: list[Shape] = []
    grid: list[Shape] = []
    for size, count in zip(x.shape, scale.shape, strict=True):
        if count in (1, size):
            split.append((size,))
            grid.append((count,))
        else:
            split.append((count, size // count))
            grid.append((count, 1))
    return join_axes(op(split_axes(x, split), split_axes(jnp.asarray(scale), grid)), x)
