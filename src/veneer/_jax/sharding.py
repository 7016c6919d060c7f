"""Replicate arrays, reshape arrays over explicit meshes, and read compiled shardings."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The function that JAX's shard_map runs returns a FlatTree of results, with their specs.
try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten


def replicated_sharding(x: Any) -> NamedSharding | None:
    """Return the sharding that replicates an array, or None if its mesh has no explicit axes."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, PartitionSpec())


def replicated(x: Any) -> Any:
    """Return an array, replicated if its mesh has explicit axes."""
    sharding = replicated_sharding(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def split_axes(x: Any, new_sizes: Sequence[Sequence[int]]) -> Any:
    """Return an array with each axis split into axes of the given sizes.

    For example, `[[4], [2, 3]]` reshapes (4, 6) to (4, 2, 3). The first new axis keeps the sharding
    of the old axis if the number of shards divides its size. If not, the old axis is gathered
    first, because JAX cannot reshape an axis across the borders of its shards.
    """
    shape = [size for sizes in new_sizes for size in sizes]
    if replicated_sharding(x) is None or shape == [*x.shape]:
        return x.reshape(shape)
    mesh = jax.typeof(x).sharding.mesh
    old_spec: list[Any] = []
    new_spec: list[Any] = []
    for entry, sizes in zip(_spec_entries(x), new_sizes, strict=True):
        names = entry if isinstance(entry, tuple) else (entry,)
        shards = math.prod(mesh.shape[name] for name in names if name is not None)
        old_spec.append(entry if sizes[0] % shards == 0 else None)
        new_spec += [old_spec[-1], *[None] * (len(sizes) - 1)]
    x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*old_spec)))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*new_spec)))


def join_axes(x: Any, like: Any) -> Any:
    """Return an array with adjacent axes joined, in the shape and with the sharding of `like`."""
    if replicated_sharding(like) is None or x.shape == like.shape:
        return x.reshape(like.shape)
    # First join the axes: a new axis gets the sharding of the first axis that is joined.
    axis, entries, spec = 0, _spec_entries(x), []
    for size in like.shape:
        spec.append(entries[axis])
        joined_size = x.shape[axis]
        axis += 1
        while joined_size < size:
            joined_size *= x.shape[axis]
            axis += 1
    mesh = jax.typeof(like).sharding.mesh
    x = jax.lax.reshape(x, like.shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*_spec_entries(like))))


def _spec_entries(x: Any) -> list[Any]:
    spec = jax.typeof(x).sharding.spec
    return [*spec, *[None] * (len(x.shape) - len(spec))]


def find_partition_spec(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """Return the `PartitionSpec` of a sharding that XLA's partitioner chose.

    The result is an empty spec if no spec can express the sharding. For example, the partitioner
    can split an array over a part of a mesh axis.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # JAX raises errors of several types, such as KeyError for a part of an axis
        return PartitionSpec()
