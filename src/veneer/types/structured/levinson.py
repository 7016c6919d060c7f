"""Solves with a Toeplitz matrix: Levinson's recursion, and the formula of Gohberg and Semencul.

The first and the last column of the inverse determine it. Levinson's recursion (Golub and Van Loan,
*Matrix Computations*, 4.7) finds those of each leading block from those of the one before, which
takes `O(n^2)`. The formula (Heinig and Rost, *Algebraic Methods for Toeplitz-like Matrices and
Operators*, 1984) writes the inverse by them in products of triangular Toeplitz matrices, so each
vector costs a few FFTs from there on.

A leading block that is near to singular spoils the recursion, though the matrix may be fine. So a
solution is refined, and its residual checked.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

# How often a solution is refined, at least and at most.
_REFINEMENTS = 2, 6

# The backward error that is accepted, in units of eps times the Frobenius norm. LU with partial
# pivoting was measured to have that on random matrices of size 2048.
_ACCEPTED = 4


@functools.partial(jnp.vectorize, signature="(d)->(n),(n)")
def _ends_of_inverse(diagonals: Any) -> Any:
    """The first and the last column of the inverse."""
    n = (len(diagonals) + 1) // 2
    backwards = diagonals[::-1]
    row = lambda i: lax.dynamic_slice(backwards, (n - 1 - i,), (n,))
    dot = lambda x, y: jnp.dot(x, y, precision="highest")

    def step(ends: Any, i: Any) -> Any:  # those of the block of size i, with zeros under them
        first, last = ends
        last = jnp.roll(last, 1)
        under, over = dot(row(i), first), dot(row(0), last)  # what they give outside of the block
        determinant = 1 - under * over
        return ((first - under * last) / determinant, (last - over * first) / determinant), None

    corner = jnp.zeros(n, diagonals.dtype).at[0].set(1 / diagonals[n - 1])
    return lax.scan(step, (corner, corner), jnp.arange(1, n))[0]


def solve(
    diagonals: Any,
    b: Any,
    product: Callable[[Any, Any, Any], Any],
    matvec: Callable[[Any], Any],
    dense: Callable[[], Any],
) -> Any:
    """x such that `A @ x = v` for each vector v of b `[*lead, k, n]`.

    By the recursion, or by LU of the dense matrix where that is not exact enough.

    **Arguments:**

    - `diagonals`: `[*lead, 2 n - 1]`, of which `[..., n - 1 + i - j]` is `A[i, j]`.
    - `product`: of a column, a row and vectors: what the Toeplitz matrix of these gives.
    - `matvec`, `dense`: `A` as a function of vectors, and as an array.
    """
    first, last = _ends_of_inverse(diagonals)
    zero = jnp.zeros_like(first)
    lower = lambda column, x: product(column, zero, x)
    upper = lambda row, x: product(zero.at[..., 0].set(row[..., 0]), row, x)
    moved = lambda x: jnp.roll(x, 1, -1).at[..., 0].set(0)

    def by_inverse(b: Any) -> Any:
        one = lower(first, upper(last[..., ::-1], b))
        other = lower(moved(last), upper(moved(first[..., ::-1]), b))
        return (one - other) / first[..., None, :1]

    size = lambda v: jnp.linalg.norm(v, axis=-1)
    norm = math.sqrt(b.shape[-1]) * size(diagonals)[..., None]  # at least the Frobenius norm
    accepted = _ACCEPTED * jnp.finfo(b.dtype).eps

    def exact(x: Any, residual: Any) -> Any:  # False for NaN
        return (size(residual) <= accepted * (norm * size(x) + size(b))).all()

    def refine(state: Any) -> Any:
        count, x, residual = state
        x = x + by_inverse(residual)
        return count + 1, x, b - matvec(x)

    def goes_on(state: Any) -> Any:
        least, most = _REFINEMENTS
        count, x, residual = state
        return (count <= least) | ((count <= most) & ~exact(x, residual))

    _, x, residual = lax.while_loop(goes_on, refine, (0, jnp.zeros_like(b), b))
    return lax.cond(exact(x, residual), lambda: x, lambda: jnp.linalg.solve(dense(), b.mT).mT)
