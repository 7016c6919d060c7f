"""Second moments of activations, and the channel factors and corrections of least loss.

The loss of a rounded matrix is the mean squared error of its outputs `x @ w`. It depends on the
activations `x` only by their second moments.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..models.correction import balance_factors

#: The exponents that AWQ tries (section 3.2: a grid of 20 over [0, 1]).
_EXPONENTS = np.linspace(0, 1, 21)
#: AWQ compares the losses of this many outputs. Other outputs have similar losses.
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
        columns = strmm(1, self._root, np.asarray(w, np.float32).T, side=1, trans_a=1)
        return np.einsum("nk,nk->n", columns, columns, dtype=float)

    @functools.cached_property
    def _root(self) -> np.ndarray:
        """The upper triangular R with `R.T @ R = gram`, in float32.

        With R, a loss is a sum of squares. Float32 is then precise enough even if errors of
        different channels cancel.
        """
        size = np.sqrt(np.diagonal(self.gram))
        alive = np.where(size > 0, size, 1)
        correlations = self.gram / alive / alive[:, None]
        upper = cholesky(correlations + np.diag(size == 0)).T
        return (upper * size).astype(np.float32)


def cholesky(metric: np.ndarray) -> np.ndarray:
    """Return the lower triangular L with `L @ L.T = metric`.

    If the matrix, which must be finite, is not positive definite to working precision, its diagonal
    is increased.
    """
    from scipy.linalg.lapack import dpotrf

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
    """Return AWQ's channel factors: the power of the magnitudes of activations with the least loss.

    The weight is multiplied by the factors, and the activations are divided by them. Source: Lin et
    al., arXiv 2306.00978, equation 5.

    **Arguments:**

    - `matrices`: the weight, `[S, K, N]`, finite.
    - `moments`: the second moments of the activations of each matrix.
    - `magnitudes`: the mean magnitude of each channel of the activations, `[S, K]`.
    - `round_matrices`: a function that quantizes and dequantizes matrices.

    **Returns:** the factors, `[S, K]` in float32.
    """
    columns = slice(None, None, math.ceil(max(1, matrices.shape[2]) / _COLUMNS))
    least = np.full(len(matrices), np.inf)
    best = np.ones(magnitudes.shape, np.float32)
    for exponent in _EXPONENTS:
        factors = np.where(magnitudes > 0, magnitudes, 1) ** exponent
        factors /= np.sqrt(factors.max(1, keepdims=True) * factors.min(1, keepdims=True))
        factors = factors.astype(np.float32)
        values = round_matrices(matrices * factors[:, :, None]) / factors[:, :, None]
        for i, moment in enumerate(moments):
            loss = moment.loss(matrices[i, :, columns], values[i, :, columns]).sum()
            if loss < least[i]:
                least[i], best[i] = loss, factors[i]
    return best


def smoothquant_factors(matrices: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Return SmoothQuant's channel factors, which move outliers of activations to the weight.

    Source: Xiao et al., arXiv 2211.10438, equation 4 with alpha 0.5.

    **Arguments:**

    - `matrices`: the weight, `[S, K, N]`, finite.
    - `largest`: the largest magnitude of each channel of the activations, `[S, K]`.

    **Returns:** the factors, `[S, K]` in float32. Channels of zeros have factor 1.
    """
    of_weight = np.abs(matrices).max(2, initial=0)
    alive = (of_weight > 0) & (largest > 0)
    ratios = np.where(alive, largest, 1) ** 0.5 / np.where(alive, of_weight, 1) ** 0.5
    return ratios.astype(np.float32)


def low_rank_factors(
    error: np.ndarray, gram: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors `a` and `b` of the low-rank correction C of least loss.

    C has the least trace of `(E - C).T @ G @ (E - C)`, where E is the error and G the gram. With V
    the right singular vectors of the largest singular values of `G^(1/2) @ E`, it is `E @ V @ V.T`.
    That equals QERA's `G^(-1/2) @ svd_r(G^(1/2) @ E)` (Zhang et al., arXiv 2410.06040, theorem 1),
    but it has no inverse, so G can be singular.

    **Arguments:**

    - `error`: the weight minus the rounded weight, `[K, N]`.
    - `gram`: the second moments of the activations, `[K, K]`. If all are 0, the correction has the
      least squared error.
    - `rank`: the rank, at most K and N.

    **Returns:** `[K, rank]` and `[rank, N]` in float64, whose columns and rows have equal norms.

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
    if error.shape[1] <= error.shape[0]:
        right = _top_eigenvectors(error.T @ gram @ error, rank)
    else:
        values, vectors = np.linalg.eigh(gram)
        weighted = np.sqrt(np.maximum(values, 0))[:, None] * (vectors.T @ error)
        right, _ = np.linalg.qr(weighted.T @ _top_eigenvectors(weighted @ weighted.T, rank))
    return balance_factors(error @ right, right.T)


def _top_eigenvectors(matrix: np.ndarray, count: int) -> np.ndarray:
    from scipy.linalg import eigh

    n = len(matrix)
    return eigh(matrix, subset_by_index=[n - count, n - 1])[1]
