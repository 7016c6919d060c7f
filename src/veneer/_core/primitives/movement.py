"""Rules of primitives that move elements, such as transpose, slice and gather, for all types.

Each rule computes the operands and parameters with which each leaf goes through the primitive
(see `leaf_movement.py`). It declines if a block would be cut, or if the primitive changes an axis
that no leaf axis corresponds to. Rules that name a type run first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.known_values import find_divisor
from ..leaf_axes import Axes, LeafAxis, Movement, Shape
from ..transform import redispatch
from ..value import Value, aval_of
from .leaf_movement import UNCHANGED, Leaf, Step, can_move, layout_of, leaf_rule, move, rebuild
from .reshaping import reshape


def _all_axes(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))


@leaf_rule("squeeze")
def _squeeze(x: Value, *, dimensions: Sequence[int]) -> Any:
    old = x.aval().shape
    kept = [i for i in _all_axes(old) if i not in dimensions]
    axes = tuple(kept.index(i) if i in kept else None for i in _all_axes(old))

    def step(leaf: Leaf) -> Step:
        removed = tuple(j for i, j in leaf.axis_map().items() if i in dimensions)
        return ((), {"dimensions": removed}) if removed else UNCHANGED

    return move(x, "squeeze", Movement(tuple(old[i] for i in kept), axes), step)


@leaf_rule("transpose")
def _transpose(x: Value, *, permutation: Sequence[int]) -> Any:
    old = x.aval().shape
    new, axes = (old[i] for i in permutation), map([*permutation].index, _all_axes(old))

    def step(leaf: Leaf) -> Step:
        axis_map = leaf.axis_map()
        order = iter([axis_map[i] for i in permutation if i in axis_map])
        # A leaf axis without a dense axis stays.
        own = tuple(j if axis is None else next(order) for j, axis in enumerate(leaf.axes))
        return UNCHANGED if own == _all_axes(own) else ((), {"permutation": own})

    return move(x, "transpose", Movement(tuple(new), tuple(axes), reorders=True), step)


@leaf_rule("reshape")
def _reshape(x: Value, *, new_sizes: Sequence[int], dimensions: Any, sharding: Any) -> Any:
    if dimensions is not None or sharding is not None:
        return NotImplemented
    return reshape(x, tuple(new_sizes))


@leaf_rule("broadcast_in_dim")
def _broadcast_in_dim(
    x: Value, *operands: Any, shape: Sequence[int], broadcast_dimensions: Any, sharding: Any
) -> Any:
    if sharding is not None or operands:
        return NotImplemented
    old, axes = x.aval().shape, tuple(broadcast_dimensions)
    dense = [axes.index(j) if j in axes else None for j in range(len(shape))]

    def step(leaf: Leaf) -> Any:
        # Every leaf gets the new axes in full size, so that vmap and scan can slice them.
        new_sizes = iter(size for size, i in zip(shape, dense, strict=True) if i is None)
        order = leaf.arrange(dense)
        sizes = [next(new_sizes) if j is None else leaf.shape[j] for j in order]
        for i, j in leaf.axis_map().items():
            axis: Any = leaf.axes[j]
            if shape[axes[i]] != old[i] and axis.block != "shared":
                if axis.block == "whole" or axis.packed_in:
                    return NotImplemented
                sizes[order.index(j)] = shape[axes[i]]
        dimensions = tuple(k for k, j in enumerate(order) if j is not None)
        params = {"shape": tuple(sizes), "broadcast_dimensions": dimensions, "sharding": None}
        return (), params

    return move(x, "broadcast_in_dim", Movement(tuple(shape), axes), step)


def _slice_spans(x: Value, spans: Sequence[tuple[int, int, int]]) -> Any:
    """Slice a value by a `(start, limit, stride)` for each axis."""
    old = x.aval().shape
    cut = {i: span for i, span in enumerate(spans) if span != (0, old[i], 1)}

    def step(leaf: Leaf) -> Any:
        leaf_spans = []
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            span: Any = 0, size, 1
            if axis is not None and axis.axis in cut and axis.block != "shared":
                span = axis.span(*cut[axis.axis], old[axis.axis])
                if span is None:
                    return NotImplemented
            leaf_spans.append(span)
        if all(span == (0, n, 1) for span, n in zip(leaf_spans, leaf.shape, strict=True)):
            return UNCHANGED
        starts, limits, strides = zip(*leaf_spans, strict=True)
        params = {"start_indices": starts, "limit_indices": limits}
        return (), {**params, "strides": None if set(strides) == {1} else strides}

    # `range` takes no symbolic sizes.
    new = tuple(n - i if stride == 1 else len(range(i, n, stride)) for i, n, stride in spans)
    return move(x, "slice", Movement(new, _all_axes(old)), step, touched=cut)


@leaf_rule("slice")
def _slice(x: Value, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    strides = strides or (1,) * len(start_indices)
    return _slice_spans(x, [*zip(start_indices, limit_indices, strides, strict=True)])


@leaf_rule("split")
def _split(x: Value, *, sizes: Any, axis: int) -> Any:
    layout, old = layout_of(x), x.aval().shape
    pieces: list[Any] = []
    if not layout.is_declared:  # a batch axis, along which one equation splits each leaf
        movement = Movement(old, _all_axes(old))
        if not can_move(x, layout, movement, (axis,)):
            return NotImplemented
        leaf_pieces = zip(*(lax.split(leaf, sizes, axis) for leaf in layout.parts), strict=True)
        pieces = [rebuild(layout.structure, leaves, movement) for leaves in leaf_pieces]
    else:
        start = 0
        for size in map(int, sizes):
            spans = [(0, n, 1) for n in old]
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
    old, new = x.aval().shape, tuple(slice_sizes)
    cut = {i for i in _all_axes(old) if new[i] != old[i]}
    if any(isinstance(i, Value) for i in indices):
        return NotImplemented

    def step(leaf: Leaf) -> Any:
        starts, sizes = [], list(leaf.shape)
        for j, axis in enumerate(leaf.axes):
            starts.append(jnp.zeros_like(indices[0]) if axis is None else indices[axis.axis])
            if axis is not None and axis.axis in cut and axis.block != "shared":
                if axis.block == "whole" or not _takes_whole_blocks(axis, starts[j], old, new):
                    return NotImplemented
                width = axis.packed_in or 1
                sizes[j] = new[axis.axis] // axis.block * width
                if axis.block > 1:
                    starts[j] = lax.div(starts[j], jnp.array(axis.block, starts[j].dtype))
                if width > 1:
                    starts[j] *= width
        return UNCHANGED if tuple(sizes) == leaf.shape else (starts, {"slice_sizes": tuple(sizes)})

    return move(x, "dynamic_slice", Movement(new, _all_axes(old)), step)


def _takes_whole_blocks(axis: LeafAxis, start: Any, old: Shape, new: Shape) -> bool:
    """Return whether every value of a traced `start` begins a slice of whole blocks.

    This follows from the computation of `start`, such as `i * 32`.
    """
    i, block = axis.axis, int(axis.block)
    if block == 1:
        return True
    is_divisible = old[i] % block == new[i] % block == 0
    fits_dtype = block <= jnp.iinfo(start.dtype).max
    return is_divisible and fits_dtype and find_divisor(start) % block == 0


@leaf_rule("rev")
def _rev(x: Value, *, dimensions: Sequence[int]) -> Any:
    old = x.aval().shape

    def step(leaf: Leaf) -> Any:
        reversed_axes = []
        for i, j in leaf.axis_map().items():
            axis: Any = leaf.axes[j]
            if i not in dimensions or (leaf.shape[j] == 1 and not axis.packed_in):
                continue
            if axis.block != 1:
                return NotImplemented
            reversed_axes.append(j)
        return ((), {"dimensions": tuple(reversed_axes)}) if reversed_axes else UNCHANGED

    return move(x, "rev", Movement(old, _all_axes(old)), step, touched=dimensions)


@leaf_rule("gather")
def _gather(x: Value, indices: Any, **params: Any) -> Any:
    # Rows out of bounds are NaN or a number, which zeros or NaNs in the leaves need not represent.
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    return NotImplemented if fills else gather(x, indices, **params)


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
    """Gather from each leaf of a value. Return the result, or NotImplemented.

    **Arguments:** the parameters of the primitive, and

    - `fills`: the fill value of each leaf, for indices out of bounds. Replaces `fill_value`.
    - `rule`: the rule for a field that is of the type of `x`.
    """
    numbers, old = dimension_numbers, x.aval().shape
    if isinstance(indices, Value) or 0 in old:
        return NotImplemented
    indices = jnp.asarray(indices)
    collapsed, batching = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    kept = [i for i in _all_axes(old) if i not in (*collapsed, *batching)]
    axes = dict(zip(kept, numbers.offset_dims, strict=True))
    dense: list[int | None] = [None] * (len(kept) + indices.ndim - 1)
    for i, j in axes.items():
        dense[j] = i
    batch = iter(indices.shape[:-1])
    new = tuple(next(batch) if i is None else slice_sizes[i] for i in dense)

    def step(leaf: Leaf) -> Any:
        axis_map = leaf.axis_map()
        sizes, blocks = list(leaf.shape), dict.fromkeys(axis_map, 1)
        for i, j in axis_map.items():
            axis: Any = leaf.axes[j]
            if slice_sizes[i] == old[i]:
                continue
            blocks[i] = old[i] if axis.block == "shared" else axis.block
            takes_one = slice_sizes[i] == 1 and i not in batching and not axis.packed_in
            if blocks[i] == "whole" or (blocks[i] not in (0, 1) and not takes_one):
                return NotImplemented
            sizes[j] = slice_sizes[i]
        columns = [k for k, i in enumerate(numbers.start_index_map) if i in axis_map]
        mapped = [numbers.start_index_map[k] for k in columns]
        leaf_dims = lambda dims: tuple(axis_map[i] for i in dims if i in axis_map)
        # If columns are dropped or divided, different indices can become equal or unsorted.
        all_columns = columns == [*range(indices.shape[-1])] and {*batching} <= {*axis_map}
        same_indices = all_columns and all(block == 1 for block in blocks.values())
        pairs = zip(batching, numbers.start_indices_batching_dims, strict=True)
        offsets = (k for k, j in enumerate(leaf.arrange(dense)) if j is not None)
        return (_leaf_indices(indices, columns, [blocks[i] for i in mapped]),), {
            "dimension_numbers": lax.GatherDimensionNumbers(
                offset_dims=tuple(offsets),
                collapsed_slice_dims=leaf_dims(collapsed),
                start_index_map=leaf_dims(mapped),
                operand_batching_dims=leaf_dims(batching),
                start_indices_batching_dims=tuple(k for i, k in pairs if i in axis_map),
            ),
            "slice_sizes": tuple(sizes),
            "unique_indices": unique_indices and same_indices,
            "indices_are_sorted": indices_are_sorted and same_indices,
            "fill_value": fill_value if fills is None else fills[leaf.number],
            **params,
        }

    movement = Movement(new, tuple(map(axes.get, _all_axes(old))))
    return move(x, "gather", movement, step, rule=rule)


def _leaf_indices(indices: jax.Array, columns: Sequence[int], blocks: list[int]) -> jax.Array:
    """Return some columns of dense indices, divided by the sizes of blocks.

    Floor division keeps indices out of bounds, also negative ones, out of bounds.
    """
    if [*columns] != [*range(indices.shape[-1])]:
        indices = indices[..., jnp.array(columns, int)]
    if set(blocks) <= {1}:
        return indices
    if jnp.iinfo(indices.dtype).bits < 32:  # a block may be too large for the dtype
        indices = indices.astype(jnp.int32)
    return indices // jnp.array(blocks, indices.dtype)


def _have_same_type(values: Sequence[Any]) -> bool:
    dtypes = lambda v: tuple(jax.typeof(leaf).dtype for leaf in jax.tree.leaves(v))
    return len({(jax.tree.structure(v), dtypes(v)) for v in values}) == 1


@leaf_rule("concatenate")
def concatenate(*operands: Value, dimension: Any) -> Any:
    """Concatenate the leaves of values of one type. Return the result, or NotImplemented."""
    dimension = int(dimension)  # jnp.roll passes an integer of NumPy
    if len({type(x) for x in operands}) > 1:
        return NotImplemented
    nonempty = tuple(x for x in operands if x.aval().shape[dimension])
    if nonempty and _have_same_type(operands):
        operands = nonempty
    operands = tuple(x._movable() for x in operands)
    shapes = [x.aval().shape for x in operands]
    sizes = [shape[dimension] for shape in shapes]
    new = (*shapes[0][:dimension], sum(sizes), *shapes[0][dimension + 1 :])
    layouts, movement = [layout_of(x) for x in operands], Movement(new, _all_axes(new))
    for x, layout in zip(operands, layouts, strict=True):
        if not can_move(x, layout, movement, (dimension,)):
            return NotImplemented
    if layouts[0].is_declared and 0 in (*shapes[0], *sizes):
        return NotImplemented
    # A shared entry is for a block with the size of the axis, which all operands must share.
    is_shared = lambda axis: axis is not None and axis.block == "shared"
    sized = lambda axis, shape: axis._replace(block=shape[axis.axis]) if is_shared(axis) else axis
    axes = [
        [[sized(axis, shape) for axis in leaf.axes] for leaf in layout.leaves]
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    if any(other != axes[0] for other in axes):
        return NotImplemented
    columns = zip(*(layout.parts for layout in layouts), strict=True)
    joined = [
        _concatenate_parts(type(operands[0]), leaf_axes, parts, sizes, dimension)
        for leaf_axes, parts in zip(axes[0], columns, strict=True)
    ]
    if any(part is NotImplemented for part in joined):
        return NotImplemented
    results = [rebuild(layout.structure, joined, movement) for layout in layouts]
    if any(result is NotImplemented for result in results):
        return NotImplemented
    return results[0] if _have_same_type(results) else NotImplemented


def _concatenate_parts(
    kind: type[Value], axes: Axes, parts: Sequence[Any], sizes: Sequence[int], dimension: int
) -> Any:
    """Concatenate the parts of several values, unless a block before the last is partial."""
    at = next((j for j, axis in enumerate(axes) if axis and axis.axis == dimension), None)
    if at is None:
        return NotImplemented
    block: Any = axes[at].block  # type: ignore[union-attr]
    others = {(*shape[:at], *shape[at + 1 :]) for shape in (aval_of(part).shape for part in parts)}
    if block == "whole" or len(others) > 1 or any(size % block for size in sizes[:-1]):
        return NotImplemented
    if all(isinstance(part, kind) for part in parts):
        joined = concatenate(*parts, dimension=at)
        if joined is not NotImplemented:
            return joined
    parts = [part.materialise() if isinstance(part, kind) else part for part in parts]
    if len({aval_of(part).dtype for part in parts}) > 1:
        return NotImplemented
    return redispatch(lambda *xs: lax.concatenate(xs, at), *parts)


@leaf_rule("stack")
def _stack(*operands: Value, axis: int) -> Any:
    with_axis = [redispatch(jnp.expand_dims, x, axis) for x in operands]
    return redispatch(jnp.concatenate, with_axis, axis)


@leaf_rule("select_n")
def _select(predicate: Any, *cases: Value) -> Any:
    """Select each leaf by one scalar predicate."""
    shapes = lambda x: tuple(map(jnp.shape, jax.tree.leaves(x)))
    same_types = _have_same_type(cases) and len(set(map(shapes, cases))) == 1
    if isinstance(predicate, Value) or jnp.ndim(predicate) or not same_types:
        return NotImplemented
    return jax.tree.map(lambda *leaves: lax.select_n(predicate, *leaves), *cases)
