"""Move the leaves of a value instead of its dense array, by the axes that they correspond to.

The axes come from `leaf_axes`. A type without it can have batch axes: leading axes that every leaf
has, and along which slices of the leaves represent slices of the array.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from ..._jax.primitives import find_primitive
from ..._jax.tracing import vary_together
from ..dispatch import unhandled_operands
from ..leaf_axes import Axes, Movement, Shape, aligned_axes
from ..rules import add_rule
from ..transform import redispatch
from ..tree import has_metadata
from ..value import Value, aval_of, declared_layout, dense_shape_of
from .labels import is_label

F = TypeVar("F", bound=Callable)

Step = tuple[Sequence[Any], dict[str, Any]]  # further operands and parameters of the primitive
UNCHANGED: Step = ((), {})

#: The rules that `leaf_rule` has registered, by primitive.
RULES: dict[str, Callable[..., Any]] = {}


def leaf_rule(primitive: str) -> Callable[[F], F]:
    """Register a rule for all types, which may return NotImplemented."""

    def add(function: F) -> F:
        RULES[primitive] = function
        add_rule(function, [find_primitive(primitive)], conditional=True)
        return function

    return add


class Leaf(NamedTuple):
    """The shape of a leaf, its axes with dense axes counted from the front, and its number."""

    shape: Shape
    axes: Axes
    number: int

    def axis_map(self) -> dict[int, int]:
        """Return the leaf axis of each dense axis that one corresponds to."""
        return {axis.axis: i for i, axis in enumerate(self.axes) if axis is not None}

    def arrange(self, result: Sequence[int | None]) -> list[int | None]:
        """Return the order of the leaf axes for a result with this order of dense axes.

        None is a new axis. A leaf axis without a dense axis stays before its right neighbor.
        """
        axis_map, start = self.axis_map(), 0
        order: list[int | None] = []
        stays = [axis is None or axis.axis in result for axis in self.axes]
        for i in result:
            if i is None:
                order.append(None)
            elif i in axis_map:
                order += [j for j in range(start, axis_map[i] + 1) if stays[j]]
                start = axis_map[i] + 1
        return [*order, *(j for j in range(start, len(self.axes)) if stays[j])]


class LeafLayout(NamedTuple):
    """The parts of a value (leaves, or implicit arrays in its fields) with their axes."""

    parts: list[Any]
    structure: Any
    leaves: list[Leaf]
    is_declared: bool  # by `leaf_axes` of the type. If False, the axes are batch axes.

    def dense_axes(self) -> set[int]:
        """Return the dense axes, counted from the front, that leaf axes correspond to."""
        return {axis.axis for leaf in self.leaves for axis in leaf.axes if axis is not None}


def layout_of(value: Value) -> LeafLayout:
    """Return the layout that the type of a value declares, or the layout of its batch axes."""
    ndim = value.aval().ndim
    parts, structure, declared = declared_layout(value)
    axes = declared
    if axes is None:
        parts, structure = jax.tree.flatten(value)
        batch = aligned_axes(ndim)[: _count_batch_axes(value)]
        axes = [(*batch, *[None] * (jax.typeof(x).ndim - len(batch))) for x in parts]
    leaves = [
        Leaf(aval_of(part).shape, [a and a._replace(axis=a.axis + ndim) for a in of_part], i)
        for i, (part, of_part) in enumerate(zip(parts, axes, strict=True))
    ]
    return LeafLayout(parts, structure, leaves, declared is not None)


def _count_batch_axes(value: Value) -> int:
    """Return the number of batch axes, or 0 if the `default` of the type must be tried first."""
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
        _has_shape_with(value, count, n, own[count:]) for n in range(count + 1)
    )


def can_stack_leaves(value: Value) -> bool:
    """Return whether a new first axis of every leaf would be a batch axis."""
    own = value.aval().shape
    return _has_shape_with(value, 0, 0, own) and _has_shape_with(value, 0, 1, own)


def _has_shape_with(value: Value, old: int, new: int, inner: Shape) -> bool:
    """Return whether the dense shape ends with `inner` if `new` axes replace the first `old`."""
    leaves, treedef = jax.tree.flatten(value)
    if not _is_batch_transparent(treedef):
        return False
    avals = list(map(jax.typeof, leaves))
    # The sizes of the new axes differ from all others. A symbolic size equals no number.
    largest = max((n for aval in avals for n in aval.shape if isinstance(n, int)), default=0)
    batch = tuple(range(largest + 1, largest + 1 + new))
    abstract = (jax.ShapeDtypeStruct((*batch, *a.shape[old:]), a.dtype) for a in avals)
    return dense_shape_of(treedef, tuple(abstract)) == (*batch, *inner)


def _is_batch_transparent(tree: Any) -> bool:
    data = tree.node_data()
    if data and issubclass(data[0], Value) and not data[0].batch_transparent:
        return False
    return all(map(_is_batch_transparent, tree.children()))


def can_move(
    x: Value, layout: LeafLayout, movement: Movement, touched: Collection[int] = ()
) -> bool:
    """Return whether moving the leaves can represent a movement of the dense array.

    A dense axis that no leaf axis corresponds to must keep its size and its position from the end,
    and must not be in `touched`.
    """
    old, new, mapped = x.aval().shape, movement.shape, layout.dense_axes()
    for i, j in enumerate(movement.axes):
        stays = j is not None and j - len(new) == i - len(old) and new[j] == old[i]
        if i not in mapped and not (stays and i not in touched):
            return False
    if layout.is_declared:
        # A leaf that lacks a dense axis is broadcast along it. If axes change their places, only
        # the type knows where the missing axis is now.
        lacks_axis = any(len({*filter(None, leaf.axes)}) < len(old) for leaf in layout.leaves)
        changes_places = movement.reorders or None in movement.axes
        return not (lacks_axis and changes_places and type(x)._moved is Value._moved)
    # Every axis of a label looks like a batch axis, but its metadata may refer to any of them.
    if has_metadata(x) and is_label(x):
        return False
    return bool(mapped) or new == old or can_stack_leaves(x)


def move(
    x: Value,
    primitive: str,
    movement: Movement,
    step: Callable[[Leaf], Any],
    touched: Collection[int] = (),
    rule: Callable[..., Any] | None = None,
) -> Any:
    """Bind a primitive with each leaf of a value. Return the result, or NotImplemented.

    **Arguments:**

    - `movement`: the effect of the primitive on the axes of the dense array.
    - `step`: returns the further operands and the parameters for a leaf. Or `UNCHANGED`, or
      NotImplemented.
    - `touched`: dense axes along which the primitive changes entries. See `can_move`.
    - `rule`: the rule for a field that is of the type of `x`. The default is from `RULES`.
    """
    x = x._movable()
    layout = layout_of(x)
    if not can_move(x, layout, movement, touched):
        return NotImplemented
    moved = []
    for part, leaf in zip(layout.parts, layout.leaves, strict=True):
        action = step(leaf)
        if action is NotImplemented:
            return NotImplemented
        if action is not UNCHANGED:
            part = _move_part(x, primitive, part, action, rule or RULES[primitive])
        moved.append(part)
    return rebuild(layout.structure, moved, movement)


def _move_part(x: Value, primitive: str, part: Any, step: Step, rule: Callable[..., Any]) -> Any:
    operands, params = step

    def bind(*operands: Any) -> Any:
        # Inside shard_map, an index may vary over devices, and the leaf may not.
        arrays = vary_together(operands) if len(operands) > 1 else operands
        return find_primitive(primitive).bind(*arrays, **params)

    if not isinstance(part, Value):
        return bind(part, *operands)
    if isinstance(part, type(x)):
        # Such a field, as of quantized scales, belongs to the storage of `x`. So nothing is
        # reported if it is materialized.
        moved = rule(part, *operands, **params)
        return bind(part.materialise(), *operands) if moved is NotImplemented else moved
    return redispatch(bind, part, *operands)


def rebuild(structure: Any, parts: Sequence[Any], movement: Movement) -> Any:
    """Return the value of moved parts, or NotImplemented if its class rejects them."""
    value = jax.tree.unflatten(structure, parts)._moved(movement)
    if isinstance(value, Value):
        leaves, tree = jax.tree.flatten(value)
        avals = map(jax.typeof, leaves)
        abstract = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
        if dense_shape_of(tree, abstract) is None:
            return NotImplemented
    return value
