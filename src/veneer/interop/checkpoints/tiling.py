"""Tiles of other libraries, as a `QArray` has them: axes of a scale divide those of the values.

Where a tile of theirs does not divide an axis, or goes on in the next row, smaller tiles do that
divide both (their greatest common divisor), and a scale is there once for each.
"""

import math
from collections.abc import Sequence

import numpy as np


def tile_of(size: int, count: int, stated: int | None) -> int | None:
    """Return how many values share a scale along an axis, or None where the numbers do not fit.

    The count alone does not say it: 1000 values under 8 scales are tiles of 128, the last of them
    shorter, or of 125.

    **Arguments:**

    - `size`, `count`: the values and the scales along the axis.
    - `stated`: the tile that the configuration states, -1 for the whole axis. With None, only a
      count that leaves no doubt fits: one scale, or even tiles of a power of two.
    """
    if not size or not count:
        return None
    if stated is not None:
        tile = size if stated == -1 else stated
        return tile if count == -(-size // tile) else None
    tile, rest = divmod(size, count)
    is_power_of_two = tile & (tile - 1) == 0
    return tile if not rest and (count == 1 or is_power_of_two) else None


def tiled_axis(entries: np.ndarray, axis: int, size: int, tile: int) -> np.ndarray:
    """Scales along an axis of `size` values, of which every `tile` share one, the last perhaps few.

    **Arguments:**

    - `entries`: with `ceil(size / tile)` along `axis`.

    **Returns:** the same, or with more entries along the axis: a divisor of `size`.
    """
    if size % tile == 0 or entries.shape[axis] == 1:
        return entries
    smaller = math.gcd(size, tile)
    return np.take(entries, np.arange(0, size, smaller) // tile, axis)


def tiled_rows(entries: np.ndarray, shape: Sequence[int], tile: int) -> np.ndarray:
    """Scales of a matrix, of which every `tile` values in the order of memory share one.

    **Arguments:**

    - `entries`: `[ceil(rows * columns / tile)]`.
    - `shape`: rows and columns.

    **Returns:** a matrix, whose axes divide those of `shape`.
    """
    rows, columns = shape
    if columns % tile == 0:
        return entries.reshape(rows, columns // tile)
    if tile % columns == 0 and rows % (tile // columns) == 0:
        return entries.reshape(rows * columns // tile, 1)
    smaller = math.gcd(columns, tile)
    at = np.arange(0, rows * columns, smaller) // tile
    return entries[at].reshape(rows, columns // smaller)


def sorted_groups(groups: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Puts columns in the order of their groups, so that tiles are neighbours.

    **Arguments:**

    - `groups`: the group of each column, `int[columns]`.

    **Returns:** the columns in their new order, None where they keep theirs; and the group of each
    tile, of which there are a divisor of the columns.
    """
    order = None
    if (np.diff(groups) < 0).any():
        order = np.argsort(groups, kind="stable").astype(np.int32)
        groups = groups[order]
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    tile = math.gcd(len(groups), *map(int, starts))
    return order, groups[::tile]
