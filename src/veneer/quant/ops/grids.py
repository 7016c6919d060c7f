"""The leaves of a QArray as grids, of which each entry goes with a block of the values.

An entry of the scale goes with a tile. An entry of the packed axis is a *unit*: the bytes that hold
a run of codes, one or several, and nothing of others (`packing.UNITS`). What a primitive does to
the values, a rule does to the entries of each grid, and looks neither into tiles nor into units.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..formats.packing import UNITS, Packing, unpack
from ..formats.tiles import Leaf, Shape
from ..qarray import QArray


class Grid(NamedTuple):
    """How a leaf covers the values.

    **Arguments:**

    - `leaf`: the field of the QArray: packed, scale or zero_point.
    - `shape`: how many entries there are along each axis.
    - `block`: how many neighbours an entry goes with along each axis; the last may have fewer.
    """

    leaf: str
    shape: Shape
    block: Shape

    def is_shared(self, axis: int) -> bool:
        """Whether any values along the axis go with the one entry there: codes never share."""
        return self.leaf != "packed" and self.shape[axis] == 1


def grids(q: QArray) -> dict[str, Grid]:
    """Returns the grid of each leaf that `q` has."""
    shapes = {"packed": q.shape, "scale": q.scale.shape}
    if q.zero_point is not None:
        shapes["zero_point"] = q.zero_point.shape
    found = {}
    for leaf, shape in shapes.items():
        # An axis of size 0 may have a scale of size 0, too.
        block = [max(1, size // max(1, count)) for size, count in zip(q.shape, shape, strict=True)]
        found[leaf] = Grid(leaf, shape, tuple(block))
    if q.packing is not None:
        axis, size = q.packing
        codes, _ = _unit(q)
        units, covered = list(q.shape), [1] * q.ndim
        units[axis], covered[axis] = -(-size // codes), codes
        found["packed"] = Grid("packed", tuple(units), tuple(covered))
    return found


def _unit(q: QArray) -> tuple[int, int]:
    return UNITS[q.format.bits]


def without_needless_packing(q: QArray) -> QArray:
    """Returns `q` with one code a byte where a packed axis has size 1, which is no larger."""
    if q.packing is None or q.packing.size != 1:
        return q
    packed = q.packed
    if _unit(q)[1] > 1:
        packed = unpack(packed, q.packing, q.format.bits)
    return q.replace(packed=packed, packing=None)


# Moves a leaf, which is an array of the shape of its grid, or a QArray where a scale is one.
Step = Callable[[Any], Any]


def move(
    q: QArray,
    plan: Callable[[Grid], Any],
    shape: Shape,
    axis_to: Callable[[int], int] = lambda axis: axis,
) -> Any:
    """Returns the QArray whose leaves are those of `q`, moved.

    **Arguments:**

    - `plan`: from a grid to the `Step` that moves its leaf; NotImplemented where that would cut a
      block in two.
    - `shape`: the new one of the values.
    - `axis_to`: where the packed axis goes, both counted from the front.

    **Returns:** NotImplemented where `plan` does for the codes or a scale.
    """
    q = without_needless_packing(q)
    leaves = {}
    for name, grid in grids(q).items():
        step = plan(grid)
        if step is NotImplemented:
            return NotImplemented
        if name == "packed":
            leaves[name] = move_codes([q], functools.partial(_move_one, step), axis_to)
        else:
            leaves[name] = move_scale(getattr(q, name), step)
    return rebuild(q, leaves, shape, axis_to)


def _move_one(step: Step, leaves: Sequence[Leaf]) -> jax.Array:
    (leaf,) = leaves
    return step(leaf)


def move_scale(scale: Leaf | QArray, step: Step) -> Any:
    """Does `step` to a scale, or to what it is worth where its own format would be cut."""
    moved = step(scale)
    if moved is NotImplemented and isinstance(scale, QArray):
        return step(scale.dequantize())
    return moved


def move_codes(
    operands: Sequence[QArray],
    step: Callable[[Sequence[Leaf]], jax.Array],
    axis_to: Callable[[int], int],
) -> jax.Array:
    """Does `step` to the packed leaves of QArrays whose grids agree on what a unit is."""
    packed = [q.packed for q in operands]
    first = operands[0]
    if first.packing is None or (bytes_ := _unit(first)[1]) == 1:
        return step(packed)
    # Where a unit is several bytes, it is done to the first of each, to the second, ...
    axis = first.ndim + first.packing.axis
    units = [
        jnp.reshape(x, (*x.shape[:axis], x.shape[axis] // bytes_, bytes_, *x.shape[axis + 1 :]))
        for x in packed
    ]
    to = axis_to(axis)
    new = jax.vmap(step, in_axes=axis + 1, out_axes=to + 1)(units)
    return new.reshape(*new.shape[:to], new.shape[to] * bytes_, *new.shape[to + 2 :])


def rebuild(
    q: QArray, leaves: dict[str, Any], shape: Shape, axis_to: Callable[[int], int]
) -> QArray:
    """Returns `q` with other leaves, which stand for values of `shape`."""
    packing = None
    if q.packing is not None:
        axis = axis_to(q.ndim + q.packing.axis)
        packing = Packing(axis - len(shape), shape[axis])
    return q.replace(**leaves, packing=packing)
