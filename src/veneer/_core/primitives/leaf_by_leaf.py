"""What a primitive that moves entries about does to each leaf of a value."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from ..._jax.primitives import find_primitive
from ..._jax.tracing import vary_together
from ..leaf_axes import Axes, Movement, Shape
from ..transform import redispatch
from ..tree import has_metadata
from ..value import Value, aval_of, dense_shape_of
from .batch_axes import LeafLayout, layout_of, takes_batch_axis
from .labels import is_label

Step = tuple[Sequence[Any], dict[str, Any]]  # further operands and parameters of the primitive
AsItIs: Step = ((), {})

#: The rule of each primitive, for an array of the same type among the fields of a value.
RULES: dict[str, Callable[..., Any]] = {}


class Leaf(NamedTuple):
    """A leaf's shape, the axes that it follows, counted from the front here, and its number."""

    shape: Shape
    axes: Axes
    number: int

    def places(self) -> dict[int, int]:
        """By an axis of the dense array, the axis of the leaf that follows it."""
        return {axis.axis: i for i, axis in enumerate(self.axes) if axis is not None}

    def order(self, result: Sequence[int | None]) -> list[int | None]:
        """The axes of the leaf as those of the dense array are in a result; None is a new axis.

        What follows no axis comes before the axis that it is before, or at the end.
        """
        order: list[int | None] = []
        places, left = self.places(), 0
        for i in result:
            if i is None:
                order.append(None)
            elif i in places:
                order += [j for j in range(left, places[i] + 1) if self._stays(j, result)]
                left = places[i] + 1
        return [*order, *(j for j in range(left, len(self.axes)) if self._stays(j, result))]

    def _stays(self, j: int, result: Sequence[int | None]) -> bool:
        axis = self.axes[j]
        return axis is None or axis.axis in result


class MovementPlan(NamedTuple):
    """What a primitive does to a dense array, and what to a leaf.

    **Arguments:**

    - `movement`: what becomes of the axes.
    - `step`: from a leaf to the operands and parameters with which it goes through the same
      primitive; `AsItIs`, or NotImplemented.
    - `touched`: axes that a leaf must follow though they stay where they are.
    - `rule`: the rule that moves an array of the same type among the fields, if not the one here.
    """

    movement: Movement
    step: Callable[[Leaf], Any]
    touched: Collection[int] = ()
    rule: Callable[..., Any] | None = None


def allows(x: Value, layout: LeafLayout, plan: MovementPlan) -> bool:
    """Whether a plan leaves alone what no leaf follows, and what metadata may speak of."""
    old, (new, axes, _), followed = x.aval().shape, plan.movement, layout.followed(x.aval().ndim)
    for i, j in enumerate(axes):
        stays = j is not None and j - len(new) == i - len(old) and new[j] == old[i]
        if i not in followed and not (stays and i not in plan.touched):
            return False
    if layout.stated:
        # A leaf without one of the axes is spread along it by where it stands: the type must say.
        spread = any(len({*filter(None, axes)}) < len(old) for axes in layout.axes)
        moves = plan.movement.reorders or None in plan.movement.axes
        return not (spread and moves and type(x)._moved is Value._moved)
    # Of a label every axis looks like one of a batch, and its metadata may speak of any.
    if has_metadata(x) and is_label(x):
        return False
    return bool(followed) or new == old or takes_batch_axis(x)


def move(x: Value, primitive: str, plan: MovementPlan) -> Any:
    """A value with each leaf moved, or NotImplemented."""
    x = x._movable()
    layout, ndim = layout_of(x), x.aval().ndim
    if not allows(x, layout, plan):
        return NotImplemented
    moved = []
    for i, (part, axes) in enumerate(zip(layout.parts, layout.axes, strict=True)):
        in_front = [axis and axis._replace(axis=axis.axis + ndim) for axis in axes]
        step = plan.step(Leaf(aval_of(part).shape, in_front, i))
        if step is NotImplemented:
            return NotImplemented
        moved.append(part if step is AsItIs else _moved_part(x, primitive, part, step, plan))
    return rebuilt(layout.structure, moved, plan.movement)


def rebuilt(structure: Any, parts: Sequence[Any], movement: Movement) -> Any:
    """The value of parts that were moved; NotImplemented if its type has none such."""
    value = jax.tree.unflatten(structure, parts)._moved(movement)
    if isinstance(value, Value):
        leaves, tree = jax.tree.flatten(value)
        avals = map(jax.typeof, leaves)
        if (
            dense_shape_of(tree, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
            is None
        ):
            return NotImplemented
    return value


def _moved_part(x: Value, primitive: str, part: Any, step: Step, plan: MovementPlan) -> Any:
    operands, params = step
    bind = partial(_bind, primitive, params)
    if not isinstance(part, Value):
        return bind(part, *operands)
    if isinstance(part, type(x)):  # a matter of how x is stored (quantised scales): dense, no news
        moved = (plan.rule or RULES[primitive])(part, *operands, **params)
        return bind(part.materialise(), *operands) if moved is NotImplemented else moved
    return redispatch(bind, part, *operands)


def _bind(primitive: str, params: dict[str, Any], *operands: Any) -> Any:
    # An index may differ between the devices of a shard_map, and a leaf that it is for may not.
    arrays = vary_together(operands) if len(operands) > 1 else operands
    return find_primitive(primitive).bind(*arrays, **params)
