"""`BlockDiagonal`: a block-diagonal matrix with blocks of equal size."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._core.value import materialise_one
from ..axes import Leaf, check_axes
from .diagonal import Diagonal
from .matrix import PartwiseMatrix, matmul_rule, register_elementwise


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

    - `blocks`: the stacked blocks, `[..., k, m, n]`. `BlockDiagonal.of(*matrices)` stacks matrices.

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
    def of(cls, *matrices: Any) -> "BlockDiagonal":
        """Create a block-diagonal matrix from its blocks.

        **Arguments:**

        - `matrices`: the blocks `[..., m, n]`, all dense or all of one implicit type.

        **Raises:** `ValueError` if there are no matrices, or their shapes differ.

        >>> import jax.numpy as jnp, veneer as vn
        >>> vn.types.BlockDiagonal.of(jnp.eye(3), jnp.ones((3, 3)))
        BlockDiagonal(blocks=f32[2,3,3])
        """
        shapes = [tuple(jnp.shape(w)) for w in matrices]
        if len(set(shapes)) != 1 or len(shapes[0]) < 2:
            raise ValueError(
                f"BlockDiagonal.of takes matrices of one shape, got {shapes}. Pad them to one "
                "shape, or multiply with each matrix separately."
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
