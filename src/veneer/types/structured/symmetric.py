"""`Symmetric`: a symmetric matrix, stored as its packed lower triangle."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import linalg as lax_linalg

from ..._core.tree import static
from ..axes import Array, check_axes
from .diagonal import Diagonal
from .matrix import Matrix, elementwise_rule, register_elementwise
from .triangular import Triangular


@register_elementwise
class Symmetric(Matrix):
    """A symmetric matrix `[..., n, n]`, stored as its packed lower triangle.

    It takes about half the bytes of the dense matrix. Use it for covariances, Gram matrices and
    preconditioners of optimizers. Each use unpacks the matrix with a gather of `n^2` entries, so a
    product is slower than with the dense matrix.

    With `positive_definite=True`, solves, inverses and determinants use the Cholesky factorization,
    which takes half the operations of LU. The results are NaN if the matrix is not positive
    definite.

    **Keeps the structure:** transposes, multiples by a number, elementwise functions that map 0 to
    0, sums with `Symmetric` and `Diagonal`, and inverses if `positive_definite`. The sum of two
    `Symmetric` has `positive_definite=True` if both have it. The Cholesky factor is a `Triangular`.

    **Materializes:** elementwise products, sums with a dense array, functions that map 0 to another
    number (`exp`), and solves, inverses and determinants without `positive_definite`.

    **Arguments:**

    - `packed`: real numbers `[..., n (n + 1) / 2]` in the order
      `A[0, 0], A[1, 0], A[1, 1], A[2, 0], ...`. `Symmetric.of` packs a matrix.
    - `positive_definite`: whether the matrix is known to be positive definite; static.

    **Raises:** `TypeError` if `packed` is not a dense array or is complex, `ValueError` if its last
    axis does not have size `n (n + 1) / 2` for some `n`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Symmetric.of(jnp.array([[2.0, 9.0], [1.0, 3.0]]), positive_definite=True)
    >>> a
    Symmetric(packed=f32[3], positive_definite=True)
    >>> vn.materialise(a).tolist()
    [[2.0, 1.0], [1.0, 3.0]]
    >>> vn.implicit(jnp.linalg.cholesky)(a)
    Triangular(x=f32[2,2], lower=True, unit_diagonal=False)
    """

    packed: Array  # [..., n (n + 1) / 2]
    positive_definite: bool = static(default=False)

    def __post_init__(self) -> None:
        check_axes(self, Array, packed="entries")
        if jnp.issubdtype(self.packed.dtype, jnp.complexfloating):
            raise TypeError(f"Symmetric takes real entries, not {self.packed.dtype}")
        n, entries = self._n, self.packed.shape[-1]
        if _size(n) != entries:
            raise ValueError(
                f"Symmetric takes n (n + 1) / 2 entries: {entries} lies between {_size(n)} (n = "
                f"{n}) and {_size(n + 1)} (n = {n + 1}). Symmetric.of packs a square matrix."
            )

    @staticmethod
    def of(x: Any, *, lower: bool = True, positive_definite: bool = False) -> "Symmetric":
        """Create a `Symmetric` from one triangle of a matrix. The other triangle is not read.

        **Arguments:**

        - `x`: a real matrix `[..., n, n]`.
        - `lower`: True to read the lower triangle, False to read the upper one.
        - `positive_definite`: whether the matrix is known to be positive definite.

        **Raises:** `ValueError` if `x` is not square.
        """
        x = jnp.asarray(x)
        if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
            raise ValueError(f"Symmetric.of takes a square matrix, got {x.shape}")
        x, n = x if lower else x.mT, x.shape[-1]
        i, j = jnp.arange(n)[:, None], jnp.arange(n)
        # Entries above the diagonal get an index out of range, so that they are dropped.
        index = jnp.where(i >= j, _packed_index(i, j), _size(n)).reshape(-1)
        packed = jnp.zeros((*x.shape[:-2], _size(n)), x.dtype)
        packed = packed.at[..., index].set(x.reshape(*x.shape[:-2], n * n), mode="drop")
        return Symmetric(packed, positive_definite)

    @property
    def _n(self) -> int:
        return (math.isqrt(8 * self.packed.shape[-1] + 1) - 1) // 2

    def materialise(self) -> Any:
        i = jnp.arange(self._n)
        index = _packed_index(jnp.maximum(i[:, None], i), jnp.minimum(i[:, None], i))
        return jnp.asarray(self.packed)[..., index]

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        return jnp.matmul(x, self.materialise(), precision=precision)

    def transposed(self) -> "Symmetric":
        return self

    def rescaled(self, scale: Callable[[Any], Any]) -> Any:
        # The result may not be positive definite. It is complex if `scale` is `lax.conj`.
        packed = scale(self.packed)
        return NotImplemented if jnp.iscomplexobj(packed) else Symmetric(packed)

    def solve(self, b: Any) -> Any:
        if not self.positive_definite:
            return NotImplemented
        factor = dataclasses.replace(self, packed=lax.stop_gradient(self.packed)).cholesky()
        solve = lambda _, b: factor.transposed().solve(factor.solve(b))
        return lax.custom_linear_solve(self.matvec, b, solve, symmetric=True)

    def inverse(self) -> Any:
        if not self.positive_definite:
            return NotImplemented
        eye = jnp.broadcast_to(jnp.eye(self._n, dtype=self.packed.dtype), self.shape)
        return Symmetric.of(self.solve(eye), positive_definite=True)

    def cholesky(self) -> Triangular:
        factor = lax_linalg.cholesky(self.materialise(), symmetrize_input=False)
        return Triangular(factor)

    def slogdet(self) -> Any:
        if not self.positive_definite:
            return NotImplemented
        sign, logs = self.cholesky().slogdet()
        return sign, 2 * logs

    def main_diagonal(self) -> Any:
        return jnp.asarray(self.packed)[..., _diagonal_index(self._n)]


def _size(n: int) -> int:
    return n * (n + 1) // 2


def _packed_index(i: Any, j: Any) -> Any:
    """Return the index of `A[i, j]` in `packed`, for `i >= j`."""
    return i * (i + 1) // 2 + j


def _diagonal_index(n: int) -> Any:
    i = jnp.arange(n)
    return _packed_index(i, i)


@elementwise_rule("add")
def _(x: Symmetric, y: Symmetric) -> Symmetric:
    return Symmetric(x.packed + y.packed, x.positive_definite and y.positive_definite)


@elementwise_rule("add")
def _(x: Symmetric, y: Diagonal) -> Symmetric:
    return Symmetric(jnp.asarray(x.packed).at[..., _diagonal_index(x._n)].add(y.diagonal))
