"""Replicate arrays, reshape arrays over explicit meshes, and read compiled shardings."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The function of a shard_map returns a FlatTree, and the specs of its leaves.
try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten


def replicated_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding that replicates an array over its mesh, or None without explicit axes."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, PartitionSpec())


def replicated(x: Any) -> Any:
    """Return an array, replicated if it is sharded over an explicit mesh."""
    sharding = replicated_sharding(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def split_axes(x: Any, parts: Sequence[Sequence[int]]) -> Any:
    """Return an array with each axis split into axes of the given sizes.

    The first part of a sharded axis keeps the sharding if the shards divide it. If not, the axis is
    gathered first, because JAX cannot reshape an axis across the borders of its shards.
    """
    sizes = [size for part in parts for size in part]
    if replicated_sharding(x) is None or sizes == [*x.shape]:
        return x.reshape(sizes)
    mesh = jax.typeof(x).sharding.mesh
    kept: list[Any] = []
    split: list[Any] = []
    for entry, part in zip(_spec_entries(x), parts, strict=True):
        names = entry if isinstance(entry, tuple) else (entry,)
        shards = math.prod(mesh.shape[name] for name in names if name is not None)
        kept.append(entry if part[0] % shards == 0 else None)
        split += [kept[-1], *[None] * (len(part) - 1)]
    x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))
    return jax.lax.reshape(x, sizes, out_sharding=NamedSharding(mesh, PartitionSpec(*split)))


def join_axes(x: Any, like: Any) -> Any:
    """Return an array with adjacent axes joined to the shape of another, and sharded like it."""
    if replicated_sharding(like) is None or x.shape == like.shape:
        return x.reshape(like.shape)
    mesh, axis = jax.typeof(like).sharding.mesh, 0
    entries, spec = _spec_entries(x), []
    for size in like.shape:
        spec.append(entries[axis])
        joined = x.shape[axis]
        axis += 1
        while joined < size:
            joined *= x.shape[axis]
            axis += 1
    x = jax.lax.reshape(x, like.shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*_spec_entries(like))))


def _spec_entries(x: Any) -> list[Any]:
    spec = jax.typeof(x).sharding.spec
    return [*spec, *[None] * (len(x.shape) - len(spec))]


def find_partition_spec(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """Return the spec of a sharding that XLA's partitioner chose, or an empty spec.

    The partitioner can split an array along a part of a mesh axis, which no spec can express.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # JAX raises errors of several types, such as KeyError for a part of an axis
        return PartitionSpec()
