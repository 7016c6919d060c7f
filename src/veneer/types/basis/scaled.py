"""`Scaled`: an array stored divided by factors."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.leaf_axes import LeafAxis, Movement, aligned_axes
from ..._core.transform import redispatch
from ..axes import Leaf, check_arrays
from .in_basis import InBasis, Places, align


class Scaled(InBasis):
    """An array `array * factor`, stored as `array` and a factor per channel.

    If a product contracts the channel axis, the other operand is multiplied by `factor`, and then
    multiplied with `array`. Otherwise the other operand is multiplied with `array`, and then the
    result is multiplied by `factor`. Two calibration methods use this. AWQ (Lin et al., arXiv
    2306.00978) scales up the channels with large activations before it rounds the weight, so the
    rounding errors of these channels are smaller. SmoothQuant (Xiao et al., arXiv 2211.10438)
    divides large activations by a factor, and multiplies their weights by the same factor.

    **Keeps the structure:** transposes, slices, reshapes, row lookups, and floating dtype
    conversions.

    **Materializes:** elementwise functions and sums.

    **Arguments:**

    - `array`: a floating array of any shape, dense or implicit, such as a `QArray`.
    - `factor`: a floating array with the rank of `array`. Along each axis, its size is 1 or the
      size of `array`.

    **Raises:**

    - `TypeError` if `array` or `factor` is not a floating array.
    - `ValueError` if `factor` has another shape than stated above.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Scaled(jnp.ones((3, 2)), jnp.array([[1.0], [10.0], [100.0]]))
    >>> (jnp.array([1.0, 2.0, 3.0]) @ w).tolist()
    [321.0, 321.0]
    """

    trainable: ClassVar[tuple[str, ...] | None] = ("array", "factor")

    array: Any
    factor: jax.Array | np.ndarray

    def __post_init__(self) -> None:
        check_arrays(self, Leaf, "array", "factor")
        shape, sizes = tuple(self.array.shape), tuple(self.factor.shape)
        for name in ("array", "factor"):
            dtype = getattr(self, name).dtype
            if not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(f"{name} must be floating, not {dtype.name}")
        if len(sizes) != len(shape) or any(
            n not in (1, size) for n, size in zip(sizes, shape, strict=True)
        ):
            raise ValueError(
                f"factor has shape {sizes}, but must have the rank of the array {shape}, and "
                "along each axis its size or 1"
            )

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the axes outside of `batch` along which `factor` has more than one entry."""
        return {i for i, n in enumerate(self.factor.shape) if n != 1 and i not in batch}

    def into_basis(self, x: Any, places: Places) -> Any:
        multiply = lambda x, factor: (x * factor).astype(x.dtype)
        return redispatch(multiply, x, align(self.factor, places, jnp.ndim(x)))

    def out_of_basis(self, x: Any, places: Places) -> Any:
        return self.into_basis(x, places)

    def stored(self, dense: Any) -> Any:
        """Divide a dense array by the factors."""
        return (dense / self.factor).astype(dense.dtype)

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Scaled":
        """Return the result of a reshape, which stores the reshaped `array`.

        If axes are split or merged, and `factor` has several entries along one of them, `factor` is
        first broadcast to the sizes of these axes.
        """
        sizes, broadcast = [1] * len(new), list(self.factor.shape)
        for old_axes, new_axes in groups:
            if math.prod(broadcast[axis] for axis in old_axes) != 1:
                for axis in old_axes:
                    broadcast[axis] = self.shape[axis]
                for axis in new_axes:
                    sizes[axis] = new[axis]
        return Scaled(array, jnp.broadcast_to(self.factor, broadcast).reshape(sizes))

    def leaf_axes(self) -> Any:
        """Return a `vn.LeafAxis` per axis of each leaf.

        A slice of the array slices `factor` too, except along axes where `factor` has size 1.
        """

        def factor_axis(axis: LeafAxis, size: int) -> LeafAxis:
            return axis if size == self.shape[axis.axis] else axis._replace(block="shared")

        axes = aligned_axes(self.ndim)
        return [axes, [*map(factor_axis, axes, self.factor.shape)]]

    def _moved(self, movement: Movement) -> "Scaled":
        return self
