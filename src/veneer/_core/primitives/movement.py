"""Rules for what moves entries about: leaf by leaf, for every type, as its leaf axes say.

Each primitive is a function from what is done to the dense array to what is done to a leaf, along
the axes that it follows. A rule that names a type wins over these, and they decline what would cut
a block of entries in two, or touches an axis that no leaf follows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._jax.known_values import find_divisor
from ..._jax.primitives import find_primitive
from ..leaf_axes import Axes, LeafAxis, Movement, Shape
from ..rules import add_rule
from ..transform import redispatch
from ..value import Value, aval_of
from .batch_axes import layout_of
from .leaf_by_leaf import RULES, AsItIs, Leaf, MovementPlan, Step, allows, move, rebuilt
from .reshaping import axis_of_units, reshaped


def _stay(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))


def _squeeze(x: Value, *, dimensions: Sequence[int]) -> Any:
    old = x.aval().shape
    kept = [i for i in _stay(old) if i not in dimensions]
    axes = tuple(kept.index(i) if i in kept else None for i in _stay(old))

    def step(leaf: Leaf) -> Step:
        gone = tuple(j for i, j in leaf.places().items() if i in dimensions)
        return ((), {"dimensions": gone}) if gone else AsItIs

    return move(x, "squeeze", MovementPlan(Movement(tuple(old[i] for i in kept), axes), step))


def _transpose(x: Value, *, permutation: Sequence[int]) -> Any:
    old = x.aval().shape
    movement = Movement(
        tuple(old[i] for i in permutation), tuple(map([*permutation].index, _stay(old))), True
    )

    def step(leaf: Leaf) -> Step:
        places = leaf.places()
        order = iter([places[i] for i in permutation if i in places])
        # What follows no axis stays in its place.
        own = tuple(j if axis is None else next(order) for j, axis in enumerate(leaf.axes))
        return ((), {"permutation": own}) if own != _stay(own) else AsItIs

    return move(x, "transpose", MovementPlan(movement, step))


def _reshape(x: Value, *, new_sizes: Sequence[int], dimensions: Any, sharding: Any) -> Any:
    if dimensions is not None or sharding is not None:
        return NotImplemented
    return reshape(x, tuple(new_sizes))


def reshape(x: Value, new: Shape) -> Any:
    """A value of another shape, or NotImplemented where a block of entries would be cut."""
    x = x._movable()
    old, layout = x.aval().shape, layout_of(x)
    outer = 1 + max(layout.followed(len(old)), default=-1)  # the axes after them stay as they are
    made = len(new) - (len(old) - outer)
    if made < 0 or old[outer:] != new[made:] or (layout.stated and 0 in old):
        return NotImplemented
    sizes = old[:outer], new[:made]
    axes: list[int | None] = [None] * outer
    for axes_of_leaf, part in zip(layout.axes, layout.parts, strict=True):
        for i, axis in enumerate(axes_of_leaf):
            if axis is not None and axis.packed_in:
                at, block = int(axis.axis) + len(old), int(axis.block)
                units = (*old[:at], aval_of(part).shape[i] // axis.packed_in, *old[at + 1 : outer])
                axes[at] = axis_of_units(units, *sizes, at, block)
                if axes[at] is None:
                    return NotImplemented

    def step(leaf: Leaf) -> Any:
        follows: Any = leaf.axes[:outer]
        if [axis and axis.axis for axis in follows] != [*range(outer)]:
            return NotImplemented
        if any(axis.block == "whole" for axis in follows):
            return NotImplemented
        widths = [axis.packed_in or 1 for axis in follows]
        counts = tuple(n // width for n, width in zip(leaf.shape, widths, strict=False))
        entries = reshaped(counts, *sizes)
        if entries is None:
            return NotImplemented
        own = [*entries, *leaf.shape[outer:]]
        for i, width in zip(axes, widths, strict=True):
            if width > 1 and i is not None:
                own[i] *= width
        return (), {"new_sizes": tuple(own), "dimensions": None, "sharding": None}

    kept = range(made, len(new))
    return move(x, "reshape", MovementPlan(Movement(new, (*axes, *kept), True), step))


def _broadcast_in_dim(
    x: Value, *operands: Any, shape: Sequence[int], broadcast_dimensions: Any, sharding: Any
) -> Any:
    if sharding is not None or operands:
        return NotImplemented
    old, to = x.aval().shape, tuple(broadcast_dimensions)
    dense = [to.index(j) if j in to else None for j in range(len(shape))]

    def step(leaf: Leaf) -> Any:
        # Every leaf has the new axes in full, so that vmap and scan may take them off again.
        new = iter(size for size, i in zip(shape, dense, strict=True) if i is None)
        order = leaf.order(dense)
        sizes = [next(new) if j is None else leaf.shape[j] for j in order]
        for i, j in leaf.places().items():
            axis: Any = leaf.axes[j]
            if shape[to[i]] != old[i] and axis.block != "shared":
                if axis.block == "whole" or axis.packed_in:
                    return NotImplemented
                sizes[order.index(j)] = shape[to[i]]
        dimensions = tuple(k for k, j in enumerate(order) if j is not None)
        params = {"shape": tuple(sizes), "broadcast_dimensions": dimensions}
        return (), {**params, "sharding": None}

    return move(x, "broadcast_in_dim", MovementPlan(Movement(tuple(shape), to), step))


def _slices(x: Value, spans: Sequence[tuple[int, int, int]]) -> MovementPlan:
    old = x.aval().shape
    cut = {i: span for i, span in enumerate(spans) if span != (0, old[i], 1)}

    def step(leaf: Leaf) -> Any:
        own = []
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            span: Any = 0, size, 1
            if axis is not None and axis.axis in cut and axis.block != "shared":
                span = axis.span(*cut[axis.axis], old[axis.axis])
                if span is None:
                    return NotImplemented
            own.append(span)
        if all(span == (0, n, 1) for span, n in zip(own, leaf.shape, strict=True)):
            return AsItIs
        starts, limits, strides = zip(*own, strict=True)
        steps = None if set(strides) == {1} else strides
        return (), {"start_indices": starts, "limit_indices": limits, "strides": steps}

    new = tuple(n - i if stride == 1 else len(range(i, n, stride)) for i, n, stride in spans)
    return MovementPlan(Movement(new, _stay(old)), step, cut)


def _slice(x: Value, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    strides = strides or (1,) * len(start_indices)
    return move(x, "slice", _slices(x, [*zip(start_indices, limit_indices, strides, strict=True)]))


def _split(x: Value, *, sizes: Any, axis: int) -> Any:
    layout = layout_of(x)
    if not layout.stated:  # each leaf has the axis, or none: one equation a leaf
        whole = Movement(x.aval().shape, _stay(x.aval().shape))
        if not allows(x, layout, MovementPlan(whole, lambda leaf: AsItIs, (axis,))):
            return NotImplemented
        of_leaves = zip(*(lax.split(leaf, sizes, axis) for leaf in layout.parts), strict=True)
        pieces = [rebuilt(layout.structure, piece, whole) for piece in of_leaves]
    else:
        pieces, start = [], 0
        for size in map(int, sizes):
            spans = [(0, n, 1) for n in x.aval().shape]
            spans[axis] = start, start + size, 1
            pieces.append(move(x, "slice", _slices(x, spans)))
            start += size
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


def _unstack(x: Value, *, axis: int) -> Any:
    pieces = _split(x, sizes=(1,) * x.aval().shape[axis], axis=axis)
    if pieces is NotImplemented:
        return pieces
    pieces = [_squeeze(piece, dimensions=(axis,)) for piece in pieces]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else pieces


def _dynamic_slice(x: Value, *indices: Any, slice_sizes: Sequence[int]) -> Any:
    old, new = x.aval().shape, tuple(slice_sizes)
    cut = {i for i in _stay(old) if new[i] != old[i]}
    if any(isinstance(i, Value) for i in indices):
        return NotImplemented

    def step(leaf: Leaf) -> Any:
        starts, sizes = [], list(leaf.shape)
        for j, axis in enumerate(leaf.axes):
            # What is taken whole starts at 0, whatever the index says.
            starts.append(jnp.zeros_like(indices[0]) if axis is None else indices[axis.axis])
            if axis is not None and axis.axis in cut and axis.block != "shared":
                if axis.block == "whole" or not _in_blocks(axis, starts[j], old, new):
                    return NotImplemented
                width = axis.packed_in or 1
                sizes[j] = new[axis.axis] // axis.block * width
                if axis.block > 1:
                    starts[j] = lax.div(starts[j], jnp.array(axis.block, starts[j].dtype))
                if width > 1:
                    starts[j] *= width
        return AsItIs if tuple(sizes) == leaf.shape else (starts, {"slice_sizes": tuple(sizes)})

    return move(x, "dynamic_slice", MovementPlan(Movement(new, _stay(old)), step))


def _in_blocks(axis: LeafAxis, start: Any, old: Shape, new: Shape) -> bool:
    """Whether a slice is of whole blocks wherever it starts: by how that is computed."""
    at, block = axis.axis, int(axis.block)
    if block == 1:
        return True
    is_whole = old[at] % block == new[at] % block == 0 and block <= jnp.iinfo(start.dtype).max
    return is_whole and find_divisor(start) % block == 0


def _rev(x: Value, *, dimensions: Sequence[int]) -> Any:
    old = x.aval().shape

    def step(leaf: Leaf) -> Any:
        reversed_axes = []
        for i, j in leaf.places().items():
            axis: Any = leaf.axes[j]
            if i not in dimensions or (leaf.shape[j] == 1 and not axis.packed_in):
                continue  # one entry, whichever way round
            if axis.block != 1:
                return NotImplemented
            reversed_axes.append(j)
        return ((), {"dimensions": tuple(reversed_axes)}) if reversed_axes else AsItIs

    return move(x, "rev", MovementPlan(Movement(old, _stay(old)), step, dimensions))


def _gather(x: Value, indices: Any, **params: Any) -> Any:
    # Where something outside is filled, a leaf that is filled may mean anything.
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
    """`x[indices]`; what lies outside is filled, in each leaf, by the one of `fills`."""
    numbers, old = dimension_numbers, x.aval().shape
    if isinstance(indices, Value) or 0 in old:
        return NotImplemented
    indices = jnp.asarray(indices)
    collapsed, batching = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    kept = [i for i in _stay(old) if i not in (*collapsed, *batching)]
    axes = dict(zip(kept, numbers.offset_dims, strict=True))
    dense: list[int | None] = [None] * (len(kept) + indices.ndim - 1)
    for i, j in axes.items():
        dense[j] = i
    batch = iter(indices.shape[:-1])
    new = tuple(next(batch) if i is None else slice_sizes[i] for i in dense)

    def step(leaf: Leaf) -> Any:
        places = leaf.places()
        sizes, blocks = list(leaf.shape), dict.fromkeys(places, 1)
        for i, j in places.items():
            axis: Any = leaf.axes[j]
            if slice_sizes[i] == old[i]:
                continue
            blocks[i] = old[i] if axis.block == "shared" else axis.block
            one = slice_sizes[i] == 1 and i not in batching and not axis.packed_in
            if blocks[i] == "whole" or (blocks[i] not in (0, 1) and not one):
                return NotImplemented
            sizes[j] = slice_sizes[i]
        columns = [k for k, i in enumerate(numbers.start_index_map) if i in places]
        mapped = [numbers.start_index_map[k] for k in columns]
        in_leaf = lambda dims: tuple(places[i] for i in dims if i in places)
        # What is said of all indices holds of those of entries if none is left out or shared.
        all_columns = columns == [*range(indices.shape[-1])] and {*batching} <= {*places}
        are_entries = all_columns and all(block == 1 for block in blocks.values())
        pairs = zip(batching, numbers.start_indices_batching_dims, strict=True)
        offsets = (k for k, j in enumerate(leaf.order(dense)) if j is not None)
        return (_entries(indices, columns, [blocks[i] for i in mapped]),), {
            "dimension_numbers": lax.GatherDimensionNumbers(
                offset_dims=tuple(offsets),
                collapsed_slice_dims=in_leaf(collapsed),
                start_index_map=in_leaf(mapped),
                operand_batching_dims=in_leaf(batching),
                start_indices_batching_dims=tuple(k for i, k in pairs if i in places),
            ),
            "slice_sizes": tuple(sizes),
            "unique_indices": unique_indices and are_entries,
            "indices_are_sorted": indices_are_sorted and are_entries,
            "fill_value": fill_value if fills is None else fills[leaf.number],
            **params,
        }

    movement = Movement(new, tuple(map(axes.get, _stay(old))))
    return move(x, "gather", MovementPlan(movement, step, rule=rule))


def _entries(indices: jax.Array, columns: Sequence[int], blocks: list[int]) -> jax.Array:
    """The entries that cover what is looked up. Floor division keeps out of bounds what is."""
    if [*columns] != [*range(indices.shape[-1])]:
        indices = indices[..., jnp.array(columns, int)]
    if set(blocks) <= {1}:
        return indices
    if jnp.iinfo(indices.dtype).bits < 32:  # too few for the divisors, perhaps
        indices = indices.astype(jnp.int32)
    return indices // jnp.array(blocks, indices.dtype)


def _same_type(values: Sequence[Any]) -> bool:
    dtypes = lambda v: tuple(jax.typeof(leaf).dtype for leaf in jax.tree.leaves(v))
    return len({(jax.tree.structure(v), dtypes(v)) for v in values}) == 1


def concatenate(*operands: Value, dimension: Any) -> Any:
    dimension = int(dimension)  # of jnp.roll a number of NumPy's
    if len({type(x) for x in operands}) > 1:
        return NotImplemented
    some = tuple(x for x in operands if x.aval().shape[dimension])
    if some and _same_type(operands):  # what is empty adds nothing
        operands = some
    operands = tuple(x._movable() for x in operands)
    shapes = [x.aval().shape for x in operands]
    sizes = [shape[dimension] for shape in shapes]
    new = (*shapes[0][:dimension], sum(sizes), *shapes[0][dimension + 1 :])
    layouts = [layout_of(x) for x in operands]
    plan = MovementPlan(Movement(new, _stay(new)), lambda leaf: AsItIs, (dimension,))
    if not all(map(partial(allows, plan=plan), operands, layouts)):
        return NotImplemented
    if layouts[0].stated and 0 in (*shapes[0], *sizes):
        return NotImplemented
    # Where all share one entry, that is a block of their number.
    blocks = [
        [[_in_numbers(axis, shape) for axis in axes] for axes in layout.axes]
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    if any(other != blocks[0] for other in blocks):
        return NotImplemented
    columns = zip(*(layout.parts for layout in layouts), strict=True)
    joined = [
        _joined(type(operands[0]), axes, parts, sizes, dimension - len(new))
        for axes, parts in zip(blocks[0], columns, strict=True)
    ]
    if any(part is NotImplemented for part in joined):
        return NotImplemented
    wholes = [rebuilt(layout.structure, joined, plan.movement) for layout in layouts]
    if any(whole is NotImplemented for whole in wholes):
        return NotImplemented
    return wholes[0] if _same_type(wholes) else NotImplemented


def _in_numbers(axis: LeafAxis | None, shape: Shape) -> LeafAxis | None:
    if axis is None or axis.block != "shared":
        return axis
    return axis._replace(block=shape[axis.axis])


def _joined(
    kind: type[Value], axes: Axes, parts: Sequence[Any], sizes: Sequence[int], dimension: int
) -> Any:
    """The leaves of several values side by side, if no block but the last is a partial one."""
    at = next((j for j, axis in enumerate(axes) if axis and axis.axis == dimension), None)
    if at is None:
        return NotImplemented
    block: Any = axes[at].block  # type: ignore[union-attr]
    others = {(*shape[:at], *shape[at + 1 :]) for shape in (aval_of(part).shape for part in parts)}
    if block == "whole" or len(others) > 1 or any(size % block for size in sizes[:-1]):
        return NotImplemented
    if all(isinstance(part, kind) for part in parts):
        whole = concatenate(*parts, dimension=at)
        if whole is not NotImplemented:
            return whole
    parts = [part.materialise() if isinstance(part, kind) else part for part in parts]
    if len({aval_of(part).dtype for part in parts}) > 1:
        return NotImplemented
    return redispatch(lambda *xs: lax.concatenate(xs, at), *parts)


def _stack(*operands: Value, axis: int) -> Any:
    with_axis = [redispatch(jnp.expand_dims, x, axis) for x in operands]
    return redispatch(jnp.concatenate, with_axis, axis)


def _select(which: Any, *cases: Value) -> Any:
    """By one predicate for all of the entries."""
    shapes = lambda x: tuple(map(jnp.shape, jax.tree.leaves(x)))
    alike = _same_type(cases) and len({shapes(x) for x in cases}) == 1
    if isinstance(which, Value) or jnp.ndim(which) or not alike:
        return NotImplemented
    return jax.tree.map(lambda *leaves: lax.select_n(which, *leaves), *cases)


RULES |= {
    "squeeze": _squeeze,
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast_in_dim,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "rev": _rev,
    "gather": _gather,
    "concatenate": concatenate,
    "stack": _stack,
    "split": _split,
    "unstack": _unstack,
    "select_n": _select,
}
for _name, _rule in RULES.items():
    add_rule(_rule, [find_primitive(_name)], conditional=True)
