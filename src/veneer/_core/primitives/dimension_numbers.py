"""Dimension numbers: which axes of two operands a product sums, and which both have."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Axes = tuple[int, ...]

#: `dimension_numbers` as `jax.lax.dot_general` takes them.
NestedAxes = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class DotDimensionNumbers(NamedTuple):
    """`dimension_numbers` of `jax.lax.dot_general`, which takes this as it is; hashable.

    **Arguments:** each for the first operand and the second, which are the sides 0 and 1.

    - `contracting`: the axes that are summed.
    - `batch`: the axes that both have, and the output first.

    >>> from veneer._core.primitives.dimension_numbers import DotDimensionNumbers
    >>> numbers = DotDimensionNumbers.of((([2], [1]), ([0], [0])))
    >>> numbers.free(0, 3), numbers.swapped.contracting
    ((1,), ((1,), (2,)))
    """

    contracting: tuple[Axes, Axes]
    batch: tuple[Axes, Axes]

    @classmethod
    def of(cls, dimension_numbers: Sequence[Sequence[Sequence[Any]]]) -> "DotDimensionNumbers":
        """Returns JAX's, whose axes may be in lists, and integers of NumPy's."""
        (lhs, rhs), (lhs_batch, rhs_batch) = dimension_numbers
        return cls(
            (tuple(map(int, lhs)), tuple(map(int, rhs))),
            (tuple(map(int, lhs_batch)), tuple(map(int, rhs_batch))),
        )

    @property
    def swapped(self) -> "DotDimensionNumbers":
        """Those of the product with its operands the other way round."""
        return DotDimensionNumbers(self.contracting[::-1], self.batch[::-1])

    def free(self, side: int, ndim: int) -> Axes:
        """Returns the axes of an operand that the output has and the other operand has not."""
        shared = (*self.contracting[side], *self.batch[side])
        return tuple(axis for axis in range(ndim) if axis not in shared)

    def without(self, lhs_axis: int | None, rhs_axis: int | None) -> "DotDimensionNumbers":
        """Returns the numbers that axes have when one of an operand, or of both, is gone."""
        gone = lhs_axis, rhs_axis
        contracting, batch = (
            (without(pair[0], gone[0]), without(pair[1], gone[1])) for pair in self
        )
        return DotDimensionNumbers(contracting, batch)


def without(axes: Axes, gone: int | None) -> Axes:
    """Returns the numbers that axes have when one, which may be of them, is gone.

    >>> from veneer._core.primitives.dimension_numbers import without
    >>> without((0, 1, 3), 1)
    (0, 2)
    """
    if gone is None:
        return axes
    return tuple(axis - (axis > gone) for axis in axes if axis != gone)
