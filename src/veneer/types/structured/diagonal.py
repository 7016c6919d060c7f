"""Matrices with one entry per row and column: `Diagonal`, `Identity` and `Permutation`."""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.rules import register
from ..._core.surface import Array, Leaf, check_axes
from ..._core.trace import redispatch
from ..._core.tree import static
from ..._core.value import describe
from ..._jax.primitives import find_primitive
from .matrix import (
    Matrix,
    elementwise_rule,
    matmul_rule,
    register_elementwise,
    slogdet_of_diagonal,
)
from .product import Product


@register_elementwise
class Diagonal(Matrix):
    """A diagonal matrix `[..., n, n]`, stored as its `n` diagonal entries.

    A product with a dense array or a solve costs `n` operations per vector.

    **Keeps the structure:** transposes, inverses, Cholesky factors, sums and products of two
    `Diagonal`, multiples by a number, elementwise products with any array, and elementwise
    functions that map 0 to 0 (`sqrt`, `tanh`).

    **Materializes:** sums with a dense array, and functions that map 0 to another number (`exp`).

    **Arguments:**

    - `diagonal`: the diagonal entries, `[..., n]`, dense, of any dtype.

    **Raises:** `TypeError` if `diagonal` is not a dense array, `ValueError` if it has no axis.

    >>> import jax.numpy as jnp, veneer as vn
    >>> d = vn.types.Diagonal(jnp.array([1.0, 2.0]))
    >>> d @ d
    Diagonal(diagonal=f32[2])
    >>> vn.implicit(jnp.linalg.solve)(d, jnp.array([3.0, 4.0])).tolist()
    [3.0, 2.0]
    """

    diagonal: Array  # [..., n]

    linear_in: ClassVar[tuple[str, ...]] = ("diagonal",)
    is_diagonal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_axes(self, Array, diagonal="n")

    def materialise(self) -> Any:
        d = jnp.asarray(self.diagonal)
        on_diagonal = jnp.eye(d.shape[-1], dtype=bool)
        return jnp.where(on_diagonal, d[..., None], jnp.zeros((), d.dtype))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        return x * self.diagonal[..., None, :]

    def transposed(self) -> "Diagonal":
        return self

    def solve(self, b: Any) -> Any:
        return b / self.diagonal[..., None, :]

    def inverse(self) -> "Diagonal":
        return Diagonal(1 / self.diagonal)

    def cholesky(self) -> "Diagonal":
        # JAX factorizes the Hermitian part, whose diagonal is real.
        real = jnp.real(jnp.asarray(self.diagonal))
        return Diagonal(jnp.sqrt(real).astype(jnp.result_type(self.diagonal)))

    def slogdet(self) -> Any:
        return slogdet_of_diagonal(self.diagonal)

    def main_diagonal(self) -> Any:
        return self.diagonal


@elementwise_rule("mul")
@matmul_rule
def _(x: Diagonal, y: Diagonal) -> Diagonal:
    return Diagonal(x.diagonal * y.diagonal)


@register("mul")
def _(x: Diagonal, y: Matrix | ArrayLike, **params: Any) -> Any:
    if jnp.shape(y)[-2:] != x.shape[-2:]:
        return NotImplemented  # a number, which a rule of all matrices multiplies by
    return Diagonal(x.diagonal * redispatch(jnp.linalg.diagonal, y))


@register("triangular_solve")
def _(
    a: Diagonal, b: ArrayLike, *, left_side: bool, conjugate_a: bool, unit_diagonal: bool, **params
) -> Any:
    del params  # the triangle to read, and whether to transpose it: both are the diagonal here
    if unit_diagonal:
        return b
    entries = jnp.conj(a.diagonal) if conjugate_a else a.diagonal
    return b / (entries[..., None] if left_side else entries[..., None, :])


