"""`LowRank`: a matrix stored as two factors."""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..._core.rules import register
from ..._core.transform import redispatch
from ..axes import Leaf, check_axes
from ..structured.matrix import Matrix, matmul_rule, multiply_vectors
from .array import LoraArray
from .contractions import scale_by


class LowRank(Matrix):
    """A low-rank matrix `a @ b`, `[..., m, n]`, stored as its factors.

    With rank `r`, a product costs `r (m + n)` operations per vector. The trace and the diagonal
    cost `r min(m, n)`.

    **Keeps the structure:** transposes, multiples by a number, products with structured matrices on
    either side, and sums of two `LowRank`. The rank of a sum is the sum of both ranks. Above the
    rank `m n / (m + n)`, the dense matrix takes less memory. The sum with another structured matrix
    is a `LoraArray`. So solves with `Diagonal + LowRank` use the Woodbury identity (Golub and Van
    Loan, *Matrix Computations*, 2.1.4).

    **Materializes:** sums with a dense array, elementwise functions, elementwise products, and
    solves, inverses and determinants of a `LowRank` itself.

    **Arguments:**

    - `a`: the left factor, `[..., m, r]`, dense or implicit.
    - `b`: the right factor, `[..., r, n]`, dense or implicit.

    **Raises:**

    - `TypeError` if a factor is not an array.
    - `ValueError` if the rank `r` or the leading axes of the factors differ.

    >>> import jax.numpy as jnp, veneer as vn
    >>> x = vn.types.LowRank(jnp.ones((4, 1)), jnp.ones((1, 4)))
    >>> x + x
    LowRank(a=f32[4,2], b=f32[2,4])
    >>> x + vn.types.Diagonal(jnp.ones(4))
    LoraArray(w=Diagonal:f32[4,4], a=f32[4,1], b=f32[1,4], scale=1.0)
    """

    linear_in: ClassVar[tuple[str, ...]] = ("b",)

    a: Leaf  # [..., m, r]
    b: Leaf  # [..., r, n]

    def __post_init__(self) -> None:
        check_axes(self, a="m r", b="r n")

    def materialise(self) -> Any:
        """Return the dense matrix."""
        return redispatch(jnp.matmul, self.a, self.b)

    def partition(self, spec: P, shape: tuple[int, ...]) -> "LowRank":
        """Return a `PartitionSpec` per factor. The rank axis is not sharded.

        **Arguments:**

        - `spec`: the `PartitionSpec` of the matrix `[..., m, n]`.
        - `shape`: the shape of the matrix. It is not used.
        """
        del shape
        *lead, m, n = spec
        specs = iter((P(*lead, m, None), P(*lead, None, n)))
        return jax.tree.map(lambda _: next(specs), self, is_leaf=lambda x: x is not self)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        low = multiply_vectors(self.b, x, precision=precision)
        return multiply_vectors(self.a, low, precision=precision)

    def transposed(self) -> "LowRank":
        return LowRank(*(redispatch(jnp.matrix_transpose, w) for w in (self.b, self.a)))

    def main_diagonal(self) -> Any:
        def diagonal(a: Any, b: Any) -> Any:
            n = min(a.shape[-2], b.shape[-1])
            return (a[..., :n, :] * jnp.matrix_transpose(b)[..., :n, :]).sum(-1)

        return redispatch(diagonal, self.a, self.b)


@matmul_rule
def _(x: Matrix, y: LowRank) -> LowRank:
    return LowRank(redispatch(jnp.matmul, x, y.a), y.b)


# With the same precedence as the rule above, neither would be more specific for two `LowRank`.
@partial(matmul_rule, precedence=-1)
def _(x: LowRank, y: Matrix) -> LowRank:
    return LowRank(x.a, redispatch(jnp.matmul, x.b, y))


@matmul_rule
def _(x: LowRank, y: LowRank) -> LowRank:
    inner = redispatch(jnp.matmul, x.b, y.a)
    if x.b.shape[-2] < y.a.shape[-1]:  # the result has the smaller of the two ranks
        return LowRank(x.a, redispatch(jnp.matmul, inner, y.b))
    return LowRank(redispatch(jnp.matmul, x.a, inner), y.b)


def _concatenate(x: Any, y: Any, axis: int) -> Any:
    return redispatch(lambda x, y: jnp.concatenate([x, y], axis), x, y)


# The rules for sums compare the shapes, because JAX's primitives broadcast axes of size 1.


@register("add")
def _(x: LowRank, y: LowRank, **params: Any) -> Any:
    if x.shape != y.shape:
        return NotImplemented
    return LowRank(_concatenate(x.a, y.a, -1), _concatenate(x.b, y.b, -2))


@register("add")
def _(x: Matrix, y: LowRank, **params: Any) -> Any:
    if x.shape != y.shape or not jnp.issubdtype(x.dtype, jnp.inexact):
        return NotImplemented
    return LoraArray(x, y.a, y.b)


@register("add")
def _(x: LoraArray, y: LowRank, **params: Any) -> Any:
    if x.shape != y.shape or not x.is_sum:
        return NotImplemented
    b = _concatenate(scale_by(x.scale, x.b), y.b, -2)
    return LoraArray(x.w, _concatenate(x.a, y.a, -1), b)
