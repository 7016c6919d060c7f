"""Matrices stored as two factors: `Product` and `LowRank`."""

import math
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..._core.rules import register
from ..._core.surface import Leaf, check_axes
from ..._core.trace import redispatch
from ..._core.value import make_dense, materialise_one
from ..._jax.primitives import find_primitive
from .matrix import (
    Matrix,
    call_if_supported,
    computing_dtype,
    has_method,
    is_square,
    matmul_rule,
    multiply_vectors,
)


class Product(Matrix):
    """A product `left @ right`, `[..., m, n]`, stored as its two structured factors.

    For structured matrices, `x @ y` is a `Product` if no other structured type can represent it. If
    `x` and `y` take more than twice the bytes of the dense product, the dense product is computed
    instead. A product with a dense array multiplies by `right` and then by `left`. A product of
    three matrices is stored as `a @ (b @ c)`, but adjacent factors are multiplied if another
    structured type can represent their product.

    **Keeps the structure:** transposes, inverses, multiples by a number and products. If both
    factors are square, solves, inverses and determinants use the methods of the factors.

    **Materializes:** sums, elementwise functions and Cholesky factors.

    **Arguments:**

    - `left`: a structured matrix `[..., m, k]`, such as a `vn.types.Diagonal`.
    - `right`: a structured matrix `[..., k, n]`.

    **Raises:** `TypeError` if a factor is not a structured matrix, `ValueError` if the inner sizes
    `k` or the leading axes differ.

    >>> import jax.numpy as jnp, veneer as vn
    >>> d = vn.types.Diagonal(jnp.array([1.0, 2.0, 4.0]))
    >>> p = vn.types.Permutation(jnp.array([2, 0, 1]))
    >>> d @ p
    Product(left=Diagonal(diagonal=f32[3]), right=Permutation(indices=i32[3], dtype=float32))
    >>> vn.implicit(jnp.linalg.det)(d @ p).item()
    8.0
    """

    left: Any  # [..., m, k]
    right: Any  # [..., k, n]

    def __post_init__(self) -> None:
        check_axes(self, left="m k", right="k n")
        for name, factor in (("left", self.left), ("right", self.right)):
            if not isinstance(factor, Matrix):
                raise TypeError(
                    f"Product takes two structured matrices, but {name} is an array of shape "
                    f"{tuple(factor.shape)}. Multiply with @ instead."
                )

    def materialise(self) -> Any:
        return redispatch(jnp.matmul, self.left, materialise_one(self.right))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.dtype)
        x = self.right.matvec(x.astype(computing_dtype(dtype)), precision=precision)
        x = call_if_supported(partial(self.left.matvec, precision=precision), x)
        return call_if_supported(lambda x: x.astype(dtype), x)

    def transposed(self) -> Any:
        return call_if_supported(Product, self.right.transposed(), self.left.transposed())

    def rescaled(self, scale: Any) -> Any:
        left = self.left.rescaled(scale)
        if left is not NotImplemented:
            return Product(left, self.right)
        return call_if_supported(Product, self.left, self.right.rescaled(scale))

    def solve(self, b: Any) -> Any:
        if not self._has_square_factors:
            return NotImplemented
        return call_if_supported(self.right.solve, self.left.solve(b))

    def inverse(self) -> Any:
        if not self._has_square_factors:
            return NotImplemented
        return call_if_supported(Product, self.right.inverse(), self.left.inverse())

    def slogdet(self) -> Any:
        if not self._has_square_factors:
            return NotImplemented
        multiply = lambda left, right: (left[0] * right[0], left[1] + right[1])
        return call_if_supported(multiply, self.left.slogdet(), self.right.slogdet())

    def main_diagonal(self) -> Any:
        if not (self.left.is_diagonal or self.right.is_diagonal):
            return NotImplemented

        def multiply(left: Any, right: Any) -> Any:
            n = min(left.shape[-1], right.shape[-1])
            return left[..., :n] * right[..., :n]

        return call_if_supported(multiply, self.left.main_diagonal(), self.right.main_diagonal())

    @property
    def _has_square_factors(self) -> bool:
        return is_square(self.left) and is_square(self.right)


# The rules of two types come first.
@partial(matmul_rule, precedence=-1)
def _(x: Matrix, y: Matrix) -> Any:
    if not (has_method(x, "matvec") and has_method(y, "matvec")):
        return NotImplemented
    out = _multiply_factors(x, y)
    return out if _is_small(out.nbytes, x, y) else NotImplemented


def _multiply_factors(x: Matrix, y: Matrix) -> Matrix:
    """Return `x @ y` as a `Product`. If `x` or `y` is a `Product`, simplify adjacent factors."""
    if isinstance(x, Product):
        return _simplify(x.left, _simplify(x.right, y))
    if isinstance(y, Product):
        first = _simplify(x, y.left)
        if not isinstance(first, Product):
            return _simplify(first, y.right)
    return Product(x, y)


def _simplify(x: Matrix, y: Matrix) -> Matrix:
    """Return `x @ y` by a rule of the two types, or as a `Product` if they have no rule."""
    out = redispatch(jnp.matmul, x, y) if _is_small(x.nbytes + y.nbytes, x, y) else None
    return out if isinstance(out, Matrix) else Product(x, y)


def _is_small(nbytes: int, x: Matrix, y: Matrix) -> bool:
    """Return whether `nbytes` are at most twice the bytes of a dense `x @ y`.

    Then a product of the factors and a vector takes at most about twice the time of a product of
    the dense matrix and the vector. The dense matrix itself costs a matmul.
    """
    entries = math.prod((*x.shape[:-1], y.shape[-1]))
    return nbytes <= 2 * entries * jnp.result_type(x.dtype, y.dtype).itemsize


# If a product has no other rule, materialize the second matrix only.
@register("dot_general", precedence=-2)
def _materialize_second(x: Matrix, y: Matrix, **params: Any) -> Any:
    if not has_method(x, "matvec"):
        return NotImplemented
    primitive = find_primitive("dot_general")
    return redispatch(primitive.bind, x, *make_dense(primitive, [y]), **params)


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


@register("add")
def _(x: LowRank, y: LowRank, **params: Any) -> Any:
    if x.shape != y.shape:  # the primitive broadcasts axes of size 1
        return NotImplemented
    return LowRank(concatenate(x.a, y.a, -1), concatenate(x.b, y.b, -2))


def concatenate(x: Any, y: Any, axis: int) -> Any:
    """Concatenate two dense or implicit arrays."""
    return redispatch(lambda x, y: jnp.concatenate([x, y], axis), x, y)
