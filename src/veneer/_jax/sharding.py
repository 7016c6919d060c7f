"""Shardings, and the trees that functions of a `shard_map` return."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The function of a shard_map returns a tree of JAX's own, with the specs of its leaves beside it.

try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten


def replicated_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding of an array that is not cut, or None without explicit mesh axes."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, PartitionSpec())


def replicated(x: Any) -> Any:
    """Return an array with no axis cut over an explicit mesh; without one, as it is."""
    sharding = replicated_sharding(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def split_axes(x: Any, parts: Sequence[Sequence[int]]) -> Any:
    """Return an array with each axis split in parts.

    JAX does not reshape an array over an explicit mesh if that would split an axis elsewhere than
    the mesh cuts it. Such an axis is gathered first. Otherwise the first part is cut.
    """
    sizes = [size for part in parts for size in part]
    if replicated_sharding(x) is None or sizes == [*x.shape]:
        return x.reshape(sizes)
    mesh, entries = jax.typeof(x).sharding.mesh, _entries(x)
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
    cut = [math.prod(mesh.shape[n] for n in of if n is not None) for of in names]
    kept = [e if part[0] % n == 0 else None for e, part, n in zip(entries, parts, cut, strict=True)]
    spec = [
        e
        for kept_entry, part in zip(kept, parts, strict=True)
        for e in (kept_entry, *[None] * (len(part) - 1))
    ]
    x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))
    return jax.lax.reshape(x, sizes, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def join_axes(x: Any, like: Any) -> Any:
    """Return an array with its axes joined to those of another one, and cut as that is."""
    if replicated_sharding(like) is None or x.shape == like.shape:
        return x.reshape(like.shape)
    mesh, axis = jax.typeof(like).sharding.mesh, 0
    entries, spec = _entries(x), []
    for size in like.shape:
        spec.append(entries[axis])
        joined = x.shape[axis]
        axis += 1
        while joined < size:
            joined *= x.shape[axis]
            axis += 1
    x = jax.lax.reshape(x, like.shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*_entries(like))))


def _entries(x: Any) -> list[Any]:
    spec = jax.typeof(x).sharding.spec
    return [*spec, *[None] * (len(x.shape) - len(spec))]


def spec_over(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """The spec of a sharding that the partitioner has found; an empty one where there is none.

    It may cut along a part of an axis of the mesh, which no spec says.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # of several types, and some by mistake: a KeyError for a part of an axis
        return PartitionSpec()
