"""Which values of an operand share a scale, by the axes that a product contracts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..formats import Format
from ..formats.tiles import Shape


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
    ndim: int, shared: Sequence[int], format: Format | None, tile_size: int | None = None
) -> ScaleAxes:
    """Returns those with which values share a scale along some axes, and along no others.

    **Arguments:**

    - `ndim`: how many axes there are.
    - `shared`: those along which a scale is shared, which a product contracts; the last of them is
      the one that tiles cut.
    - `format`: one that is defined for a tile (mxfp4) has it along that axis, and nothing else
      shares.
    - `tile_size`: how many values along that axis share a scale; None is all of them.
    """
    *whole, last = shared if shared else [None]
    if format is not None and format.tile_size is not None:
        whole, tile_size = [], tile_size or format.tile_size
    tiled = () if tile_size is None or last is None else ((last, int(tile_size)),)
    return ScaleAxes(tuple(axis for axis in range(ndim) if axis not in (*whole, last)), tiled)


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
        raise ValueError(f"tile_axis {axes!r} names an axis of shape {shape} twice, or none")
    return from_end
