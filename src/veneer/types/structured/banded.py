"""`Tridiagonal` and `Banded`: square matrices with nonzero entries only near the diagonal."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import linalg as lax_linalg

from ..._core.surface import Array, check_axes
from ..._core.tree import static
from .diagonal import Diagonal
from .matrix import (
    Matrix,
    computing_dtype,
    elementwise_rule,
    matmul_rule,
    register_elementwise,
    solve_implicitly,
)


@register_elementwise
class Tridiagonal(Matrix):
    """A tridiagonal matrix `[..., n, n]`, stored as its three diagonals.

    A product costs `3 n` operations per vector, a solve or a determinant `O(n)`. On CPU and GPU,
    solves pivot (LAPACK's `gtsv` and cuSPARSE's `gtsv2`). On other platforms they use Thomas's
    algorithm without pivoting, so the matrix should be diagonally dominant or positive definite. A
    solve with a singular matrix gives NaN or infinity.

    **Keeps the structure:** transposes, multiples by a number, sums with `Tridiagonal` and
    `Diagonal`, products with `Diagonal`, Cholesky factors, and elementwise functions that map 0 to
    0. The product of two `Tridiagonal` is a `Banded`.

    **Materializes:** elementwise products, sums with a dense array, and functions that map 0 to
    another number (`exp`). The inverse is a dense array, computed by solves.

    **Arguments:**

    - `lower`: the entries below the main diagonal, `A[i + 1, i]`: an array `[..., n - 1]`.
    - `diagonal`: the main diagonal, `[..., n]`.
    - `upper`: the entries above the main diagonal, `A[i, i + 1]`: an array `[..., n - 1]`.

    **Raises:** `TypeError` if an argument is not a dense array, `ValueError` if the shapes do not
    match.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Tridiagonal(jnp.ones(2), jnp.full(3, 2.0), jnp.ones(2))
    >>> vn.materialise(a).tolist()
    [[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 2.0]]
    >>> a + a.T
    Tridiagonal(lower=f32[2], diagonal=f32[3], upper=f32[2])
    >>> round(vn.implicit(jnp.linalg.det)(a).item(), 5)
    4.0
    """

    lower: Array  # [..., n - 1]
    diagonal: Array  # [..., n]
    upper: Array  # [..., n - 1]

    linear_in: ClassVar[tuple[str, ...]] = ("lower", "diagonal", "upper")

    def __post_init__(self) -> None:
        check_axes(self, Array, lower="n-1", diagonal="n", upper="n-1")
        n, n_lower = self.diagonal.shape[-1], self.lower.shape[-1]
        if n_lower != max(n - 1, 0):
            raise ValueError(
                "Tridiagonal takes lower and upper with one entry fewer than diagonal, got "
                f"{n_lower} and {n} entries"
            )

    def materialise(self) -> Any:
        return _as_banded(self).materialise()

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        dtype = jnp.result_type(x, self.diagonal)
        lower, diagonal, upper, v = _widen(self.lower, self.diagonal, self.upper, x)
        y = diagonal[..., None, :] * v
        if x.shape[-1] > 1:
            y += _pad(lower[..., None, :] * v[..., :-1], 1, 0)
            y += _pad(upper[..., None, :] * v[..., 1:], 0, 1)
        return y.astype(dtype)

    def transposed(self) -> "Tridiagonal":
        return Tridiagonal(self.upper, self.diagonal, self.lower)

    def solve(self, b: Any) -> Any:
        lower, diagonal, upper = map(jnp.asarray, (self.lower, self.diagonal, self.upper))
        if not b.size:
            return b
        bands = _pad(lower, 1, 0), diagonal, _pad(upper, 0, 1)
        return lax_linalg.tridiagonal_solve(*bands, b.mT).mT

    def cholesky(self) -> "Tridiagonal":
        """Return the lower Cholesky factor. It is NaN if the matrix is not positive definite."""
        diagonal = jnp.moveaxis(jnp.real(self.diagonal), -1, 0)
        subdiagonal = jnp.moveaxis((self.lower + jnp.conj(self.upper)) / 2, -1, 0)
        if not len(diagonal):
            return self

        def step(previous_root: Any, entries: Any) -> Any:
            d, e = entries
            e = e / previous_root
            root = jnp.sqrt(d - jnp.abs(e) ** 2)
            return root, (root, e)

        first = jnp.sqrt(diagonal[0])
        _, (rest, lower) = lax.scan(step, first, (diagonal[1:], subdiagonal))
        roots = jnp.concatenate([first[None], rest])
        valid = jnp.where((roots > 0).all(0), 1, jnp.nan).astype(roots.dtype)
        lower, roots = (jnp.moveaxis(x * valid, 0, -1) for x in (lower, roots))
        return Tridiagonal(lower, roots.astype(lower.dtype), jnp.zeros_like(lower))

    def slogdet(self) -> Any:
        # The three-term recurrence of the leading minors. The result is exact for a matrix that
        # differs by a few rounding errors (Wilkinson, *The Algebraic Eigenvalue Problem*, 5.38).
        diagonal = jnp.moveaxis(jnp.asarray(self.diagonal), -1, 0)
        products = jnp.moveaxis(self.lower * self.upper, -1, 0)
        products = jnp.concatenate([jnp.zeros_like(diagonal[:1]), products])
        one = jnp.ones_like(diagonal, shape=diagonal.shape[1:])

        # Carry the last two leading minors, divided by a scale so that they do not overflow.
        def step(minors: Any, entries: Any) -> Any:
            (minor, previous), (d, e) = minors, entries
            new = d * minor - e * previous
            scale = lax.stop_gradient(jnp.maximum(jnp.abs(new), jnp.abs(minor)))
            scale = jnp.where(scale == 0, 1, scale)  # if both are 0, so are all later minors
            return (new / scale, minor / scale), jnp.log(scale)

        (minor, _), logs = lax.scan(step, (one, 0 * one), (diagonal, products), unroll=8)
        return jnp.sign(minor), logs.sum(0) + jnp.log(jnp.abs(minor))

    def main_diagonal(self) -> Any:
        return self.diagonal


@register_elementwise
class Banded(Matrix):
    """A banded matrix `[..., n, n]`, stored as its main diagonal and nearby diagonals.

    As in LAPACK and `scipy.linalg.solve_banded`, `A[i, j]` is stored as `bands[upper + i - j, j]`.
    Entries of `bands` that lie outside of the matrix are ignored. With `w` stored diagonals, a
    product costs `w n` operations per vector. A solve or a determinant uses elimination with
    partial pivoting, in `n` steps and `O(n lower w)` operations (Golub and Van Loan, *Matrix
    Computations*, 4.3).

    **Keeps the structure:** transposes, multiples by a number, sums and products with `Banded`,
    `Tridiagonal` and `Diagonal`, and elementwise functions that map 0 to 0.

    **Materializes:** Cholesky factors, elementwise products, sums with a dense array, and functions
    that map 0 to another number (`exp`). The inverse is a dense array, computed by solves.

    **Arguments:**

    - `bands`: the diagonals `[..., upper + 1 + lower, n]`, the uppermost first.
    - `lower`, `upper`: the number of diagonals below and above the main diagonal; static.

    **Raises:** `TypeError` if `bands` is not a dense array, `ValueError` if `lower` or `upper` is
    negative or `bands` does not have `upper + 1 + lower` rows.

    >>> import jax.numpy as jnp, veneer as vn
    >>> a = vn.types.Banded(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]), lower=1, upper=0)
    >>> vn.materialise(a).tolist()
    [[1.0, 0.0, 0.0], [4.0, 2.0, 0.0], [0.0, 5.0, 3.0]]
    >>> a @ a.T
    Banded(bands=f32[3,3], lower=1, upper=1)
    """

    bands: Array  # [..., upper + 1 + lower, n]
    lower: int = static()
    upper: int = static()

    def __post_init__(self) -> None:
        if min(self.lower, self.upper) < 0:
            raise ValueError(
                "Banded takes lower and upper that are not negative, got "
                f"lower={self.lower}, upper={self.upper}"
            )
        check_axes(self, Array, bands=f"{self.upper + 1 + self.lower} n")

    def rescaled(self, scale: Callable[[Any], Any]) -> "Banded":
        # Replace entries outside of the matrix by ones. Their derivative must be 0. It would be NaN
        # if the derivative of `scale` there were infinite.
        bands = jnp.asarray(self.bands)
        row = jnp.arange(bands.shape[-2])[:, None] - self.upper + jnp.arange(bands.shape[-1])
        is_inside = (row >= 0) & (row < bands.shape[-1])
        ones = jnp.ones((), bands.dtype)
        return Banded(scale(jnp.where(is_inside, bands, ones)), self.lower, self.upper)

    def materialise(self) -> Any:
        bands = jnp.asarray(self.bands)
        column = jnp.arange(bands.shape[-1])
        band = self.upper + column[:, None] - column
        is_stored = (band >= 0) & (band < bands.shape[-2])
        entries = bands[..., jnp.where(is_stored, band, 0), jnp.broadcast_to(column, band.shape)]
        return jnp.where(is_stored, entries, jnp.zeros((), bands.dtype))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        bands, v = _widen(self.bands, x)
        terms = [_shift(bands[..., None, i, :] * v, i - self.upper) for i in range(bands.shape[-2])]
        return sum(terms[1:], terms[0]).astype(jnp.result_type(x, self.bands))

    def transposed(self) -> "Banded":
        bands = jnp.asarray(self.bands)
        rows = [_shift(bands[..., i, :], i - self.upper) for i in range(bands.shape[-2])]
        return Banded(jnp.stack(rows[::-1], -2), lower=self.upper, upper=self.lower)

    def solve(self, b: Any) -> Any:
        return solve_implicitly(self, b, _solve_by_elimination)

    def slogdet(self) -> Any:
        @functools.partial(jnp.vectorize, signature="(w,n)->(),()")
        def slogdet_one(bands: Any) -> Any:
            no_vectors = jnp.zeros((bands.shape[-1], 0), bands.dtype)
            pivot_rows, _, is_swap = _eliminate(bands, no_vectors, self.lower, self.upper)
            pivots = pivot_rows[:, 0]
            signs = jnp.where(is_swap, -1, 1).astype(pivots.dtype)
            return (signs * jnp.sign(pivots)).prod(), jnp.log(jnp.abs(pivots)).sum()

        return slogdet_one(jnp.asarray(self.bands))

    def main_diagonal(self) -> Any:
        return self.bands[..., self.upper, :]


def _shift(x: Any, by: int) -> Any:
    """Move entries towards the end of the last axis by `by` places, and fill with zeros."""
    by = max(-x.shape[-1], min(by, x.shape[-1]))
    return _pad(x, by, -by)


def _pad(x: Any, before: int, after: int) -> Any:
    config = [(0, 0, 0)] * (x.ndim - 1) + [(before, after, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _widen(*arrays: Any) -> list[Any]:
    dtype = computing_dtype(*arrays)
    return [jnp.asarray(x, dtype) for x in arrays]


def _solve_by_elimination(a: Banded, b: Any) -> Any:
    """Return the rows `x` that solve `a @ x = v` for each row `v` of `b` `[*lead, k, n]`."""

    @functools.partial(jnp.vectorize, signature="(w,n),(k,n)->(k,n)")
    def solve_one(bands: Any, b: Any) -> Any:
        pivot_rows, b, _ = _eliminate(bands, b.T, a.lower, a.upper)

        # Compute one entry of x from the entries that follow it, beginning with the last entry.
        def substitute(later: Any, row_and_v: Any) -> Any:
            row, v = row_and_v
            x = (v - (row[1:, None] * later).sum(0)) / row[0]
            return jnp.concatenate([x[None], later])[: len(later)], x

        zeros = jnp.zeros((a.lower + a.upper, b.shape[1]), b.dtype)
        return lax.scan(substitute, zeros, (pivot_rows, b), reverse=True)[1].T

    return solve_one(a.bands, b)


def _eliminate(bands: Any, b: Any, lower: int, upper: int) -> Any:
    """Eliminate the entries below the diagonal, with partial pivoting.

    Each of the `n` steps chooses its pivot in a window of the `lower + 1` rows that reach its
    column. So a row of the upper factor has up to `lower + upper` entries after the pivot (Golub
    and Van Loan, *Matrix Computations*, 4.3.3).

    **Arguments:**

    - `bands`: the bands `[lower + upper + 1, n]`.
    - `b`: the right-hand sides, one per column, `[n, k]`.

    **Returns:** `(pivot_rows, b, is_swap)`. `pivot_rows` `[n, lower + upper + 1]` are the rows of
    the upper factor, each from its diagonal entry on. `b` `[n, k]` are the right-hand sides after
    the same operations. `is_swap` `[n]` is True for each step that swapped two rows.
    """
    width = lower + upper + 1
    # Row i holds columns i - lower to i + upper. Rows of zeros follow the last row.
    rows = jnp.stack([_shift(bands[upper - d], -d) for d in range(-lower, upper + 1)], -1)
    rows = jnp.concatenate([rows, jnp.zeros((lower, width), rows.dtype)])
    b = jnp.concatenate([b, jnp.zeros((lower, b.shape[1]), b.dtype)])

    def step(window: Any, next_row: Any) -> Any:
        a, v = jax.tree.map(lambda old, new: jnp.concatenate([old, new[None]]), window, next_row)
        pivot = jnp.argmax(jnp.abs(a[:, 0]))
        a, v = (x.at[pivot].set(x[0]).at[0].set(x[pivot]) for x in (a, v))
        factors = a[1:, :1] / jnp.where(a[0, 0] == 0, 1, a[0, 0])  # the column can be all zeros
        remaining = _shift(a[1:] - factors * a[0], -1), v[1:] - factors * v[0]
        return remaining, (a[0], v[0], pivot != 0)

    # The rows of the first window begin at column 0, not at column i - lower.
    first = [_shift(rows[i], i - lower) for i in range(lower)]
    window = jnp.stack(first) if first else rows[:0]
    return lax.scan(step, (window, b[:lower]), (rows[lower:], b[lower:]))[1]


Band = Banded | Tridiagonal | Diagonal


def _as_banded(x: Band) -> Banded:
    """Return the same matrix as a `Banded`."""
    if isinstance(x, Banded):
        return x
    diagonal = jnp.asarray(x.diagonal)
    if isinstance(x, Diagonal):
        return Banded(diagonal[..., None, :], lower=0, upper=0)
    if not diagonal.shape[-1]:
        return Banded(jnp.zeros((*diagonal.shape[:-1], 3, 0), diagonal.dtype), lower=1, upper=1)
    upper, lower = jnp.asarray(x.upper), jnp.asarray(x.lower)
    return Banded(jnp.stack([_pad(upper, 1, 0), diagonal, _pad(lower, 0, 1)], -2), 1, 1)


@matmul_rule
def _(x: Diagonal, y: Tridiagonal) -> Tridiagonal:
    d = x.diagonal
    return Tridiagonal(y.lower * d[..., 1:], y.diagonal * d, y.upper * d[..., :-1])


@matmul_rule
def _(x: Tridiagonal, y: Diagonal) -> Tridiagonal:
    d = y.diagonal
    return Tridiagonal(x.lower * d[..., :-1], x.diagonal * d, x.upper * d[..., 1:])


@matmul_rule
def _(x: Band, y: Band) -> Banded:
    """Multiply by diagonals: diagonals `d` of `x` and `e` of `y` contribute to diagonal `d + e`."""
    a, b = _as_banded(x), _as_banded(y)
    last = max(a.bands.shape[-1] - 1, 0)
    lower, upper = min(a.lower + b.lower, last), min(a.upper + b.upper, last)
    a_bands, b_bands = _widen(a.bands, b.bands)
    sums: dict[int, Any] = {}
    for d in range(-a.lower, a.upper + 1):
        for e in range(-b.lower, b.upper + 1):
            # Align both bands at the column of x, which is the row of y. The shift drops entries
            # of `b_bands` that lie outside of the matrix.
            term = a_bands[..., a.upper - d, :] * _shift(b_bands[..., b.upper - e, :], -e)
            term = _shift(term, e)
            sums[d + e] = sums[d + e] + term if d + e in sums else term
    bands = jnp.stack([sums[offset] for offset in range(upper, -lower - 1, -1)], -2)
    return Banded(bands.astype(jnp.result_type(a.bands, b.bands)), lower, upper)


@elementwise_rule("add")
def _(x: Tridiagonal | Diagonal, y: Tridiagonal | Diagonal) -> Tridiagonal:
    tridiagonal: Any = x if isinstance(x, Tridiagonal) else y
    return Tridiagonal(tridiagonal.lower, x.diagonal + y.diagonal, tridiagonal.upper)


@elementwise_rule("add")
def _(x: Band, y: Band) -> Banded:
    a, b = _as_banded(x), _as_banded(y)
    lower, upper = max(a.lower, b.lower), max(a.upper, b.upper)

    def pad_bands(m: Banded) -> Any:
        config = [(0, 0)] * (m.bands.ndim - 2) + [(upper - m.upper, lower - m.lower), (0, 0)]
        return jnp.pad(m.bands, config)

    return Banded(pad_bands(a) + pad_bands(b), lower, upper)
