"""`Toeplitz` and `Circulant`: matrices whose diagonals are constant, multiplied by FFT."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ..._core.surface import Array, check_axes
from .matrix import (
    Matrix,
    computing_dtype,
    elementwise_rule,
    matmul_rule,
    register_elementwise,
    slogdet_of_diagonal,
    solve_implicitly,
)

#: Up to this size, a product uses the dense matrix. This is faster than the FFT, as measured on CPU
#: with 1 and with 64 vectors, and more accurate.
DIRECT_UP_TO = 128

# The least and the greatest number of refinement steps of a solve.
_REFINEMENTS = 2, 6

# The accepted backward error of a solve, in units of eps times the Frobenius norm. LU with partial
# pivoting has this error on random matrices of size 2048.
_ACCEPTED_ERROR = 4


@register_elementwise
class Toeplitz(Matrix):
    """A Toeplitz matrix `[..., m, n]`, whose entries depend only on `i - j`.

    If `m` and `n` are at most 128, products and solves use the dense matrix, which is faster.
    Otherwise, a product is a convolution by FFT, with `O((m + n) log(m + n))` operations per
    vector. A solve takes `O(n^2)` operations for Levinson's recursion, and then `O(n log n)` per
    vector (Golub and Van Loan, *Matrix Computations*, 4.7). If the residual of the solution is
    large, the system is solved again by dense LU. With `jax.vmap(vn.implicit(f))`, both solutions
    are always computed, so use `vn.implicit(jax.vmap(f))`.

    The rounding error of an FFT is about `eps * log2(m + n)` times the norm of the vector. So small
    entries of a product have fewer correct digits than in the dense product. If a vector contains a
    NaN or infinity, all entries of its product are NaN.

    **Keeps the structure:** transposes, multiples by a number, sums with `Toeplitz` and
    `Circulant`, and elementwise functions that map 0 to 0.

    **Materializes:** determinants, Cholesky factors, matmuls of integers, elementwise products,
    sums with a dense array, and functions that map 0 to another number. The inverse is a dense
    array, computed by solves.

    **Arguments:**

    - `column`: the first column, `[..., m]`.
    - `row`: the first row, `[..., n]`. `row[0]` is ignored, because `column[0]` is the corner. The
      default is the conjugate of `column`, as in `scipy.linalg.toeplitz`.

    **Raises:** `TypeError` if an argument is not a dense array, `ValueError` if it has no axis or
    the leading axes differ.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Toeplitz(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 5.0]))
    >>> vn.materialise(a).tolist()
    [[1.0, 5.0], [2.0, 1.0], [3.0, 2.0]]
    >>> a.T
    Toeplitz(column=f32[2], row=f32[3])
    """

    column: Array  # [..., m]
    row: Array  # [..., n]

    linear_in: ClassVar[tuple[str, ...]] = ("column", "row")

    def __init__(self, column: Array, row: Array | None = None):
        self.__dict__.update(column=column, row=jnp.conj(column) if row is None else row)

    def __post_init__(self) -> None:
        check_axes(self, Array, column="m", row="n")

    def materialise(self) -> Any:
        m, n = self.column.shape[-1], self.row.shape[-1]
        if not (m and n):
            return jnp.zeros((*self.column.shape[:-1], m, n), self._diagonals().dtype)
        i, j = jnp.arange(m), jnp.arange(n)
        return self._diagonals()[..., n - 1 + i[:, None] - j]

    def _diagonals(self) -> Any:
        """Return the diagonals `[..., m + n - 1]`, with `A[i, j]` at `n - 1 + i - j`."""
        return jnp.concatenate([self.row[..., :0:-1], jnp.asarray(self.column)], -1)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        return _multiply(self, x, precision)

    def transposed(self) -> "Toeplitz":
        return Toeplitz(_with_first(self.row, self.column), self.column)

    def rescaled(self, scale: Callable[[Any], Any]) -> "Toeplitz":
        # Replace `row[0]`, which is ignored, by the corner. Its derivative must be 0. It would be
        # NaN if the derivative of `scale` there were infinite.
        return Toeplitz(scale(self.column), scale(_with_first(self.row, self.column)))

    def solve(self, b: Any) -> Any:
        n = self.column.shape[-1]
        if n <= DIRECT_UP_TO:
            return jnp.linalg.solve(self.materialise(), b.mT).mT
        return solve_implicitly(self, b, _solve_by_levinson)

    def main_diagonal(self) -> Any:
        column = jnp.asarray(self.column)[..., :1]
        size = min(self.column.shape[-1], self.row.shape[-1])
        return jnp.broadcast_to(column, (*column.shape[:-1], size)) if size else column[..., :0]


def _solve_by_levinson(a: Toeplitz, b: Any) -> Any:
    """Solve `a @ x = v` for each row `v` of `b` `[*lead, k, n]`.

    Levinson's recursion computes the first and the last column of the inverse in `O(n^2)`. The
    formula of Gohberg and Semencul (Heinig and Rost, *Algebraic Methods for Toeplitz-like Matrices
    and Operators*, 1984) writes the inverse as products of triangular Toeplitz matrices that these
    two columns define. So a product of the inverse and a vector costs a few FFTs.

    The recursion is inaccurate if a leading block of the matrix is nearly singular, even if the
    matrix is well conditioned. So the solution is refined. If the residual is still large, the
    system is solved again by LU of the dense matrix.
    """
    first, last = _inverse_columns(a._diagonals())
    zeros = jnp.zeros_like(first)
    lower = lambda column, x: Toeplitz(column, zeros).matvec(x)
    upper = lambda row, x: Toeplitz(_with_first(zeros, row), row).matvec(x)
    shift = lambda x: jnp.roll(x, 1, -1).at[..., 0].set(0)

    def multiply_inverse(b: Any) -> Any:
        y = lower(first, upper(last[..., ::-1], b))
        z = lower(shift(last), upper(shift(first[..., ::-1]), b))
        return (y - z) / first[..., None, :1]

    norm = lambda v: jnp.linalg.norm(v, axis=-1)
    matrix_norm = math.sqrt(b.shape[-1]) * norm(a._diagonals())[..., None]  # >= the Frobenius norm
    tolerance = _ACCEPTED_ERROR * jnp.finfo(b.dtype).eps

    def is_accurate(x: Any, residual: Any) -> Any:  # False for NaN
        return (norm(residual) <= tolerance * (matrix_norm * norm(x) + norm(b))).all()

    def refine(state: Any) -> Any:
        count, x, residual = state
        x = x + multiply_inverse(residual)
        return count + 1, x, b - a.matvec(x)

    def needs_refinement(state: Any) -> Any:
        least, most = _REFINEMENTS
        count, x, residual = state
        return (count <= least) | ((count <= most) & ~is_accurate(x, residual))

    _, x, residual = lax.while_loop(needs_refinement, refine, (0, jnp.zeros_like(b), b))
    solve_dense = lambda: jnp.linalg.solve(a.materialise(), b.mT).mT
    return lax.cond(is_accurate(x, residual), lambda: x, solve_dense)


@functools.partial(jnp.vectorize, signature="(d)->(n),(n)")
def _inverse_columns(diagonals: Any) -> Any:
    """Return the first and the last column of the inverse, by Levinson's recursion in `O(n^2)`.

    Step `i` computes the two columns for the leading block of size `i + 1` from the two columns for
    the block of size `i` (Golub and Van Loan, *Matrix Computations*, 4.7). `diagonals` `[2 n - 1]`
    has `A[i, j]` at `n - 1 + i - j`.
    """
    n = (len(diagonals) + 1) // 2
    reversed_diagonals = diagonals[::-1]
    row = lambda i: lax.dynamic_slice(reversed_diagonals, (n - 1 - i,), (n,))
    dot = lambda x, y: jnp.dot(x, y, precision="highest")

    def step(columns: Any, i: Any) -> Any:  # the columns for the block of size i, padded with zeros
        first, last = columns
        last = jnp.roll(last, 1)
        # The columns of the inverse of the larger block have 0 as their product with row i (for
        # `first`) and row 0 (for `last`). Combine the two columns so that both products are 0.
        below, above = dot(row(i), first), dot(row(0), last)
        determinant = 1 - below * above
        first, last = first - below * last, last - above * first
        return (first / determinant, last / determinant), None

    corner = jnp.zeros(n, diagonals.dtype).at[0].set(1 / diagonals[n - 1])
    return lax.scan(step, (corner, corner), jnp.arange(1, n))[0]


@register_elementwise
class Circulant(Matrix):
    """A circulant matrix `[..., n, n]`, whose columns are cyclic shifts of the first one.

    `A[i, j]` is `column[(i - j) % n]`. The FFT diagonalizes the matrix (Golub and Van Loan, *Matrix
    Computations*, 4.8): a product or a solve costs `O(n log n)` per vector, an inverse or a
    determinant `O(n log n)` in total. Up to size 128 a product uses the dense matrix, which is
    faster. Rounding errors of the FFT are proportional to the norm of the vector. If the vector
    contains a NaN, all entries of the product are NaN. A solve gives infinity or NaN if an
    eigenvalue is zero, and large numbers if it is zero up to rounding.

    **Keeps the structure:** transposes, inverses, multiples by a number, sums and products of two
    `Circulant`, and elementwise functions that map 0 to 0. The sum with a `Toeplitz` is a
    `Toeplitz`.

    **Materializes:** Cholesky factors, matmuls of integers, elementwise products, sums with a dense
    array, and functions that map 0 to another number.

    **Arguments:**

    - `column`: the first column, `[..., n]`.

    **Raises:** `TypeError` if `column` is not a dense array, `ValueError` if it has no axis.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Circulant(jnp.array([4.0, 1.0, 0.0]))
    >>> vn.materialise(a).tolist()
    [[4.0, 0.0, 1.0], [1.0, 4.0, 0.0], [0.0, 1.0, 4.0]]
    >>> vn.implicit(jnp.linalg.inv)(a @ a)
    Circulant(column=f32[3])
    """

    column: Array  # [..., n]

    linear_in: ClassVar[tuple[str, ...]] = ("column",)

    def __post_init__(self) -> None:
        check_axes(self, Array, column="n")

    def materialise(self) -> Any:
        i = jnp.arange(self.column.shape[-1])
        return jnp.asarray(self.column)[..., (i[:, None] - i) % max(len(i), 1)]

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        return _multiply(self, x, precision)

    def transposed(self) -> "Circulant":
        return Circulant(_first_row(self))

    def solve(self, b: Any) -> Any:
        return _spectral(lambda x, y: y / x, jnp.asarray(self.column)[..., None, :], b)

    def inverse(self) -> "Circulant":
        return Circulant(_spectral(lambda x: 1 / x, jnp.asarray(self.column)))

    def slogdet(self) -> Any:
        column = jnp.asarray(self.column)
        n = column.shape[-1]
        if not n:
            one = jnp.ones_like(column, shape=column.shape[:-1])
            return one, jnp.log(jnp.abs(one))
        if jnp.iscomplexobj(column):
            return slogdet_of_diagonal(jnp.fft.fft(column))
        # The eigenvectors (1, 1, 1, ...) and, if n is even, (1, -1, 1, ...) have real eigenvalues.
        # The other eigenvalues come in conjugate pairs, whose products are positive.
        alternating = (1 - 2 * (jnp.arange(n) % 2)).astype(column.dtype)
        eigenvalues = [column.sum(-1), (column * alternating).sum(-1)][: 2 - n % 2]
        sign, logs = slogdet_of_diagonal(jnp.stack(eigenvalues, -1))
        pairs = jnp.fft.rfft(column)[..., 1 : (n + 1) // 2]
        is_singular = (pairs == 0).any(-1)
        return jnp.where(is_singular, 0, sign), logs + 2 * jnp.log(jnp.abs(pairs)).sum(-1)

    def main_diagonal(self) -> Any:
        return jnp.broadcast_to(jnp.asarray(self.column)[..., :1], self.column.shape)


def _first_row(x: Circulant) -> Any:
    return jnp.roll(jnp.asarray(x.column)[..., ::-1], 1, -1)


def _with_first(x: Any, other: Any) -> Any:
    """Replace the first entry of `x` by the first entry of `other` along the last axis.

    Return `x` if one of them is empty.
    """
    count = min(1, x.shape[-1], other.shape[-1])
    return jnp.concatenate([other[..., :count], x[..., count:]], -1)


def _multiply(a: Toeplitz | Circulant, x: Any, precision: Any) -> Any:
    """Return `a.matvec(x)`, with the dense matrix up to size `DIRECT_UP_TO`, and by FFT above."""
    dtype = jnp.result_type(x, *jax.tree.leaves(a))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return NotImplemented
    m, n = a.shape[-2:]
    a, x = jax.tree.map(lambda v: jnp.asarray(v, computing_dtype(dtype)), (a, x))
    if max(m, n) <= DIRECT_UP_TO or not min(m, n):
        return jnp.matmul(x, a.materialise().mT, precision=precision).astype(dtype)
    column = a.column
    if isinstance(a, Toeplitz):
        # A Toeplitz matrix is a block of a circulant matrix with at least m + n - 1 columns. Use
        # the next length that is a power of two times 1, 3, 5, 9 or 15, for which FFTs are fast.
        size = m + n - 1
        length = min(odd << (-(-size // odd) - 1).bit_length() for odd in (1, 3, 5, 9, 15))
        zeros = jnp.zeros((*column.shape[:-1], length - size), column.dtype)
        column = jnp.concatenate([column, zeros, a.row[..., :0:-1]], -1)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - n)])
    return _spectral(jnp.multiply, column[..., None, :], x)[..., :m].astype(dtype)


def _spectral(function: Any, *arrays: Any) -> Any:
    """Apply a function to the Fourier transforms of arrays, and transform its result back.

    The transforms are along the last axis. The last of the arrays has the size of the result.
    """
    n = arrays[-1].shape[-1]
    if not n:
        return arrays[-1]
    if any(map(jnp.iscomplexobj, arrays)):
        return jnp.fft.ifft(function(*map(jnp.fft.fft, arrays)))
    return jnp.fft.irfft(function(*map(jnp.fft.rfft, arrays)), n)


@matmul_rule
def _(x: Circulant, y: Circulant) -> Any:
    column = y.matvec(jnp.asarray(x.column)[..., None, :])
    return NotImplemented if column is NotImplemented else Circulant(column[..., 0, :])


@elementwise_rule("add")
def _(x: Toeplitz, y: Circulant) -> Toeplitz:
    return Toeplitz(x.column + y.column, x.row + _first_row(y))