@register_elementwise
class Identity(Matrix):
    """An identity matrix `[*leading, n, n]` that stores no entries.

    It stores one empty array `[*leading, n, 0]`, whose shape and dtype determine the matrix. So
    `jax.vmap` and `jax.lax.scan` work with batches of identities, which also take no memory.

    **Keeps the structure:** transposes, inverses, Cholesky factors and products of two `Identity`.
    A product or a solve with another array returns that array. Multiples by a number, sums with
    `Identity` or `Diagonal`, elementwise products, and elementwise functions that map 0 to 0 return
    a `Diagonal`.

    **Materializes:** sums with a dense array, and functions that map 0 to another number (`exp`).

    **Arguments:**

    - `n`: the number of rows and columns, an integer.
    - `dtype`: the dtype of the matrix. The default is JAX's default float.
    - `leading`: a tuple with the sizes of the leading axes, for a batch of identities.

    **Raises:** `TypeError` if `n` is not an integer, `ValueError` if it is negative.

    >>> import jax.numpy as jnp, veneer as vn
    >>> eye = vn.types.Identity(1000)
    >>> eye, eye.nbytes
    (Identity(f32[1000,1000]), 0)
    >>> vn.implicit(jnp.linalg.inv)(eye @ eye) + eye
    Diagonal(diagonal=f32[1000])
    """

    empty: Leaf  # [*leading, n, 0]

    def __init__(self, n: int, dtype: DTypeLike = float, *, leading: Sequence[int] = ()):
        if operator.index(n) < 0:
            raise ValueError(f"Identity takes a size that is not negative, got {n}")
        shape = (*leading, operator.index(n), 0)
        self.__dict__["empty"] = np.zeros(shape, jax.dtypes.canonicalize_dtype(dtype))

    def __post_init__(self) -> None:
        check_axes(self, empty="n 0")

    def materialise(self) -> Any:
        *leading, n, _ = self.empty.shape
        return jnp.broadcast_to(jnp.eye(n, dtype=self.empty.dtype), (*leading, n, n))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        return jnp.broadcast_to(x, (*self.shape[:-2], *x.shape[-2:]))

    def transposed(self) -> "Identity":
        return self

    def rescaled(self, scale: Any) -> Diagonal:
        return self.as_diagonal().rescaled(scale)

    def solve(self, b: Any) -> Any:
        return b

    def inverse(self) -> "Identity":
        return self

    def cholesky(self) -> "Identity":
        return self

    def slogdet(self) -> Any:
        one = jnp.ones(self.shape[:-2], self.dtype)
        return one, jnp.zeros_like(one)

    def main_diagonal(self) -> Any:
        return jnp.ones(self.shape[:-1], self.dtype)

    def as_diagonal(self) -> Diagonal:
        """Return the same matrix as a `Diagonal` of ones."""
        return Diagonal(self.main_diagonal())

    def __repr__(self) -> str:
        if not hasattr(self.empty, "shape"):  # a placeholder
            return super().__repr__()
        return f"Identity({self.aval().str_short(short_dtypes=True)})"


# These rules precede the rules of other types for a product with any matrix. Their precedences
# differ, because both fit a product of two identities.
@partial(matmul_rule, precedence=1)
def _(x: Identity, y: Matrix) -> Matrix:
    return _promote(y, x)


@partial(matmul_rule, precedence=2)
def _(x: Matrix, y: Identity) -> Matrix:
    return _promote(x, y)


def _promote(x: Matrix, eye: Identity) -> Matrix:
    dtype = jnp.result_type(x.dtype, eye.dtype)
    return x if x.dtype == dtype else x.converted(dtype)


@register("triangular_solve")
def _(a: Identity, b: ArrayLike, **params: Any) -> Any:
    return b


@register("mul")
def _(x: Identity, y: ArrayLike, **params: Any) -> Any:
    return redispatch(lax.mul, x.as_diagonal(), y)


def _register_as_diagonal(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive, precedence=-1)  # after the rules of other types for any matrix
    def _(x: Identity, y: Matrix, **params: Any) -> Any:
        return redispatch(lambda x, y: primitive.bind(x, y, **params), x.as_diagonal(), y)


for _name in ("add", "mul"):
    _register_as_diagonal(_name)


