"""Shardings, and what `shard_map` tells of the axes along which an array varies."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src.sharding_impls import UNSPECIFIED as UNSPECIFIED
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax.sharding import PartitionSpec

from .primitives import find_primitive

# The function of a shard_map returns a tree of JAX's own, with the specs of its leaves beside it.

try:
    from jax._src.flattree import flatten as flat_tree
except ImportError:  # JAX < 0.12
    from jax._src.tree_util import FlatTree

    flat_tree = FlatTree.flatten


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes along which an array inside a shard_map may differ, by its type."""
    return jax.typeof(x).mat.varying


def vary_together(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that vary along the same manual axes: those along which any of them does.

    As JAX has the operands of its own primitives, where a shard_map keeps account of that.
    """
    axes = [varying_axes(x) for x in arrays]
    union = frozenset[str]().union(*axes)
    pvary = find_primitive("pvary")
    return [
        pvary.bind(x, axes=tuple(sorted(union - own))) if own != union else x
        for x, own in zip(arrays, axes, strict=True)
    ]


def spec_over(mesh: Any, sharding: Any, ndim: int) -> PartitionSpec:
    """The spec of a sharding that the partitioner has found; an empty one where there is none.

    It may cut along a part of an axis of the mesh, which no spec says.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(ndim), mesh)[0]
    except Exception:  # of several types, and some by mistake: a KeyError for a part of an axis
        return PartitionSpec()
