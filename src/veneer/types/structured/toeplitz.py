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
    """The matrix `[..., m, n]` whose entries depend on `i - j` alone.

    A product with a dense array is a convolution: `O((m + n) log(m + n))` a vector, by FFT; up to
    size 128 it is the product with the dense matrix, made for it, which is faster there. A solve
    costs `O(n^2)` for Levinson's recursion, in `n` steps that keep `O(n)` numbers, and
    `O(n log n)` for each vector. The recursion goes through the leading blocks: if one of them
    is singular, or so near to it that the refined solution has a larger backward error than
    elimination has, then dense LU runs in its place, chosen as the program runs. `jax.vmap` of a
    choice makes both, so put `implicit` outside of it for solves.

    *Exactness*: an FFT rounds in proportion to the norm of the vector, about `eps * log2(m + n)`
    times the norms of matrix and vector, and not to each entry. An entry of the product that is
    small beside the others has fewer right digits than the dense product gives it; NaN and infinity
    in a vector reach all entries of its product. bfloat16 and float16 are computed in float32;
    products of integers are dense.

    Kept: transposes, multiples by a number, sums with `Toeplitz` and `Circulant`, elementwise
    functions that give 0 for 0. Inverses, determinants and Cholesky factors are dense.

    **Arguments:**

    - `column`: `[..., m]`, the first column.
    - `row`: `[..., n]`, the first row, of which `row[0]` is not read: the corner is `column[0]`.
      By default the conjugate of `column`, as in `scipy.linalg.toeplitz`.

    **Raises:** `TypeError` for what is no array, `ValueError` if leading axes differ.

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
        """The dense matrix."""
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
    """The square matrix `[..., n, n]` whose columns are the first one moved around.

    `A[i, j]` is `column[(i - j) % n]`. The FFT diagonalises it: a product or a solve costs
    `O(n log n)` a vector, an inverse or a determinant as much in all. Up to size 128 a product is
    the one with the dense matrix, made for it, which is faster there. What is said of exactness
    under `Toeplitz` holds here too, for solves in proportion to the condition number. A singular
    matrix gives infinities or NaN where an eigenvalue is zero; if one is zero but for rounding,
    large numbers, as the dense solve does.

    Kept: transposes, inverses, multiples by a number, sums and products of two, elementwise
    functions that give 0 for 0. The sum with `Toeplitz` is `Toeplitz`. Cholesky factors are dense.

    **Arguments:**

    - `column`: `[..., n]`, the first column.

    **Raises:** `TypeError` for what is no array, `ValueError` for a scalar.

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
        """The dense matrix."""
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
        """Of a real matrix, eigenvalues that are not real come in pairs, with positive products."""
        column = jnp.asarray(self.column)
        n = column.shape[-1]
        if not n:
            one = jnp.ones_like(column, shape=column.shape[:-1])
            return one, jnp.log(jnp.abs(one))
        if jnp.iscomplexobj(column):
            eigenvalues = jnp.fft.fft(column)
            return jnp.sign(eigenvalues).prod(-1), jnp.log(jnp.abs(eigenvalues)).sum(-1)
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
