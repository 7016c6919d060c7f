"""`Kronecker`: the Kronecker product of two matrices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from ..axes import Leaf, check_axes
from .factors import applied, converted, is_square, solved, transposed
from .matrix import Matrix, product


class Kronecker(Matrix):
    """A Kronecker product `[..., m1 m2, n1 n2]` of two matrices: `a[i, j] * b` in block `i, j`.

    The factors can be dense or implicit. For a Kronecker product of three matrices, pass a
    `Kronecker` as a factor. A product reshapes the vector to a matrix `X` `[n1, n2]`, and computes
    `a @ X @ b.T` (Van Loan, *The ubiquitous Kronecker product*, 2000). With dense factors a product
    costs `n1 n2 m2 + n1 m1 m2` operations per vector. If both factors are square, a solve, an
    inverse, a Cholesky factor or a determinant costs `O(n1^3 + n2^3)`, or less if the factors have
    structure.

    **Keeps the structure:** transposes, inverses, multiples by a number, `abs`, `sign`, `square`
    and integer powers. Products `x @ y` of two `Kronecker` keep it if `x.a @ y.a` and `x.b @ y.b`
    exist, and elementwise products if the shapes of the factors are equal. Cholesky factors keep it
    if both factors are symmetric positive definite. If both are negative definite, the Cholesky
    factor is NaN.

    **Materializes:** sums, other elementwise functions, and solves or determinants if a factor is
    not square.

    **Arguments:**

    - `a`: the first factor, `[..., m1, n1]`.
    - `b`: the second factor, `[..., m2, n2]`, with the same leading axes.

    **Raises:**

    - `TypeError` if a factor is not an array.
    - `ValueError` if a factor has fewer than two axes, or the leading axes differ.

    >>> import jax.numpy as jnp, veneer as vn
    >>> k = vn.types.Kronecker(jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.eye(3))
    >>> (k @ jnp.arange(6.0)).tolist()
    [6.0, 9.0, 12.0, 3.0, 4.0, 5.0]
    >>> k @ k
    Kronecker(a=f32[2,2], b=f32[3,3])
    >>> vn.implicit(jnp.linalg.det)(2 * k).item()
    64.0
    """

    a: Leaf  # [..., m1, n1]
    b: Leaf  # [..., m2, n2]

    def __post_init__(self) -> None:
        check_axes(self, a="m1 n1", b="m2 n2")

    def materialise(self) -> Any:
        """Return the dense matrix."""
        a, b = (jnp.asarray(materialise_one(w)) for w in (self.a, self.b))
        (*_, m1, n1), (*_, m2, n2) = a.shape, b.shape
        entries = a[..., :, None, :, None] * b[..., None, :, None, :]
        return entries.reshape(*a.shape[:-2], m1 * m2, n1 * n2)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        y = self._by_factors(x, lambda w, x: applied(w, x, precision=precision))
        return y.astype(jnp.result_type(x, self.dtype))

    def _by_factors(self, x: Any, of: Callable[[Any, Any], Any]) -> Any:
        """`of` b and the rows of each vector as a matrix, then of a and the columns."""
        *lead, k, _ = x.shape
        n1, n2 = self.a.shape[-1], self.b.shape[-1]
        x = of(self.b, x.reshape(*lead, k * n1, n2))
        *lead, _, m2 = x.shape
        x = of(self.a, x.reshape(*lead, k, n1, m2).mT.reshape(*lead, k * m2, n1))
        m1 = x.shape[-1]
        return x.reshape(*lead, k, m2, m1).mT.reshape(*lead, k, m1 * m2)

    def transposed(self) -> "Kronecker":
        return Kronecker(transposed(self.a), transposed(self.b))

    def rescaled(self, scale: Any) -> "Kronecker":
        if isinstance(self.a, Matrix) and not isinstance(self.b, Matrix):  # a may have to be dense
            return Kronecker(self.a, scale(self.b))
        return Kronecker(scale(self.a), self.b)

    def converted(self, dtype: Any) -> "Kronecker":
        return Kronecker(converted(self.a, dtype), converted(self.b, dtype))

    def solve(self, b: Any) -> Any:
        return self._by_factors(b, solved) if self._of_square_ones() else NotImplemented

    def inverse(self) -> Any:
        return self._of_each(jnp.linalg.inv)

    def cholesky(self) -> Any:
        return self._of_each(jnp.linalg.cholesky)

    def slogdet(self) -> Any:
        if not self._of_square_ones():
            return NotImplemented
        (sign_a, log_a), (sign_b, log_b) = map(
            partial(redispatch, jnp.linalg.slogdet), (self.a, self.b)
        )
        n1, n2 = self.a.shape[-1], self.b.shape[-1]
        return sign_a**n2 * sign_b**n1, n2 * log_a + n1 * log_b

    def main_diagonal(self) -> Any:
        if not self._of_square_ones():
            return NotImplemented
        a, b = map(partial(redispatch, jnp.linalg.diagonal), (self.a, self.b))
        entries = a[..., :, None] * b[..., None, :]
        return entries.reshape(*a.shape[:-1], self.shape[-1])

    def _of_each(self, function: Callable) -> Any:
        if not self._of_square_ones():
            return NotImplemented
        return Kronecker(redispatch(function, self.a), redispatch(function, self.b))

    def _of_square_ones(self) -> bool:
        return is_square(self.a) and is_square(self.b)


def _same_factors(x: Kronecker, y: Kronecker) -> bool:
    return x.a.shape == y.a.shape and x.b.shape == y.b.shape


@product
def _(x: Kronecker, y: Kronecker) -> Any:
    fit = x.a.shape[-1] == y.a.shape[-2] and x.b.shape[-1] == y.b.shape[-2]
    multiply = partial(redispatch, jnp.matmul)
    return Kronecker(multiply(x.a, y.a), multiply(x.b, y.b)) if fit else NotImplemented


@register("mul")
def _(x: Kronecker, y: Kronecker, **params: Any) -> Any:
    del params
    multiply = partial(redispatch, jnp.multiply)
    same = _same_factors(x, y)
    return Kronecker(multiply(x.a, y.a), multiply(x.b, y.b)) if same else NotImplemented


def _multiplicative(name: str) -> None:
    """Of a function with `f(a b) == f(a) f(b)`."""
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Kronecker, **params: Any) -> Kronecker:
        of = partial(redispatch, lambda w: primitive.bind(w, **params))
        return Kronecker(of(x.a), of(x.b))


for _primitive in ("abs", "sign", "square", "integer_pow"):
    _multiplicative(_primitive)
