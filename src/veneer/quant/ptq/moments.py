"""Second moments of activations, and what the outputs of a weight lose by them."""

import functools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Moments:
    """Means over the rows x that a matrix `[K, N]` meets, in float64.

    **Arguments:**

    - `gram`: of `x.T @ x`, `[K, K]`.

    **Raises:** `ValueError` for what is not finite, as of activations with a NaN.
    """

    gram: np.ndarray

    def __post_init__(self) -> None:
        if not np.isfinite(self.gram).all():
            raise ValueError(
                "the second moments of the activations are not finite: some activations are NaN or "
                "infinite, or their squares overflow. Check the model on these batches"
            )

    def loss(self, w: np.ndarray, rounded: np.ndarray) -> np.ndarray:
        """Returns the mean of `(x @ w - x @ rounded) ** 2` for each output, `[N]`."""
        return squares(self._root, np.asarray(w - rounded, np.float32))

    def power(self, w: np.ndarray) -> np.ndarray:
        """Returns the mean of `(x @ w) ** 2` for each output, `[N]`."""
        return squares(self._root, np.asarray(w, np.float32))

    @functools.cached_property
    def _root(self) -> np.ndarray:
        """R, upper triangular, of which `R.T @ R` is the gram.

        By it a loss is a sum of squares, which float32 has to its precision even where errors make
        up for each other.
        """
        size = np.sqrt(np.diagonal(self.gram))
        alive = np.where(size > 0, size, 1)
        correlations = self.gram / alive / alive[:, None]
        upper = cholesky(correlations + np.diag(size == 0)).T
        return (upper * size).astype(np.float32)


def cholesky(metric: np.ndarray) -> np.ndarray:
    """Returns L, lower triangular, of which `L @ L.T` is a positive matrix.

    More is put on the diagonal where the matrix, which is finite, is not positive to working
    precision.
    """
    from scipy.linalg.lapack import dpotrf  # of JAX's own dependencies

    lower, failed = dpotrf(metric.T, lower=1, clean=1)
    added = 1e-8 * np.diagonal(metric).max(initial=0)
    while failed:
        lower, failed = dpotrf(metric.T + added * np.eye(len(metric)), lower=1, clean=1)
        added *= 10
    return lower


def squares(root: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the sum of squares of each column of `root @ x`, `[N]`, in float64.

    **Arguments:**

    - `root`: upper triangular, `[K, K]`, of float32, as is `x`, `[K, N]`.
    """
    from scipy.linalg.blas import strmm

    if not x.size:
        return np.zeros(x.shape[1])
    columns = strmm(1, root, x.T, side=1, trans_a=1)
    return np.einsum("nk,nk->n", columns, columns, dtype=float)
