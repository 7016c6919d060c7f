"""`Tridiagonal` and `Banded`: square matrices with entries near the diagonal alone."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.lax import linalg as lax_linalg

from ..._core.tree import static
from ..axes import Array, check_axes
from . import band_elimination
from .band_elimination import shifted
from .diagonal import Diagonal
from .half_precision import computing_dtype
from .matrix import Matrix, entrywise, product
from .stored_entries import stores_entries


@stores_entries
class Tridiagonal(Matrix):
    """A tridiagonal matrix `[..., n, n]`, stored as its three diagonals.

    A product costs `3 n` operations per vector, and a solve `O(n)`. Solves use LAPACK's `gtsv` on
    CPU and cuSPARSE's `gtsv2` on GPU, which pivot. On other platforms JAX runs Thomas's algorithm,
    which does not pivot: the matrix should be diagonally dominant or positive definite. A solve
    with a singular matrix gives NaN or infinity.

    The determinant is computed by the three-term recurrence of the leading minors. The result is
    the exact determinant of a matrix whose entries differ from the stored ones by a few rounding
    errors (Wilkinson, *The Algebraic Eigenvalue Problem*, 5.38).

    **Keeps the structure:** transposes, multiples by a number, sums with `Tridiagonal` and
    `Diagonal`, products with `Diagonal`, Cholesky factors, and elementwise functions that map 0 to
    0. The product of two `Tridiagonal` is a `Banded`.

    **Materializes:** elementwise products, sums with a dense array, and functions that map 0 to
    another number (`exp`). The inverse is a dense array, computed by solves.

    **Arguments:**

    - `lower`: the entries below the main diagonal, `A[i + 1, i]`: an array `[..., n - 1]`.
    - `diagonal`: the main diagonal, `[..., n]`.
    - `upper`: the entries above the main diagonal, `A[i, i + 1]`: an array `[..., n - 1]`.

    **Raises:**

    - `TypeError` if an argument is not a dense array.
    - `ValueError` if `lower` or `upper` does not have one entry fewer than `diagonal`, or the
      leading axes differ.

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
        n, beside = self.diagonal.shape[-1], self.lower.shape[-1]
        if beside != max(n - 1, 0):
            raise ValueError(
                "Tridiagonal takes lower and upper with one entry fewer than diagonal, got "
                f"{beside} and {n} entries"
            )

    def materialise(self) -> Any:
        """Return the dense matrix."""
        return _as_banded(self).materialise()

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        del precision
        dtype = jnp.result_type(x, self.diagonal)
        lower, diagonal, upper, v = _computing(self.lower, self.diagonal, self.upper, x)
        y = diagonal[..., None, :] * v
        if x.shape[-1] > 1:
            y += _padded(lower[..., None, :] * v[..., :-1], 1, 0)
            y += _padded(upper[..., None, :] * v[..., 1:], 0, 1)
        return y.astype(dtype)

    def transposed(self) -> "Tridiagonal":
        return Tridiagonal(self.upper, self.diagonal, self.lower)

    def solve(self, b: Any) -> Any:
        lower, diagonal, upper = map(jnp.asarray, (self.lower, self.diagonal, self.upper))
        b = jnp.broadcast_to(b, (*diagonal.shape[:-1], *b.shape[-2:]))
        if not b.size:
            return b
        lower, upper = _padded(lower, 1, 0), _padded(upper, 0, 1)
        return lax_linalg.tridiagonal_solve(lower, diagonal, upper, b.mT).mT

    def cholesky(self) -> "Tridiagonal":
        """Return the lower Cholesky factor, as a structured matrix.

        All entries are NaN if the matrix is not positive definite.
        """
        diagonal = jnp.moveaxis(jnp.real(self.diagonal), -1, 0)
        beside = jnp.moveaxis((self.lower + jnp.conj(self.upper)) / 2, -1, 0)
        if not len(diagonal):
            return self

        def step(last: Any, entries: Any) -> Any:
            d, e = entries
            e = e / last
            root = jnp.sqrt(d - jnp.abs(e) ** 2)
            return root, (root, e)

        first = jnp.sqrt(diagonal[0])
        _, (rest, lower) = lax.scan(step, first, (diagonal[1:], beside))
        roots = jnp.concatenate([first[None], rest])
        valid = jnp.where((roots > 0).all(0), 1, jnp.nan).astype(roots.dtype)
        lower, roots = (jnp.moveaxis(x * valid, 0, -1) for x in (lower, roots))
        return Tridiagonal(lower, roots.astype(lower.dtype), jnp.zeros_like(lower))

    def slogdet(self) -> Any:
        diagonal = jnp.moveaxis(jnp.asarray(self.diagonal), -1, 0)
        around = jnp.moveaxis(self.lower * self.upper, -1, 0)
        around = jnp.concatenate([jnp.zeros_like(diagonal[:1]), around])
        one = jnp.ones_like(diagonal, shape=diagonal.shape[1:])

        # The determinants of the last two leading minors, over a scale: else they overflow soon.
        def step(minors: Any, entries: Any) -> Any:
            (last, before), (d, e) = minors, entries
            new = d * last - e * before
            scale = lax.stop_gradient(jnp.maximum(jnp.abs(new), jnp.abs(last)))
            scale = jnp.where(scale == 0, 1, scale)  # both 0, and all that follow
            return (new / scale, last / scale), jnp.log(scale)

        (last, _), logs = lax.scan(step, (one, 0 * one), (diagonal, around), unroll=8)
        return jnp.sign(last), logs.sum(0) + jnp.log(jnp.abs(last))

    def main_diagonal(self) -> Any:
        return self.diagonal


