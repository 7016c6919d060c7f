"""Dimension numbers of `jax.lax.dot_general`: contracted axes and batch axes of two operands."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Axes = tuple[int, ...]

#: `dimension_numbers` as `jax.lax.dot_general` takes them.
NestedAxes = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class DotDimensionNumbers(NamedTuple):
    """The `dimension_numbers` of `jax.lax.dot_general`, in hashable form.

    **Arguments:**

    - `contracting`: the contracted axes of the left and of the right operand.
    - `batch`: the batch axes of the left and of the right operand. The output has them first.

    >>> from veneer._core.primitives.dimension_numbers import DotDimensionNumbers
    >>> numbers = DotDimensionNumbers.of((([2], [1]), ([0], [0])))
    >>> numbers.free(0, 3), numbers.swapped.contracting
    ((1,), ((1,), (2,)))
    """

    contracting: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]

    @classmethod
    def of(cls, dimension_numbers: Sequence[Sequence[Sequence[Any]]]) -> "DotDimensionNumbers":
        """Convert `dimension_numbers` of `lax.dot_general`: nested sequences of any integers."""
        contracting, batch = (
            (tuple(map(int, lhs)), tuple(map(int, rhs))) for lhs, rhs in dimension_numbers
        )
        return cls(contracting, batch)

    @property
    def swapped(self) -> "DotDimensionNumbers":
        """The dimension numbers of the product with its operands exchanged."""
        return DotDimensionNumbers(self.contracting[::-1], self.batch[::-1])

    def free(self, side: int, ndim: int) -> Axes:
        """Return the axes of operand 0 or 1 that are neither contracted nor batch axes."""
        shared = (*self.contracting[side], *self.batch[side])
        return tuple(axis for axis in range(ndim) if axis not in shared)

    def without(self, lhs_axis: int | None, rhs_axis: int | None) -> "DotDimensionNumbers":
        """Return the numbers after one axis of each operand is removed. None removes no axis."""
        contracting, batch = ((without(lhs, lhs_axis), without(rhs, rhs_axis)) for lhs, rhs in self)
        return DotDimensionNumbers(contracting, batch)


def without(axes: Axes, removed: int | None) -> Axes:
    """Return `axes` of an array, renumbered for the array without its axis `removed`.

    If `removed` is None, return `axes`.

    >>> from veneer._core.primitives.dimension_numbers import without
    >>> without((0, 1, 3), 1)
    (0, 2)
    """
    if removed is None:
        return axes
    return tuple(axis - (axis > removed) for axis in axes if axis != removed)
