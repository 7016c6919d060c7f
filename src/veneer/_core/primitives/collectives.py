"""Rules for what sends entries to other devices: leaf by leaf, for every type, as it is stored.

A collective cuts an array along an axis, of which each device is sent another part, or sends all of
it; and puts what comes in side by side along an axis, or keeps the one that comes. So does a leaf,
along the axes of its own that follow these:

| of the axis that is cut | of that along which parts are put | a leaf goes by |
|---|---|---|
| nothing | entries | `all_gather` |
| entries | entries | `all_to_all` |
| nothing | nothing: all devices have the same | nothing |
| entries | nothing: all devices have the same | its own part, which nobody sends |

They decline what would cut a block of entries in two, or put together what differs along an axis
that a leaf does not follow; and sums, for those of codes stand for nothing: all that is dense.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax

from ..._jax.primitives import find_primitive
from ..._jax.tracing import vary_along, varying_axes
from ..leaf_axes import LeafAxis, Movement
from ..rules import add_rule
from ..transform import redispatch
from ..value import Value, aval_of
from .batch_axes import layout_of
from .leaf_by_leaf import Leaf, MovementPlan, allows, rebuilt


class Exchange(NamedTuple):
    """A collective, by what it does to the axes of an array, or of a leaf.

    **Arguments:**

    - `names`: the axes of the mesh along which devices send.
    - `groups`: of devices, which send within each; None is one of all.
    - `devices`: how many there are in one.
    - `cut`: the axis of which each device is sent another part; None where it is sent all.
    - `join`: the axis along which what comes in is put side by side; None where one is kept.
    - `is_new`: whether that is an axis which only the result has.
    - `gather`: the primitive that puts together.
    """

    names: Sequence[str]
    groups: Any
    devices: int
    cut: int | None
    join: int | None
    is_new: bool = False
    gather: str = "all_gather"

    def movement(self, old: tuple[int, ...]) -> Movement:
        """What becomes of the axes of an array of the shape `old`."""
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
        """The axes of which there is another number of entries, or which have other ones."""
        return [i for i in (self.cut, None if self.is_new else self.join) if i is not None]

    def of_array(self, x: Any) -> Any:
        """What comes of an array, by JAX's own primitives."""
        groups = {} if self.groups is None else {"axis_index_groups": self.groups}
        if self.cut is not None and self.join is not None:
            return lax.all_to_all(x, self.names, self.cut, self.join, tiled=True, **groups)
        if self.cut is not None:
            size = x.shape[self.cut] // self.devices
            at = lax.axis_index(self.names) * size
            return lax.dynamic_slice_in_dim(x, at, size, self.cut)
        if self.join is None:
            return x
        if self.gather == "all_gather":
            groups["axis_index_groups"] = self.groups
        params = {"all_gather_dimension": self.join, "axis_size": self.devices, **groups}
        bind = partial(find_primitive(self.gather).bind, axis_name=self.names, **params)
        return bind(vary_along(self.names, x), tiled=not self.is_new)

    def of_leaf(self, leaf: Leaf, old: tuple[int, ...], known: bool, is_same: bool) -> Any:
        """What comes of a leaf of an array of the shape `old`, or NotImplemented.

        `known` says whether an account is kept of what may differ between devices, and `is_same`
        whether by that all have the same.
        """
        places = leaf.places()
        axis_at = lambda i: None if i not in places else leaf.axes[places[i]]
        cut, join = self.cut, self.join
        if cut is not None:
            axis: Any = axis_at(cut)
            if not _ends_with_a_block(axis, old[cut] // self.devices):
                return NotImplemented
            cut = None if axis is None or axis.block == "shared" else places[cut]
        if self.is_new and join is not None:
            stay = [*range(len(old))]
            join = leaf.order([*stay[:join], None, *stay[join:]]).index(None)
        elif join is not None:
            axis = axis_at(join)
            if axis is None or axis.block == "shared":
                if axis is None and not is_same:
                    return NotImplemented
                join = None if is_same else places[join]
            elif _ends_with_a_block(axis, old[join]):
                join = places[join]
            else:
                return NotImplemented
        if cut is not None and join is None and self.groups is not None:
            return NotImplemented  # whose number in its group a device does not know
        # Of what is sent to all, all have the same then.
        is_sent_to_all = known and self.groups is None and self.cut is not None and cut is None
        gather = "all_gather_invariant" if is_sent_to_all else self.gather
        return self._replace(cut=cut, join=join, gather=gather)


def _ends_with_a_block(axis: LeafAxis | None, size: int) -> bool:
    """Whether a part of an axis, of a `size`, is of whole blocks."""
    if axis is None or axis.block == "shared":
        return True
    return axis.block != "whole" and size % axis.block == 0


def exchanged(x: Value, exchange: Exchange) -> Any:
    """A value of which each leaf is exchanged as it is stored, or NotImplemented."""
    x = x._movable()
    layout, old = layout_of(x), x.aval().shape
    movement = exchange.movement(old)
    if not allows(x, layout, MovementPlan(movement, lambda leaf: leaf, exchange.touched())):
        return NotImplemented
    # Inside a shard_map that keeps account of it, each leaf says whether it varies.
    known = varying_axes(*jax.tree.leaves(x)) & {*exchange.names}
    steps = []
    for i, (part, axes) in enumerate(zip(layout.parts, layout.axes, strict=True)):
        in_front = [axis and axis._replace(axis=axis.axis + len(old)) for axis in axes]
        is_same = bool(known) and not known & varying_axes(*jax.tree.leaves(part))
        leaf = Leaf(aval_of(part).shape, in_front, i)
        steps.append(exchange.of_leaf(leaf, old, bool(known), is_same))
    if any(step is NotImplemented for step in steps):
        return NotImplemented
    parts = map(partial(_exchanged_part, x), layout.parts, steps)
    return rebuilt(layout.structure, [*parts], movement)


def _exchanged_part(x: Value, part: Any, step: Exchange) -> Any:
    if not step.touched() and not step.is_new:
        return part
    if isinstance(part, type(x)):  # a matter of how x is stored (quantised scales): dense, no news
        out = exchanged(part, step)
        return step.of_array(part.materialise()) if out is NotImplemented else out
    return redispatch(step.of_array, part) if isinstance(part, Value) else step.of_array(part)


def _gathers_by(primitive: str) -> Callable[..., Any]:
    """The rule of one of JAX's primitives that gather what all devices have."""

    def rule(
        x: Value,
        *,
        all_gather_dimension: int,
        axis_name: Any,
        axis_size: int,
        tiled: bool,
        axis_index_groups: Any = None,
    ) -> Any:
        names, join = _names(axis_name), all_gather_dimension
        exchange = Exchange(names, axis_index_groups, axis_size, None, join, not tiled, primitive)
        return exchanged(x, exchange)

    return rule


def _all_to_all(
    x: Value,
    *,
    split_axis: int,
    concat_axis: int,
    axis_name: Any,
    axis_index_groups: Any,
    tiled: bool,
) -> Any:
    del tiled  # lax.all_to_all has made an axis where it is not, and squeezes it afterwards
    names, groups = _names(axis_name), axis_index_groups
    devices = prod(map(lax.axis_size, names)) if groups is None else len(groups[0])
    return exchanged(x, Exchange(names, groups, devices, cut=split_axis, join=concat_axis))


def _ppermute(x: Value, *, perm: Any, axis_name: Sequence[str]) -> Any:
    # Who is sent nothing has zeros, and leaves that are zero need not stand for that.
    if {to for _, to in perm} != {*range(prod(map(lax.axis_size, axis_name)))}:
        return NotImplemented
    return permute(x, perm, axis_name)


def permute(x: Value, perm: Any, axis_name: Sequence[str]) -> Value:
    """`lax.ppermute` of each leaf: who is sent nothing has zeros in each."""
    return _each_leaf("ppermute", x, axis_name, perm=perm)


def _pbroadcast(x: Value, *, axis_name: Any, source: int) -> Value:
    return _each_leaf("pbroadcast", x, axis_name, source=source)


def _each_leaf(primitive: str, x: Value, axis_name: Any, **params: Any) -> Value:
    """The value of another device, whose leaves vary where those that are sent do."""
    known = tuple(varying_axes(*jax.tree.leaves(x)) & {*_names(axis_name)})
    bind = partial(find_primitive(primitive).bind, axis_name=axis_name, **params)
    return jax.tree.map(lambda leaf: bind(vary_along(known, leaf)), x)


def _names(axis_name: Any) -> Sequence[str]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


RULES: dict[str, Callable[..., Any]] = {
    "all_gather": _gathers_by("all_gather"),
    "all_gather_invariant": _gathers_by("all_gather_invariant"),
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
}
for _name, _rule in RULES.items():
    add_rule(_rule, [find_primitive(_name)], conditional=True)
