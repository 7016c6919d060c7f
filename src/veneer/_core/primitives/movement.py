"""Rules of primitives that move elements, such as transpose, slice and gather, for all types.

Each rule binds the primitive with each leaf. A function `get_step` returns the other operands and
the parameters for a leaf. A rule returns NotImplemented if a block (dense elements that share a
leaf entry) would be cut, or if the primitive changes an axis that no leaf axis corresponds to. A
rule that is registered for a type takes precedence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.tracing import find_divisor
from ..leaf_axes import Axes, LeafAxis, Movement, Shape
from ..trace import redispatch
from ..value import Value, aval_of
from .axes import find_packed_axis, reshape_leaf_shape
from .leaves import UNCHANGED, Leaf, Step, can_move, layout_of, leaf_rule, move, rebuild


def _all_axes(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))


@leaf_rule("squeeze")
def _squeeze(x: Value, *, dimensions: Sequence[int]) -> Any:
    shape = x.aval().shape
    kept_axes = [i for i in _all_axes(shape) if i not in dimensions]
    new_axes = tuple(kept_axes.index(i) if i in kept_axes else None for i in _all_axes(shape))

    def get_step(leaf: Leaf) -> Step:
        removed = tuple(j for i, j in leaf.axis_map().items() if i in dimensions)
        return ((), {"dimensions": removed}) if removed else UNCHANGED

    return move(x, "squeeze", Movement(tuple(shape[i] for i in kept_axes), new_axes), get_step)


@leaf_rule("transpose")
def _transpose(x: Value, *, permutation: Sequence[int]) -> Any:
    shape = x.aval().shape
    new_shape = tuple(shape[i] for i in permutation)
    new_axes = tuple(map([*permutation].index, _all_axes(shape)))

    def get_step(leaf: Leaf) -> Step:
        axis_map = leaf.axis_map()
        order = iter([axis_map[i] for i in permutation if i in axis_map])
        # A leaf axis without a dense axis stays.
        leaf_order = tuple(j if axis is None else next(order) for j, axis in enumerate(leaf.axes))
        is_sorted = leaf_order == _all_axes(leaf_order)
        return UNCHANGED if is_sorted else ((), {"permutation": leaf_order})

    return move(x, "transpose", Movement(new_shape, new_axes, reorders=True), get_step)


@leaf_rule("reshape")
def _reshape(x: Value, *, new_sizes: Sequence[int], dimensions: Any, sharding: Any) -> Any:
    if dimensions is not None or sharding is not None:
        return NotImplemented
    return reshape(x, tuple(new_sizes))


def reshape(x: Value, new_shape: Shape) -> Any:
    """Reshape the leaves of a value, so that they represent the reshaped dense array.

    Return NotImplemented if a block (dense elements that share a leaf entry) would be cut.
    """
    x = x._movable()
    old_shape, layout = x.aval().shape, layout_of(x)
    # Outer axes end with the last axis that a leaf axis corresponds to. Later axes must not change.
    outer = 1 + max(layout.dense_axes(), default=-1)
    new_outer = len(new_shape) - (len(old_shape) - outer)
    if new_outer < 0 or old_shape[outer:] != new_shape[new_outer:]:
        return NotImplemented
    if layout.is_declared and 0 in old_shape:
        return NotImplemented
    outer_shapes = old_shape[:outer], new_shape[:new_outer]
    # Find the new axis of each outer axis along which blocks are packed. Other axes may be split
    # or merged, so they have no single new axis.
    new_axes: list[int | None] = [None] * outer
    for leaf in layout.leaves:
        for i, axis in enumerate(leaf.axes):
            if axis is not None and axis.packed_in:
                dense_axis, count = axis.axis, leaf.shape[i] // axis.packed_in
                block_counts = (*old_shape[:dense_axis], count, *old_shape[dense_axis + 1 : outer])
                new_axis = find_packed_axis(
                    block_counts, *outer_shapes, dense_axis, int(axis.block)
                )
                if new_axis is None:
                    return NotImplemented
                new_axes[dense_axis] = new_axis

    def get_step(leaf: Leaf) -> Any:
        outer_axes: Any = leaf.axes[:outer]
        if [axis and axis.axis for axis in outer_axes] != [*range(outer)]:
            return NotImplemented
        if any(axis.block == "whole" for axis in outer_axes):
            return NotImplemented
        # Reshape the blocks. A packed block is `width` entries of the leaf.
        widths = [axis.packed_in or 1 for axis in outer_axes]
        block_counts = tuple(n // width for n, width in zip(leaf.shape, widths, strict=False))
        new_block_counts = reshape_leaf_shape(block_counts, *outer_shapes)
        if new_block_counts is None:
            return NotImplemented
        new_sizes = [*new_block_counts, *leaf.shape[outer:]]
        for new_axis, width in zip(new_axes, widths, strict=True):
            if width > 1 and new_axis is not None:
                new_sizes[new_axis] *= width
        return (), {"new_sizes": tuple(new_sizes), "dimensions": None, "sharding": None}

    movement = Movement(new_shape, (*new_axes, *range(new_outer, len(new_shape))), reorders=True)
    return move(x, "reshape", movement, get_step)


@leaf_rule("broadcast_in_dim")
def _broadcast_in_dim(
    x: Value, *operands: Any, shape: Sequence[int], broadcast_dimensions: Any, sharding: Any
) -> Any:
    if sharding is not None or operands:
        return NotImplemented
    old_shape, new_axes = x.aval().shape, tuple(broadcast_dimensions)
    # For each axis of the result, the axis of the operand, or None for a new axis.
    old_axes = [new_axes.index(j) if j in new_axes else None for j in range(len(shape))]

    def get_step(leaf: Leaf) -> Any:
        # Every leaf gets the new axes in full size, so that vmap and scan can slice them.
        new_sizes = iter(size for size, i in zip(shape, old_axes, strict=True) if i is None)
        leaf_order = leaf.arrange(old_axes)
        sizes = [next(new_sizes) if j is None else leaf.shape[j] for j in leaf_order]
        # An old axis of size 1 may be broadcast to another size.
        for i, j in leaf.axis_map().items():
            axis: Any = leaf.axes[j]
            if shape[new_axes[i]] != old_shape[i] and axis.block != "shared":
                if axis.block == "whole" or axis.packed_in:
                    return NotImplemented
                sizes[leaf_order.index(j)] = shape[new_axes[i]]
        dimensions = tuple(k for k, j in enumerate(leaf_order) if j is not None)
        params = {"shape": tuple(sizes), "broadcast_dimensions": dimensions, "sharding": None}
        return (), params

    return move(x, "broadcast_in_dim", Movement(tuple(shape), new_axes), get_step)


def _slice_spans(x: Value, spans: Sequence[tuple[int, int, int]]) -> Any:
    """Slice the leaves of an implicit array by a `(start, limit, stride)` for each dense axis.

    Return NotImplemented if a slice would cut a block (dense elements that share a leaf entry).
    """
    old_shape = x.aval().shape
    cut_spans = {i: span for i, span in enumerate(spans) if span != (0, old_shape[i], 1)}

    def get_step(leaf: Leaf) -> Any:
        leaf_spans = []
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            span: Any = 0, size, 1
            if axis is not None and axis.axis in cut_spans and axis.block != "shared":
                span = axis.span(*cut_spans[axis.axis], old_shape[axis.axis])
                if span is None:
                    return NotImplemented
            leaf_spans.append(span)
        if all(span == (0, n, 1) for span, n in zip(leaf_spans, leaf.shape, strict=True)):
            return UNCHANGED
        starts, limits, strides = zip(*leaf_spans, strict=True)
        params = {"start_indices": starts, "limit_indices": limits}
        return (), {**params, "strides": None if set(strides) == {1} else strides}

    # `range` takes no symbolic sizes.
    new_shape = tuple(n - i if stride == 1 else len(range(i, n, stride)) for i, n, stride in spans)
    movement = Movement(new_shape, _all_axes(old_shape))
    return move(x, "slice", movement, get_step, changed_axes=cut_spans)


@leaf_rule("slice")
def _slice(x: Value, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    strides = strides or (1,) * len(start_indices)
    return _slice_spans(x, [*zip(start_indices, limit_indices, strides, strict=True)])


@leaf_rule("split")
def _split(x: Value, *, sizes: Any, axis: int) -> Any:
    layout, shape = layout_of(x), x.aval().shape
    pieces: list[Any] = []
    if not layout.is_declared:
        # Split each leaf along the same batch axis. The sizes in the movement do not matter.
        movement = Movement(shape, _all_axes(shape))
        if not can_move(x, layout, movement, (axis,)):
            return NotImplemented
        leaf_pieces = zip(*(lax.split(leaf, sizes, axis) for leaf in layout.parts), strict=True)
        pieces = [rebuild(layout.structure, leaves, movement) for leaves in leaf_pieces]
    else:
        start = 0
        for size in map(int, sizes):
            spans = [(0, n, 1) for n in shape]
            spans[axis] = start, start + size, 1
            pieces.append(_slice_spans(x, spans))
            start += size
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


@leaf_rule("unstack")
def _unstack(x: Value, *, axis: int) -> Any:
    pieces = _split(x, sizes=(1,) * x.aval().shape[axis], axis=axis)
    if pieces is NotImplemented:
        return pieces
    pieces = [_squeeze(piece, dimensions=(axis,)) for piece in pieces]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


@leaf_rule("dynamic_slice")
def _dynamic_slice(x: Value, *indices: Any, slice_sizes: Sequence[int]) -> Any:
    old_shape, new_shape = x.aval().shape, tuple(slice_sizes)
    if any(isinstance(i, Value) for i in indices):
        return NotImplemented

    def get_step(leaf: Leaf) -> Any:
        starts, sizes = [], list(leaf.shape)
        for j, axis in enumerate(leaf.axes):
            if axis is None:
                starts.append(jnp.zeros_like(indices[0]))
                continue
            start, old_size, size = indices[axis.axis], old_shape[axis.axis], new_shape[axis.axis]
            if size != old_size and axis.block != "shared":
                if axis.block == "whole" or not _has_whole_blocks(axis, start, old_size, size):
                    return NotImplemented
                # A packed block is `width` entries of the leaf.
                width = axis.packed_in or 1
                sizes[j] = size // axis.block * width
                if axis.block > 1:
                    start = lax.div(start, jnp.array(axis.block, start.dtype))
                if width > 1:
                    start *= width
            starts.append(start)
        return UNCHANGED if tuple(sizes) == leaf.shape else (starts, {"slice_sizes": tuple(sizes)})

    return move(x, "dynamic_slice", Movement(new_shape, _all_axes(old_shape)), get_step)


def _has_whole_blocks(axis: LeafAxis, start: Any, old_size: int, size: int) -> bool:
    """Return whether a dynamic slice of a dense axis is known to have no partial block.

    A block is `axis.block` dense elements that share a leaf entry. `old_size` is the size of the
    axis, and `size` is the size of the slice. The equations that compute a traced `start`, such as
    `i * 32`, may show that `start` is divisible by the block size.
    """
    block = int(axis.block)
    if block == 1:
        return True
    is_divisible = old_size % block == size % block == 0
    fits_dtype = block <= jnp.iinfo(start.dtype).max
    return is_divisible and fits_dtype and find_divisor(start) % block == 0


@leaf_rule("rev")
def _rev(x: Value, *, dimensions: Sequence[int]) -> Any:
    shape = x.aval().shape

    def get_step(leaf: Leaf) -> Any:
        reversed_axes = []
        for i, j in leaf.axis_map().items():
            axis: Any = leaf.axes[j]
            has_one_entry = leaf.shape[j] == 1 and not axis.packed_in
            if i in dimensions and not has_one_entry:
                if axis.block != 1:
                    return NotImplemented
                reversed_axes.append(j)
        return ((), {"dimensions": tuple(reversed_axes)}) if reversed_axes else UNCHANGED

    return move(x, "rev", Movement(shape, _all_axes(shape)), get_step, changed_axes=dimensions)


@leaf_rule("gather")
def _gather(x: Value, indices: Any, **params: Any) -> Any:
    # In this mode, rows out of bounds are NaN or a fill value. Leaves filled with NaNs or zeros
    # need not represent such rows.
    can_fill = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    return NotImplemented if can_fill else gather(x, indices, **params)


def gather(
    x: Value,
    indices: Any,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    unique_indices: bool,
    indices_are_sorted: bool,
    fill_value: Any,
    fills: Sequence[Any] | None = None,
    rule: Callable[..., Any] | None = None,
    **params: Any,
) -> Any:
    """Gather from each leaf of an implicit array, and rebuild the array from the results.

    Return NotImplemented if a block (dense elements that share a leaf entry) would be cut.

    **Arguments:** the parameters of the primitive, and

    - `fills`: the fill value of each leaf, for indices out of bounds. Replaces `fill_value`.
    - `rule`: the rule for an implicit array of the same type in a field of `x`. The default is the
      rule of `gather`.
    """
    numbers, old_shape = dimension_numbers, x.aval().shape
    if isinstance(indices, Value) or 0 in old_shape:
        return NotImplemented
    indices = jnp.asarray(indices)
    # Find the axis of the operand for each axis of the result, or None for an axis of the indices.
    collapsed, batching = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    kept_axes = [i for i in _all_axes(old_shape) if i not in (*collapsed, *batching)]
    new_axes = dict(zip(kept_axes, numbers.offset_dims, strict=True))
    old_axes: list[int | None] = [None] * (len(kept_axes) + indices.ndim - 1)
    for i, j in new_axes.items():
        old_axes[j] = i
    index_sizes = iter(indices.shape[:-1])
    new_shape = tuple(next(index_sizes) if i is None else slice_sizes[i] for i in old_axes)

    def get_step(leaf: Leaf) -> Any:
        # Find the sizes of the slices of the leaf, and by what to divide the indices.
        axis_map = leaf.axis_map()
        sizes, divisors = list(leaf.shape), dict.fromkeys(axis_map, 1)
        for i, j in axis_map.items():
            axis: Any = leaf.axes[j]
            if slice_sizes[i] == old_shape[i]:
                continue
            divisors[i] = old_shape[i] if axis.block == "shared" else axis.block
            takes_one = slice_sizes[i] == 1 and i not in batching and not axis.packed_in
            if divisors[i] == "whole" or (divisors[i] != 1 and not takes_one):
                return NotImplemented
            sizes[j] = slice_sizes[i]
        # The last axis of the indices has a column for each indexed axis of the operand.
        columns = [k for k, i in enumerate(numbers.start_index_map) if i in axis_map]
        indexed_axes = [numbers.start_index_map[k] for k in columns]
        leaf_indices = _leaf_indices(indices, columns, [divisors[i] for i in indexed_axes])
        # If columns are dropped or divided, different indices can become equal or unsorted.
        has_all_columns = columns == [*range(indices.shape[-1])] and {*batching} <= {*axis_map}
        has_same_indices = has_all_columns and all(n == 1 for n in divisors.values())
        leaf_dims = lambda dims: tuple(axis_map[i] for i in dims if i in axis_map)
        batching_pairs = zip(batching, numbers.start_indices_batching_dims, strict=True)
        offsets = (k for k, j in enumerate(leaf.arrange(old_axes)) if j is not None)
        return (leaf_indices,), {
            "dimension_numbers": lax.GatherDimensionNumbers(
                offset_dims=tuple(offsets),
                collapsed_slice_dims=leaf_dims(collapsed),
                start_index_map=leaf_dims(indexed_axes),
                operand_batching_dims=leaf_dims(batching),
                start_indices_batching_dims=tuple(k for i, k in batching_pairs if i in axis_map),
            ),
            "slice_sizes": tuple(sizes),
            "unique_indices": unique_indices and has_same_indices,
            "indices_are_sorted": indices_are_sorted and has_same_indices,
            "fill_value": fill_value if fills is None else fills[leaf.number],
            **params,
        }

    movement = Movement(new_shape, tuple(map(new_axes.get, _all_axes(old_shape))))
    return move(x, "gather", movement, get_step, rule=rule)


def _leaf_indices(indices: jax.Array, columns: Sequence[int], divisors: list[int]) -> jax.Array:
    """Return the indices of a leaf: some columns of the dense indices, divided by block sizes.

    The last axis of `indices` has a column for each indexed dense axis. Floor division keeps
    indices out of bounds, also negative indices, out of bounds.
    """
    if [*columns] != [*range(indices.shape[-1])]:
        indices = indices[..., jnp.array(columns, int)]
    if set(divisors) <= {1}:
        return indices
    if jnp.iinfo(indices.dtype).bits < 32:  # a block size may be too large for the dtype
        indices = indices.astype(jnp.int32)
    return indices // jnp.array(divisors, indices.dtype)


def _have_same_type(values: Sequence[Any]) -> bool:
    """Return whether implicit arrays have the same tree structure and the same dtypes of leaves."""
    dtypes = lambda v: tuple(jax.typeof(leaf).dtype for leaf in jax.tree.leaves(v))
    return len({(jax.tree.structure(v), dtypes(v)) for v in values}) == 1


@leaf_rule("concatenate")
def concatenate(*operands: Value, dimension: Any) -> Any:
    """Concatenate the leaves of implicit arrays along the dense axis `dimension`.

    Return NotImplemented if the arrays differ in class, metadata or blocks, or if a block (dense
    elements that share a leaf entry) would be cut.
    """
    dimension = int(dimension)  # jnp.roll passes an integer of NumPy
    if len({type(x) for x in operands}) > 1:
        return NotImplemented
    nonempty = tuple(x for x in operands if x.aval().shape[dimension])
    if nonempty and _have_same_type(operands):
        operands = nonempty
    # Check whether the leaves of each operand can represent the result.
    operands = tuple(x._movable() for x in operands)
    shapes = [x.aval().shape for x in operands]
    sizes = [shape[dimension] for shape in shapes]
    new_shape = (*shapes[0][:dimension], sum(sizes), *shapes[0][dimension + 1 :])
    layouts, movement = list(map(layout_of, operands)), Movement(new_shape, _all_axes(new_shape))
    for x, layout in zip(operands, layouts, strict=True):
        if not can_move(x, layout, movement, (dimension,)):
            return NotImplemented
    if layouts[0].is_declared and 0 in (*shapes[0], *sizes):
        return NotImplemented
    # The operands must have the same blocks. A shared entry is one block of the whole axis.
    is_shared = lambda axis: axis is not None and axis.block == "shared"
    unshare = lambda axis, shape: axis._replace(block=shape[axis.axis]) if is_shared(axis) else axis
    first_axes, *other_axes = [
        [[unshare(axis, shape) for axis in leaf.axes] for leaf in layout.leaves]
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    if any(axes != first_axes for axes in other_axes):
        return NotImplemented
    # Concatenate leaf by leaf.
    parts_by_leaf = zip(*(layout.parts for layout in layouts), strict=True)
    joined_parts = [
        _concatenate_parts(type(operands[0]), leaf_axes, parts, sizes, dimension)
        for leaf_axes, parts in zip(first_axes, parts_by_leaf, strict=True)
    ]
    if any(part is NotImplemented for part in joined_parts):
        return NotImplemented
    # The result must not depend on which operand its metadata comes from.
    results = [rebuild(layout.structure, joined_parts, movement) for layout in layouts]
    if any(result is NotImplemented for result in results):
        return NotImplemented
    return results[0] if _have_same_type(results) else NotImplemented


def _concatenate_parts(
    cls: type[Value], axes: Axes, parts: Sequence[Any], sizes: Sequence[int], dimension: int
) -> Any:
    """Concatenate one part (a leaf, or an implicit array in a field) of several implicit arrays.

    Return NotImplemented if an array before the last array ends with a partial block.

    `cls` is the class of the arrays. `parts` has the part of each array, and `axes` has the axes of
    each part. `sizes` has the size of each array along the dense axis `dimension`.
    """
    leaf_axis = next((j for j, axis in enumerate(axes) if axis and axis.axis == dimension), None)
    if leaf_axis is None:
        return NotImplemented
    block: Any = axes[leaf_axis].block  # type: ignore[union-attr]
    shapes = [aval_of(part).shape for part in parts]
    other_sizes = {(*shape[:leaf_axis], *shape[leaf_axis + 1 :]) for shape in shapes}
    if block == "whole" or len(other_sizes) > 1 or any(size % block for size in sizes[:-1]):
        return NotImplemented
    if all(isinstance(part, cls) for part in parts):
        joined = concatenate(*parts, dimension=leaf_axis)
        if joined is not NotImplemented:
            return joined
    # A part of the class is storage of its value, such as quantized scales: report nothing.
    parts = [part.materialise() if isinstance(part, cls) else part for part in parts]
    if len({aval_of(part).dtype for part in parts}) > 1:
        return NotImplemented
    return redispatch(lambda *xs: lax.concatenate(xs, leaf_axis), *parts)


@leaf_rule("stack")
def _stack(*operands: Value, axis: int) -> Any:
    expanded = [redispatch(jnp.expand_dims, x, axis) for x in operands]
    return redispatch(jnp.concatenate, expanded, axis)


@leaf_rule("select_n")
def _select(predicate: Any, *cases: Value) -> Any:
    """Select the leaves of one case by a scalar predicate.

    Return NotImplemented if the predicate is an array, or if the cases differ in their types.
    """
    leaf_shapes = lambda x: tuple(map(jnp.shape, jax.tree.leaves(x)))
    same_types = _have_same_type(cases) and len(set(map(leaf_shapes, cases))) == 1
    if isinstance(predicate, Value) or jnp.ndim(predicate) or not same_types:
        return NotImplemented
    return jax.tree.map(lambda *leaves: lax.select_n(predicate, *leaves), *cases)
