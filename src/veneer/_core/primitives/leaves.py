"""How the leaves of a value represent its dense array, and how to move elements in them.

The rules for all types share three parts:

- *Labels*: types whose only leaf is the dense array, with metadata such as a unit or a tag.
- *Layouts*: which axis of each leaf corresponds to which axis of the dense array. The method
  `leaf_axes` of a type declares them. A type without it can have batch axes: leading axes that
  every leaf has, and along which slices of the leaves represent slices of the array.
- *Moving*: a primitive that moves elements, such as `slice`, is bound with each leaf instead of
  the dense array.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax

from ..._jax.primitives import Primitive, find_primitive
from ..._jax.tracing import is_zero, vary_together
from ..dispatch import unhandled_operands
from ..errors import CHECK_BUGS
from ..leaf_axes import Axes, Movement, Shape, aligned_axes
from ..rules import add_rule
from ..trace import redispatch
from ..tree import checks_of, has_metadata
from ..value import Value, aval_of, declared_layout, is_part, is_value, make_dense

# Labels.


def is_label(value: Any) -> bool:
    """Return whether an object is a label: an implicit array whose only leaf is the dense array.

    The leaf may be abstract. It must have the shape and dtype of the implicit array, and
    `materialise` must return the leaf or raise an error. The class attribute `is_label` overrides
    the check of `materialise`.
    """
    return isinstance(value, Value) and _label_kind(value) != "other"


def has_no_dense_form(value: Any) -> bool:
    """Return whether an object is a label that cannot be materialized, such as a length in meters.

    A label is an implicit array whose only leaf is the dense array.
    """
    return isinstance(value, Value) and _label_kind(value) == "raises"


def can_become_label(x: Any, label: Value) -> bool:
    """Return whether a dense array can be converted to a label of the same type as `label`.

    A label is an implicit array whose only leaf is the dense array, such as an array with a unit.
    An array of zeros can be converted, because it is zero in any unit. Any array can be converted
    if the label has no metadata and cannot be materialized.
    """
    return is_zero(x) or (not has_metadata(label) and has_no_dense_form(label))


def dense_unless(
    keep: Callable[[Any], bool], primitive: Primitive, values: Sequence[Any]
) -> list[Any]:
    """Return `values`, after materializing each implicit array for which `keep` returns False.

    The materialized arrays are reported as operands of `primitive`.
    """
    dense = iter(make_dense(primitive, [v for v in values if not keep(v)]))
    return [v if keep(v) else next(dense) for v in values]


def _label_kind(value: Value) -> str:
    """Return what `materialise` of an implicit array does: "returns leaf", "raises" or "other"."""
    leaves, treedef = jax.tree.flatten(value)
    if len(leaves) != 1 or type(value).is_label is False:
        return "other"
    leaf, aval = jax.typeof(leaves[0]), value.aval()
    if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
        return "other"
    kind = _find_label_kind(treedef, leaf)
    return "returns leaf" if kind == "other" and type(value).is_label else kind


@lru_cache(maxsize=4096)
def _find_label_kind(treedef: Any, leaf: Any) -> str:
    """Trace `materialise` of a value with one leaf. Return the same as `_label_kind`."""
    kind = "other"

    def trace_materialise(x: jax.Array) -> None:
        nonlocal kind
        try:
            if jax.tree.unflatten(treedef, [x]).materialise() is x:
                kind = "returns leaf"
        except CHECK_BUGS:
            pass
        except Exception:  # a type that cannot be materialized may raise anything
            kind = "raises"

    jax.eval_shape(trace_materialise, leaf)
    return kind


# Layouts.


class Leaf(NamedTuple):
    """A leaf of an implicit array: its shape, and the dense axis of each of its axes.

    The dense axes are counted from the front.
    """

    shape: Shape
    axes: Axes
    number: int  # the position of the leaf in its `LeafLayout`

    def axis_map(self) -> dict[int, int]:
        """Return a dict from axes of the dense array to the corresponding axes of the leaf."""
        return {axis.axis: i for i, axis in enumerate(self.axes) if axis is not None}

    def arrange(self, dense_order: Sequence[int | None]) -> list[int | None]:
        """Return the order of the axes of a leaf in a result, given the order of the dense axes.

        In both lists, None is a new axis. A dense axis that is not in `dense_order` is removed. A
        leaf axis without a dense axis stays before its right neighbor. `dense_order` must not
        permute axes.
        """
        axis_map, start = self.axis_map(), 0
        leaf_order: list[int | None] = []
        is_kept = [axis is None or axis.axis in dense_order for axis in self.axes]
        for i in dense_order:
            if i is None:
                leaf_order.append(None)
            elif i in axis_map:
                leaf_order += [j for j in range(start, axis_map[i] + 1) if is_kept[j]]
                start = axis_map[i] + 1
        return [*leaf_order, *(j for j in range(start, len(self.axes)) if is_kept[j])]


class LeafLayout(NamedTuple):
    """The parts of an implicit array: its leaves, and the implicit arrays in its fields."""

    parts: list[Any]
    structure: Any  # the tree structure whose leaves are the parts
    leaves: list[Leaf]  # the axes of each part
    is_declared: bool  # whether the type has `leaf_axes`. If False, the axes are batch axes.

    def dense_axes(self) -> set[int]:
        """Return the axes of the dense array, counted from the front, that a part has, too."""
        return {axis.axis for leaf in self.leaves for axis in leaf.axes if axis is not None}


def layout_of(value: Value) -> LeafLayout:
    """Return which axis of each leaf corresponds to which axis of the dense array.

    The method `leaf_axes` of the type says so. If it returns None, only batch axes correspond:
    leading axes of the dense array that every leaf has, too (see `has_batch_axes`).
    """
    ndim = value.aval().ndim
    parts, structure, declared = declared_layout(value)
    axes = declared
    if axes is None:
        parts, structure = jax.tree.flatten(value)
        batch_axes = aligned_axes(ndim)[: _count_batch_axes(value)]
        axes = [(*batch_axes, *[None] * (jax.typeof(x).ndim - len(batch_axes))) for x in parts]
    from_front = lambda axis: axis and axis._replace(axis=axis.axis + ndim)
    leaves = [
        Leaf(aval_of(part).shape, list(map(from_front, part_axes)), i)
        for i, (part, part_axes) in enumerate(zip(parts, axes, strict=True))
    ]
    return LeafLayout(parts, structure, leaves, declared is not None)


def _count_batch_axes(value: Value) -> int:
    """Return the number of batch axes of an implicit array (see `has_batch_axes`).

    Return 0 if the class defines the method `default`, and dispatch has not called it yet. Rules
    that move the leaves along batch axes then return NotImplemented, so that `default` runs first.
    """
    default = type(value).default
    has_own_default = default is not Value.default and not getattr(default, "is_fallback", False)
    # `unhandled_operands` are those for which `default` has returned NotImplemented.
    if has_own_default and not any(value is operand for operand in unhandled_operands.get()):
        return 0
    ndim = value.aval().ndim
    return next((n for n in range(ndim, 0, -1) if has_batch_axes(value, n)), 0)


def has_batch_axes(value: Value, count: int) -> bool:
    """Return whether the first `count` axes of an implicit array are batch axes.

    The leaves may be abstract. Batch axes are leading axes of the dense array and of every leaf.
    Slices of the leaves along a batch axis represent slices of the dense array.
    """
    shape = value.aval().shape
    leaf_shapes = [jax.typeof(leaf).shape for leaf in jax.tree.leaves(value)]
    # `vmap` and indexing remove batch axes. So check the dense shape for each number of them.
    return all(leaf_shape[:count] == shape[:count] for leaf_shape in leaf_shapes) and all(
        _has_dense_shape(value, count, n, shape[count:]) for n in range(count + 1)
    )


def can_stack_leaves(value: Value) -> bool:
    """Return whether leaves stacked along a new first axis represent the stacked dense arrays."""
    shape = value.aval().shape
    return _has_dense_shape(value, 0, 0, shape) and _has_dense_shape(value, 0, 1, shape)


def _has_dense_shape(value: Value, removed: int, added: int, inner_shape: Shape) -> bool:
    """Return whether the dense shape is as expected after leading axes of all leaves are replaced.

    The first `removed` axes of each leaf are replaced by `added` new axes, with sizes that no other
    axis has. The expected dense shape is the sizes of the new axes, followed by `inner_shape`.
    """
    leaves, treedef = jax.tree.flatten(value)
    if not _is_batch_transparent(treedef):
        return False
    avals = list(map(jax.typeof, leaves))
    # The sizes of the new axes differ from all others. A symbolic size equals no number.
    largest = max((n for aval in avals for n in aval.shape if isinstance(n, int)), default=0)
    new_sizes = tuple(range(largest + 1, largest + 1 + added))
    abstract = (jax.ShapeDtypeStruct((*new_sizes, *a.shape[removed:]), a.dtype) for a in avals)
    return dense_shape_of(treedef, tuple(abstract)) == (*new_sizes, *inner_shape)


def _is_batch_transparent(tree: Any) -> bool:
    """Return whether no class in a tree structure sets `batch_transparent = False`."""
    data = tree.node_data()
    if data and issubclass(data[0], Value) and not data[0].batch_transparent:
        return False
    return all(map(_is_batch_transparent, tree.children()))


@lru_cache(maxsize=4096)
def dense_shape_of(tree: Any, leaves: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[int, ...] | None:
    """Return the dense shape of an implicit array, given its tree structure and abstract leaves.

    Return None if the checks of its class, or its `aval`, raise an error for these leaves.
    """
    try:
        with suppress(*CHECK_BUGS):
            jax.eval_shape(partial(run_checks, tree), *leaves)
        return jax.tree.unflatten(tree, leaves).aval().shape
    except Exception:  # code of the class may raise anything for leaves that do not fit
        return None


def run_checks(tree: Any, *leaves: Any) -> None:
    """Build an implicit array from a tree structure and leaves, and run the checks of its classes.

    The checks are the methods `__post_init__` and `__check_init__`.
    """
    values = [jax.tree.unflatten(tree, leaves)]
    for value in values:  # grows by the values in the fields
        values += filter(is_value, jax.tree.leaves(value, is_leaf=is_part(value)))
        for check in checks_of(value):
            check()


# Moving.

F = TypeVar("F", bound=Callable)

#: How to bind a primitive with a leaf: the operands after the leaf, and the parameters.
Step = tuple[Sequence[Any], dict[str, Any]]
UNCHANGED: Step = ((), {})  # do not bind the primitive, because the leaf does not change

#: The rules that `leaf_rule` has registered, by primitive.
RULES: dict[str, Callable[..., Any]] = {}


def leaf_rule(primitive: str) -> Callable[[F], F]:
    """Register the decorated function as the rule of a primitive for all implicit types.

    If the function returns NotImplemented, the next rule is tried.
    """

    def add(function: F) -> F:
        RULES[primitive] = function
        add_rule(function, [find_primitive(primitive)], conditional=True)
        return function

    return add


def can_move(
    x: Value, layout: LeafLayout, movement: Movement, changed_axes: Collection[int] = ()
) -> bool:
    """Return whether moved leaves of `x` can represent the moved dense array.

    A dense axis that no leaf axis corresponds to must keep its size, its elements, and its position
    from the end.

    **Arguments:**

    - `layout`: the result of `layout_of(x)`.
    - `movement`: the effect of a primitive on the axes of the dense array.
    - `changed_axes`: dense axes along which elements are dropped, added or reversed, as by a slice.
    """
    old_shape, new_shape, mapped_axes = x.aval().shape, movement.shape, layout.dense_axes()
    for i, j in enumerate(movement.axes):
        if i in mapped_axes:
            continue
        if j is None or i in changed_axes or new_shape[j] != old_shape[i]:
            return False
        if j - len(new_shape) != i - len(old_shape):
            return False
    if layout.is_declared:
        # A leaf that lacks a dense axis is broadcast along it. If axes change their places, only
        # the method `_moved` of the type knows where the missing axis is now.
        lacks_axis = any(len({*filter(None, leaf.axes)}) < len(old_shape) for leaf in layout.leaves)
        changes_places = movement.reorders or None in movement.axes
        return not (lacks_axis and changes_places and type(x)._moved is Value._moved)
    # Every axis of a label (a type whose only leaf is the dense array) looks like a batch axis. But
    # its metadata may refer to an axis.
    if has_metadata(x) and is_label(x):
        return False
    return bool(mapped_axes) or new_shape == old_shape or can_stack_leaves(x)


def move(
    x: Value,
    primitive: str,
    movement: Movement,
    get_step: Callable[[Leaf], Any],
    changed_axes: Collection[int] = (),
    rule: Callable[..., Any] | None = None,
) -> Any:
    """Bind a primitive with each leaf of an implicit array, and rebuild the array from the results.

    Return NotImplemented if the results could not represent the result of the dense array.

    **Arguments:**

    - `movement`: the effect of the primitive on the axes of the dense array.
    - `get_step`: a function of a `Leaf`. It returns a step: the operands after the leaf, and the
      parameters. Or `UNCHANGED` to keep the leaf, or NotImplemented.
    - `changed_axes`: dense axes along which elements are dropped, added or reversed, as by a slice.
    - `rule`: the rule for an implicit array of the same type in a field of `x`. The default is
      `RULES[primitive]`.
    """
    x = x._movable()
    layout = layout_of(x)
    if not can_move(x, layout, movement, changed_axes):
        return NotImplemented
    moved = []
    for part, leaf in zip(layout.parts, layout.leaves, strict=True):
        step = get_step(leaf)
        if step is NotImplemented:
            return NotImplemented
        if step is not UNCHANGED:
            part = _move_part(x, primitive, part, step, rule or RULES[primitive])
        moved.append(part)
    return rebuild(layout.structure, moved, movement)


def _move_part(x: Value, primitive: str, part: Any, step: Step, rule: Callable[..., Any]) -> Any:
    """Bind a primitive with `part`, one part of `x`: a leaf, or an implicit array in a field.

    `step` has the operands after the part, and the parameters. `rule` is the rule for a part of the
    same type as `x`.
    """
    operands, params = step

    def bind(*operands: Any) -> Any:
        # Inside shard_map, an index may vary over devices, and the leaf may not.
        arrays = vary_together(operands) if len(operands) > 1 else operands
        return find_primitive(primitive).bind(*arrays, **params)

    if not isinstance(part, Value):
        return bind(part, *operands)
    if isinstance(part, type(x)):
        # Such a field, for example quantized scales, is storage of `x`. So nothing is reported if
        # the field is materialized.
        moved = rule(part, *operands, **params)
        return bind(part.materialise(), *operands) if moved is NotImplemented else moved
    return redispatch(bind, part, *operands)


def rebuild(structure: Any, parts: Sequence[Any], movement: Movement) -> Any:
    """Build an implicit array of the tree structure `structure` after its parts were moved.

    A part is a leaf, or an implicit array in a field. Return NotImplemented if the class cannot
    adapt its metadata to `movement` (a transpose, for example), or rejects the shapes of the parts.
    """
    value = jax.tree.unflatten(structure, parts)._moved(movement)
    if isinstance(value, Value):
        leaves, tree = jax.tree.flatten(value)
        avals = map(jax.typeof, leaves)
        abstract = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
        if dense_shape_of(tree, abstract) is None:
            return NotImplemented
    return value
