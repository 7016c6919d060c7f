"""Rules of primitives that write into a value, for all types.

The update is first converted to the format of the value (`stored_as`). Then each leaf of the update
is written into the same leaf of the value, at the same place. So nothing is materialized. For some
types, the conversion depends on the old elements, so `stored_as` may read them. The rules return
NotImplemented if only a part of a block would be written, because a leaf entry of the block, such
as a scale, also applies to the rest of the block.
"""

from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.primitives import find_primitive
from ..leaf_axes import Shape
from ..trace import redispatch
from ..tree import has_metadata
from ..value import Value, aval_of
from .leaves import Leaf, is_label, layout_of, leaf_rule
from .movement import concatenate


@singledispatch
def stored_as(
    x: Any, update: Any, axes: Sequence[int | None], read: Callable[[], Any] | None = None
) -> Any:
    """Convert an update to the format of the implicit array that it is written into.

    A class registers its own conversion. By default, an update of the same class is returned
    unchanged.

    **Arguments:**

    - `x`: the implicit array.
    - `update`: a dense or implicit array.
    - `axes`: for each axis of the update, the corresponding axis of `x`, or None.
    - `read`: a function that returns the elements of `x` that the update replaces, in the shape of
      the update. None if the update replaces nothing.

    **Returns:** the converted update, or NotImplemented if the format cannot store the update.
    """
    del axes, read
    return update if type(update) is type(x) else NotImplemented


@leaf_rule("dynamic_update_slice")
def _dynamic_update_slice(x: Value, update: Any, *starts: Any) -> Any:
    axes, window = range(x.aval().ndim), jnp.shape(update)
    if any(isinstance(start, Value) for start in starts):
        return NotImplemented
    if 0 in window:
        return x

    def write_leaf(leaf: Leaf, array: Any, leaf_update: Any) -> Any:
        zero = jnp.zeros_like(starts[0]) if starts else 0
        leaf_starts = [zero if axis is None else starts[axis.axis] for axis in leaf.axes]
        return find_primitive("dynamic_update_slice").bind(array, leaf_update, *leaf_starts)

    def read() -> Any:
        bind = partial(find_primitive("dynamic_slice").bind, slice_sizes=window)
        return redispatch(bind, x, *starts)

    return _write_leaves(x, stored_as(x, update, axes, read), window, write_leaf, axes)


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
    # Move the axes of the indices to the front of the update. Then follow all axes of `x`, except
    # batching axes. Axes that the update omits, because it has size 1 along them, are inserted.
    inserted, batching = numbers.inserted_window_dims, numbers.operand_batching_dims
    window_dims = [int(i) for i in numbers.update_window_dims]
    index_axes = [i for i in range(jnp.ndim(update)) if i not in window_dims]
    index_ndim = len(index_axes)
    axes = [i for i in range(ndim) if i not in batching]
    inserted_axes = [index_ndim + k for k, i in enumerate(axes) if i in inserted]
    order = [*index_axes, *window_dims]
    update = redispatch(lambda x: jnp.expand_dims(jnp.transpose(x, order), inserted_axes), update)
    window_axes = tuple(range(index_ndim, index_ndim + len(axes)))
    indexed_axes = tuple(map(int, numbers.scatter_dims_to_operand_dims))
    sizes = dict(zip(axes, jnp.shape(update)[index_ndim:], strict=True))
    window = tuple(sizes.get(i, 1) for i in range(ndim))

    def write_leaf(leaf: Leaf, array: Any, leaf_update: Any) -> Any:
        if [axis and axis.axis for axis in leaf.axes] != [*range(ndim)]:
            return NotImplemented
        scatter_numbers = lax.ScatterDimensionNumbers(
            update_window_dims=window_axes,
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=indexed_axes,
            operand_batching_dims=batching,
            scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
        )
        reduction = {"update_jaxpr": None, "update_consts": ()}  # overwrite the old elements
        all_params = {**params, **reduction, "dimension_numbers": scatter_numbers}
        return find_primitive("scatter").bind(array, indices, leaf_update, **all_params)

    def read() -> Any:
        gather_numbers = lax.GatherDimensionNumbers(
            offset_dims=window_axes,
            collapsed_slice_dims=(),
            start_index_map=indexed_axes,
            operand_batching_dims=tuple(batching),
            start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
        )
        all_params = {**params, "dimension_numbers": gather_numbers}
        all_params |= {"slice_sizes": window, "fill_value": None}
        return redispatch(partial(find_primitive("gather").bind, **all_params), x, indices)

    update_axes = [*[None] * index_ndim, *axes]
    return _write_leaves(x, stored_as(x, update, update_axes, read), window, write_leaf, axes)


def _write_leaves(
    x: Value, update: Any, window: Shape, write_leaf: Callable, axes: Sequence[int]
) -> Any:
    """Write the leaves of an update into the leaves of an implicit array.

    Return NotImplemented if the update has another structure or dtype, or if only a part of a block
    (dense elements that share a leaf entry) would be written.

    **Arguments:**

    - `update`: the result of `stored_as`. Its last axes correspond to the dense axes `axes`.
    - `window`: the shape of the part of the dense array that is written at one place.
    - `write_leaf`: a function of a `Leaf`, the leaf of `x`, and the leaf of the update. It returns
      the written leaf, or NotImplemented.
    """
    layout, shape = layout_of(x), x.aval().shape
    if update is NotImplemented or (has_metadata(x) and is_label(x)):
        return NotImplemented
    update_layout = layout_of(update)
    if update_layout.structure != layout.structure:
        return NotImplemented
    cut_axes = [i for i, size in enumerate(window) if size != shape[i]]
    leaves = []
    for leaf, old, new in zip(layout.leaves, layout.parts, update_layout.parts, strict=True):
        dtype, new_shape = aval_of(old).dtype, aval_of(new).shape
        if dtype != aval_of(new).dtype or isinstance(old, Value):
            return NotImplemented
        # Along a cut axis, each element must have its own entry in the leaf.
        axis_map = leaf.axis_map()
        for i in cut_axes:
            if i not in axis_map or leaf.axes[axis_map[i]].block != 1:  # type: ignore[union-attr]
                return NotImplemented
        # The leaf of the update must end with the shape of the window in the leaf.
        leaf_window = [
            window[axis.axis] if axis is not None and axis.axis in cut_axes else size
            for axis, size in zip(leaf.axes, leaf.shape, strict=True)
            if axis is None or axis.axis in axes
        ]
        if [*new_shape[len(new_shape) - len(leaf_window) :]] != leaf_window:
            return NotImplemented
        # On CPU, XLA widens an array of 8-bit floats to write one entry. So write bytes.
        is_float8 = dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
        if is_float8:
            old, new = (lax.bitcast_convert_type(x, jnp.uint8) for x in (old, new))
        written = write_leaf(leaf, old, new)
        if written is NotImplemented:
            return NotImplemented
        leaves.append(lax.bitcast_convert_type(written, dtype) if is_float8 else written)
    return jax.tree.unflatten(layout.structure, leaves)


@leaf_rule("concatenate")
def _concatenate(*operands: Any, dimension: Any) -> Any:
    """Concatenate an implicit array with arrays that `stored_as` can convert to its format."""
    has_conversion = lambda x: stored_as.dispatch(type(x)) is not stored_as.dispatch(object)
    target = next(filter(has_conversion, operands), None)
    if target is None:
        return NotImplemented
    axes = range(target.aval().ndim)
    converted = [x if x is target else stored_as(target, x, axes) for x in operands]
    if any(x is NotImplemented for x in converted):
        return NotImplemented
    return concatenate(*converted, dimension=dimension)
