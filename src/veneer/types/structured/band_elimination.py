"""Gaussian elimination of a banded matrix, with partial pivoting: `n` steps on a window of rows.

A step chooses its pivot among the `lower + 1` rows that reach its column, so a row of the upper
factor has up to `lower + upper` entries beside the pivot (Golub and Van Loan, *Matrix
Computations*, 4.3.3). The window is what is left of those rows; each step takes in one more.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def shifted(x: Any, by: int) -> Any:
    """Entries moved along the last axis towards its end, with zeros in the places left free."""
    by = max(-x.shape[-1], min(by, x.shape[-1]))
    config = [(0, 0, 0)] * (x.ndim - 1) + [(by, -by, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def solve(bands: Any, b: Any, lower: int, upper: int) -> Any:
    """x such that `A @ x = v` for each vector v of b: `[*lead, bands, n]`, `[*lead, k, n]`."""

    @functools.partial(jnp.vectorize, signature="(w,n),(k,n)->(k,n)")
    def solve_one(bands: Any, b: Any) -> Any:
        pivot_rows, b, _ = _eliminate(bands, b.T, lower, upper)

        def substitute(below: Any, step: Any) -> Any:  # of x, the entries under this one
            row, v = step
            x = (v - (row[1:, None] * below).sum(0)) / row[0]
            return jnp.concatenate([x[None], below])[: len(below)], x

        last = jnp.zeros((lower + upper, b.shape[1]), b.dtype)
        return lax.scan(substitute, last, (pivot_rows, b), reverse=True)[1].T

    return solve_one(bands, b)


def slogdet(bands: Any, lower: int, upper: int) -> Any:
    """The sign of the determinant and the logarithm of its magnitude: each `[*lead]`."""

    @functools.partial(jnp.vectorize, signature="(w,n)->(),()")
    def slogdet_one(bands: Any) -> Any:
        nothing = jnp.zeros((bands.shape[-1], 0), bands.dtype)
        pivot_rows, _, swaps = _eliminate(bands, nothing, lower, upper)
        pivots = pivot_rows[:, 0]
        parity = jnp.where(swaps, -1, 1).astype(pivots.dtype)
        return (parity * jnp.sign(pivots)).prod(), jnp.log(jnp.abs(pivots)).sum()

    return slogdet_one(bands)


def _eliminate(bands: Any, b: Any, lower: int, upper: int) -> Any:
    """The rows of the upper factor from their pivots on, b `[n, k]` likewise, and who swapped."""
    width = lower + upper + 1
    # Of row i, the columns from i - lower on; then rows of zeros, under the last.
    rows = jnp.stack([shifted(bands[upper - d], -d) for d in range(-lower, upper + 1)], -1)
    rows = jnp.concatenate([rows, jnp.zeros((lower, width), rows.dtype)])
    b = jnp.concatenate([b, jnp.zeros((lower, b.shape[1]), b.dtype)])

    def step(window: Any, entering: Any) -> Any:
        a, v = jax.tree.map(lambda old, new: jnp.concatenate([old, new[None]]), window, entering)
        pivot = jnp.argmax(jnp.abs(a[:, 0]))
        a, v = (x.at[pivot].set(x[0]).at[0].set(x[pivot]) for x in (a, v))
        factors = a[1:, :1] / jnp.where(a[0, 0] == 0, 1, a[0, 0])  # of a column of zeros
        left = shifted(a[1:] - factors * a[0], -1), v[1:] - factors * v[0]
        return left, (a[0], v[0], pivot != 0)

    # The first rows begin at column 0, and not at i - lower.
    first = [shifted(rows[i], i - lower) for i in range(lower)]
    window = jnp.stack(first) if first else rows[:0]
    return lax.scan(step, (window, b[:lower]), (rows[lower:], b[lower:]))[1]
