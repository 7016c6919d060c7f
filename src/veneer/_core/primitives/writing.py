"""Rules for what writes into a value: leaf by leaf, as its leaf axes say.

The update is first stored in the format of the value (`stored_as`). Then each of its leaves is
written where the dense primitive writes. So nothing is materialized. Old values are read only for
types that compare them with the update.
They decline what would write a part of a block, whose other entries an entry of a leaf speaks of.
"""

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.primitives import find_primitive
from ..leaf_axes import Shape
from ..rules import add_rule
from ..transform import redispatch
from ..tree import has_metadata
from ..value import Value, aval_of
from .batch_axes import layout_of
from .labels import is_label
from .leaf_by_leaf import Leaf
from .movement import concatenate


@singledispatch
def stored_as(
    x: Any, update: Any, axes: Sequence[int | None], read: Callable[[], Any] | None = None
) -> Any:
    """Another array, which is written into `x`, stored as that is; of most types one of the same.

    **Arguments:**

    - `x`: the value, by whose class a type registers what it does.
    - `update`: dense, or implicit.
    - `axes`: for each of its axes the one of `x` that it lies along, or None.
    - `read`: returns the part of `x` that the update replaces, of the update's shape; None if it
      replaces nothing.

    **Returns:** NotImplemented if there is no such array.
    """
    del axes, read
    return update if type(update) is type(x) else NotImplemented


def _dynamic_update_slice(x: Value, update: Any, *starts: Any) -> Any:
    old, new = x.aval().shape, jnp.shape(update)
    if any(isinstance(start, Value) for start in starts):
        return NotImplemented
    if 0 in new:
        return x

    def bind(leaf: Leaf, part: Any, of_update: Any) -> Any:
        # What is written whole starts at 0, whatever the index says.
        zero = jnp.zeros_like(starts[0]) if starts else 0
        own = [zero if axis is None else starts[axis.axis] for axis in leaf.axes]
        return find_primitive("dynamic_update_slice").bind(part, of_update, *own)

    def read() -> Any:
        bind = lambda *operands: find_primitive("dynamic_slice").bind(*operands, slice_sizes=new)
        return redispatch(bind, x, *starts)

    cut = [i for i, size in enumerate(new) if size != old[i]]
    return _written(x, stored_as(x, update, range(len(old)), read), new, cut, bind)


def _scatter(
    x: Value,
    indices: Any,
    update: Any,
    *,
    dimension_numbers: Any,
    update_jaxpr: Any,
    update_consts: Any,
    **params: Any,
) -> Any:
    old, numbers = x.aval().shape, dimension_numbers
    if isinstance(indices, Value) or update_jaxpr is not None or 0 in old:
        return NotImplemented
    if 0 in jnp.shape(update):
        return x
    # The update with the axes of the indices first, and then all of x that are in a window.
    inserted, batching = numbers.inserted_window_dims, numbers.operand_batching_dims
    windows = [int(i) for i in numbers.update_window_dims]
    of_indices = [i for i in range(len(jnp.shape(update))) if i not in windows]
    lead = len(of_indices)
    axes = [i for i in range(len(old)) if i not in batching]
    ones = [lead + k for k, i in enumerate(axes) if i in inserted]

    def arranged(update: Any) -> Any:
        return jnp.expand_dims(jnp.transpose(update, [*of_indices, *windows]), ones)

    update = redispatch(arranged, update)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(lead, lead + len(axes))),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=tuple(map(int, numbers.scatter_dims_to_operand_dims)),
        operand_batching_dims=batching,
        scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )

    def bind(leaf: Leaf, part: Any, of_update: Any) -> Any:
        if [axis and axis.axis for axis in leaf.axes] != [*range(len(old))]:
            return NotImplemented
        own = {"dimension_numbers": numbers, "update_jaxpr": None, "update_consts": ()}
        return find_primitive("scatter").bind(part, indices, of_update, **own, **params)

    sizes = jnp.shape(update)[lead:]
    window = dict(zip(axes, sizes, strict=True))
    new = tuple(window.get(i, 1) for i in range(len(old)))

    def read() -> Any:
        of_gather = lax.GatherDimensionNumbers(
            offset_dims=tuple(numbers.update_window_dims),
            collapsed_slice_dims=(),
            start_index_map=tuple(numbers.scatter_dims_to_operand_dims),
            operand_batching_dims=tuple(batching),
            start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
        )
        own = {"dimension_numbers": of_gather, "slice_sizes": new, "fill_value": None}
        bind = lambda *operands: find_primitive("gather").bind(*operands, **own, **params)
        return redispatch(bind, x, indices)

    cut = [i for i, size in enumerate(new) if size != old[i]]
    return _written(x, stored_as(x, update, [*[None] * lead, *axes], read), new, cut, bind, axes)


