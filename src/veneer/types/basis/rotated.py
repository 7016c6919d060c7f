"""`Rotated`: an array that is stored rotated along some axes, so that no entry stands out."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._core.leaf_axes import Movement, aligned
from ..._core.transform import redispatch
from ..._core.tree import static
from .in_basis import InBasis, Places
from .rotation import rotated, rotated_back


class Rotated(InBasis):
    """An array of which the entries along some axes are stored mixed, each of all, by an orthogonal
    matrix: signs, and Hadamard matrices where the size is a power of two.

    A product that sums over these axes rotates its other operand as it comes, by a fast transform,
    and multiplies by `array` as it lies. What stands out in few of the entries, of a weight or of
    activations, is then spread over all, and a format of few bits loses less: as QuaRot has it, and
    with no knowledge of the model.

    **Algebra:** products; transposes, slices of other axes and other movements; conversions; rows
    that are looked up are rotated back. Everything else is dense.

    **Arguments:**

    - `array`: of any rank, floating, dense or implicit, as a `QArray`; as it is when rotated.
    - `axes`: those that are rotated, each by itself, counted from the end. All are contracted by a
      product, or none is.

    **Raises:** `TypeError` for an array that is not floating; `ValueError` where an axis is none.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.zeros((64, 1)).at[3].set(8.0)
    >>> r = vn.types.Rotated.of(w)
    >>> float(abs(r.array).max()), (jnp.ones(64) @ r).round(3).tolist()
    (1.0, [8.0])
    """

    array: Any
    axes: tuple[int, ...] = static(default=(-2,))

    def __post_init__(self) -> None:
        shape, dtype = self.array.shape, self.array.dtype
        object.__setattr__(self, "axes", tuple(int(axis) for axis in self.axes))
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(f"what is rotated is floating, not {dtype.name}")
        if not all(-len(shape) <= axis < 0 for axis in self.axes) or len({*self.axes}) != len(
            self.axes
        ):
            raise ValueError(
                f"axes are negative and differ, of an array of shape {tuple(shape)}: {self.axes}"
            )

    @classmethod
    def of(cls, dense: Any, axes: Sequence[int] = (-2,)) -> "Rotated":
        """Returns what stands for a dense array, which is rotated along axes.

        **Arguments:**

        - `dense`: `[..., K, N]`, floating.
        - `axes`: counted from the end.
        """
        unrotated = cls(jnp.asarray(dense), tuple(axes))  # checks them
        return unrotated.with_array(unrotated.stored(unrotated.array))

    def with_array(self, array: Any) -> "Rotated":
        """`array`, rotated as this one is."""
        return Rotated(array, self.axes)

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """The axes that are rotated."""
        del batch
        return {self.ndim + axis for axis in self.axes}

    def into_basis(self, x: Any, places: Places) -> Any:
        """x, rotated."""
        for axis in self._among(places):
            x = redispatch(lambda x, at=places[axis]: rotated(x, at), x)
        return x

    def out_of_basis(self, x: Any, places: Places) -> Any:
        """x, rotated back."""
        for axis in self._among(places):
            x = redispatch(lambda x, at=places[axis]: rotated_back(x, at), x)
        return x

    def stored(self, dense: Any) -> Any:
        """A dense array, rotated."""
        return self.into_basis(dense, {axis: axis for axis in range(self.ndim)})

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Rotated | None":
        """This array, if each of the axes stays one."""
        axes = {self.ndim + axis for axis in self.axes if self.shape[axis] != 1}
        moved = [group for group in groups if axes & {*group[0]}]
        if any(len(old) != 1 or len(new_axes) != 1 for old, new_axes in moved):
            return None
        return Rotated(array, tuple(new_axes[0] - len(new) for _, new_axes in moved))

    def leaf_axes(self) -> Any:
        """Those that are rotated are whole."""
        whole = lambda at: at._replace(block="whole") if at.axis in self.axes else at
        return [list(map(whole, aligned(self.ndim)))]

    def _moved(self, movement: Movement) -> "Rotated":
        """This array, whose leaves were moved, rotated along the axes that now are."""
        moved = [movement.axes[axis] for axis in self.axes]
        new = object.__new__(Rotated)  # leaves may be specs here, of which no rank is known
        axes = tuple(int(axis) - len(movement.shape) for axis in moved if axis is not None)
        new.__dict__.update({"array": self.array, "axes": axes})
        return new

    def _among(self, places: Places) -> list[int]:
        return [self.ndim + axis for axis in self.axes if self.ndim + axis in places]
