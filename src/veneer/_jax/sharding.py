"""Shardings, and the trees that functions of a `shard_map` return."""

from typing import Any

from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import PartitionSpec

# The function of a shard_map returns a tree of JAX's own, with the specs of its leaves beside it.

try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten


def spec_over(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """The spec of a sharding that the partitioner has found; an empty one where there is none.

    It may cut along a part of an axis of the mesh, which no spec says.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # of several types, and some by mistake: a KeyError for a part of an axis
        return PartitionSpec()
