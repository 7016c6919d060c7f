"""Second moments of activations, and the channel factors and corrections with the least loss.

The loss of a rounded matrix is the mean squared error of the outputs `x @ w`. The loss depends on
the activations `x` only through their second moments.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..models.correction import balance_factors

#: The exponents that AWQ tries (section 3.2: a grid of 20 over [0, 1]).
_EXPONENTS = np.linspace(0, 1, 21)
#: The number of outputs whose losses AWQ computes. Other outputs have similar losses.
_COLUMNS = 512


@dataclass(frozen=True, eq=False)
class Moments:
    """The second moments of the activations that multiply a matrix `[K, N]`.

    **Arguments:**

    - `gram`: the mean of `x.T @ x` over the rows `x` of the activations, `[K, K]` in float64.

    **Raises:** `ValueError` if `gram` is not finite, for example because an activation is NaN.
    """

    gram: np.ndarray

    def __post_init__(self) -> None:
        if not np.isfinite(self.gram).all():
            raise ValueError(
                "the second moments of the activations are not finite: some activations are NaN or "
                "infinite, or their squares overflow. Check the model on these batches"
            )

    def loss(self, w: np.ndarray, rounded: np.ndarray) -> np.ndarray:
        """Return the mean of `(x @ w - x @ rounded) ** 2` for each output, `[N]`."""
        return self.power(w - rounded)

    def power(self, w: np.ndarray) -> np.ndarray:
        """Return the mean of `(x @ w) ** 2` for each output, `[N]`."""
        from scipy.linalg.blas import strmm  # JAX depends on SciPy

        if not w.size:
            return np.zeros(w.shape[1])
        # For each output, this is the squared norm of a column of R @ w, with R from `_root`.
        # BLAS needs Fortran order, so compute the transpose, w.T @ R.T.
        products = strmm(1, self._root, np.asarray(w, np.float32).T, side=1, trans_a=1)
        return np.einsum("nk,nk->n", products, products, dtype=float)

    @functools.cached_property
    def _root(self) -> np.ndarray:
        """The upper triangular R with `R.T @ R = gram`, in float32.

        `e @ gram @ e` is the sum of the squares of `R @ e`. As a sum of squares, it is precise
        enough in float32 even if errors of different channels cancel.
        """
        # Factorize the correlations, which do not depend on the scale of each channel. Channels
        # without activations get a 1 on the diagonal here, and 0 in the result.
        root_mean_square = np.sqrt(np.diagonal(self.gram))
        divisor = np.where(root_mean_square > 0, root_mean_square, 1)
        correlations = self.gram / divisor / divisor[:, None]
        upper = cholesky(correlations + np.diag(root_mean_square == 0)).T
        return (upper * root_mean_square).astype(np.float32)


def cholesky(metric: np.ndarray) -> np.ndarray:
    """Return the lower triangular L with `L @ L.T = metric`, for a finite symmetric matrix.

    If rounding errors make the matrix indefinite, its diagonal is increased.
    """
    from scipy.linalg.lapack import dpotrf

    # LAPACK needs Fortran order. `metric` is symmetric, so pass its transpose instead of a copy.
    lower, failed = dpotrf(metric.T, lower=1, clean=1)
    increase = 1e-8 * np.diagonal(metric).max(initial=0)
    while failed:
        lower, failed = dpotrf(metric.T + increase * np.eye(len(metric)), lower=1, clean=1)
        increase *= 10
    return lower


def awq_factors(
    matrices: np.ndarray,
    moments: Sequence[Moments],
    magnitudes: np.ndarray,
    round_matrices: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return the channel factors of AWQ, which reduce the error of channels with large activations.

    The factors are a power of the mean magnitudes of the activations. The exponent is the one with
    the least loss. The weight is multiplied by the factors before rounding, and divided by them
    afterwards. Source: Lin et al., arXiv 2306.00978, equation 5.

    **Arguments:**

    - `matrices`: the weight, finite. A stack of S matrices, `[S, K, N]`, where products contract K.
    - `moments`: the second moments of the activations of each matrix.
    - `magnitudes`: the mean magnitude of each channel of the activations, `[S, K]`.
    - `round_matrices`: a function that quantizes and dequantizes matrices.

    **Returns:** the factors, `[S, K]` in float32.
    """
    # Estimate the loss from a sample of the columns.
    columns = slice(None, None, math.ceil(max(1, matrices.shape[2]) / _COLUMNS))
    least_losses = np.full(len(matrices), np.inf)
    best_factors = np.ones(magnitudes.shape, np.float32)
    for exponent in _EXPONENTS:
        factors = np.where(magnitudes > 0, magnitudes, 1) ** exponent
        # Normalize the factors, as in the code of AWQ.
        factors /= np.sqrt(factors.max(1, keepdims=True) * factors.min(1, keepdims=True))
        factors = factors.astype(np.float32)
        rounded = round_matrices(matrices * factors[:, :, None]) / factors[:, :, None]
        for i, moment in enumerate(moments):
            loss = moment.loss(matrices[i, :, columns], rounded[i, :, columns]).sum()
            if loss < least_losses[i]:
                least_losses[i], best_factors[i] = loss, factors[i]
    return best_factors


