"""`Diagonal`, stored as its diagonal, and `Identity`, which stores no entries."""

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
from ..._core.transform import redispatch
from ..._jax.primitives import find_primitive
from ..axes import Array, Leaf, check_axes
from .matrix import (
    Matrix,
    elementwise_rule,
    matmul_rule,
    register_elementwise,
    slogdet_of_diagonal,
)


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
