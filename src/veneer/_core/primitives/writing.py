"""Rules of primitives that write into a value, for all types.

The update is first stored in the format of the value (`stored_as`). Then each of its leaves is
written where the dense primitive writes. So nothing is materialized. Old values are read only for
types that compare them with the update. The rules decline if a part of a block would be written,
because an entry of a leaf, such as a scale, also applies to the rest of the block.
"""

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.primitives import find_primitive
from ..leaf_axes import Shape
from ..transform import redispatch
from ..tree import has_metadata
from ..value import Value, aval_of
from .labels import is_label
from .leaf_movement import Leaf, layout_of, leaf_rule
from .movement import concatenate


@singledispatch
def stored_as(
    x: Any, update: Any, axes: Sequence[int | None], read: Callable[[], Any] | None = None
) -> Any:
    """Return an update in the format of the value that it is written into.

    A type registers a function for its class. Other types take only updates of their own class.

    **Arguments:**

    - `x`: the value.
    - `update`: a dense or implicit array.
    - `axes`: for each axis of the update, the axis of `x` that it is written along, or None.
    - `read`: returns the part of `x` that the update replaces, in the shape of the update. None if
      the update replaces nothing.

    **Returns:** NotImplemented if the update cannot be stored so.
    """
    del axes, read
    return update if type(update) is type(x) else NotImplemented


@leaf_rule("dynamic_update_slice")
def _dynamic_update_slice(x: Value, update: Any, *starts: Any) -> Any:
    ndim, new = x.aval().ndim, jnp.shape(update)
    if any(isinstance(start, Value) for start in starts):
        return NotImplemented
    if 0 in new:
        return x

    def bind(leaf: Leaf, part: Any, part_update: Any) -> Any:
        zero = jnp.zeros_like(starts[0]) if starts else 0
        part_starts = [zero if axis is None else starts[axis.axis] for axis in leaf.axes]
        return find_primitive("dynamic_update_slice").bind(part, part_update, *part_starts)

    def read() -> Any:
        bind = lambda *operands: find_primitive("dynamic_slice").bind(*operands, slice_sizes=new)
        return redispatch(bind, x, *starts)

    return _write(x, stored_as(x, update, range(ndim), read), new, bind, [*range(ndim)])


@leaf_rule("scatter")
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
    ndim, numbers = x.aval().ndim, dimension_numbers
    if isinstance(indices, Value) or update_jaxpr is not None or 0 in x.aval().shape:
        return NotImplemented
    if 0 in jnp.shape(update):
        return x
    # Bring the axes of the indices to the front of the update, followed by all axes of `x` except
    # the batching ones, also those that it lacks because the window has size 1 along them.
    inserted, batching = numbers.inserted_window_dims, numbers.operand_batching_dims
    windows = [int(i) for i in numbers.update_window_dims]
    index_axes = [i for i in range(jnp.ndim(update)) if i not in windows]
    lead = len(index_axes)
    axes = [i for i in range(ndim) if i not in batching]
    new_axes = [lead + k for k, i in enumerate(axes) if i in inserted]
    order = [*index_axes, *windows]
    update = redispatch(lambda x: jnp.expand_dims(jnp.transpose(x, order), new_axes), update)
    window_axes, mapped = tuple(range(lead, lead + len(axes))), numbers.scatter_dims_to_operand_dims

    def bind(leaf: Leaf, part: Any, part_update: Any) -> Any:
        if [axis and axis.axis for axis in leaf.axes] != [*range(ndim)]:
            return NotImplemented
        scatter_numbers = lax.ScatterDimensionNumbers(
            update_window_dims=window_axes,
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=tuple(map(int, mapped)),
            operand_batching_dims=batching,
            scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
        )
        own = {"dimension_numbers": scatter_numbers, "update_jaxpr": None, "update_consts": ()}
        return find_primitive("scatter").bind(part, indices, part_update, **own, **params)

    window = dict(zip(axes, jnp.shape(update)[lead:], strict=True))
    new = tuple(window.get(i, 1) for i in range(ndim))

    def read() -> Any:
        gather_numbers = lax.GatherDimensionNumbers(
            offset_dims=window_axes,
            collapsed_slice_dims=(),
            start_index_map=tuple(map(int, mapped)),
            operand_batching_dims=tuple(batching),
            start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
        )
        own = {"dimension_numbers": gather_numbers, "slice_sizes": new, "fill_value": None}
        bind = lambda *operands: find_primitive("gather").bind(*operands, **own, **params)
        return redispatch(bind, x, indices)

    return _write(x, stored_as(x, update, [*[None] * lead, *axes], read), new, bind, axes)


def _write(x: Value, update: Any, new: Shape, bind: Callable, axes: Sequence[int]) -> Any:
    """Write the leaves of an update into the leaves of a value. Or return NotImplemented.

    **Arguments:**

    - `update`: a value of the same structure, or NotImplemented. Its last axes are along `axes`.
    - `new`: the size of the part of `x` that is written at one place.
    - `bind`: a function of a `Leaf`, a part of `x`, and a part of the update. It writes the part.
    """
    layout, old = layout_of(x), x.aval().shape
    if update is NotImplemented or (has_metadata(x) and is_label(x)):
        return NotImplemented
    update_layout = layout_of(update)
    if update_layout.structure != layout.structure:
        return NotImplemented
    cut = [i for i, size in enumerate(new) if size != old[i]]
    written = []
    for part, leaf, new_part in zip(layout.parts, layout.leaves, update_layout.parts, strict=True):
        dtype, new_shape = aval_of(part).dtype, aval_of(new_part).shape
        if dtype != aval_of(new_part).dtype or isinstance(part, Value):
            return NotImplemented
        axis_map = leaf.axis_map()
        for i in cut:  # along such an axis, each element must have its own entry
            if i not in axis_map or leaf.axes[axis_map[i]].block != 1:  # type: ignore[union-attr]
                return NotImplemented
        expected = [
            new[axis.axis] if axis is not None and axis.axis in cut else size
            for axis, size in zip(leaf.axes, leaf.shape, strict=True)
            if axis is None or axis.axis in axes
        ]
        if [*new_shape[len(new_shape) - len(expected) :]] != expected:
            return NotImplemented
        # On CPU, XLA widens an array of 8-bit floats to write one entry. So write bytes.
        is_narrow = dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
        if is_narrow:
            part, new_part = (lax.bitcast_convert_type(x, jnp.uint8) for x in (part, new_part))
        out = bind(leaf, part, new_part)
        if out is NotImplemented:
            return NotImplemented
        written.append(lax.bitcast_convert_type(out, dtype) if is_narrow else out)
    return jax.tree.unflatten(layout.structure, written)


@leaf_rule("concatenate")
def _concatenate(*operands: Any, dimension: Any) -> Any:
    """Concatenate values with others, stored in the format of the first type with `stored_as`."""
    stores = lambda x: stored_as.dispatch(type(x)) is not stored_as.dispatch(object)
    first = next(filter(stores, operands), None)
    if first is None:
        return NotImplemented
    axes = range(first.aval().ndim)
    stored = [x if x is first else stored_as(first, x, axes) for x in operands]
    if any(x is NotImplemented for x in stored):
        return NotImplemented
    return concatenate(*stored, dimension=dimension)
