"""`Permutation`: a permutation matrix, stored as its indices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.tree import static
from ..._core.value import describe
from ..axes import Leaf, check_axes
from .diagonal import Diagonal
from .matrix import Matrix, matmul_rule
from .product import Product


class Permutation(Matrix):
    """A permutation matrix `[..., n, n]`, where `P @ x` is `x[indices]`.

    Row `i` has its 1 in column `indices[i]`. A product or a solve reorders the `n` entries of each
    vector, without multiplications. Transposes, solves and products `x @ P` first sort the indices.
    The determinant is the sign of the permutation, computed in `O(n log n)`.

    **Keeps the structure:** transposes, inverses and products of two `Permutation`. A multiple by a
    number is a `Product` of a `Diagonal` and the `Permutation`.

    **Materializes:** sums, elementwise functions and Cholesky factors.

    **Arguments:**

    - `indices`: integers `[..., n]` that contain each of `0, ..., n - 1` once.
    - `dtype`: the dtype of the matrix; static. The default is JAX's default float.

    **Raises:** `TypeError` if `indices` is not an array of integers, `ValueError` if it is not a
    permutation. Traced indices are not checked: an index out of range gives NaN in products.

    >>> import jax.numpy as jnp, veneer as vn
    >>> p = vn.types.Permutation(jnp.array([2, 0, 1]))
    >>> (p @ jnp.array([1.0, 2.0, 3.0])).tolist()
    [3.0, 1.0, 2.0]
    >>> (p @ p).indices.tolist(), p.T.indices.tolist()
    ([1, 2, 0], [1, 2, 0])
    """

    indices: Leaf  # int[..., n]
    dtype: Any = static(default=float)

    def __post_init__(self) -> None:
        self.__dict__["dtype"] = jax.dtypes.canonicalize_dtype(self.dtype)
        check_axes(self, indices="n")
        if not jnp.issubdtype(self.indices.dtype, jnp.integer):
            raise TypeError(f"Permutation takes integers for indices, not {self.indices.dtype}")
        is_known = not isinstance(self.indices, jax.core.Tracer)
        if is_known and getattr(self.indices, "is_fully_addressable", True):
            indices = np.asarray(self.indices)
            if not (np.sort(indices, -1) == np.arange(indices.shape[-1])).all():
                raise ValueError(
                    "Permutation takes indices that contain each of 0, ..., "
                    f"{indices.shape[-1] - 1} once, got {np.array2string(indices, threshold=10)}"
                )

    def __repr__(self) -> str:
        (indices,) = describe([self.indices])
        return f"Permutation(indices={indices}, dtype={jnp.dtype(self.dtype).name})"

    def materialise(self) -> Any:
        return jax.nn.one_hot(self.indices, self.indices.shape[-1], dtype=self.dtype)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.dtype)
        return jnp.take_along_axis(x, jnp.asarray(self.indices)[..., None, :], -1).astype(dtype)

    def transposed(self) -> "Permutation":
        return _unchecked(jnp.argsort(self.indices, -1), self.dtype)

    def rescaled(self, scale: Any) -> Any:
        return Product(Diagonal(scale(jnp.ones(self.shape[:-1], self.dtype))), self)

    def converted(self, dtype: Any) -> "Permutation":
        return _unchecked(self.indices, dtype)

    def solve(self, b: Any) -> Any:
        return self.transposed().matvec(b)

    def inverse(self) -> "Permutation":
        return self.transposed()

    def slogdet(self) -> Any:
        odd = (self.indices.shape[-1] - _count_cycles(jnp.asarray(self.indices))) % 2
        sign = (1 - 2 * odd).astype(self.dtype)
        return sign, jnp.zeros_like(sign)

    def main_diagonal(self) -> Any:
        return (self.indices == jnp.arange(self.indices.shape[-1])).astype(self.dtype)


def _unchecked(indices: Any, dtype: Any) -> Permutation:
    """Create a `Permutation` without a check, which would wait for the values of the indices."""
    new = Permutation.__new__(Permutation)
    new.__dict__.update(indices=indices, dtype=jnp.dtype(dtype))
    return new


def _count_cycles(indices: Any) -> Any:
    """Return the number of cycles `[...]` of permutations `[..., n]`.

    Each element finds the least element of its cycle by pointer doubling: the minimum over
    `2^(k+1)` successors is the minimum of two minima over `2^k` successors.
    """
    n = indices.shape[-1]
    own = jnp.broadcast_to(jnp.arange(n, dtype=indices.dtype), indices.shape)
    least, ahead = own, indices
    for _ in range(max(n - 1, 0).bit_length()):
        least = jnp.minimum(least, jnp.take_along_axis(least, ahead, -1))
        ahead = jnp.take_along_axis(ahead, ahead, -1)
    return (least == own).sum(-1)


@matmul_rule
def _(x: Permutation, y: Permutation) -> Permutation:
    indices = jnp.take_along_axis(jnp.asarray(y.indices), jnp.asarray(x.indices), -1)
    return _unchecked(indices, jnp.result_type(x.dtype, y.dtype))
