"""Tiles: the groups of values that share a scale, and the axes along which scales differ.

A scale array has the rank of the values. Each axis has one entry per tile of the same axis of the
values: one entry if all values along the axis share a scale, and one per index if the axis is
channelwise.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.primitives.sharding import join_axes, split_axes
from .format import Format

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
    """Return whether a scale fits values of a shape.

    The ranks must be equal, and the size of each axis of the scale must divide the same axis of
    the values.
    """
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


# The number of values per tile along the last contracted axis, or pairs `(axis, tile size)`. None
# means that the whole axis is one tile.
TileSize = int | tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class ScaleAxes:
    """The axes of an array along which scales differ.

    `channelwise` axes have one scale per index, and `tiled` axes, given as pairs `(axis, size)`,
    one scale per tile of this size. Along other axes, all values share a scale.
    """

    channelwise: tuple[int, ...]
    tiled: tuple[tuple[int, int], ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `vn.quant.quantize` for these axes."""
        return {"channelwise_axes": self.channelwise, "tiled_axes": dict(self.tiled) or None}

    def size(self, axis: int) -> int | None:
        """Return the number of values along an axis that share a scale.

        It is 1 for a channelwise axis, and None if all values along the axis share a scale.
        """
        return 1 if axis in self.channelwise else dict(self.tiled).get(axis)


def choose_scale_axes(
    ndim: int, shared: Sequence[int], format: Format | None, tile_size: TileSize = None
) -> ScaleAxes:
    """Return the axes along which the scales of an operand of a product differ.

    **Arguments:**

    - `ndim`: the rank of the array.
    - `shared`: the axes that the product contracts, counted from the front. Without tiles, values
      along these axes share a scale.
    - `format`: the format of the values, or None if they are not quantized. If the format has a
      fixed tile size, only the last axis of `shared` has tiles. Along all other axes, each index
      has its own scale.
    - `tile_size`: the tile size along the last axis of `shared`, or pairs `(axis, tile size)` of
      any axes. None means no tiles, unless the format has a tile size.
    """
    if format is not None and format.tile_size is not None:
        shared, tile_size = shared[-1:], tile_size or format.tile_size  # `shared` can be empty.
    if isinstance(tile_size, tuple):
        tiled = tuple((axis % ndim, size) for axis, size in tile_size)
    else:
        tiled = () if tile_size is None or not shared else ((shared[-1], int(tile_size)),)
    excluded = {*shared, *(axis for axis, _ in tiled)}
    return ScaleAxes(tuple(axis for axis in range(ndim) if axis not in excluded), tiled)


def choose_activation_axes(
    shape: Shape, shared: Sequence[int], format: Format, tile_size: Any
) -> ScaleAxes:
    """Return the axes along which the scales of activations or gradients of shape `shape` differ.

    The product contracts the axes in `shared`. Values along these axes, or along tiles of them,
    share a scale. `tile_size` is None, a number, a fraction, or a dict such as `{-1: 128}`.
    """
    size = resolve_tile_sizes(shape, shared, tile_size) if shared else None
    return choose_scale_axes(len(shape), shared, format, size)


def resolve_tile_sizes(shape: Shape, shared: Sequence[int], tile_size: Any) -> TileSize:
    """Convert a tile size that a user passes: replace fractions of an axis by numbers of values.

    **Arguments:**

    - `shared`: the axes that a product contracts. A single size is for the last of these axes.
    - `tile_size`: None, a number of values, or a float that is a fraction of the axis. Or a dict
      from axes to such sizes.

    **Returns:** None, a number of values, or sorted pairs `(axis, number of values)`.

    **Raises:** `ValueError` if an axis is out of range or named twice, or a fraction is above 1.
    """
    if tile_size is None:
        return None
    if not isinstance(tile_size, Mapping | tuple):
        return resolve_tile_size(shape, shared[-1], tile_size)
    sizes = dict(tile_size)
    # `normalize_tile_axes` checks the axes, and needs at least one.
    axes = normalize_tile_axes(tuple(sizes), shape) if sizes else ()
    pairs = zip(axes, sizes.values(), strict=True)
    return tuple(sorted((axis, resolve_tile_size(shape, axis, size)) for axis, size in pairs))


def resolve_tile_size(shape: Shape, axis: int, tile: SupportsIndex | float) -> int:
    """Return the number of values per tile along an axis. A float is a fraction of the axis.

    **Raises:** `ValueError` if the fraction is not above 0 and at most 1.
    """
    if not isinstance(tile, float):
        return operator.index(tile)
    if not 0 < tile <= 1:
        raise ValueError(
            f"the tile size of axis {axis} of shape {shape} is {tile}: it must be an integer, or a "
            "float from above 0 to 1, which is a fraction of the axis"
        )
    # For an axis that does not exist, any size will do: `tile_counts` raises the error later.
    return round(shape[axis] * tile) if -len(shape) <= axis < len(shape) else 1


def check_tile_size(tile_size: Any, format: Format | None, *, by_axis: bool = False) -> None:
    """Check a tile size that a user passes, before the shape of the array is known.

    `tile_size` is None, a number of values, or a float as a fraction of the axis. If `by_axis`, it
    can also be a dict from axes to such sizes.

    **Raises:** `TypeError` if `tile_size` has another type. `ValueError` if a number is below 1, if
    a fraction is not above 0 and at most 1, or if the format has another fixed tile size.
    """
    sizes: Collection[Any] = () if tile_size is None else (tile_size,)
    if by_axis and isinstance(tile_size, Mapping | tuple):
        size_by_axis = dict(tile_size)
        sizes = size_by_axis.values()
        if wrong := [axis for axis in size_by_axis if not isinstance(axis, int | np.integer)]:
            raise TypeError(
                f"tile_size must map axes, which are integers, to sizes, not {wrong[0]!r}"
            )
    for size in sizes:
        if not isinstance(size, int | np.integer | float):
            raise TypeError(
                "tile_size must be an integer, or a float that is a fraction of the axis, not "
                f"{size!r}"
            )
        if isinstance(size, float) and not 0 < size <= 1:
            raise ValueError(
                f"a float tile_size is a fraction of the axis, from above 0 to 1, not {size}"
            )
        if not isinstance(size, float) and size < 1:
            raise ValueError(f"tile_size must be at least 1, not {size}")
    if format is None or format.tile_size is None:
        return
    if tile_size not in (None, format.tile_size):
        raise ValueError(
            f"{format.name} needs tiles of {format.tile_size}, not {tile_size}: leave out "
            "tile_size, or use a format without a fixed tile size"
        )


def normalize_tile_axes(axes: int | Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Return the `tile_axis` of a weight as negative axes, which leading axes do not change.

    `axes` is an axis or a sequence of axes, and `shape` the shape of the weight.

    **Raises:** `ValueError` if no axis is named, or if an axis is out of range or named twice.
    """
    axis_list = axes if isinstance(axes, Sequence) else [axes]
    for axis in axis_list:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"tile_axis {axis} is out of range for shape {shape}")
    from_end = tuple(int(axis) % len(shape) - len(shape) for axis in axis_list)
    if not from_end or len(set(from_end)) < len(from_end):
        raise ValueError(
            f"tile_axis {axes!r} must name at least one axis of shape {shape}, and none twice"
        )
    return from_end