class Permutation(Matrix):
    """A permutation matrix `[..., n, n]`, where `P @ x` is `x[indices]`.

    Row `i` has its 1 in column `indices[i]`. A product or a solve reorders the `n` entries of each
    vector, without multiplications. Transposes, solves and products `x @ P` first sort the indices.
    The determinant is the sign of the permutation, computed in `O(n log n)`.

    **Keeps the structure:** transposes, inverses and products of two `Permutation`. A multiple by a
    number is a `Product` of a `Diagonal` and the `Permutation`.

    **Materializes:** sums, elementwise functions and Cholesky factors.

    **Arguments:**

    - `indices`: integers `[..., n]` that contain each of `0, ..., n - 1` once.
    - `dtype`: the dtype of the matrix; static. The default is JAX's default float.

    **Raises:** `TypeError` if `indices` is not an array of integers, `ValueError` if it is not a
    permutation. Traced indices are not checked: an index out of range gives NaN in products.

    >>> import jax.numpy as jnp, veneer as vn
    >>> p = vn.types.Permutation(jnp.array([2, 0, 1]))
    >>> (p @ jnp.array([1.0, 2.0, 3.0])).tolist()
    [3.0, 1.0, 2.0]
    >>> (p @ p).indices.tolist(), p.T.indices.tolist()
    ([1, 2, 0], [1, 2, 0])
    """

    indices: Leaf  # int[..., n]
    dtype: Any = static(default=float)

    def __post_init__(self) -> None:
        self.__dict__["dtype"] = jax.dtypes.canonicalize_dtype(self.dtype)
        check_axes(self, indices="n")
        if not jnp.issubdtype(self.indices.dtype, jnp.integer):
            raise TypeError(f"Permutation takes integers for indices, not {self.indices.dtype}")
        is_known = not isinstance(self.indices, jax.core.Tracer)
        if is_known and getattr(self.indices, "is_fully_addressable", True):
            indices = np.asarray(self.indices)
            if not (np.sort(indices, -1) == np.arange(indices.shape[-1])).all():
                raise ValueError(
                    "Permutation takes indices that contain each of 0, ..., "
                    f"{indices.shape[-1] - 1} once, got {np.array2string(indices, threshold=10)}"
                )

    def __repr__(self) -> str:
        (indices,) = describe([self.indices])
        return f"Permutation(indices={indices}, dtype={jnp.dtype(self.dtype).name})"

    def materialise(self) -> Any:
        return jax.nn.one_hot(self.indices, self.indices.shape[-1], dtype=self.dtype)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.dtype)
        return jnp.take_along_axis(x, jnp.asarray(self.indices)[..., None, :], -1).astype(dtype)

    def transposed(self) -> "Permutation":
        return _unchecked(jnp.argsort(self.indices, -1), self.dtype)

    def rescaled(self, scale: Any) -> Any:
        return Product(Diagonal(scale(jnp.ones(self.shape[:-1], self.dtype))), self)

    def converted(self, dtype: Any) -> "Permutation":
        return _unchecked(self.indices, dtype)

    def solve(self, b: Any) -> Any:
        return self.transposed().matvec(b)

    def inverse(self) -> "Permutation":
        return self.transposed()

    def slogdet(self) -> Any:
        odd = (self.indices.shape[-1] - _count_cycles(jnp.asarray(self.indices))) % 2
        sign = (1 - 2 * odd).astype(self.dtype)
        return sign, jnp.zeros_like(sign)

    def main_diagonal(self) -> Any:
        return (self.indices == jnp.arange(self.indices.shape[-1])).astype(self.dtype)


def _unchecked(indices: Any, dtype: Any) -> Permutation:
    """Create a `Permutation` without a check, which would wait for the values of the indices."""
    new = Permutation.__new__(Permutation)
    new.__dict__.update(indices=indices, dtype=jnp.dtype(dtype))
    return new


def _count_cycles(indices: Any) -> Any:
    """Return the number of cycles `[...]` of permutations `[..., n]`.

    Each element finds the least element of its cycle by pointer doubling: the minimum over
    `2^(k+1)` successors is the minimum of two minima over `2^k` successors.
    """
    n = indices.shape[-1]
    own = jnp.broadcast_to(jnp.arange(n, dtype=indices.dtype), indices.shape)
    least, ahead = own, indices
    for _ in range(max(n - 1, 0).bit_length()):
        least = jnp.minimum(least, jnp.take_along_axis(least, ahead, -1))
        ahead = jnp.take_along_axis(ahead, ahead, -1)
    return (least == own).sum(-1)


@matmul_rule
def _(x: Permutation, y: Permutation) -> Permutation:
    indices = jnp.take_along_axis(jnp.asarray(y.indices), jnp.asarray(x.indices), -1)
    return _unchecked(indices, jnp.result_type(x.dtype, y.dtype))