@stores_entries
class Banded(Matrix):
    """A banded matrix `[..., n, n]`, stored as its main diagonal and nearby diagonals.

    As in LAPACK and `scipy.linalg.solve_banded`, `A[i, j]` is stored as `bands[upper + i - j, j]`.
    Entries of `bands` that lie outside of the matrix are ignored.

    With `w` stored diagonals, a product costs `w n` operations per vector. A solve or a determinant
    uses elimination with partial pivoting, in `n` steps and `O(n lower w)` operations (Golub and
    Van Loan, *Matrix Computations*, 4.3).

    **Keeps the structure:** transposes, multiples by a number, sums and products with `Banded`,
    `Tridiagonal` and `Diagonal`, and elementwise functions that map 0 to 0.

    **Materializes:** Cholesky factors, elementwise products, sums with a dense array, and functions
    that map 0 to another number (`exp`). The inverse is a dense array, computed by solves.

    **Arguments:**

    - `bands`: the diagonals `[..., upper + 1 + lower, n]`, the uppermost first.
    - `lower`, `upper`: the number of diagonals below and above the main diagonal; static.

    **Raises:**

    - `TypeError` if `bands` is not a dense array.
    - `ValueError` if `lower` or `upper` is negative, or `bands` does not have `upper + 1 + lower`
      rows.

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
        # Corners are not read: a derivative by one of them must not be 0 times infinity.
        bands = jnp.asarray(self.bands)
        row = jnp.arange(bands.shape[-2])[:, None] - self.upper + jnp.arange(bands.shape[-1])
        read = (row >= 0) & (row < bands.shape[-1])
        ones = jnp.ones((), bands.dtype)
        return Banded(scale(jnp.where(read, bands, ones)), self.lower, self.upper)

    def materialise(self) -> Any:
        """Return the dense matrix."""
        bands = jnp.asarray(self.bands)
        column = jnp.arange(bands.shape[-1])
        band = self.upper + column[:, None] - column
        stored = (band >= 0) & (band < bands.shape[-2])
        entries = bands[..., jnp.where(stored, band, 0), jnp.broadcast_to(column, band.shape)]
        return jnp.where(stored, entries, jnp.zeros((), bands.dtype))

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        del precision
        bands, v = _computing(self.bands, x)
        terms = [
            shifted(bands[..., None, i, :] * v, i - self.upper) for i in range(bands.shape[-2])
        ]
        return sum(terms[1:], terms[0]).astype(jnp.result_type(x, self.bands))

    def transposed(self) -> "Banded":
        bands = jnp.asarray(self.bands)
        moved = [shifted(bands[..., i, :], i - self.upper) for i in range(bands.shape[-2])]
        return Banded(jnp.stack(moved[::-1], -2), lower=self.upper, upper=self.lower)

    def solve(self, b: Any) -> Any:
        b = jnp.broadcast_to(b, (*self.bands.shape[:-2], *b.shape[-2:]))
        fixed = Banded(lax.stop_gradient(self.bands), self.lower, self.upper)
        by = lambda a: lambda _, b: band_elimination.solve(a.bands, b, a.lower, a.upper)
        return lax.custom_linear_solve(self.matvec, b, by(fixed), by(fixed.transposed()))

    def slogdet(self) -> Any:
        return band_elimination.slogdet(jnp.asarray(self.bands), self.lower, self.upper)

    def main_diagonal(self) -> Any:
        return self.bands[..., self.upper, :]


Band = Banded | Tridiagonal | Diagonal


def _as_banded(x: Band) -> Banded:
    if isinstance(x, Banded):
        return x
    if isinstance(x, Diagonal):
        return Banded(jnp.asarray(x.diagonal)[..., None, :], lower=0, upper=0)
    diagonal = jnp.asarray(x.diagonal)
    if not diagonal.shape[-1]:
        return Banded(jnp.zeros((*diagonal.shape[:-1], 3, 0), diagonal.dtype), lower=1, upper=1)
    upper, lower = jnp.asarray(x.upper), jnp.asarray(x.lower)
    return Banded(jnp.stack([_padded(upper, 1, 0), diagonal, _padded(lower, 0, 1)], -2), 1, 1)


def _padded(x: Any, before: int, after: int) -> Any:
    config = [(0, 0, 0)] * (x.ndim - 1) + [(before, after, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _computing(*arrays: Any) -> list[Any]:
    dtype = computing_dtype(*arrays)
    return [jnp.asarray(x, dtype) for x in arrays]


@product
def _(x: Diagonal, y: Tridiagonal) -> Tridiagonal:
    d = x.diagonal
    return Tridiagonal(y.lower * d[..., 1:], y.diagonal * d, y.upper * d[..., :-1])


@product
def _(x: Tridiagonal, y: Diagonal) -> Tridiagonal:
    d = y.diagonal
    return Tridiagonal(x.lower * d[..., :-1], x.diagonal * d, x.upper * d[..., 1:])


@product
def _(x: Band, y: Band) -> Banded:
    """Entries of x at offset d and of y at offset e make the product's at d + e."""
    a, b = _as_banded(x), _as_banded(y)
    last = max(a.bands.shape[-1] - 1, 0)
    lower, upper = min(a.lower + b.lower, last), min(a.upper + b.upper, last)
    a_bands, b_bands = _computing(a.bands, b.bands)
    sums: dict[int, Any] = {}
    for d in range(-a.lower, a.upper + 1):
        for e in range(-b.lower, b.upper + 1):
            # At the row of y, which is the column of x; what y stores outside of itself is dropped.
            term = a_bands[..., a.upper - d, :] * shifted(b_bands[..., b.upper - e, :], -e)
            term = shifted(term, e)
            sums[d + e] = sums[d + e] + term if d + e in sums else term
    bands = jnp.stack([sums[offset] for offset in range(upper, -lower - 1, -1)], -2)
    return Banded(bands.astype(jnp.result_type(a.bands, b.bands)), lower, upper)


@entrywise("add")
def _(x: Tridiagonal, y: Tridiagonal, **params: Any) -> Tridiagonal:
    del params
    return Tridiagonal(x.lower + y.lower, x.diagonal + y.diagonal, x.upper + y.upper)


@entrywise("add")
def _(x: Tridiagonal, y: Diagonal, **params: Any) -> Tridiagonal:
    del params
    return Tridiagonal(x.lower, x.diagonal + y.diagonal, x.upper)


@entrywise("add")
def _(x: Diagonal, y: Tridiagonal, **params: Any) -> Tridiagonal:
    del params
    return Tridiagonal(y.lower, x.diagonal + y.diagonal, y.upper)


@entrywise("add")
def _(x: Band, y: Band, **params: Any) -> Banded:
    del params
    a, b = _as_banded(x), _as_banded(y)
    lower, upper = max(a.lower, b.lower), max(a.upper, b.upper)

    def widened(m: Banded) -> Any:
        config = [(0, 0)] * (m.bands.ndim - 2) + [(upper - m.upper, lower - m.lower), (0, 0)]
        return jnp.pad(m.bands, config)

    return Banded(widened(a) + widened(b), lower, upper)
