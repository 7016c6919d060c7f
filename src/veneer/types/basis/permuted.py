"""`Permuted`: an array stored in another order along an axis."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.leaf_axes import LeafAxis, Movement, aligned_axes
from ..._core.transform import redispatch
from ..._core.tree import static
from ..axes import Leaf, check_arrays
from .in_basis import InBasis, Places, align


class Permuted(InBasis):
    """An array `[...]` whose slices along one axis are stored in another order.

    Along the axis, entry `order[k]` of the dense array is stored as entry `k` of `array`. GPTQ with
    `desc_act` (Frantar et al., arXiv 2210.17323) sorts the input channels of a weight by
    importance. Channels of similar importance then share a scale. Such a weight is a `Permuted` of
    a `QArray`.

    If a product contracts the permuted axis, the other operand is permuted, and then multiplied
    with `array`. If a product contracts other axes, the other operand is multiplied with `array`,
    and then the result is permuted.

    **Keeps the structure:** transposes, floating dtype conversions, and slices and reshapes along
    axes that are not permuted. Row lookups along another axis return dense rows in the original
    order.

    **Materializes:** elementwise functions, sums, and slices along the permuted axis.

    **Arguments:**

    - `array`: the stored array, of any shape and dtype, dense or implicit, such as a `QArray`.
    - `order`: an integer array with the rank of `array`. Along `axis` it must be a permutation,
      which is not checked. Along each other axis its size is 1 if all indices of that axis share
      the permutation. Otherwise it is the size of `array`.
    - `axis`: the permuted axis, a negative number; static.

    **Raises:**

    - `TypeError` if `array` or `order` is not an array, or `order` does not contain integers.
    - `ValueError` if `order` has another shape than stated above, or `axis` is not between
      `-array.ndim` and -1.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Permuted(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2, 0, 1]]))
    >>> w.materialise().tolist(), (jnp.array([10.0, 1.0, 0.1]) @ w.T).tolist()
    ([[2.0, 3.0, 1.0]], [23.1...])
    """

    array: Any
    order: jax.Array | np.ndarray
    axis: int = static(default=-1)

    def __post_init__(self) -> None:
        check_arrays(self, Leaf, "array", "order")
        shape, sizes = tuple(self.array.shape), tuple(self.order.shape)
        if not jnp.issubdtype(self.order.dtype, jnp.integer):
            raise TypeError(f"order must hold integers, not {self.order.dtype.name}")
        if not -len(shape) <= self.axis < 0:
            raise ValueError(
                f"axis must be negative, for an array of shape {shape}, not {self.axis}"
            )
        allowed = [(1, size) for size in shape]
        allowed[self.axis] = (shape[self.axis], shape[self.axis])
        if len(sizes) != len(shape) or any(
            n not in ok for n, ok in zip(sizes, allowed, strict=True)
        ):
            raise ValueError(
                f"order has shape {sizes}, but must have the rank of the array {shape}, its size "
                f"along axis {self.axis}, and 1 or its size along other axes"
            )

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return a set with the permuted axis. None if `order` varies along axes not in `batch`."""
        axis = self.ndim + self.axis
        varies = {i for i, n in enumerate(self.order.shape) if n != 1 and i != axis}
        return {axis} if varies <= {*batch} else None

    def into_basis(self, x: Any, places: Places) -> Any:
        order = align(self.order, places, jnp.ndim(x))
        return _take(x, order, places[self.ndim + self.axis])

    def out_of_basis(self, x: Any, places: Places) -> Any:
        axis = places[self.ndim + self.axis]
        return _take(x, jnp.argsort(align(self.order, places, jnp.ndim(x)), axis), axis)

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Permuted | None":
        """Return the result of a reshape, which stores the reshaped `array`.

        Return None if the reshape splits or merges the permuted axis, or if `order` has more than
        one entry along another axis.
        """
        if self.order.size != self.order.shape[self.axis]:
            return None
        for old_axes, (axis, *others) in groups:
            if old_axes == [self.ndim + self.axis] and not others:
                sizes = [self.order.size if i == axis else 1 for i in range(len(new))]
                return Permuted(array, jnp.reshape(self.order, sizes), axis - len(new))
        return None

    def leaf_axes(self) -> Any:
        """Return a `vn.LeafAxis` per axis of each leaf. The permuted axis cannot be sliced."""

        def leaf_axis(axis: LeafAxis, size: int) -> LeafAxis:
            if axis.axis == self.axis:
                return axis._replace(block="whole")
            return axis if size == self.shape[axis.axis] else axis._replace(block="shared")

        axes = aligned_axes(self.ndim)
        return [[*map(leaf_axis, axes, sizes)] for sizes in (self.shape, self.order.shape)]

    def _moved(self, movement: Movement) -> Any:
        axis = movement.axes[self.axis]
        if axis is None:  # the permuted axis had size 1 and was removed
            return NotImplemented
        # Without the constructor: the leaves can be a PartitionSpec, which has no rank.
        new = object.__new__(Permuted)
        axis = int(axis) - len(movement.shape)
        new.__dict__.update(array=self.array, order=self.order, axis=axis)
        return new


def _take(x: Any, indices: jax.Array, axis: int) -> Any:
    """Take slices of `x` at indices along an axis. The indices can vary along other axes."""
    if indices.size == indices.shape[axis]:
        take = lambda x, i: jnp.take(x, i, axis, mode="clip", unique_indices=True)
        return redispatch(take, x, indices.reshape(-1))
    take_along_axis = lambda x, i: jnp.take_along_axis(x, i, axis, mode="clip")
    return redispatch(take_along_axis, x, indices)
