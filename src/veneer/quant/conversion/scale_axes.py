"""Which values of an operand share a scale, by the axes that a product contracts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats import Format
from ..formats.tiles import Shape
from .quantize import tile_in

# How many values share a scale along the last axis that is contracted; or along each axis, counted
# from the end.
TileSize = int | tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class ScaleAxes:
    """The axes that have a scale an index, and those that have one a tile; others share one."""

    channelwise: tuple[int, ...]
    tiled: tuple[tuple[int, int], ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """What `quantize` takes."""
        return {"channelwise_axes": self.channelwise, "tiled_axes": dict(self.tiled) or None}

    def size(self, axis: int) -> int | None:
        """How many neighbours along an axis share a scale; None is all of them."""
        return 1 if axis in self.channelwise else dict(self.tiled).get(axis)


def scale_axes_of(
    ndim: int, shared: Sequence[int], format: Format | None, tile_size: TileSize = None
) -> ScaleAxes:
    """Returns those with which values share a scale along some axes, and along no others.

    **Arguments:**

    - `ndim`: how many axes there are.
    - `shared`: those along which a scale is shared, which a product contracts, from the front.
    - `format`: one that is defined for a tile (mxfp4) has it along the last of these, and nothing
      else shares.
    - `tile_size`: how many values share a scale, along the last of `shared` or along each axis; an
      axis that has tiles need not be contracted. None is all of them.
    """
    if format is not None and format.tile_size is not None:
        shared, tile_size = shared[-1:], tile_size or format.tile_size
    if isinstance(tile_size, tuple):
        tiled = tuple((axis % ndim, size) for axis, size in tile_size)
    else:
        tiled = () if tile_size is None or not shared else ((shared[-1], int(tile_size)),)
    parted = {*shared, *(axis for axis, _ in tiled)}
    return ScaleAxes(tuple(axis for axis in range(ndim) if axis not in parted), tiled)


def row_axes(shape: Shape, shared: Sequence[int], format: Format, tile_size: Any) -> ScaleAxes:
    """Returns which activations share a scale: those of a row, or of a tile of it.

    **Arguments:**

    - `shape`: of the activations, or of a gradient.
    - `shared`: the axes that a product contracts; tiles are along the last.
    - `tile_size`: a number of values, or as a float a share of that axis; None is all of it. Or
      `{axis: such a size}`.
    """
    size = tile_size_in(shape, shared, tile_size) if shared else None
    return scale_axes_of(len(shape), shared, format, size)


def tile_size_in(shape: Shape, shared: Sequence[int], tile_size: Any) -> TileSize:
    """Returns a size of tiles, or one for each of several axes, as whole numbers of values.

    **Arguments:**

    - `shape`: of the array.
    - `shared`: the contracting axes; a single size is that along the last.
    - `tile_size`: a number of values, or as a float a share of the axis; or `{axis: such a size}`.

    **Raises:** `ValueError` for an axis out of range or named twice, and a share above 1.
    """
    if tile_size is None:
        return None
    if not isinstance(tile_size, Mapping | tuple):
        return tile_in(shape, shared[-1], tile_size)
    sizes = dict(tile_size)
    axes = from_the_end(tuple(sizes), shape) if sizes else ()
    pairs = zip(axes, sizes.values(), strict=True)
    return tuple(sorted((axis, tile_in(shape, axis, size)) for axis, size in pairs))


def check_tile_size(tile_size: Any, format: Format | None, *, by_axis: bool = False) -> None:
    """Checks a size of tiles before it is known of what shape they are.

    **Arguments:**

    - `tile_size`: None, a number of values, or as a float the share of an axis.
    - `format`: of the values, if they have one.
    - `by_axis`: whether it may be `{axis: size}` as well.

    **Raises:** `TypeError` for what is none of these. `ValueError` for a number below 1, a share
    that is not above 0 and up to 1, and where the format is defined for another tile.
    """
    if by_axis and isinstance(tile_size, Mapping | tuple):
        sizes = dict(tile_size)
        if wrong := [axis for axis in sizes if not isinstance(axis, int | np.integer)]:
            raise TypeError(
                f"tile_size must map axes, which are integers, to sizes, not {wrong[0]!r}"
            )
    else:
        sizes = {} if tile_size is None else {-1: tile_size}
    for size in sizes.values():
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
    usual = None if format is None else format.tile_size
    if format is not None and usual is not None and tile_size not in (None, usual):
        raise ValueError(
            f"{format.name} needs tiles of {usual}, not {tile_size}: leave out tile_size, or use a "
            "format without a fixed tile size"
        )


def from_the_end(axes: int | Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Returns axes counted from the end, where leading ones may come and go.

    **Raises:** `ValueError` for one that `shape` does not have, or that is named twice.
    """
    named = [axes] if not isinstance(axes, Sequence) else axes
    for axis in named:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"tile_axis {axis} is out of range for shape {shape}")
    from_end = tuple(int(axis) % len(shape) - len(shape) for axis in named)
    if not from_end or len(set(from_end)) < len(from_end):
        raise ValueError(
            f"tile_axis {axes!r} must name at least one axis of shape {shape}, and none twice"
        )
    return from_end
