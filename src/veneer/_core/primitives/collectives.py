"""Rules of collectives that send elements between devices, for all types.

A collective cuts the array along an axis and sends one slice to each device, or it sends the whole
array to all. Each device concatenates the received slices along an axis, or keeps one slice. A
leaf may lack one or both of these axes, which determines the collective of the leaf:

| leaf has the axis to cut | leaf has the axis to concatenate along | collective of the leaf |
|---|---|---|
| no | yes | `all_gather` |
| yes | yes | `all_to_all` |
| no | no, and all devices have the same leaf | none |
| yes | no, and all devices have the same leaf | none; each device slices its own leaf |

The rules return NotImplemented in two cases: if a block (dense elements that share a leaf entry)
would be cut, or if devices have different leaves and the leaf has no axis to concatenate along.
There is no rule for sums, because a sum of codes has no meaning.
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
from ..trace import redispatch
from ..value import Value
from .leaves import Leaf, can_move, layout_of, leaf_rule, rebuild


class Exchange(NamedTuple):
    """A collective that sends slices of an array, or the whole array, to other devices.

    **Arguments:**

    - `names`: the mesh axes along which devices send.
    - `groups`: the groups of devices that send to each other. None if all are one group.
    - `devices`: the number of devices in a group.
    - `cut`: the axis along which the array is cut, with a slice for each device. None if the whole
      array is sent to all devices.
    - `join`: the axis along which received slices are concatenated. None if devices keep one slice.
    - `is_new`: whether `join` is a new axis, along which the slices are stacked.
    - `gather`: the name of the primitive to use if `cut` is None.
    """

    names: Sequence[str]
    groups: Any
    devices: int
    cut: int | None
    join: int | None
    is_new: bool = False
    gather: str = "all_gather"

    def movement(self, old_shape: Shape) -> Movement:
        """Return the new shape of an array of shape `old_shape`, and the new index of each axis."""
        new_shape, axes = list(old_shape), tuple(range(len(old_shape)))
        if self.cut is not None:
            new_shape[self.cut] //= self.devices
        if self.join is not None and self.is_new:
            new_shape.insert(self.join, self.devices)
            axes = tuple(i + (i >= self.join) for i in axes)
        elif self.join is not None:
            new_shape[self.join] *= self.devices
        return Movement(tuple(new_shape), axes)

    def changed_axes(self) -> list[int]:
        """Return the axes along which the operand is cut or concatenated."""
        return [i for i in (self.cut, None if self.is_new else self.join) if i is not None]

    def run(self, x: Any) -> Any:
        """Run the collective on a dense array, with JAX's primitives."""
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

    def for_leaf(self, leaf: Leaf, dense_shape: Shape, is_checked: bool, is_same: bool) -> Any:
        """Return the collective to run on a leaf in place of this collective on the dense array.

        The results of all leaves then represent the result of the dense array. Return
        NotImplemented if there is no such collective.

        `is_checked` says whether JAX knows which arrays may differ between devices (`check_vma`).
        `is_same` says whether JAX knows that all devices have the same leaf.
        """
        axis_map = leaf.axis_map()
        axis_of = lambda i: leaf.axes[axis_map[i]] if i in axis_map else None
        # Map the axis to cut to the leaf. All slices of a shared axis have the same entry.
        cut = self.cut
        if cut is not None:
            axis: Any = axis_of(cut)
            if not _has_whole_blocks(axis, dense_shape[cut] // self.devices):
                return NotImplemented
            cut = None if axis is None or axis.block == "shared" else axis_map[cut]
        # Map the axis to concatenate along.
        join = self.join
        if join is not None and self.is_new:
            kept_axes = [*range(len(dense_shape))]
            join = leaf.arrange([*kept_axes[:join], None, *kept_axes[join:]]).index(None)
        elif join is not None:
            axis = axis_of(join)
            if is_same and (axis is None or axis.block == "shared"):
                join = None
            elif axis is None or not _has_whole_blocks(axis, dense_shape[join]):
                return NotImplemented
            else:
                join = axis_map[join]
        if cut is not None and join is None and self.groups is not None:
            return NotImplemented  # a device does not know its index in its group
        # If only the dense array is cut, all devices gather one leaf: the result does not vary.
        is_invariant = is_checked and self.groups is None and self.cut is not None and cut is None
        gather = "all_gather_invariant" if is_invariant else self.gather
        return self._replace(cut=cut, join=join, gather=gather)


def _has_whole_blocks(axis: LeafAxis | None, size: int) -> bool:
    """Return whether a slice of `size` dense elements along an axis has no partial block.

    A block is a group of dense elements that share one entry of a leaf. `axis` is the axis of the
    leaf, or None if the leaf lacks the axis.
    """
    if axis is None or axis.block == "shared":
        return True
    return axis.block != "whole" and size % axis.block == 0


def exchange_leaves(x: Value, exchange: Exchange) -> Any:
    """Run a collective on the leaves of an implicit array, and rebuild the array from the results.

    Return NotImplemented if the results could not represent the result of the dense array.
    """
    x = x._movable()
    layout, old_shape = layout_of(x), x.aval().shape
    movement = exchange.movement(old_shape)
    if not can_move(x, layout, movement, exchange.changed_axes()):
        return NotImplemented
    varying = varying_axes(*jax.tree.leaves(x)) & {*exchange.names}
    is_checked = bool(varying)  # without `check_vma`, no array is typed as varying
    leaf_exchanges = []
    for part, leaf in zip(layout.parts, layout.leaves, strict=True):
        is_same = is_checked and not varying & varying_axes(*jax.tree.leaves(part))
        leaf_exchanges.append(exchange.for_leaf(leaf, old_shape, is_checked, is_same))
    if any(leaf_exchange is NotImplemented for leaf_exchange in leaf_exchanges):
        return NotImplemented
    parts = map(partial(_exchange_part, x), layout.parts, leaf_exchanges)
    return rebuild(layout.structure, [*parts], movement)


def _exchange_part(x: Value, part: Any, exchange: Exchange) -> Any:
    """Run a collective on `part`, one part of `x`: a leaf, or an implicit array in a field.

    `exchange` is the collective for this part, a result of `Exchange.for_leaf`.
    """
    if not exchange.changed_axes() and not exchange.is_new:
        return part
    if isinstance(part, type(x)):  # storage of `x`, such as quantized scales: report nothing
        out = exchange_leaves(part, exchange)
        return exchange.run(part.materialise()) if out is NotImplemented else out
    return redispatch(exchange.run, part) if isinstance(part, Value) else exchange.run(part)


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
    """Apply `lax.ppermute` to each leaf. A device that receives nothing gets zeros as leaves."""
    return _bind_leaves("ppermute", x, axis_name, perm=perm)


@leaf_rule("pbroadcast")
def _pbroadcast(x: Value, *, axis_name: Any, source: int) -> Value:
    return _bind_leaves("pbroadcast", x, axis_name, source=source)


def _bind_leaves(primitive: str, x: Value, axis_name: Any, **params: Any) -> Value:
    """Bind a collective with each leaf of `x`, and return the results as an implicit array.

    JAX requires that each operand varies along the mesh axes of the collective. So first type each
    leaf as varying along these axes if any leaf of `x` varies along them.
    """
    varying = tuple(varying_axes(*jax.tree.leaves(x)) & {*_as_names(axis_name)})
    bind = partial(find_primitive(primitive).bind, axis_name=axis_name, **params)
    return jax.tree.map(lambda leaf: bind(vary_along(varying, leaf)), x)


def _as_names(axis_name: Any) -> Sequence[str]:
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
