"""Tiles: the groups of values that share a scale.

A scale has the rank of the values, and each of its axes divides theirs: an axis of the values is
cut into as many equal tiles as the scale has entries on it. One is a shared scale; as many as there
are values is channelwise.
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
    """Returns the shape of the scale: how many tiles each axis of `shape` is cut into.

    **Raises:** `ValueError` for an axis that does not exist or is named twice, and for a tile that
    does not divide its axis, with sizes that would.
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
        counts[axis] = _count(shape, axis, operator.index(tile))
    return tuple(counts)


def normalize_axis(axis: int, shape: Shape) -> int:
    """Return an axis counted from the front.

    **Raises:** `ValueError` if it is out of range.
    """
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is out of range for an array of shape {shape}")
    return axis % len(shape)


def _count(shape: Shape, axis: int, tile: int) -> int:
    size = shape[axis]
    if tile < 1 or size % tile:
        raise ValueError(
            f"a tile of {tile} does not divide axis {axis} (size {size}) of shape {shape}; "
            f"sizes that do: {', '.join(map(str, dividing_tiles(size, tile)))}"
        )
    return size // tile


def dividing_tiles(size: int, tile: int, limit: int = 6) -> list[int]:
    """Returns the sizes nearest to `tile`, by ratio, that divide an axis of `size`; in order.

    >>> from veneer.quant.formats.tiles import dividing_tiles
    >>> dividing_tiles(384, 100)
    [32, 48, 64, 96, 128, 192]
    """
    tile = max(tile, 1)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return sorted(sorted(divisors, key=lambda d: max(d / tile, tile / d))[:limit])


def divides(counts: Shape, shape: Shape) -> bool:
    """Returns whether a scale of shape `counts` is one for values of `shape`."""
    return len(counts) == len(shape) and all(
        size == count or (count > 0 and size % count == 0)
        for size, count in zip(shape, counts, strict=True)
    )


def tile_shape(shape: Shape, counts: Shape) -> Shape:
    """Returns how many neighbours share an entry of a scale of shape `counts`, along each axis."""
    # An axis of size 0 may have a scale of size 0, too.
    return tuple(size // max(count, 1) for size, count in zip(shape, counts, strict=True))


def split_tiles(x: jax.Array, counts: Shape) -> jax.Array:
    """Splits every axis in two: `[..., size, ...]` to `[..., count, tile, ...]`."""
    return split_axes(x, list(zip(counts, tile_shape(x.shape, counts), strict=True)))


def over_tiles(op: Callable, x: jax.Array, scale: Leaf) -> jax.Array:
    """Returns `op(x, scale)`, each entry of `scale` broadcast over its tile of `x`."""
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