def smoothquant_factors(matrices: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return the channel factors of SmoothQuant, which move outliers of activations to the weight.

    The weight is multiplied by the factors, and the activations are divided by them. Source: Xiao
    et al., arXiv 2211.10438, equation 4 with alpha 0.5.

    **Arguments:**

    - `matrices`: the weight, finite. A stack of S matrices, `[S, K, N]`, where products contract K.
    - `largest`: the largest magnitude of each channel of the activations, `[S, K]`.

    **Returns:** the factors, `[S, K]` in float32. Channels of zeros have factor 1.
    """
    largest_weights = np.abs(matrices).max(2, initial=0)
    is_nonzero = (largest_weights > 0) & (largest > 0)
    roots = (np.sqrt(np.where(is_nonzero, x, 1)) for x in (largest, largest_weights))
    return np.divide(*roots).astype(np.float32)


def low_rank_factors(
    error: np.ndarray, gram: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors `a` and `b` of the low-rank correction `C = a @ b` with the least loss.

    The loss is the trace of `(E - C).T @ G @ (E - C)`, where E is `error` and G is `gram`. The
    solution is `C = E @ V @ V.T`, where V holds the right singular vectors of the largest singular
    values of `G^(1/2) @ E`. QERA has the equal solution `G^(-1/2) @ svd_r(G^(1/2) @ E)` (Zhang et
    al., arXiv 2410.06040, theorem 1). The form with V has no inverse, so G can be singular.

    **Arguments:**

    - `error`: the weight minus the rounded weight, `[K, N]`.
    - `gram`: the second moments of the activations, `[K, K]`. If all are 0, the loss is the squared
      error of the weight.
    - `rank`: the rank, at most K and N.

    **Returns:** `a`, `[K, rank]`, and `b`, `[rank, N]`, in float64. Column i of `a` has the same
    norm as row i of `b`.

    >>> import numpy as np
    >>> from veneer.quant.ptq.moments import low_rank_factors
    >>> error, gram = np.diag([1.0, 2.0, 3.0]), np.diag([100.0, 1.0, 1.0])
    >>> a, b = low_rank_factors(error, gram, 1)  # corrects the channel of the largest activations
    >>> abs((a @ b).round(6)).diagonal().tolist()
    [1.0, 0.0, 0.0]
    """
    error, gram = np.asarray(error, float), np.asarray(gram, float)
    if not gram.any():
        gram = np.eye(len(gram))
    # V holds eigenvectors of E.T @ G @ E, [N, N]. If K is smaller than N, compute the eigenvectors
    # of the [K, K] matrix `weighted @ weighted.T` instead, and map them to V.
    if error.shape[1] <= error.shape[0]:
        right = _top_eigenvectors(error.T @ gram @ error, rank)
    else:
        values, vectors = np.linalg.eigh(gram)
        weighted = np.sqrt(np.maximum(values, 0))[:, None] * (vectors.T @ error)
        right, _ = np.linalg.qr(weighted.T @ _top_eigenvectors(weighted @ weighted.T, rank))
    return balance_factors(error @ right, right.T)


def _top_eigenvectors(matrix: np.ndarray, count: int) -> np.ndarray:
    """Return the eigenvectors of the largest eigenvalues of a symmetric matrix, as columns."""
    from scipy.linalg import eigh

    size = len(matrix)
    _, vectors = eigh(matrix, subset_by_index=[size - count, size - 1])  # in ascending order
    return vectors
