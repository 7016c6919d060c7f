"""`Identity`: the identity matrix, of which nothing is stored."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._jax.primitives import find_primitive
from ..axes import Leaf, check_axes
from ..zero_preserving import LINEAR, NONLINEAR
from .diagonal import Diagonal
from .matrix import Matrix, product


class Identity(Matrix):
    """An identity matrix `[*leading, n, n]` that stores no entries.

    It stores one empty array `[*leading, n, 0]`, whose shape and dtype determine the matrix. So
    batches of identities also take no memory, and work with `jax.vmap` and `jax.lax.scan`.

    **Keeps the structure:** transposes, inverses, Cholesky factors and products of two `Identity`.
    A product or a solve with another array returns that array. Multiples by a number, sums with
    `Identity` or `Diagonal`, elementwise products, and elementwise functions that map 0 to 0 return
    a `Diagonal`.

    **Materializes:** sums with a dense array, and functions that map 0 to another number (`exp`).

    **Arguments:**

    - `n`: the number of rows and columns, an integer.
    - `dtype`: the dtype of the matrix. The default is JAX's default float.
    - `leading`: a tuple with the sizes of the leading axes, for a batch of identities.

    **Raises:**

    - `TypeError` if `n` is not an integer.
    - `ValueError` if `n` is negative.

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
        """Return the dense matrix."""
        *leading, n, _ = self.empty.shape
        return jnp.broadcast_to(jnp.eye(n, dtype=self.empty.dtype), (*leading, n, n))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        del precision
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


def _other(x: Matrix, y: Matrix) -> Matrix:
    dtype = jnp.result_type(x.dtype, y.dtype)
    return y if y.dtype == dtype else y.converted(dtype)


# Before the rules of other types for a product with any matrix.
def _left_identity(x: Identity, y: Matrix) -> Matrix:
    return _other(x, y)


def _right_identity(x: Matrix, y: Identity) -> Matrix:
    return _other(y, x)


def _both_identities(x: Identity, y: Identity) -> Matrix:
    return _other(x, y)


# Each of its own precedence: where the rule for two identities declines, the others would tie.
for _precedence, _rule in enumerate((_left_identity, _right_identity, _both_identities), 1):
    product(_rule, precedence=_precedence)


@register("triangular_solve")
def _(a: Identity, b: ArrayLike, **params: Any) -> Any:
    del a, params
    return b


def _as_diagonal(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Identity, **params: Any) -> Any:
        return redispatch(lambda x: primitive.bind(x, **params), x.as_diagonal())


for _primitive in (*LINEAR, *NONLINEAR, "integer_pow"):
    _as_diagonal(_primitive)


def _as_diagonal_beside(name: str) -> None:
    operation = find_primitive(name)

    def of_both(x: Identity, y: Any, params: dict[str, Any]) -> Any:
        return redispatch(lambda x, y: operation.bind(x, y, **params), x.as_diagonal(), y)

    # After the rules of other types for a sum with any matrix.
    @register(operation, precedence=-1)
    def _(x: Identity, y: Matrix, **params: Any) -> Any:
        return of_both(x, y, params)

    @register(operation)
    def _(x: Identity, y: Identity, **params: Any) -> Any:
        return of_both(x, y.as_diagonal(), params)


_as_diagonal_beside("add")
_as_diagonal_beside("mul")


@register("mul")
def _(x: Identity, y: ArrayLike, **params: Any) -> Any:
    del params
    return redispatch(lax.mul, x.as_diagonal(), y)
