"""Rules for what sends entries to other devices: leaf by leaf, for every type, as it is stored."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
from jax import lax

from ..._jax.primitives import find_primitive
from ..._jax.tracing import varying_axes
from ..batch_axes import layout_of
from ..leaf_axes import Movement
from ..rules import add_rule
from ..transform import redispatch
from ..value import Value, aval_of
from .leaf_by_leaf import RULES, Leaf, MovementPlan, allows, rebuilt

_pvary_p = find_primitive("pvary")


def permute(x: Value, perm: Any, axis_name: Sequence[str]) -> Value:
    """`lax.ppermute` of each leaf: who is sent nothing has zeros in each."""
    known = varying_axes_of(x) & {*axis_name}
    bind = partial(find_primitive("ppermute").bind, axis_name=axis_name, perm=perm)
    return jax.tree.map(lambda leaf: bind(_varying(leaf, known)), x)


def _ppermute(x: Value, *, perm: Any, axis_name: Sequence[str]) -> Any:
    # Who is sent nothing has zeros, and leaves that are zero need not stand for that.
    if {to for _, to in perm} != {*range(prod(map(lax.axis_size, axis_name)))}:
        return NotImplemented
    return permute(x, perm, axis_name)


def _gathers_by(primitive: Any) -> Callable[..., Any]:
    """The rule of one of JAX's primitives that gather what all devices have."""

    def rule(x: Value, **params: Any) -> Any:
        return _all_gather(primitive, x, params)

    return rule


def _all_gather(primitive: Any, x: Value, params: dict[str, Any]) -> Any:
    dimension, tiled = params["all_gather_dimension"], params["tiled"]
    x = x._movable()
    layout, old = layout_of(x), x.aval().shape
    # Inside a shard_map that keeps account of it, each leaf says whether it varies.
    known = varying_axes_of(x) & {*params["axis_name"]}
    stay = [*range(len(old))]
    new = list(old)
    if tiled:
        new[dimension] *= params["axis_size"]
        movement = Movement(tuple(new), tuple(stay))
    else:
        new.insert(dimension, params["axis_size"])
        movement = Movement(tuple(new), tuple(i + (i >= dimension) for i in stay))
    touched = (dimension,) if tiled else ()
    if not allows(x, layout, MovementPlan(movement, lambda leaf: NotImplemented, touched)):
        return NotImplemented

    def place(leaf: Leaf, is_same: bool) -> Any:
        """The axis of a leaf that is gathered; None if it stays what it is on each device."""
        if not tiled:
            return leaf.order([*stay[:dimension], None, *stay[dimension:]]).index(None)
        at = leaf.places().get(dimension)
        if at is None:
            return None if is_same else NotImplemented
        axis: Any = leaf.axes[at]
        if axis.block == "shared":
            return None if is_same else at
        if axis.block == "whole" or old[dimension] % axis.block:
            return NotImplemented
        return at

    gathered = []
    for i, (part, axes) in enumerate(zip(layout.parts, layout.axes, strict=True)):
        in_front = [axis and axis._replace(axis=axis.axis + len(old)) for axis in axes]
        is_same = bool(known) and not known & varying_axes_of(part)
        at = place(Leaf(aval_of(part).shape, in_front, i), is_same)
        if at is NotImplemented:
            return NotImplemented
        if at is not None:
            one = partial(primitive.bind, **params | {"all_gather_dimension": at})
            part = redispatch(lambda part, one=one: one(_varying(part, known)), part)
        gathered.append(part)
    return rebuilt(layout.structure, gathered, movement)


def varying_axes_of(x: Any) -> frozenset[str]:
    """The manual axes along which an array or a value may differ, by its type."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(x)))


def _varying(x: Any, axes: frozenset[str]) -> Any:
    missing = axes - jax.typeof(x).mat.varying
    return _pvary_p.bind(x, axes=tuple(sorted(missing))) if missing else x


add_rule(_ppermute, [find_primitive("ppermute")], conditional=True)
for _primitive in map(find_primitive, ("all_gather", "all_gather_invariant")):
    RULES[_primitive.name] = _gathers_by(_primitive)
    add_rule(RULES[_primitive.name], [_primitive], conditional=True)
