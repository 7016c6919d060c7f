"""`Triangular` and `Symmetric`: matrices that one triangle determines."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import linalg as lax_linalg
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface import Array, Leaf, check_axes
from ..._core.tree import static
from ..._core.value import make_dense, materialise_one
from ..._jax.primitives import find_primitive
from .diagonal import Diagonal
from .matrix import (
    Matrix,
    elementwise_rule,
    matmul_rule,
    register_elementwise,
    slogdet_of_diagonal,
)


@register_elementwise
class Triangular(Matrix):
    """A triangular matrix `[..., n, n]`, stored as one triangle of a square array.

    The other triangle of `x` is not read, as in `jax.scipy.linalg.solve_triangular`. So both
    factors of an LU factorization can share one array. A solve costs `n^2` operations per vector,
    and a determinant `n`. The matrix takes as much memory as the dense one. A product first copies
    the triangle, so with one vector it takes up to 5 times as long as the dense product.

    **Keeps the structure:** transposes, inverses, multiples by a number, elementwise functions that
    map 0 to 0, and sums and products of two matrices that are both lower or both upper. The product
    of a lower and an upper matrix is a `Product`. `jax.scipy.linalg.solve_triangular` accepts a
    `Triangular`.

    **Materializes:** sums of a lower and an upper matrix, sums with a dense array, elementwise
    products, Cholesky factors, and functions that map 0 to another number.

    **Arguments:**

    - `x`: the square array, `[..., n, n]`, dense or implicit.
    - `lower`: True to use the lower triangle, False to use the upper one; static.
    - `unit_diagonal`: whether the diagonal is all ones. If True, the diagonal of `x` is not read;
      static.

    **Raises:** `TypeError` if `x` is not an array, `ValueError` if it is not square.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Triangular(jnp.array([[2.0, 9.0], [1.0, 3.0]]))
    >>> vn.materialise(a).tolist()
    [[2.0, 0.0], [1.0, 3.0]]
    >>> vn.implicit(jnp.linalg.solve)(a, jnp.array([2.0, 4.0])).tolist()
    [1.0, 1.0]
    >>> a @ a
    Triangular(x=f32[2,2], lower=True, unit_diagonal=False)
    """

    x: Leaf  # [..., n, n]
    lower: bool = static(default=True)
    unit_diagonal: bool = static(default=False)

    def __post_init__(self) -> None:
        check_axes(self, x="n n")

    def materialise(self) -> Any:
        x = self._with_diagonal()._array
        return jnp.tril(x) if self.lower else jnp.triu(x)

    @property
    def _array(self) -> Any:
        return jnp.asarray(materialise_one(self.x))

    def _with_diagonal(self) -> "Triangular":
        """Return the same matrix with `unit_diagonal=False`."""
        if not self.unit_diagonal:
            return self
        x = self._array
        on_diagonal = jnp.eye(x.shape[-1], dtype=bool)
        return Triangular(jnp.where(on_diagonal, jnp.ones((), x.dtype), x), self.lower)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        return jnp.matmul(x, self.materialise().mT, precision=precision)

    def transposed(self) -> "Triangular":
        return Triangular(self._array.mT, not self.lower, self.unit_diagonal)

    def rescaled(self, scale: Callable[[Any], Any]) -> "Triangular":
        # Use zeros in the other triangle, so that the derivatives of its entries are zero.
        return Triangular(scale(self.materialise()), self.lower)

    def solve(self, b: Any) -> Any:
        options = {"lower": self.lower, "unit_diagonal": self.unit_diagonal}
        return _triangular_solve(self._array, b, left_side=False, transpose_a=True, **options)

    def inverse(self) -> "Triangular":
        eye = jnp.eye(self.x.shape[-1], dtype=self.x.dtype)
        columns = self.solve(jnp.broadcast_to(eye, self.x.shape))
        return Triangular(columns.mT, self.lower, self.unit_diagonal)

    def slogdet(self) -> Any:
        return slogdet_of_diagonal(self.main_diagonal())

    def main_diagonal(self) -> Any:
        return jnp.linalg.diagonal(self._with_diagonal()._array)


@matmul_rule
def _(x: Triangular, y: Triangular) -> Any:
    if x.lower != y.lower:
        return NotImplemented
    entries = jnp.matmul(x.materialise(), y.materialise())
    return Triangular(entries, x.lower, x.unit_diagonal and y.unit_diagonal)


@elementwise_rule("add")
def _(x: Triangular, y: Triangular) -> Any:
    if x.lower != y.lower:
        return NotImplemented
    return Triangular(x._with_diagonal()._array + y._with_diagonal()._array, x.lower)


@register("triangular_solve")
def _(
    a: Triangular, b: ArrayLike, *, lower: bool, unit_diagonal: bool, **options: Any
) -> jax.Array:
    x, unit_diagonal = a._array, unit_diagonal or a.unit_diagonal
    if lower != a.lower:  # the triangle that is read has only zeros beside the diagonal
        x = jnp.where(jnp.eye(x.shape[-1], dtype=bool), x, jnp.zeros((), x.dtype))
    return _triangular_solve(x, b, lower=lower, unit_diagonal=unit_diagonal, **options)


def _triangular_solve(x: Any, b: Any, *, lower: bool, transpose_a: bool, **options: Any) -> Any:
    """Solve with the transpose, which avoids a slow copy of `x` to column-major order in XLA.

    On CPU with n = 2048, this copy took 50 times as long as the solve for one vector.
    """
    return lax_linalg.triangular_solve(
        x.mT, b, lower=not lower, transpose_a=not transpose_a, **options
    )


@register("cholesky")
def _(a: Triangular, **params: Any) -> Any:
    # JAX reads one half of a symmetric matrix. Compute the factor of this symmetric matrix, because
    # a solve with a deferred factor would use the triangular matrix instead.
    primitive = find_primitive("cholesky")
    (dense,) = make_dense(primitive, [a])
    return primitive.bind(dense, **params)


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
      `A[0, 0], A[1, 0], A[1, 1], A[2, 0], ...`. `Symmetric.from_dense` packs a matrix.
    - `positive_definite`: whether the matrix is known to be positive definite; static.

    **Raises:** `TypeError` if `packed` is not a dense array or is complex, `ValueError` if its last
    axis does not have size `n (n + 1) / 2` for some `n`.

    >>> import jax.numpy as jnp, veneer as vn
    >>> dense = jnp.array([[2.0, 9.0], [1.0, 3.0]])
    >>> a = vn.types.Symmetric.from_dense(dense, positive_definite=True)
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
                f"{n}) and {_size(n + 1)} (n = {n + 1}). Symmetric.from_dense packs a matrix."
            )

    @staticmethod
    def from_dense(x: Any, *, lower: bool = True, positive_definite: bool = False) -> "Symmetric":
        """Create a `Symmetric` from one triangle of a matrix. The other triangle is not read.

        **Arguments:**

        - `x`: a real matrix `[..., n, n]`.
        - `lower`: True to read the lower triangle, False to read the upper one.
        - `positive_definite`: whether the matrix is known to be positive definite.

        **Raises:** `ValueError` if `x` is not square.
        """
        x = jnp.asarray(x)
        if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
            raise ValueError(f"Symmetric.from_dense takes a square matrix, got {x.shape}")
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
        return Symmetric.from_dense(self.solve(eye), positive_definite=True)

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
