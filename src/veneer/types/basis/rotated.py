"""`Rotated`: an array that is stored rotated along some axes, so that no entry stands out."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._core.leaf_axes import Movement, aligned_axes
from ..._core.transform import redispatch
from ..._core.tree import static
from ..axes import Leaf, check_arrays
from .in_basis import InBasis, Places
from .rotation import rotated, rotated_back


class Rotated(InBasis):
    """An array `[...]` that is stored rotated by an orthogonal matrix along some axes.

    The rotation spreads outliers of weights and activations over all entries, so quantization to
    few bits loses less accuracy. All axes of the same size are rotated by the same matrix. The
    rotation multiplies by random but fixed signs, and then by a Kronecker product of Hadamard
    matrices, or Hartley matrices for odd prime factors of the size. The product is computed one
    factor at a time (QuaRot, Ashkboos et al., arXiv 2404.00456; QuIP#, Tseng et al., arXiv
    2402.04396).

    If a product contracts the rotated axes, the other operand is rotated, and then multiplied with
    `array`. If a product contracts other axes, the other operand is multiplied with `array`, and
    then the result is rotated back.

    **Keeps the structure:** transposes, floating dtype conversions, and slices and reshapes along
    axes that are not rotated. Row lookups along another axis return dense rows, rotated back.

    **Materializes:** elementwise functions, sums, slices along a rotated axis, and products that
    contract only some of the rotated axes.

    **Arguments:**

    - `array`: the rotated floating array, of any shape, dense or implicit, such as a `QArray`. To
      rotate a dense array, call `Rotated.of`.
    - `axes`: the rotated axes, negative numbers; static. Each axis is rotated separately.

    **Raises:**

    - `TypeError` if `array` is not a floating array.
    - `ValueError` if `axes` are not negative, in range and distinct.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.zeros((64, 1)).at[3].set(8.0)
    >>> r = vn.types.Rotated.of(w)
    >>> float(abs(r.array).max()), (jnp.ones(64) @ r).round(3).tolist()
    (1.0, [8.0])
    """

    array: Any
    axes: tuple[int, ...] = static(default=(-2,))

    def __post_init__(self) -> None:
        check_arrays(self, Leaf, "array")
        shape, dtype = self.array.shape, self.array.dtype
        object.__setattr__(self, "axes", tuple(int(axis) for axis in self.axes))
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(f"Rotated takes a floating array, not {dtype.name}")
        if not all(-len(shape) <= axis < 0 for axis in self.axes) or len({*self.axes}) != len(
            self.axes
        ):
            raise ValueError(
                f"axes must be negative and distinct, for an array of shape {tuple(shape)}, "
                f"not {self.axes}"
            )

    @classmethod
    def of(cls, dense: Any, axes: Sequence[int] = (-2,)) -> "Rotated":
        """Rotate a dense array along some axes, and return it as a `Rotated`.

        **Arguments:**

        - `dense`: a floating array `[..., K, N]`.
        - `axes`: the axes to rotate, negative numbers.

        **Raises:** the same errors as `Rotated(dense, axes)`.
        """
        unrotated = cls(jnp.asarray(dense), tuple(axes))  # checks them
        return unrotated.with_array(unrotated.stored(unrotated.array))

    def with_array(self, array: Any) -> "Rotated":
        """Return a copy that stores `array`, which must already be rotated."""
        return Rotated(array, self.axes)

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the set of rotated axes, counted from the front."""
        del batch
        return {self.ndim + axis for axis in self.axes}

    def into_basis(self, x: Any, places: Places) -> Any:
        """Rotate an operand of a product like the stored array.

        **Arguments:**

        - `x`: the operand.
        - `places`: a dict from axes of this array to the corresponding axes of `x`.
        """
        for axis in self._among(places):
            x = redispatch(lambda x, at=places[axis]: rotated(x, at), x)
        return x

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """Undo the rotation of `into_basis`.

        **Arguments:**

        - `x`: an array in the rotated basis, such as the result of a product with the stored array.
        - `places`: a dict from axes of this array to the corresponding axes of `x`.
        """
        for axis in self._among(places):
            x = redispatch(lambda x, at=places[axis]: rotated_back(x, at), x)
        return x

    def stored(self, dense: Any) -> Any:
        """Rotate a dense array like the stored array."""
        return self.into_basis(dense, {axis: axis for axis in range(self.ndim)})

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Rotated | None":
        """Reshape this array, or return None if the reshape splits or merges a rotated axis."""
        axes = {self.ndim + axis for axis in self.axes if self.shape[axis] != 1}
        moved = [group for group in groups if axes & {*group[0]}]
        if any(len(old) != 1 or len(new_axes) != 1 for old, new_axes in moved):
            return None
        return Rotated(array, tuple(new_axes[0] - len(new) for _, new_axes in moved))

    def leaf_axes(self) -> Any:
        """Return a `vn.LeafAxis` per axis of the leaf. Rotated axes cannot be sliced."""
        whole = lambda at: at._replace(block="whole") if at.axis in self.axes else at
        return [list(map(whole, aligned_axes(self.ndim)))]

    def _moved(self, movement: Movement) -> "Rotated":
        """This array, whose leaves were moved, rotated along the axes that now are."""
        moved = [movement.axes[axis] for axis in self.axes]
        new = object.__new__(Rotated)  # leaves may be specs here, of which no rank is known
        axes = tuple(int(axis) - len(movement.shape) for axis in moved if axis is not None)
        new.__dict__.update({"array": self.array, "axes": axes})
        return new

    def _among(self, places: Places) -> list[int]:
        return [self.ndim + axis for axis in self.axes if self.ndim + axis in places]
