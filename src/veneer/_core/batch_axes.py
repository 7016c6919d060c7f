"""Batch axes: leading axes that every leaf carries, so that slices of leaves stand for slices."""

from typing import Any

import jax

from .value import Value


def has_batch_axes(value: Value, count: int) -> bool:
    """Whether the first `count` axes of a value are batch axes, which may be taken off the leaves.

    Seen on axes of a size that no other has, lest they should fit by chance. The leaves may be
    abstract.
    """
    own = value.aval().shape
    shapes = [jax.typeof(leaf).shape for leaf in jax.tree.leaves(value)]
    return all(shape[:count] == own[:count] for shape in shapes) and all(
        _has_shape(value, count, n, own[count:]) for n in range(count + 1)
    )


def takes_batch_axis(value: Value) -> bool:
    """Whether a new first axis of every leaf would be a batch axis."""
    own = value.aval().shape
    return _has_shape(value, 0, 0, own) and _has_shape(value, 0, 1, own)


def _has_shape(value: Value, old: int, new: int, inner: tuple[int, ...]) -> bool:
    """Whether `new` leading axes, in the place of `old` ones, are such of the value alone."""
    leaves, treedef = jax.tree.flatten(value)
    if not _transparent(treedef):
        return False
    avals = list(map(jax.typeof, leaves))
    unlike = 1 + max((size for aval in avals for size in aval.shape), default=0)
    batch = tuple(unlike + i for i in range(new))
    abstract = [jax.ShapeDtypeStruct((*batch, *a.shape[old:]), a.dtype) for a in avals]
    try:
        return jax.tree.unflatten(treedef, abstract).aval().shape == (*batch, *inner)
    except Exception:  # whatever a type's own code raises on leaves that make no sense to it
        return False


def _transparent(tree: Any) -> bool:
    """Whether all the types in a tree structure say that slices of leaves are slices of values."""
    data = tree.node_data()
    says_no = data and issubclass(data[0], Value) and not data[0].batch_transparent
    return not says_no and all(map(_transparent, tree.children()))
