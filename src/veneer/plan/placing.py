"""Arrays on the devices of a split: quantised, cut by the names of their axes; and their bytes.

Arrays are abstract, quantised as `vn.quant.quantize` does and cut as `vn.device_put` would; where a
tile or a byte would be cut, the axis is whole on each device, and it is said why.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._core.primitives.sharding import axes_of, block_specs, leaf_destinations, why_not_split
from .._core.value import is_value
from ..placement import fully_sharded
from ..quant import Rule, get_format, zeros
from ..quant.models.default_rules import VOCABULARY_QTYPE, default_tile, fit_default_rule
from .models import AXES, CachedShape, NamedShape

#: The axes of the mesh along which axes are cut by their names.
CUT = dict.fromkeys(AXES, ("tensor",)) | {"experts": ("expert",), "batch": ("data", "expert")}


class Split(NamedTuple):
    """How many devices there are along each axis of the mesh, and whether weights are in parts."""

    data: int
    expert: int
    tensor: int
    in_parts: bool = False

    @property
    def mesh(self) -> AbstractMesh:
        """Of neighbours, those along `tensor` are the closest."""
        return AbstractMesh(self[:3], self._fields[:3], axis_types=(AxisType.Auto,) * 3)

    def count(self, axes: Any) -> int:
        """How many blocks axes of the mesh make."""
        return math.prod(getattr(self, name) for name in axes_of(axes))

    def entry(self, axes: Sequence[str]) -> Any:
        """What a spec has for axes of the mesh: those along which there are several devices."""
        several = tuple(name for name in axes if self.count(name) > 1)
        return several[0] if len(several) == 1 else several or None


class PlacedWeight(NamedTuple):
    """A weight on a device.

    **Arguments:**

    - `weight`, `stored`: what it is, and the abstract array.
    - `by_name`, `spec`: how it is cut by the names of its axes, and in parts, too.
    - `whole_nbytes`, `nbytes`: of a device, cut so and so.
    - `why`: it is not cut along an axis as asked.
    """

    weight: NamedShape
    stored: Any
    by_name: P
    spec: P
    nbytes: int
    whole_nbytes: int
    why: str = ""


def stored_as(weight: NamedShape, format: str, tile: int | None, dtype: str) -> Any:
    """A weight as it is stored, an abstract array.

    **Raises:** `ValueError` for what is neither a format nor a dtype.
    """
    dense = _dtype_in(format)
    x = jax.ShapeDtypeStruct(weight.shape, dense or dtype)
    if dense is not None or weight.contracted is None:
        return x
    bits = get_format(format).bits
    if bits < 8 and "vocabulary" in weight.axes:
        rule = Rule(".*", VOCABULARY_QTYPE)
    else:
        rule = Rule(".*", format, tile_size=tile or default_tile(format))
    fitted = fit_default_rule(rule, {weight.contracted}, weight.shape)
    return jax.eval_shape(fitted.quantize, x)


def _dtype_in(format: str) -> str | None:
    """The name of a dtype, or None for what is a format."""
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    names |= {name: name for name in names.values()}
    return names.get(format)


# An array on a device.


def nbytes(array: Any, sharding: NamedSharding) -> int:
    """The bytes that a device has of an array, leaf by leaf."""
    leaves = zip(jax.tree.leaves(array), leaf_destinations(array, sharding), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in leaves)


def spec_by_names(array: Any, axes: tuple[str, ...], over: Split) -> tuple[P, str]:
    """How an array is cut, along the axes whose names say so; and why not along others of them."""
    entries: list[Any] = [None] * len(axes)
    why, used = "", set[str]()
    for i, name in enumerate(axes):
        to = over.entry(CUT.get(name, ()))
        if to is None or used & {*axes_of(to)}:
            continue
        cut = P(*entries[:i], to, *entries[i + 1 :])
        if _is_cut(array, cut, over.mesh):
            entries[i], used = to, used | {*axes_of(to)}
        else:
            told = why_not_split(array, cut, over.mesh.shape) if is_value(array) else ""
            why = told or f"{over.count(to)} devices do not divide its axis of {array.shape[i]}"
    return P(*entries), why


def _is_cut(array: Any, spec: P, mesh: AbstractMesh) -> bool:
    if is_value(array):
        return block_specs(array, spec, mesh.shape) is not None
    counts = [math.prod(mesh.shape[name] for name in axes_of(entry)) for entry in spec]
    return all(size % count == 0 for size, count in zip(array.shape, counts, strict=True))


def same_along(weight: NamedShape) -> tuple[str, ...]:
    """The axes of a mesh along which devices have the same of a weight."""
    return ("data",) if "experts" in weight.axes else ("data", "expert")


def placed(weight: NamedShape, stored: Any, over: Split) -> PlacedWeight:
    """Where a weight lies: along the axes that its names say, and in parts along what is left."""
    by_name, why = spec_by_names(stored, weight.axes, over)
    spec, same = by_name, over.entry(same_along(weight))
    if over.in_parts and same is not None and weight.contracted is not None:
        spec = fully_sharded(over.mesh, same, by_name)(stored).spec
    cut, given = (nbytes(stored, NamedSharding(over.mesh, s)) for s in (spec, by_name))
    return PlacedWeight(weight, stored, by_name, spec, cut, given, why)


def updates_of(weight: NamedShape, rank: int, over: Split) -> list[PlacedWeight]:
    """The two sides of an update of a weight, in f32: `a [out, rank]` and `b [rank, in]`.

    None of what is no product, and of experts, which are left as they are.
    """
    if weight.contracted is None or "experts" in weight.axes:
        return []
    (out, into), (of_out, of_in) = weight.shape, weight.axes
    sides = ((out, rank), (of_out, "rank")), ((rank, into), ("rank", of_in))
    return [
        placed(
            NamedShape(weight.path, shape, axes, -1), jax.ShapeDtypeStruct(shape, "float32"), over
        )
        for shape, axes in sides
    ]


def cache_of(cached: CachedShape, batch: int, length: int, format: str | None, dtype: str) -> Any:
    """A cache of a layer, an abstract array: with a scale for each token of each head."""
    shape, format = cached.shape(batch, length), format or dtype
    dense = _dtype_in(format)
    if dense is not None:
        return jax.ShapeDtypeStruct(shape, dense)
    axes = tuple(range(len(shape) - 1))
    make = functools.partial(zeros, shape, format, dtype=jnp.dtype(dtype), channelwise_axes=axes)
    return jax.eval_shape(make)
