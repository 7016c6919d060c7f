"""`Kronecker`: the Kronecker product of two matrices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp

from ..._core.transform import redispatch
from ..._core.value import materialise_one
from ..axes import Leaf, check_axes
from ..elementwise import register_unary
from .matrix import Matrix, PartwiseMatrix


class Kronecker(PartwiseMatrix):
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

    **Raises:** `TypeError` if a factor is not an array, `ValueError` if it has fewer than two axes
    or the leading axes differ.

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
        a, b = (jnp.asarray(materialise_one(w)) for w in (self.a, self.b))
        (*_, m1, n1), (*_, m2, n2) = a.shape, b.shape
        entries = a[..., :, None, :, None] * b[..., None, :, None, :]
        return entries.reshape(*a.shape[:-2], m1 * m2, n1 * n2)

    def map_vectors(self, function: Callable[[Any, Any], Any], x: Any) -> Any:
        # View each vector as a matrix `[n1, n2]`. Multiply `b` by its rows, and then `a` by the
        # columns of the result.
        *lead, k, _ = x.shape
        n1, n2 = self.a.shape[-1], self.b.shape[-1]
        x = function(self.b, x.reshape(*lead, k * n1, n2))
        *lead, _, m2 = x.shape
        x = function(self.a, x.reshape(*lead, k, n1, m2).mT.reshape(*lead, k * m2, n1))
        m1 = x.shape[-1]
        return x.reshape(*lead, k, m2, m1).mT.reshape(*lead, k, m1 * m2)

    def rescaled(self, scale: Any) -> "Kronecker":
        # Scale a dense factor if possible, because scaling can materialize a structured one.
        if isinstance(self.a, Matrix) and not isinstance(self.b, Matrix):
            return Kronecker(self.a, scale(self.b))
        return Kronecker(scale(self.a), self.b)

    def slogdet(self) -> Any:
        if not self.has_square_parts:
            return NotImplemented
        slogdet = partial(redispatch, jnp.linalg.slogdet)
        (sign_a, log_a), (sign_b, log_b) = map(slogdet, self.parts)
        n1, n2 = self.a.shape[-1], self.b.shape[-1]
        return sign_a**n2 * sign_b**n1, n2 * log_a + n1 * log_b

    def main_diagonal(self) -> Any:
        if not self.has_square_parts:
            return NotImplemented
        a, b = map(partial(redispatch, jnp.linalg.diagonal), self.parts)
        entries = a[..., :, None] * b[..., None, :]
        return entries.reshape(*a.shape[:-1], self.shape[-1])


# For these functions, f(a b) == f(a) f(b).
for _name in ("abs", "sign", "square", "integer_pow"):
    register_unary(Kronecker, _name, Kronecker.map_parts)
