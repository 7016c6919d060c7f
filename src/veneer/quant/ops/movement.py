"""Rules that keep a QArray quantized where its leaf axes do not: casts, gather, slices, ppermute.

Leaf axes alone do not support slices that cut a tile, or a byte with several codes. These rules
support slices of one entry, and slices within one tile, which have one scale along that axis.
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
from ..._core.transform import redispatch
from ..._jax.primitives import find_primitive, start_in_bounds
from ..arrays.qarray import QUANTIZABLE, QArray
from ..formats.packing import UNITS, Packing, unpack
from ..formats.tiles import Leaf


@register("convert_element_type")
def _convert_element_type(q: QArray, *, new_dtype, weak_type, sharding) -> Any:
    # A cast to an integer or to 8 bits is meant to round.
    if weak_type or sharding is not None or new_dtype not in QUANTIZABLE:
        return NotImplemented
    return q.replace(dense_dtype=new_dtype)


@register("gather")
def _gather(q: QArray, indices: ArrayLike, *, mode, fill_value, **params) -> Any:
    modes = lax.GatherScatterMode
    if mode == modes.ONE_HOT:
        return NotImplemented
    if mode == modes.FILL_OR_DROP and fill_value is not None and not np.isnan(fill_value):
        return NotImplemented
    if _is_packed(q, [axis for axis, size in enumerate(params["slice_sizes"]) if size == 1]):
        fields = unpack(q.packed, q.packing, q.format.bits)
        q = q.changed(packed=fields, packing=None)  # an entry takes one byte, packed or not
    # Rows out of bounds are NaN, because their scales are.
    zero_point = () if q.zero_point is None else (0,)
    fills = (0, np.nan, *zero_point, np.nan) if mode == modes.FILL_OR_DROP else None
    params |= {"mode": mode, "fill_value": None, "fills": fills, "rule": _gather}
    return gather(q, indices, **params)


@register("ppermute")
def _ppermute(q: QArray, *, perm, axis_name) -> Any:
    if any(x.dtype == jnp.float8_e8m0fnu for x in jax.tree.leaves(q)):
        return NotImplemented  # a device that receives nothing gets zeros, which this dtype has not
    return permute(q, perm, axis_name)


@register("slice")
def _slice(q: QArray, *, start_indices, limit_indices, strides) -> Any:
    part, spans = q, []
    strides = strides or [1] * q.ndim
    for axis, span in enumerate(zip(start_indices, limit_indices, strides, strict=True)):
        start, limit, stride = span
        size, tile = q.shape[axis], q.tile_shape[axis]
        if limit - start == 1 != size and (tile not in (0, 1) or _is_packed(q, [axis])):
            part = _slice_entry(part, axis, start)
            span = 0, 1, 1
        elif tile not in (0, 1, size) and stride == 1 and start // tile == (limit - 1) // tile:
            part = _keep_one_scale(part, axis, start // tile)
        spans.append(span)
    if part is q:
        return NotImplemented
    return redispatch(lambda part: lax.slice(part, *zip(*spans, strict=True)), part)


@register("dynamic_slice")
def _dynamic_slice(q: QArray, *indices: ArrayLike, slice_sizes) -> Any:
    part, starts = q, list(indices)
    for axis, size in enumerate(slice_sizes):
        is_cut = q.tile_shape[axis] not in (0, 1) or _is_packed(q, [axis])
        if size == 1 != q.shape[axis] and is_cut:
            part = _slice_entry(part, axis, start_in_bounds(indices[axis], q.shape[axis]))
            starts[axis] = jnp.zeros_like(indices[axis])
    if part is q:
        return NotImplemented
    # lax.dynamic_slice would count negative starts from the end once more.
    bind = partial(find_primitive("dynamic_slice").bind, slice_sizes=slice_sizes)
    return redispatch(lambda part: bind(part, *starts), part)


def _is_packed(q: QArray, axes: Sequence[int]) -> bool:
    """Return whether codes are packed along one of `axes`, with more than one code."""
    return q.packing is not None and q.packing.axis + q.ndim in axes and q.packing.size > 1


def _slice_axis(x: Leaf, axis: int, start: Any, size: int = 1) -> jax.Array:
    x = jnp.asarray(x)
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def _slice_entry(q: QArray, axis: int, index: Any) -> QArray:
    """Return the entry at an index along an axis, which then has size 1. One unit is unpacked."""
    part = _keep_one_scale(q, axis, index // q.tile_shape[axis])
    if not _is_packed(q, [axis]):
        return part.changed(packed=_slice_axis(part.packed, axis, index))
    codes, bytes_ = UNITS[q.format.bits]
    unit = _slice_axis(part.packed, axis, index // codes * bytes_, bytes_)
    fields = unpack(unit, Packing(axis - q.ndim, codes), q.format.bits)
    return part.changed(packed=_slice_axis(fields, axis, index % codes), packing=None)


def _keep_one_scale(q: QArray, axis: int, tile: Any) -> QArray:
    """Return the array with the scale, zero point and minimum of one tile along an axis."""
    leaves = {}
    for name in ("scale", "zero_point", "minimum"):
        leaf = getattr(q, name)
        if leaf is not None and leaf.shape[axis] not in (0, 1):
            slice_leaf = _slice_entry if isinstance(leaf, QArray) else _slice_axis
            leaves[name] = slice_leaf(leaf, axis, tile)
    return q.changed(**leaves)
