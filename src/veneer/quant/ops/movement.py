"""Rules that keep a QArray quantized in casts, gather, ppermute and some slices.

The rules for all implicit arrays apply a primitive to each leaf. They do not support slices that
cut a tile, or a byte with several codes. The rules here support slices of size 1 along an axis, and
slices within one tile, which need one scale. If a rule here returns NotImplemented, the rule for
all implicit arrays runs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core.primitives.collectives import permute
from ..._core.primitives.movement import gather
from ..._core.rules import register
from ..._core.trace import redispatch
from ..._jax.primitives import find_primitive, start_in_bounds
from ..arrays import QUANTIZABLE, QArray
from ..formats.packing import UNITS, Packing, unpack
from ..formats.tiles import Leaf


@register("convert_element_type")
def _convert_element_type(q: QArray, *, new_dtype, weak_type, sharding) -> Any:
    # A user who casts to an integer or to 8 bits wants the values to be rounded.
    if weak_type or sharding is not None or new_dtype not in QUANTIZABLE:
        return NotImplemented
    return q.replace(dense_dtype=new_dtype)


@register("gather")
def _gather(q: QArray, indices: ArrayLike, *, mode, fill_value, **params) -> Any:
    modes = lax.GatherScatterMode
    fills_number = fill_value is not None and not np.isnan(fill_value)
    if mode == modes.ONE_HOT or (mode == modes.FILL_OR_DROP and fills_number):
        return NotImplemented
    if _is_packed(q, [axis for axis, size in enumerate(params["slice_sizes"]) if size == 1]):
        # Single codes are gathered along the packed axis. Each takes one byte, packed or not.
        q = q.unpacked()
    # The fill values of codes, scales, zero points and minima. Entries out of bounds become NaN,
    # because their scales are NaN.
    zero_point = () if q.zero_point is None else (0,)
    fills = (0, np.nan, *zero_point, np.nan) if mode == modes.FILL_OR_DROP else None
    # `gather` applies `rule` to a leaf that is a QArray, such as quantized scales.
    params |= {"mode": mode, "fill_value": None, "fills": fills, "rule": _gather}
    return gather(q, indices, **params)


@register("ppermute")
def _ppermute(q: QArray, *, perm, axis_name) -> Any:
    # A device that receives nothing gets zeros, which float8_e8m0fnu cannot represent.
    if any(x.dtype == jnp.float8_e8m0fnu for x in jax.tree.leaves(q)):
        return NotImplemented
    return permute(q, perm, axis_name)


@register("slice")
def _slice(q: QArray, *, start_indices, limit_indices, strides) -> Any:
    sliced, spans = q, []
    strides = strides or [1] * q.ndim
    for axis, span in enumerate(zip(start_indices, limit_indices, strides, strict=True)):
        start, limit, stride = span
        size, tile = q.shape[axis], q.tile_shape[axis]
        has_tiles = tile not in (0, 1)  # 0 if the axis is empty, 1 if each index has a scale
        if limit - start == 1 and size != 1 and (has_tiles or _is_packed(q, [axis])):
            sliced = _slice_entry(sliced, axis, start)
            span = 0, 1, 1  # the axis has size 1 now
        elif has_tiles and tile != size and stride == 1 and start // tile == (limit - 1) // tile:
            # The slice is within one tile. The codes are sliced below.
            sliced = _keep_one_scale(sliced, axis, start // tile)
        spans.append(span)
    if sliced is q:
        return NotImplemented
    return redispatch(lambda x: lax.slice(x, *zip(*spans, strict=True)), sliced)


@register("dynamic_slice")
def _dynamic_slice(q: QArray, *indices: ArrayLike, slice_sizes) -> Any:
    sliced, starts = q, list(indices)
    for axis, slice_size in enumerate(slice_sizes):
        has_tiles = q.tile_shape[axis] not in (0, 1)
        if slice_size == 1 and q.shape[axis] != 1 and (has_tiles or _is_packed(q, [axis])):
            start = start_in_bounds(indices[axis], q.shape[axis])
            sliced = _slice_entry(sliced, axis, start)
            starts[axis] = jnp.zeros_like(indices[axis])  # the axis has size 1 now
    if sliced is q:
        return NotImplemented
    # Bind the primitive, because the caller's `lax.dynamic_slice` has already added the axis size
    # to negative starts.
    bind = partial(find_primitive("dynamic_slice").bind, slice_sizes=slice_sizes)
    return redispatch(lambda x: bind(x, *starts), sliced)


def _is_packed(q: QArray, axes: Sequence[int]) -> bool:
    """Return whether several codes are packed along one of `axes`."""
    return q.packing is not None and q.packing.axis + q.ndim in axes and q.packing.size > 1


def _slice_axis(x: Leaf, axis: int, start: Any, size: int = 1) -> jax.Array:
    x = jnp.asarray(x)
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def _slice_entry(q: QArray, axis: int, index: Any) -> QArray:
    """Slice the entry `index` of an axis of a QArray. The axis gets size 1.

    The index can be a tracer.
    """
    entry = _keep_one_scale(q, axis, index // q.tile_shape[axis])
    if not _is_packed(q, [axis]):
        return entry.changed(packed=_slice_axis(entry.packed, axis, index))
    # Unpack only the unit with the code: `unit_bytes` bytes that hold `unit_codes` codes.
    unit_codes, unit_bytes = UNITS[q.format.bits]
    unit = _slice_axis(entry.packed, axis, index // unit_codes * unit_bytes, unit_bytes)
    codes = unpack(unit, Packing(axis - q.ndim, unit_codes), q.format.bits)
    return entry.changed(packed=_slice_axis(codes, axis, index % unit_codes), packing=None)


def _keep_one_scale(q: QArray, axis: int, tile: Any) -> QArray:
    """Slice the scale, zero point and minimum of one tile of an axis, but not the codes.

    `tile` is the index of the tile. The caller must slice the codes within that tile.
    """
    leaves = {}
    for name in ("scale", "zero_point", "minimum"):
        leaf = getattr(q, name)
        if leaf is not None and leaf.shape[axis] not in (0, 1):  # 1 if tiles span the axis
            slice_leaf = _slice_entry if isinstance(leaf, QArray) else _slice_axis
            leaves[name] = slice_leaf(leaf, axis, tile)
    return q.changed(**leaves)
