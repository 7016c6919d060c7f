"""`Diagonal`: a diagonal matrix, stored as its diagonal."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from ..axes import Array, check_axes
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
