"""`BlockDiagonal` and `Kronecker`: matrices made of smaller matrices."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface import Leaf, check_axes
from ..._core.trace import redispatch
from ..._core.value import materialise_one
from ..elementwise import register_unary
from .diagonal import Diagonal
from .matrix import (
    Matrix,
    elementwise_rule,
    is_square,
    matmul_rule,
    multiply_vectors,
    register_elementwise,
)


class PartwiseMatrix(Matrix, abstract=True):
    """The base class of matrices made of smaller matrices, their parts.

    The fields are the parts, which may be implicit. A type implements `map_vectors`. Transposes,
    inverses, Cholesky factors, and products of two matrices of the same type are computed part by
    part.
    """

    def map_vectors(self, function: Callable[[Any, Any], Any], x: Any) -> Any:
        """Multiply the matrix, or its inverse, by `k` vectors.

        **Arguments:**

        - `function`: a function of a part and an array of vectors, one per row. It multiplies the
          part, or its inverse, by the vectors.
        - `x`: the vectors `[*lead, k, n]`, one per row.
        """
        raise NotImplementedError

    @property
    def parts(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def map_parts(self, function: Callable, *others: Any) -> Any:
        """Return a matrix of the same type with `function(part, *other_parts)` as each part.

        `others` are matrices of the same type. `other_parts` has the same part of each.
        """
        groups = zip(self.parts, *(other.parts for other in others), strict=True)
        return type(self)(*(redispatch(function, *group) for group in groups))

    @property
    def has_square_parts(self) -> bool:
        return all(map(is_square, self.parts))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        y = self.map_vectors(partial(multiply_vectors, precision=precision), x)
        return y.astype(jnp.result_type(x, self.dtype))

    def transposed(self) -> Any:
        return self.map_parts(jnp.matrix_transpose)

    def solve(self, b: Any) -> Any:
        solve = lambda w, b: redispatch(lambda w, b: jnp.linalg.solve(w, b.mT).mT, w, b)
        return self.map_vectors(solve, b) if self.has_square_parts else NotImplemented

    def inverse(self) -> Any:
        return self.map_parts(jnp.linalg.inv) if self.has_square_parts else NotImplemented

    def cholesky(self) -> Any:
        return self.map_parts(jnp.linalg.cholesky) if self.has_square_parts else NotImplemented


@matmul_rule
def _(x: PartwiseMatrix, y: PartwiseMatrix) -> Any:
    if type(x) is not type(y):
        return NotImplemented
    for a, b in zip(x.parts, y.parts, strict=True):
        if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
            return NotImplemented
    return x.map_parts(jnp.matmul, y)


@elementwise_rule("mul")
def _(x: PartwiseMatrix, y: PartwiseMatrix) -> Any:
    if type(x) is not type(y) or [a.shape for a in x.parts] != [b.shape for b in y.parts]:
        return NotImplemented
    return x.map_parts(jnp.multiply, y)


@register_elementwise
class BlockDiagonal(PartwiseMatrix):
    """A block-diagonal matrix `[..., k m, k n]` with `k` blocks `[m, n]`.

    The blocks are one array, dense or implicit: for example a `QArray`, or a batch of `k` Toeplitz
    matrices. A product with a dense array is a batched matmul of the blocks, with `k m n`
    operations per vector. If the blocks are square, a solve, an inverse, a Cholesky factor or a
    determinant costs `O(k n^3)`, or less if the blocks have structure.

    **Keeps the structure:** transposes, inverses, Cholesky factors, multiples by a number, products
    with a `Diagonal` on either side, elementwise products with a dense array, and elementwise
    functions that map 0 to 0. Sums and elementwise products of two `BlockDiagonal` keep it if their
    `blocks` have equal shapes. A matmul of two `BlockDiagonal` keeps it if both have `k` blocks,
    and the blocks of the first have as many columns as the blocks of the second have rows.

    **Materializes:** sums with a dense array, functions that map 0 to another number, and solves or
    determinants if the blocks are not square.

    **Arguments:**

    - `blocks`: the stacked blocks, `[..., k, m, n]`. `BlockDiagonal.from_blocks(*matrices)` stacks
      matrices.

    **Raises:** `TypeError` if `blocks` is not an array, `ValueError` if it has fewer than three
    axes.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.BlockDiagonal(jnp.arange(1.0, 9.0).reshape(2, 2, 2))
    >>> vn.materialise(a).tolist()
    [[1.0, 2.0, 0.0, 0.0], [3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 5.0, 6.0], [0.0, 0.0, 7.0, 8.0]]
    >>> a @ a.T
    BlockDiagonal(blocks=f32[2,2,2])
    """

    blocks: Leaf  # [..., k, m, n]

    linear_in: ClassVar[tuple[str, ...]] = ("blocks",)

    def __post_init__(self) -> None:
        check_axes(self, blocks="k m n")

    @classmethod
    def from_blocks(cls, *matrices: Any) -> "BlockDiagonal":
        """Create a block-diagonal matrix from its blocks.

        **Arguments:**

        - `matrices`: the blocks `[..., m, n]`, all dense or all of one implicit type.

        **Raises:** `ValueError` if there are no matrices, or their shapes differ.

        >>> import jax.numpy as jnp, veneer as vn
        >>> vn.types.BlockDiagonal.from_blocks(jnp.eye(3), jnp.ones((3, 3)))
        BlockDiagonal(blocks=f32[2,3,3])
        """
        shapes = [tuple(jnp.shape(w)) for w in matrices]
        if len(set(shapes)) != 1 or len(shapes[0]) < 2:
            raise ValueError(
                f"BlockDiagonal.from_blocks takes matrices of one shape, got {shapes}. Pad them to "
                "one shape, or multiply with each matrix separately."
            )
        return cls(redispatch(lambda ws: jnp.stack(ws, -3), matrices))

    def materialise(self) -> Any:
        blocks = jnp.asarray(materialise_one(self.blocks))
        *lead, k, m, n = blocks.shape
        on_diagonal = jnp.eye(k, dtype=bool)[:, None, :, None]
        spread = jnp.where(on_diagonal, blocks[..., None, :], jnp.zeros((), blocks.dtype))
        return spread.reshape(*lead, k * m, k * n)

    def map_vectors(self, function: Callable[[Any, Any], Any], x: Any) -> Any:
        *_, k, _, n = self.blocks.shape
        vectors = x.reshape(*x.shape[:-1], k, n).swapaxes(-3, -2)  # one part per block
        y = function(self.blocks, vectors).swapaxes(-3, -2)
        return y.reshape(*y.shape[:-2], k * y.shape[-1])

    def slogdet(self) -> Any:
        if not self.has_square_parts:
            return NotImplemented
        signs, logs = redispatch(jnp.linalg.slogdet, self.blocks)
        return signs.prod(-1), logs.sum(-1)

    def main_diagonal(self) -> Any:
        if not self.has_square_parts:
            return NotImplemented
        entries = redispatch(jnp.linalg.diagonal, self.blocks)
        return entries.reshape(*self.shape[:-2], self.shape[-1])


@matmul_rule
def _(x: Diagonal, y: BlockDiagonal) -> BlockDiagonal:
    *lead, k, m, _ = y.blocks.shape
    rows = jnp.reshape(x.diagonal, (*lead, k, m, 1))
    return BlockDiagonal(redispatch(jnp.multiply, rows, y.blocks))


@matmul_rule
def _(x: BlockDiagonal, y: Diagonal) -> BlockDiagonal:
    *lead, k, _, n = x.blocks.shape
    columns = jnp.reshape(y.diagonal, (*lead, k, 1, n))
    return BlockDiagonal(redispatch(jnp.multiply, x.blocks, columns))


@register("mul")
def _(x: BlockDiagonal, y: ArrayLike, **params: Any) -> Any:
    if jnp.shape(y)[-2:] != x.shape[-2:]:
        return NotImplemented  # a number, which a rule of all matrices multiplies by
    *_, k, m, n = x.blocks.shape
    y = jnp.asarray(y)
    blocks = jnp.diagonal(y.reshape(*y.shape[:-2], k, m, k, n), axis1=-4, axis2=-2)
    return BlockDiagonal(redispatch(jnp.multiply, x.blocks, jnp.moveaxis(blocks, -1, -3)))


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
