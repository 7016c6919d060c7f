"""`Identity`: an identity matrix that stores no entries."""

import operator
from collections.abc import Sequence
from functools import partial
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
from .diagonal import Diagonal
from .matrix import Matrix, matmul_rule, register_elementwise


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
