"""`Toeplitz` and `Circulant`: matrices with one number a diagonal, multiplied by FFT."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from ..axes import Array, check_axes
from . import levinson
from .half_precision import computing_dtype
from .matrix import Matrix, entrywise, product
from .stored_entries import stores_entries

#: Up to this size a product by the dense matrix is faster than one by FFT, as measured on a CPU
#: with one vector and with 64; it is more exact, too.
DIRECT_UP_TO = 128


@stores_entries
class Toeplitz(Matrix):
    """A Toeplitz matrix `[..., m, n]`, whose entries depend only on `i - j`.

    If `m` and `n` are at most 128, products and solves use the dense matrix, which is faster.
    Otherwise, a product is a convolution by FFT, with `O((m + n) log(m + n))` operations per
    vector. A solve takes `O(n^2)` operations for Levinson's recursion, and then `O(n log n)` per
    vector (Golub and Van Loan, *Matrix Computations*, 4.7). If the backward error of the solution
    is larger than is typical of LU with partial pivoting, the system is solved again by dense LU.
    With `jax.vmap(vn.implicit(f))`, both solutions are always computed, so use
    `vn.implicit(jax.vmap(f))`.

    The rounding error of an FFT is about `eps * log2(m + n)` times the norm of the vector. So small
    entries of a product have fewer correct digits than in the dense product. If a vector contains a
    NaN or infinity, all entries of its product are NaN. In bfloat16 and float16, products are
    computed in float32.

    **Keeps the structure:** transposes, multiples by a number, sums with `Toeplitz` and
    `Circulant`, and elementwise functions that map 0 to 0.

    **Materializes:** determinants, Cholesky factors, matmuls of integers, elementwise products,
    sums with a dense array, and functions that map 0 to another number. The inverse is a dense
    array, computed by solves.

    **Arguments:**

    - `column`: the first column, `[..., m]`.
    - `row`: the first row, `[..., n]`. `row[0]` is ignored, because `column[0]` is the corner. The
      default is the conjugate of `column`, as in `scipy.linalg.toeplitz`.

    **Raises:**

    - `TypeError` if `column` or `row` is not a dense array.
    - `ValueError` if `column` or `row` has no axis, or their leading axes differ.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Toeplitz(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 5.0]))
    >>> vn.materialise(a).tolist()
    [[1.0, 5.0], [2.0, 1.0], [3.0, 2.0]]
    >>> a.T
    Toeplitz(column=f32[2], row=f32[3])
    """

    column: Array  # [..., m]
    row: Array  # [..., n]

    def __init__(self, column: Array, row: Array | None = None):
        self.__dict__.update(column=column, row=jnp.conj(column) if row is None else row)

    def __post_init__(self) -> None:
        check_axes(self, Array, column="m", row="n")

    def materialise(self) -> Any:
        """Return the dense matrix."""
        m, n = self.column.shape[-1], self.row.shape[-1]
        if not (m and n):
            return jnp.zeros((*self.column.shape[:-1], m, n), self._diagonals().dtype)
        i, j = jnp.arange(m), jnp.arange(n)
        return self._diagonals()[..., n - 1 + i[:, None] - j]

    def _diagonals(self) -> Any:
        """`A[i, j]` at `n - 1 + i - j`."""
        return jnp.concatenate([self.row[..., :0:-1], jnp.asarray(self.column)], -1)

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.column, self.row)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return NotImplemented
        x, column, row = (
            jnp.asarray(v, computing_dtype(dtype)) for v in (x, self.column, self.row)
        )
        m, n = column.shape[-1], row.shape[-1]
        if max(m, n) <= DIRECT_UP_TO or not min(m, n):
            dense = Toeplitz(column, row).materialise()
            return jnp.matmul(x, dense.mT, precision=precision).astype(dtype)
        length = _fast_length(m + n - 1)
        between = jnp.zeros((*column.shape[:-1], length - m - n + 1), column.dtype)
        column = jnp.concatenate([column, between, row[..., :0:-1]], -1)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - n)])
        return _convolved(column[..., None, :], x)[..., :m].astype(dtype)

    def transposed(self) -> "Toeplitz":
        if not (self.column.shape[-1] and self.row.shape[-1]):
            return Toeplitz(self.row, self.column)
        return Toeplitz(_with_first(self.row, self.column), self.column)

    def rescaled(self, scale: Callable[[Any], Any]) -> "Toeplitz":
        if not (self.column.shape[-1] and self.row.shape[-1]):
            return self
        # With the corner in both: a derivative by what is not read must not be 0 times infinity.
        return Toeplitz(scale(self.column), scale(_with_first(self.row, self.column)))

    def solve(self, b: Any) -> Any:
        n = self.column.shape[-1]
        if n <= DIRECT_UP_TO:
            return jnp.linalg.solve(self.materialise(), b.mT).mT
        b = jnp.broadcast_to(b, (*self.column.shape[:-1], *b.shape[-2:]))
        fixed = Toeplitz(lax.stop_gradient(self.column), lax.stop_gradient(self.row))
        by = lambda a: lambda _, b: _solved(a, b)
        return lax.custom_linear_solve(self.matvec, b, by(fixed), by(fixed.transposed()))

    def main_diagonal(self) -> Any:
        column = jnp.asarray(self.column)[..., :1]
        size = min(self.column.shape[-1], self.row.shape[-1])
        return jnp.broadcast_to(column, (*column.shape[:-1], size)) if size else column[..., :0]


def _solved(a: Toeplitz, b: Any) -> Any:
    product = lambda column, row, x: Toeplitz(column, row).matvec(x)
    return levinson.solve(a._diagonals(), b, product, a.matvec, a.materialise)


@stores_entries
class Circulant(Matrix):
    """A circulant matrix `[..., n, n]`, whose columns are cyclic shifts of the first one.

    `A[i, j]` is `column[(i - j) % n]`. The FFT diagonalizes the matrix (Golub and Van Loan, *Matrix
    Computations*, 4.8): a product or a solve costs `O(n log n)` per vector, an inverse or a
    determinant `O(n log n)` in total. Up to size 128 a product uses the dense matrix, which is
    faster. For larger sizes it uses the FFT. The rounding errors of the FFT are proportional to the
    norm of the vector. If the vector contains a NaN, all entries of the product are NaN. Rounding
    errors of a solve grow with the condition number. A solve gives infinity or NaN if an eigenvalue
    is zero, and large numbers if it is zero up to rounding.

    **Keeps the structure:** transposes, inverses, multiples by a number, sums and products of two
    `Circulant`, and elementwise functions that map 0 to 0. The sum with a `Toeplitz` is a
    `Toeplitz`.

    **Materializes:** Cholesky factors, matmuls of integers, elementwise products, sums with a dense
    array, and functions that map 0 to another number.

    **Arguments:**

    - `column`: the first column, `[..., n]`.

    **Raises:**

    - `TypeError` if `column` is not a dense array.
    - `ValueError` if `column` has no axis.

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
        """Return the dense matrix."""
        i = jnp.arange(self.column.shape[-1])
        return jnp.asarray(self.column)[..., (i[:, None] - i) % max(len(i), 1)]

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.column)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return NotImplemented
        x, column = (jnp.asarray(v, computing_dtype(dtype)) for v in (x, self.column))
        if column.shape[-1] <= DIRECT_UP_TO:
            dense = Circulant(column).materialise()
            return jnp.matmul(x, dense.mT, precision=precision).astype(dtype)
        return _convolved(column[..., None, :], x).astype(dtype)

    def transposed(self) -> "Circulant":
        return Circulant(_reversed(self.column))

    def solve(self, b: Any) -> Any:
        return _spectral(lambda x, y: y / x, jnp.asarray(self.column)[..., None, :], b)

    def inverse(self) -> "Circulant":
        return Circulant(_spectral(lambda x: 1 / x, jnp.asarray(self.column)))

    def slogdet(self) -> Any:
        """Return the sign of the determinant and the log of its magnitude, as arrays `[*lead]`."""
        column = jnp.asarray(self.column)
        n = column.shape[-1]
        if not n:
            one = jnp.ones_like(column, shape=column.shape[:-1])
            return one, jnp.log(jnp.abs(one))
        if jnp.iscomplexobj(column):
            eigenvalues = jnp.fft.fft(column)
            return jnp.sign(eigenvalues).prod(-1), jnp.log(jnp.abs(eigenvalues)).sum(-1)
        # Non-real eigenvalues come in conjugate pairs, whose products are positive.
        ends = jnp.stack([column.sum(-1), _alternating(column).sum(-1)][: 2 - n % 2], -1)
        pairs = jnp.fft.rfft(column)[..., 1 : (n + 1) // 2]
        logs = jnp.log(jnp.abs(ends)).sum(-1) + 2 * jnp.log(jnp.abs(pairs)).sum(-1)
        singular = (pairs == 0).any(-1)
        return jnp.where(singular, 0, jnp.sign(ends).prod(-1)), logs

    def main_diagonal(self) -> Any:
        return jnp.broadcast_to(jnp.asarray(self.column)[..., :1], self.column.shape)


def _alternating(x: Any) -> Any:
    return x * (1 - 2 * (jnp.arange(x.shape[-1]) % 2)).astype(x.dtype)


def _reversed(column: Any) -> Any:
    """`c[-i mod n]`: the first row."""
    column = jnp.asarray(column)
    return jnp.roll(column[..., ::-1], 1, -1)


def _with_first(x: Any, first: Any) -> Any:
    return jnp.concatenate([first[..., :1], x[..., 1:]], -1)


def _fast_length(size: int) -> int:
    """The least length of at least this size that is a power of two times 1, 3, 5, 9 or 15."""
    return min(odd << (-(-size // odd) - 1).bit_length() for odd in (1, 3, 5, 9, 15))


def _spectral(function: Any, *arrays: Any) -> Any:
    """A function of discrete Fourier transforms along the last axis, transformed back."""
    n = arrays[-1].shape[-1]
    if not n:
        return arrays[-1]
    if any(map(jnp.iscomplexobj, arrays)):
        return jnp.fft.ifft(function(*map(jnp.fft.fft, arrays)))
    return jnp.fft.irfft(function(*map(jnp.fft.rfft, arrays)), n)


def _convolved(x: Any, y: Any) -> Any:
    return _spectral(lambda x, y: x * y, x, y)


@product
def _(x: Circulant, y: Circulant) -> Any:
    column = y.matvec(jnp.asarray(x.column)[..., None, :])
    return NotImplemented if column is NotImplemented else Circulant(column[..., 0, :])


@entrywise("add")
def _(x: Circulant, y: Circulant, **params: Any) -> Circulant:
    del params
    return Circulant(x.column + y.column)


@entrywise("add")
def _(x: Toeplitz, y: Toeplitz, **params: Any) -> Toeplitz:
    del params
    return Toeplitz(x.column + y.column, x.row + y.row)


@entrywise("add")
def _(x: Toeplitz, y: Circulant, **params: Any) -> Toeplitz:
    del params
    return Toeplitz(x.column + y.column, x.row + _reversed(y.column))
