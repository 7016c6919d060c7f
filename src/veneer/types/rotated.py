"""`Rotated`: an array stored rotated along some axes, which spreads outliers."""

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.leaf_axes import Movement, aligned_axes
from .._core.surface import Leaf, check_arrays
from .._core.trace import redispatch
from .._core.tree import static
from .basis import InBasis, Places


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
      rotate a dense array, call `Rotated.from_dense`.
    - `axes`: the rotated axes, negative numbers; static. Each axis is rotated separately.

    **Raises:**

    - `TypeError` if `array` is not a floating array.
    - `ValueError` if `axes` are not negative, in range and distinct.

    >>> import jax.numpy as jnp, veneer as vn
    >>> w = jnp.zeros((64, 1)).at[3].set(8.0)
    >>> r = vn.types.Rotated.from_dense(w)
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
    def from_dense(cls, dense: Any, axes: Sequence[int] = (-2,)) -> "Rotated":
        """Rotate a dense array along some axes, and return it as a `Rotated`.

        **Arguments:**

        - `dense`: a floating array `[..., K, N]`.
        - `axes`: the axes to rotate, negative numbers.

        **Raises:** the same errors as `Rotated(dense, axes)`.
        """
        unrotated = cls(jnp.asarray(dense), tuple(axes))  # checks the array and the axes
        return unrotated.with_array(unrotated.stored(unrotated.array))

    def basis_axes(self, batch: Sequence[int] = ()) -> set[int] | None:
        """Return the set of rotated axes, counted from the front."""
        del batch
        return {self.ndim + axis for axis in self.axes}

    def into_basis(self, x: Any, places: Places) -> Any:
        return self._along_axes(rotate, x, places)

    def out_of_basis(self, x: Any, places: Places) -> Any:
        return self._along_axes(rotate_back, x, places)

    def _along_axes(self, function: Any, x: Any, places: Places) -> Any:
        """Apply `rotate` or `rotate_back` along the axes of `x` that correspond to rotated axes."""
        for axis in self.axes:
            place = places.get(self.ndim + axis)
            if place is not None:
                x = redispatch(functools.partial(function, axis=place), x)
        return x

    def regrouped(
        self, array: Any, groups: Sequence[tuple[list[int], list[int]]], new: tuple[int, ...]
    ) -> "Rotated | None":
        """Return this array after a reshape, given the reshaped field `array`.

        Return None if the reshape splits or merges a rotated axis. The arguments are the same as in
        `InBasis.regrouped`.
        """
        axes = {self.ndim + axis for axis in self.axes if self.shape[axis] != 1}
        rotated_groups = [group for group in groups if axes & {*group[0]}]
        if any(len(old) != 1 or len(new_axes) != 1 for old, new_axes in rotated_groups):
            return None
        return Rotated(array, tuple(new_axes[0] - len(new) for _, new_axes in rotated_groups))

    def leaf_axes(self) -> Any:
        """Return a `vn.LeafAxis` per axis of the leaf. Rotated axes cannot be sliced."""
        leaf_axis = lambda x: x._replace(block="whole") if x.axis in self.axes else x
        return [list(map(leaf_axis, aligned_axes(self.ndim)))]

    def _moved(self, movement: Movement) -> "Rotated":
        moved = [movement.axes[axis] for axis in self.axes]
        axes = tuple(int(axis) - len(movement.shape) for axis in moved if axis is not None)
        # Without the constructor: the leaf can be a PartitionSpec, which has no rank.
        new = copy.copy(self)
        new.__dict__["axes"] = axes
        return new


def rotate(x: jax.Array, axis: int) -> jax.Array:
    """Multiply by an orthogonal matrix along an axis. The matrix depends only on the size.

    16-bit floats are computed in float32.

    >>> import jax.numpy as jnp
    >>> from veneer.types.rotated import rotate, rotate_back
    >>> peak = jnp.zeros(64).at[5].set(8.0)
    >>> float(abs(rotate(peak, 0)).max()), float(rotate_back(rotate(peak, 0), 0)[5])
    (1.0, 8.0)
    """
    return _mix(x * _signs(x, axis), axis)


def rotate_back(x: jax.Array, axis: int) -> jax.Array:
    """Multiply by the transpose of the matrix of `rotate` along an axis."""
    return _mix(x, axis) * _signs(x, axis)


def _mix(x: jax.Array, axis: int) -> jax.Array:
    """Multiply by the matrix of `rotate` without its signs, one Kronecker factor at a time."""
    axis, dtype = axis % x.ndim, x.dtype
    sizes = factor_sizes(x.shape[axis])
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    wide = x.astype(jnp.promote_types(dtype, jnp.float32)).reshape(*before, *sizes, *after)
    for i, size in enumerate(sizes):
        matrix = jnp.asarray(_symmetric_orthogonal(size), wide.dtype)
        product = lax.dot_general(
            wide, matrix, (([axis + i], [0]), ([], [])), precision=lax.Precision.HIGHEST
        )
        wide = jnp.moveaxis(product, -1, axis + i)
    return wide.reshape(x.shape).astype(dtype)


_LARGEST_FACTOR = 64


@functools.cache
def factor_sizes(n: int) -> tuple[int, ...]:
    """Split `n` into factors that are at most 64 or prime.

    >>> from veneer.types.rotated import factor_sizes
    >>> factor_sizes(4096), factor_sizes(384), factor_sizes(1), factor_sizes(67 * 4)
    ((64, 64), (48, 8), (1,), (67, 4))
    """
    sizes = [1]
    for prime in sorted(_primes(n), reverse=True):
        if sizes[-1] > 1 and sizes[-1] * prime > _LARGEST_FACTOR:
            sizes.append(1)
        sizes[-1] *= prime
    return tuple(sizes)


def _primes(n: int) -> list[int]:
    primes, divisor = [], 2
    while divisor * divisor <= n:
        while n % divisor == 0:
            primes.append(divisor)
            n //= divisor
        divisor += 1
    return primes + [n] * (n > 1)


@functools.lru_cache(maxsize=64)
def _symmetric_orthogonal(n: int) -> np.ndarray:
    """Return the Kronecker product of a Hartley matrix per prime factor of `n`.

    For the prime 2, this is the Hadamard matrix.
    """
    matrix: np.ndarray = np.ones((1, 1))
    for prime in _primes(n):
        angles = 2 * math.pi * np.outer(np.arange(prime), np.arange(prime)) / prime
        matrix = np.kron(matrix, (np.cos(angles) + np.sin(angles)) / math.sqrt(prime))
    return matrix


def _signs(x: jax.Array, axis: int) -> np.ndarray:
    """Return fixed pseudorandom signs, one per index of `axis`, that broadcast with `x`.

    They depend only on the size of the axis.
    """
    signs = _random_signs(x.shape[axis]).astype(x.dtype)
    return signs.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


@functools.lru_cache(maxsize=64)
def _random_signs(n: int) -> np.ndarray:
    if n == 1:  # so that axes of size 1 can be added and removed
        return np.ones(1, int)
    # NumPy never changes the numbers of a seeded RandomState. So later versions can read old files.
    return np.random.RandomState(0).randint(0, 2, n) * 2 - 1
