"""Rules of collectives that send elements between devices, for all types.

A collective sends each device another part along an axis, or all of the array. It concatenates
the parts that a device receives along an axis, or keeps one of them. So does each leaf:

| the leaf axis that is cut | the leaf axis to concatenate along | the leaf is sent by |
|---|---|---|
| none | has entries | `all_gather` |
| has entries | has entries | `all_to_all` |
| none | none: all devices have the same | nothing |
| has entries | none: all devices have the same | nothing; a device slices its own leaf |

The rules decline if a block would be cut, or if devices have different entries that would be
concatenated along an axis that the leaf lacks. There is no rule for sums, because a sum of codes
has no meaning.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax

from ..._jax.primitives import find_primitive
from ..._jax.tracing import vary_along, varying_axes
from ..leaf_axes import LeafAxis, Movement, Shape
from ..transform import redispatch
from ..value import Value
from .leaf_movement import Leaf, can_move, layout_of, leaf_rule, rebuild


class Exchange(NamedTuple):
    """A collective of an array or of a leaf, as an effect on its axes.

    **Arguments:**

    - `names`: the mesh axes along which devices send.
    - `groups`: the groups of devices that send to each other. None is one group of all.
    - `devices`: the number of devices in a group.
    - `cut`: the axis along which each device is sent another part. None if it is sent all.
    - `join`: the axis along which received parts are concatenated. None if one part is kept.
    - `is_new`: whether `join` is an axis that only the result has.
    - `gather`: the primitive that gathers.
    """

    names: Sequence[str]
    groups: Any
    devices: int
    cut: int | None
    join: int | None
    is_new: bool = False
    gather: str = "all_gather"

    def movement(self, old: Shape) -> Movement:
        """Return the effect on the axes of an array with the shape `old`."""
        new, axes = list(old), tuple(range(len(old)))
        if self.cut is not None:
            new[self.cut] //= self.devices
        if self.join is not None and self.is_new:
            new.insert(self.join, self.devices)
            axes = tuple(i + (i >= self.join) for i in axes)
        elif self.join is not None:
            new[self.join] *= self.devices
        return Movement(tuple(new), axes)

    def touched(self) -> list[int]:
        """Return the old axes along which the result has other entries."""
        return [i for i in (self.cut, None if self.is_new else self.join) if i is not None]

    def run(self, x: Any) -> Any:
        """Run the collective on an array, with JAX's own primitives."""
        groups = {"axis_index_groups": self.groups}
        if self.cut is not None and self.join is not None:
            return lax.all_to_all(x, self.names, self.cut, self.join, tiled=True, **groups)
        if self.cut is not None:
            size = x.shape[self.cut] // self.devices
            start = lax.axis_index(self.names) * size
            return lax.dynamic_slice_in_dim(x, start, size, self.cut)
        if self.join is None:
            return x
        return find_primitive(self.gather).bind(
            vary_along(self.names, x),
            axis_name=self.names,
            all_gather_dimension=self.join,
            axis_size=self.devices,
            tiled=not self.is_new,
            **(groups if self.gather == "all_gather" else {}),
        )

    def for_leaf(self, leaf: Leaf, old: Shape, is_checked: bool, is_same: bool) -> Any:
        """Return the exchange of a leaf, or NotImplemented.

        **Arguments:**

        - `old`: the shape of the dense array.
        - `is_checked`: whether JAX tracks which arrays may differ between devices (`check_vma`).
        - `is_same`: whether, according to that, all devices have the same leaf.
        """
        axis_map = leaf.axis_map()
        axis_of = lambda i: leaf.axes[axis_map[i]] if i in axis_map else None
        cut, join = self.cut, self.join
        if cut is not None:
            axis: Any = axis_of(cut)
            if not _has_whole_blocks(axis, old[cut] // self.devices):
                return NotImplemented
            cut = None if axis is None or axis.block == "shared" else axis_map[cut]
        if self.is_new and join is not None:
            stay = [*range(len(old))]
            join = leaf.arrange([*stay[:join], None, *stay[join:]]).index(None)
        elif join is not None:
            axis = axis_of(join)
            if axis is None or axis.block == "shared":
                if axis is None and not is_same:
                    return NotImplemented
                join = None if is_same else axis_map[join]
            elif _has_whole_blocks(axis, old[join]):
                join = axis_map[join]
            else:
                return NotImplemented
        if cut is not None and join is None and self.groups is not None:
            return NotImplemented  # a device does not know its index in its group
        # Then the result of the leaf is the same on all devices.
        is_sent_whole = is_checked and self.groups is None and self.cut is not None and cut is None
        gather = "all_gather_invariant" if is_sent_whole else self.gather
        return self._replace(cut=cut, join=join, gather=gather)


def _has_whole_blocks(axis: LeafAxis | None, size: int) -> bool:
    """Return whether a part of a dense axis, with this size, has no partial block."""
    if axis is None or axis.block == "shared":
        return True
    return axis.block != "whole" and size % axis.block == 0


def exchange_leaves(x: Value, exchange: Exchange) -> Any:
    """Run a collective on the stored leaves of a value. Return the result, or NotImplemented."""
    x = x._movable()
    layout, old = layout_of(x), x.aval().shape
    movement = exchange.movement(old)
    if not can_move(x, layout, movement, exchange.touched()):
        return NotImplemented
    varying = varying_axes(*jax.tree.leaves(x)) & {*exchange.names}
    steps = []
    for part, leaf in zip(layout.parts, layout.leaves, strict=True):
        is_same = bool(varying) and not varying & varying_axes(*jax.tree.leaves(part))
        steps.append(exchange.for_leaf(leaf, old, bool(varying), is_same))
    if any(step is NotImplemented for step in steps):
        return NotImplemented
    parts = map(partial(_exchange_part, x), layout.parts, steps)
    return rebuild(layout.structure, [*parts], movement)


def _exchange_part(x: Value, part: Any, step: Exchange) -> Any:
    if not step.touched() and not step.is_new:
        return part
    if isinstance(part, type(x)):  # see `leaf_movement.move`
        out = exchange_leaves(part, step)
        return step.run(part.materialise()) if out is NotImplemented else out
    return redispatch(step.run, part) if isinstance(part, Value) else step.run(part)


def _add_gather_rule(primitive: str) -> None:
    @leaf_rule(primitive)
    def _(
        x: Value,
        *,
        all_gather_dimension: int,
        axis_name: Any,
        axis_size: int,
        tiled: bool,
        axis_index_groups: Any = None,
    ) -> Any:
        names, join = _as_names(axis_name), all_gather_dimension
        exchange = Exchange(names, axis_index_groups, axis_size, None, join, not tiled, primitive)
        return exchange_leaves(x, exchange)


for _name in ("all_gather", "all_gather_invariant"):
    _add_gather_rule(_name)


@leaf_rule("all_to_all")
def _all_to_all(
    x: Value,
    *,
    split_axis: int,
    concat_axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    tiled: bool,
) -> Any:
    del tiled  # lax.all_to_all expands and squeezes axes around the primitive
    names, groups = _as_names(axis_name), axis_index_groups
    devices = prod(map(lax.axis_size, names)) if groups is None else len(groups[0])
    return exchange_leaves(x, Exchange(names, groups, devices, cut=split_axis, join=concat_axis))


@leaf_rule("ppermute")
def _ppermute(x: Value, *, perm: Any, axis_name: Sequence[str]) -> Any:
    # A device that receives nothing gets zeros. Leaves of zeros may represent another array.
    if {to for _, to in perm} != {*range(prod(map(lax.axis_size, axis_name)))}:
        return NotImplemented
    return permute(x, perm, axis_name)


def permute(x: Value, perm: Any, axis_name: Sequence[str]) -> Value:
    """Apply `lax.ppermute` to each leaf. A device that receives nothing gets leaves of zeros."""
    return _bind_leaves("ppermute", x, axis_name, perm=perm)


@leaf_rule("pbroadcast")
def _pbroadcast(x: Value, *, axis_name: Any, source: int) -> Value:
    return _bind_leaves("pbroadcast", x, axis_name, source=source)


def _bind_leaves(primitive: str, x: Value, axis_name: Any, **params: Any) -> Value:
    """Bind a primitive with each leaf, marked as varying along the axes that any leaf varies."""
    varying = tuple(varying_axes(*jax.tree.leaves(x)) & {*_as_names(axis_name)})
    bind = partial(find_primitive(primitive).bind, axis_name=axis_name, **params)
    return jax.tree.map(lambda leaf: bind(vary_along(varying, leaf)), x)


def _as_names(axis_name: Any) -> Sequence[str]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
