"""Rules of a QArray for what its leaf axes do not say.

Leaf by leaf, a slice cuts no tile and no byte of several codes. But what is cut to one entry along
an axis, or to a part of one tile, has one scale there, and its codes are in one unit: they stay
codes. So does an array of another floating dtype, and so do rows out of bounds.
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
    # To fewer bits, it is meant to round.
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
        q = q.changed(packed=fields, packing=None)  # of which one is a byte, packed or not
    # What a scale of NaN multiplies does not matter.
    of_zero_point = () if q.zero_point is None else (0,)
    fills = (0, np.nan, *of_zero_point, np.nan) if mode == modes.FILL_OR_DROP else None
    params |= {"mode": mode, "fill_value": None, "fills": fills, "rule": _gather}
    return gather(q, indices, **params)


@register("ppermute")
def _ppermute(q: QArray, *, perm, axis_name) -> Any:
    if any(x.dtype == jnp.float8_e8m0fnu for x in jax.tree.leaves(q)):
        return NotImplemented  # who is sent nothing has zeros, which such a scale is not
    return permute(q, perm, axis_name)


@register("slice")
def _slice(q: QArray, *, start_indices, limit_indices, strides) -> Any:
    part, spans = q, []
    strides = strides or [1] * q.ndim
    for axis, span in enumerate(zip(start_indices, limit_indices, strides, strict=True)):
        start, limit, stride = span
        size, tile = q.shape[axis], q.tile_shape[axis]
        if limit - start == 1 != size and (tile not in (0, 1) or _is_packed(q, [axis])):
            part = _entry(part, axis, start)
            span = 0, 1, 1
        elif tile not in (0, 1, size) and stride == 1 and start // tile == (limit - 1) // tile:
            part = _in_one_tile(part, axis, start // tile)
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
            part = _entry(part, axis, start_in_bounds(indices[axis], q.shape[axis]))
            starts[axis] = jnp.zeros_like(indices[axis])
    if part is q:
        return NotImplemented
    # lax.dynamic_slice would count negative starts from the end once more.
    bind = partial(find_primitive("dynamic_slice").bind, slice_sizes=slice_sizes)
    return redispatch(lambda part: bind(part, *starts), part)


def _is_packed(q: QArray, axes: Sequence[int]) -> bool:
    """Whether codes are packed along one of some axes, in units of several."""
    return q.packing is not None and q.packing.axis + q.ndim in axes and q.packing.size > 1


def _one(x: Leaf, axis: int, at: Any, size: int = 1) -> jax.Array:
    x = jnp.asarray(x)
    if isinstance(at, int):
        return lax.slice_in_dim(x, at, at + size, axis=axis)
    return lax.dynamic_slice_in_dim(x, at, size, axis, allow_negative_indices=False)


def _entry(q: QArray, axis: int, at: Any) -> QArray:
    """Returns what is at a place along an axis, which then has size 1: of the codes one unit."""
    part = _in_one_tile(q, axis, at // q.tile_shape[axis])
    if not _is_packed(q, [axis]):
        return part.changed(packed=_one(part.packed, axis, at))
    codes, bytes_ = UNITS[q.format.bits]
    unit = _one(part.packed, axis, at // codes * bytes_, bytes_)
    fields = unpack(unit, Packing(axis - q.ndim, codes), q.format.bits)
    return part.changed(packed=_one(fields, axis, at % codes), packing=None)


def _in_one_tile(q: QArray, axis: int, tile: Any) -> QArray:
    """Returns an array with the scale of one tile, by its number, for all along an axis."""

    def of(leaf: "Leaf | QArray") -> Any:
        if leaf.shape[axis] in (0, 1):
            return leaf
        return _entry(leaf, axis, tile) if isinstance(leaf, QArray) else _one(leaf, axis, tile)

    leaves = {name: getattr(q, name) for name in ("scale", "zero_point", "minimum")}
    return q.changed(**{k: of(leaf) for k, leaf in leaves.items() if leaf is not None})
