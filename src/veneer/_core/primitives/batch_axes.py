"""Batch axes: leading axes that every leaf carries, found for types without `leaf_axes`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..dispatch import unhandled_operands
from ..leaf_axes import Axes, aligned_axes
from ..value import Value, declared_layout, dense_shape_of


class LeafLayout(NamedTuple):
    """The parts of a value (leaves, or implicit arrays among its fields) and their axes."""

    parts: list[Any]
    structure: Any
    axes: Sequence[Axes]
    stated: bool  # by the type

    def followed(self, ndim: int) -> set[int]:
        """The axes of the dense array, of `ndim`, that a leaf follows; counted from the front."""
        return {axis.axis + ndim for axes in self.axes for axis in axes if axis is not None}


def layout_of(value: Value) -> LeafLayout:
    """The leaf axes of a value, as its type states them, or those of a batch."""
    parts, structure, axes = declared_layout(value)
    if axes is not None:
        return LeafLayout(parts, structure, axes, True)
    leaves, structure = jax.tree.flatten(value)
    ndim, count = value.aval().ndim, _count_batch_axes(value)
    axes = [(*aligned_axes(ndim)[:count], *[None] * (jax.typeof(x).ndim - count)) for x in leaves]
    return LeafLayout(leaves, structure, axes, False)


def _count_batch_axes(value: Value) -> int:
    """Return how many leading axes every leaf carries. A `default` decides first."""
    default = type(value).default
    decides = default is not Value.default and not getattr(default, "is_fallback", False)
    if decides and not any(value is operand for operand in unhandled_operands.get()):
        return 0
    ndim = value.aval().ndim
    return next((n for n in range(ndim, 0, -1) if has_batch_axes(value, n)), 0)


def has_batch_axes(value: Value, count: int) -> bool:
    """Return whether the first `count` axes are batch axes. The leaves may be abstract."""
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
    leaves, treedef = jax.tree.flatten(value)
    if not _transparent(treedef):
        return False
    avals = list(map(jax.typeof, leaves))
    # A symbolic size equals no number.
    known = (size for aval in avals for size in aval.shape if isinstance(size, int))
    unlike = 1 + max(known, default=0)
    batch = tuple(unlike + i for i in range(new))
    abstract = (jax.ShapeDtypeStruct((*batch, *a.shape[old:]), a.dtype) for a in avals)
    return dense_shape_of(treedef, tuple(abstract)) == (*batch, *inner)


def _transparent(tree: Any) -> bool:
    data = tree.node_data()
    says_no = data and issubclass(data[0], Value) and not data[0].batch_transparent
    return not says_no and all(map(_transparent, tree.children()))
