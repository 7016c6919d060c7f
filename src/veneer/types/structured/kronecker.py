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
from .matrix import Matrix, is_square, matmul_rule, multiply_vectors, solve_vectors


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
        y = self._map_vectors(partial(multiply_vectors, precision=precision), x)
        return y.astype(jnp.result_type(x, self.dtype))

    def _map_vectors(self, function: Callable[[Any, Any], Any], x: Any) -> Any:
        """Apply `function(factor, vectors)` to the vectors `x`, viewed as matrices `[n1, n2]`.

        Apply it with `b` to the rows, and then with `a` to the columns of the result.
        """
        *lead, k, _ = x.shape
        n1, n2 = self.a.shape[-1], self.b.shape[-1]
        x = function(self.b, x.reshape(*lead, k * n1, n2))
        *lead, _, m2 = x.shape
        x = function(self.a, x.reshape(*lead, k, n1, m2).mT.reshape(*lead, k * m2, n1))
        m1 = x.shape[-1]
        return x.reshape(*lead, k, m2, m1).mT.reshape(*lead, k, m1 * m2)

    def transposed(self) -> "Kronecker":
        return self._map_factors(jnp.matrix_transpose)

    def rescaled(self, scale: Any) -> "Kronecker":
        # Scale a dense factor if there is one: a structured factor might be materialized.
        if isinstance(self.a, Matrix) and not isinstance(self.b, Matrix):
            return Kronecker(self.a, scale(self.b))
        return Kronecker(scale(self.a), self.b)

    def solve(self, b: Any) -> Any:
        return self._map_vectors(solve_vectors, b) if self._has_square_factors else NotImplemented

    def inverse(self) -> Any:
        return self._map_factors(jnp.linalg.inv) if self._has_square_factors else NotImplemented

    def cholesky(self) -> Any:
        has_factor = self._has_square_factors
        return self._map_factors(jnp.linalg.cholesky) if has_factor else NotImplemented

    def slogdet(self) -> Any:
        if not self._has_square_factors:
            return NotImplemented
        (sign_a, log_a), (sign_b, log_b) = map(
            partial(redispatch, jnp.linalg.slogdet), (self.a, self.b)
        )
        n1, n2 = self.a.shape[-1], self.b.shape[-1]
        return sign_a**n2 * sign_b**n1, n2 * log_a + n1 * log_b

    def main_diagonal(self) -> Any:
        if not self._has_square_factors:
            return NotImplemented
        a, b = map(partial(redispatch, jnp.linalg.diagonal), (self.a, self.b))
        entries = a[..., :, None] * b[..., None, :]
        return entries.reshape(*a.shape[:-1], self.shape[-1])

    def _map_factors(self, function: Callable) -> "Kronecker":
        return Kronecker(redispatch(function, self.a), redispatch(function, self.b))

    @property
    def _has_square_factors(self) -> bool:
        return is_square(self.a) and is_square(self.b)


@matmul_rule
def _(x: Kronecker, y: Kronecker) -> Any:
    if x.a.shape[-1] != y.a.shape[-2] or x.b.shape[-1] != y.b.shape[-2]:
        return NotImplemented
    return Kronecker(redispatch(jnp.matmul, x.a, y.a), redispatch(jnp.matmul, x.b, y.b))


@register("mul")
def _(x: Kronecker, y: Kronecker, **params: Any) -> Any:
    del params
    if x.a.shape != y.a.shape or x.b.shape != y.b.shape:
        return NotImplemented
    return Kronecker(redispatch(jnp.multiply, x.a, y.a), redispatch(jnp.multiply, x.b, y.b))


def _register_on_factors(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Kronecker, **params: Any) -> Kronecker:
        return x._map_factors(lambda w: primitive.bind(w, **params))


for _name in ("abs", "sign", "square", "integer_pow"):  # f(a b) == f(a) f(b)
    _register_on_factors(_name)
