"""Chunks: what is done tile by tile, a few tiles at a time.

XLA on CPU does not fuse a maximum over tiles with what is computed from it, and keeps temporaries
of the size of what it works on. A loop over chunks, each of whole tiles, keeps these small.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._jax.tracing import varying_axes
from ..formats import Format
from ..formats.packing import UNITS
from ..formats.tiles import Shape, tile_shape

# Of a chunk in f32. Several may be held at once, and all of them fit in a cache that cores share.
CHUNK_BYTES = 2**22


class Chunks(NamedTuple):
    """So many tiles at a time along an axis; the last chunk may overlap the one before it."""

    axis: int
    tiles: int


def chunks_of(array: jax.Array, counts: Shape, format: Format) -> Chunks | None:
    """Return how to cut an array of `counts` tiles. None is no cut.

    Not cut are small arrays, arrays of symbolic size, arrays whose scales are quantized
    together, arrays that are split over devices, and arrays of one tile.
    """
    size = array.size * 4
    if not isinstance(size, int):  # symbolic, in programs for export
        return None
    if size < 2 * CHUNK_BYTES or format.scale_tile is not None or _is_cut(array):
        return None
    steps = {axis: _step(axis, array.shape, counts, format) for axis in range(array.ndim)}
    least = {axis: size // counts[axis] * step for axis, step in steps.items() if step}
    if not least:
        return None
    small = [axis for axis in least if least[axis] <= CHUNK_BYTES]
    axis = small[0] if small else min(least, key=least.__getitem__)
    tiles = max(CHUNK_BYTES // least[axis], 1) * steps[axis]
    return Chunks(axis, tiles) if 2 * tiles <= counts[axis] else None


def _step(axis: int, shape: Shape, counts: Shape, format: Format) -> int:
    """How many tiles along an axis fill whole bytes, where codes are packed along it; or 0."""
    unit = UNITS[format.bits][0] if axis == len(shape) - 1 and format.bits < 8 else 1
    return (
        0
        if shape[axis] % unit
        else math.lcm(unit, tile_shape(shape, counts)[axis]) // (tile_shape(shape, counts)[axis])
    )


def _is_cut(array: jax.Array) -> bool:
    if not isinstance(array, jax.core.Tracer) and len(array.sharding.device_set) > 1:
        return True
    aval = jax.typeof(array)
    spec = getattr(aval.sharding, "spec", ())
    return bool(varying_axes(array)) or any(entry is not None for entry in spec)


def in_chunks(
    fn: Callable[[jax.Array, jax.Array | None, Shape], Any],
    array: jax.Array,
    key: jax.Array | None,
    counts: Shape,
    chunks: Chunks,
) -> list[jax.Array]:
    """Returns the leaves of `fn(array, key, counts)`, found for some tiles after the other.

    **Arguments:**

    - `fn`: acts on each tile alone. Its results have the rank of the array, and axes in proportion
      to its own. Of a chunk, it is given the tiles, a key of its own, and the counts of these.
    """
    axis, tiles = chunks
    whole = counts[axis]
    of_chunk = tuple(tiles if at == axis else count for at, count in enumerate(counts))
    tile = array.shape[axis] // whole

    def part(index: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        start = jnp.minimum(index * tiles, whole - tiles)
        chunk = jax.lax.dynamic_slice_in_dim(array, start * tile, tiles * tile, axis)
        own_key = None if key is None else jax.random.fold_in(key, index)
        return start, jax.tree.leaves(fn(chunk, own_key, of_chunk))

    def put(start: jax.Array, full: jax.Array, some: jax.Array) -> jax.Array:
        # In proportion, for bytes hold several codes and a scale is that of many.
        start = start * some.shape[axis] // tiles
        return jax.lax.dynamic_update_slice_in_dim(full, some, start, axis)

    def step(index: jax.Array, full: list[jax.Array]) -> list[jax.Array]:
        start, some = part(index)
        return list(map(functools.partial(put, start), full, some))

    _, shapes = jax.eval_shape(part, jax.ShapeDtypeStruct((), jnp.int32))
    empty = [jnp.zeros(_grown(s.shape, axis, whole, tiles), s.dtype) for s in shapes]
    return jax.lax.fori_loop(0, -(-whole // tiles), step, empty)


def _grown(shape: Shape, axis: int, whole: int, tiles: int) -> Shape:
    return tuple(n * whole // tiles if at == axis else n for at, n in enumerate(shape))
