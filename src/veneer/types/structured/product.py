"""`Product`: two structured matrices, applied one after the other."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._core.value import make_dense, materialise_one
from ..._jax.primitives import find_primitive
from ..axes import check_axes
from .diagonal import Diagonal
from .half_precision import computing_dtype
from .matrix import Matrix, overrides, product


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

    **Raises:**

    - `TypeError` if a factor is not a structured matrix.
    - `ValueError` if the inner sizes `k` or the leading axes of the factors differ.

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
        """Return the dense matrix: materialize `right`, and multiply it by `left`."""
        return redispatch(jnp.matmul, self.left, materialise_one(self.right))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.dtype)
        x = self.right.matvec(x.astype(computing_dtype(dtype)), precision=precision)
        x = x if x is NotImplemented else self.left.matvec(x, precision=precision)
        return x if x is NotImplemented else x.astype(dtype)

    def transposed(self) -> Any:
        return _of(self.right.transposed(), self.left.transposed())

    def rescaled(self, scale: Any) -> Any:
        left = self.left.rescaled(scale)
        if left is not NotImplemented:
            return Product(left, self.right)
        return _of(self.left, self.right.rescaled(scale))

    def converted(self, dtype: Any) -> Any:
        return _of(self.left.converted(dtype), self.right.converted(dtype))

    def solve(self, b: Any) -> Any:
        if not self._of_square_ones():
            return NotImplemented
        b = self.left.solve(b)
        return b if b is NotImplemented else self.right.solve(b)

    def inverse(self) -> Any:
        if not self._of_square_ones():
            return NotImplemented
        return _of(self.right.inverse(), self.left.inverse())

    def slogdet(self) -> Any:
        if not self._of_square_ones():
            return NotImplemented
        left, right = self.left.slogdet(), self.right.slogdet()
        if left is NotImplemented or right is NotImplemented:
            return NotImplemented
        return left[0] * right[0], left[1] + right[1]

    def main_diagonal(self) -> Any:
        for factor, other in ((self.left, self.right), (self.right, self.left)):
            if isinstance(factor, Diagonal):
                entries = other.main_diagonal()
                if entries is not NotImplemented:
                    return factor.diagonal[..., : entries.shape[-1]] * entries
        return NotImplemented

    def _of_square_ones(self) -> bool:
        return self.left.shape[-2:] == self.right.shape[-2:] == self.shape[-2:]


def _of(left: Any, right: Any) -> Any:
    known = left is not NotImplemented and right is not NotImplemented
    return Product(left, right) if known else NotImplemented


def _joined(x: Matrix, y: Matrix) -> Matrix:
    """`x @ y` by a rule for the two, or else as a product of them."""
    out = redispatch(jnp.matmul, x, y) if _pays([x, y], x, y) else None
    return out if isinstance(out, Matrix) else Product(x, y)


def _chained(x: Matrix, y: Matrix) -> Matrix:
    if isinstance(x, Product):
        return _joined(x.left, _joined(x.right, y))
    if isinstance(y, Product):
        first = _joined(x, y.left)
        if not isinstance(first, Product):
            return _joined(first, y.right)
    return Product(x, y)


def _pays(parts: Sequence[Matrix], x: Matrix, y: Matrix) -> bool:
    """Whether to apply some matrices in turn is at worst about twice the work of a dense `x @ y`.

    Which is not to be had for nothing: to multiply it out costs a matrix product.
    """
    entries = math.prod((*x.shape[:-1], y.shape[-1]))
    dense = entries * jnp.result_type(x.dtype, y.dtype).itemsize
    return sum(part.nbytes for part in parts) <= 2 * dense


def _product(x: Matrix, y: Matrix) -> Any:
    if not (overrides(x, "matvec") and overrides(y, "matvec")):
        return NotImplemented
    out = _chained(x, y)
    return out if _pays([out], x, y) else NotImplemented


product(_product, precedence=-1)


@register("dot_general", precedence=-2)
def _one_applied_to_the_other(x: Matrix, y: Matrix, **params: Any) -> Any:
    if not overrides(x, "matvec"):
        return NotImplemented
    primitive = find_primitive("dot_general")
    return redispatch(primitive.bind, x, *make_dense(primitive, [y]), **params)
