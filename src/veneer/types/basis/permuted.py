"""`Permuted`: an array whose entries along an axis are stored in another order."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.leaf_axes import LeafAxis, Movement, aligned
from ..._core.transform import redispatch
from ..._core.tree import static
from .in_basis import InBasis, Places, alongside


class Permuted(InBasis):
    """An array of which slices along an axis are stored in another order, as those of a tile side
    by side: entry `order[k]` along the axis is entry `k` of `array`.

    A product that sums over the axis permutes its other operand, once, and multiplies by `array` as
    it lies; one that does not permutes its result. So is a quantised weight kept whose columns were
    sorted by their importance before they were put in groups.

    **Algebra:** products; transposes, slices of other axes and other movements; conversions; rows
    that are looked up come out in order. Everything else is dense.

    **Arguments:**

    - `array`: of any rank, dense or implicit, as a `QArray`.
    - `order`: int32, a permutation along `axis`, of the rank of `array`, and of size 1 or that of
      `array` along each other axis.
    - `axis`: counted from the end.

    **Raises:** `TypeError` for an order that is no array of integers; `ValueError` where its shape
    does not fit, or the axis is none.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Permuted(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2, 0, 1]]))
    >>> w.materialise().tolist(), (jnp.array([10.0, 1.0, 0.1]) @ w.T).tolist()
    ([[2.0, 3.0, 1.0]], [23.1...])
    """

    array: Any
    order: jax.Array | np.ndarray
    axis: int = static(default=-1)

    def __post_init__(self) -> None:
        shape, axes = tuple(self.array.shape), tuple(self.order.shape)
        if not jnp.issubdtype(self.order.dtype, jnp.integer):
            raise TypeError(f"order is a permutation, of integers, not {self.order.dtype.name}")
        if not -len(shape) <= self.axis < 0:
            raise ValueError(f"axis is negative, of an array of shape {shape}, not {self.axis}")
        others = list(axes)
        if len(axes) == len(shape):
            others[self.axis] = shape[self.axis] if axes[self.axis] == shape[self.axis] else -1
        if len(axes) != len(shape) or any(
            n not in (1, m) for n, m in zip(others, shape, strict=True)
        ):
            raise ValueError(
                f"order has shape {axes}, which is not that of {shape} along axis {self.axis}, and "
                "1 or the same along others"
            )

    def with_array(self, array: Any) -> "Permuted":
        """`array` in the same order."""
        return Permuted(array, self.order, self.axis)

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """The axis; None where the order varies along one that is not in a batch."""
        axis = self.ndim + self.axis
        varies = {i for i, n in enumerate(self.order.shape) if n != 1 and i != axis}
        return {axis} if varies <= {*batch} else None

    def into_basis(self, x: Any, places: Places) -> Any:
        """The entries of x in the order of those of `array`."""
        order = alongside(self.order, places, jnp.ndim(x))
        return _taken(x, order, places[self.ndim + self.axis])

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """The entries of x in order."""
        place = places[self.ndim + self.axis]
        return _taken(x, jnp.argsort(alongside(self.order, places, jnp.ndim(x)), place), place)

    def stored(self, dense: Any) -> Any:
        """The entries of a dense array, permuted."""
        return self.into_basis(dense, {axis: axis for axis in range(self.ndim)})

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Permuted | None":
        """This array, if the axis stays one, and there is one order."""
        if self.order.size != self.order.shape[self.axis]:
            return None
        for old_axes, (axis, *others) in groups:
            if old_axes == [self.ndim + self.axis] and not others:
                sizes = [self.order.size if i == axis else 1 for i in range(len(new))]
                return Permuted(array, jnp.reshape(self.order, sizes), axis - len(new))
        return None

    def leaf_axes(self) -> Any:
        """The axis is whole; of others, `order` has those along which it differs."""
        axis = self.ndim + self.axis

        def whole(at: LeafAxis, size: int) -> LeafAxis:
            if at.axis == self.axis:
                return at._replace(block="whole")
            return at if size == self.shape[at.axis] else at._replace(block="shared")

        axes = aligned(self.ndim)
        array = [whole(at, size) for at, size in zip(axes, self.shape, strict=True)]
        assert array[axis].block == "whole"
        return [array, list(map(whole, axes, self.order.shape))]

    def _moved(self, movement: Movement) -> Any:
        """This array, whose leaves were moved, permuted along the axis that now is, if it is."""
        # By the movement: leaves may be specs here, of which no rank is known.
        axis = movement.axes[self.axis]
        if axis is None:  # of size 1, and gone
            return NotImplemented
        new = object.__new__(Permuted)
        parts = {"array": self.array, "order": self.order, "axis": int(axis) - len(movement.shape)}
        new.__dict__.update(parts)
        return new


def _taken(x: Any, indices: jax.Array, axis: int) -> Any:
    """The slices of x at indices along an axis, which differ along axes that are not of size 1."""
    if indices.size == indices.shape[axis]:
        take = lambda x, i: jnp.take(x, i, axis, mode="clip", unique_indices=True)
        return redispatch(take, x, indices.reshape(-1))
    along = lambda x, i: jnp.take_along_axis(x, i, axis, mode="clip")
    return redispatch(along, x, indices)