def _written(
    x: Value,
    update: Any,
    new: Shape,
    cut: Sequence[int],
    bind: Any,
    axes: Sequence[int] | None = None,
) -> Any:
    """The value with an update in its leaves, or NotImplemented where that is a part of a block.

    **Arguments:**

    - `update`: a value of the same structure, whose last axes are `axes` of `x`, or all.
    - `new`: how much of each axis of `x` is written at a place, and `cut`, where that is not all.
    - `bind`: of a leaf, and of one of the update, what writes that.
    """
    layout, ndim = layout_of(x), x.aval().ndim
    if update is NotImplemented or (has_metadata(x) and is_label(x)):
        return NotImplemented
    of_update = layout_of(update)
    if of_update.structure != layout.structure:
        return NotImplemented
    written = []
    parts = zip(layout.parts, layout.axes, of_update.parts, strict=True)
    for number, (part, stated, new_part) in enumerate(parts):
        in_front = [axis and axis._replace(axis=axis.axis + ndim) for axis in stated]
        leaf = Leaf(aval_of(part).shape, in_front, number)
        if aval_of(part).dtype != aval_of(new_part).dtype or isinstance(part, Value):
            return NotImplemented
        places = leaf.places()
        for i in cut:  # each leaf must have what is written of the axis, and nothing else
            if i not in places or leaf.axes[places[i]].block != 1:  # type: ignore[union-attr]
                return NotImplemented
        inside = [j for j, a in enumerate(leaf.axes) if axes is None or a is None or a.axis in axes]
        wanted = [
            new[a.axis] if (a := leaf.axes[j]) is not None and a.axis in cut else leaf.shape[j]
            for j in inside
        ]
        sizes = aval_of(new_part).shape
        if [*sizes[len(sizes) - len(wanted) :]] != wanted:
            return NotImplemented
        out = bind(leaf, *map(_as_bytes, (part, new_part)))
        if out is NotImplemented:
            return NotImplemented
        is_bytes = out.dtype != part.dtype
        written.append(lax.bitcast_convert_type(out, part.dtype) if is_bytes else out)
    return jax.tree.unflatten(layout.structure, written)


def _as_bytes(x: Any) -> Any:
    """Returns floats of 8 bits as bytes: XLA would make all of them wider to write one, on CPUs."""
    is_narrow = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    is_narrow &= not isinstance(x, Value)
    return lax.bitcast_convert_type(x, jnp.uint8) if is_narrow else x


def _concatenate(*operands: Any, dimension: Any) -> Any:
    """Of a value and of others that are stored as it is, side by side."""
    stores = lambda x: stored_as.dispatch(type(x)) is not stored_as.dispatch(object)
    first = next(filter(stores, operands), None)
    if first is None:
        return NotImplemented
    axes = range(first.aval().ndim)
    stored = [x if x is first else stored_as(first, x, axes) for x in operands]
    if any(x is NotImplemented for x in stored):
        return NotImplemented
    return concatenate(*stored, dimension=dimension)


RULES: dict[str, Callable[..., Any]] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "scatter": _scatter,
    "concatenate": _concatenate,
}
for _name, _rule in RULES.items():
    add_rule(_rule, [find_primitive(_name)], conditional=True)
