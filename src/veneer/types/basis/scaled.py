"""`Scaled`: an array that is stored divided by factors."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._core.leaf_axes import LeafAxis, Movement, aligned
from ..._core.transform import redispatch
from .in_basis import InBasis, Places, alongside


class Scaled(InBasis):
    """An array times a factor for each of its channels, which are the entries along some axes.

    A product that sums over them multiplies its other operand by the factors, and then by `array`
    as it lies. So are channels of large activations kept with more digits than the others (AWQ,
    Lin et al., arXiv 2306.00978), or activations made as small as the weights are
    (SmoothQuant, Xiao et al., arXiv 2211.10438): `factor` is the inverse of what the weight was
    multiplied by.

    **Algebra:** products; transposes, slices and other movements; conversions; rows that are looked
    up are multiplied. Everything else is dense.

    **Arguments:**

    - `array`: of any rank, floating, dense or implicit, as a `QArray`.
    - `factor`: floating, of the rank of `array`, and along each axis of its size or 1.

    **Raises:** `TypeError` for what is not floating; `ValueError` where the shape does not fit.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = vn.types.Scaled(jnp.ones((3, 2)), jnp.array([[1.0], [10.0], [100.0]]))
    >>> (jnp.array([1.0, 2.0, 3.0]) @ w).tolist()
    [321.0, 321.0]
    """

    trainable: ClassVar[tuple[str, ...] | None] = ("array", "factor")

    array: Any
    factor: jax.Array | np.ndarray

    def __post_init__(self) -> None:
        shape, sizes = tuple(self.array.shape), tuple(self.factor.shape)
        for name in ("array", "factor"):
            dtype = getattr(self, name).dtype
            if not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(f"{name} is floating, not {dtype.name}")
        if len(sizes) != len(shape) or any(
            n not in (1, size) for n, size in zip(sizes, shape, strict=True)
        ):
            raise ValueError(
                f"factor has shape {sizes}, and for an array of shape {shape} it has the same "
                "rank, and axes of the same size or of 1"
            )

    def with_array(self, array: Any) -> "Scaled":
        """`array` with the same factors."""
        return Scaled(array, self.factor)

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """The axes along which there are factors, but for those of a batch."""
        return {i for i, n in enumerate(self.factor.shape) if n != 1 and i not in batch}

    def into_basis(self, x: Any, places: Places) -> Any:
        """x times the factors."""
        return _times(x, alongside(self.factor, places, jnp.ndim(x)))

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """x times the factors, which are their own transpose."""
        return self.into_basis(x, places)

    def stored(self, dense: Any) -> Any:
        """A dense array, divided by the factors."""
        return (dense / self.factor).astype(dense.dtype)

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Scaled":
        """This array; along axes that are split or merged, its factors are repeated."""
        sizes, whole = [1] * len(new), list(self.factor.shape)
        for old_axes, new_axes in groups:
            if math.prod(whole[axis] for axis in old_axes) != 1:
                for axis in old_axes:
                    whole[axis] = self.shape[axis]
                for axis in new_axes:
                    sizes[axis] = new[axis]
        return Scaled(array, jnp.broadcast_to(self.factor, whole).reshape(sizes))

    def leaf_axes(self) -> Any:
        """Those of the factors that are of size 1 are shared."""
        axes = aligned(self.ndim)

        def at(axis: LeafAxis, size: int) -> LeafAxis:
            return axis if size == self.shape[axis.axis] else axis._replace(block="shared")

        return [axes, list(map(at, axes, self.factor.shape))]

    def _moved(self, movement: Movement) -> "Scaled":
        """This array: nothing says where its axes are."""
        del movement
        return self


def _times(x: Any, factor: ArrayLike) -> Any:
    def times(x: jax.Array, factor: jax.Array) -> jax.Array:
        return (x * factor).astype(x.dtype)

    return redispatch(times, x, factor)
