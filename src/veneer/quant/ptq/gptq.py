"""The mathematics of rounding a matrix `[K, N]` with the second moments of its activations.

The loss of a rounded matrix is the mean squared error of the outputs `x @ w`. The loss depends on
the activations `x` only through their second moments. Three methods reduce this loss:

- AWQ and SmoothQuant scale the channels of the matrix before rounding.
- A low-rank correction is added after rounding.
- GPTQ (Frantar et al., arXiv 2210.17323) chooses the codes row by row, so that each row compensates
  earlier errors. Each column is a separate problem: find the codes that minimize `e @ M @ e`, where
  e is the rounding error, and the metric M holds the second moments. LAPACK factorizes M, and
  compiled JAX code rounds blocks of rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import FORMATS
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
        """Return the mean of `(x @ w - x @ rounded) ** 2` for each output, `[N]`.

        `x` are the activations. `w` is the matrix `[K, N]`, and `rounded` the rounded matrix.
        """
        return self.power(w - rounded)

    def power(self, w: np.ndarray) -> np.ndarray:
        """Return the mean of `(x @ w) ** 2` for each output, `[N]`, over the activations `x`."""
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
    >>> from veneer.quant.ptq.gptq import low_rank_factors
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
    """Return the eigenvectors of the largest `count` eigenvalues of a symmetric matrix.

    The eigenvectors are the columns of the result.
    """
    from scipy.linalg import eigh

    size = len(matrix)
    _, vectors = eigh(matrix, subset_by_index=[size - count, size - 1])  # in ascending order
    return vectors


#: The damping, as a fraction of the mean of the diagonal of the second moments (section 3.3).
DAMPING = 0.01
#: The number of rows in a block, and in a panel of blocks. Both fit in the caches of a core.
_BLOCK, _PANEL = 8, 64
#: The number of rows whose losses `_is_norm_above` adds at a time.
_LOSS_ROWS = 512


def gptq(
    w: np.ndarray,
    moments: Moments,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    qtype: str,
    *,
    damping: float = DAMPING,
) -> np.ndarray:
    """Choose the codes of a matrix by GPTQ.

    GPTQ rounds one row after another, and each row compensates the errors of earlier rows. Rows
    with larger activations come first. Rows without activations get the nearest codes. In each
    column, the nearest codes replace the codes of GPTQ if they do not have a larger loss.

    **Arguments:**

    - `w`: the matrix `[K, N]`. Products contract K.
    - `moments`: the second moments of the activations.
    - `scale`, `zero_point`: one value per entry of `w`, `[K, N]`.
    - `qtype`: the format.
    - `damping`: a number of at least 0, as in `damp`.

    **Returns:** the codes, one per byte, `[K, N]`.

    >>> import numpy as np
    >>> from veneer.quant.ptq.gptq import Moments, gptq
    >>> w, ones = np.full((2, 1), 0.4, np.float32), np.ones((2, 1), np.float32)
    >>> correlated = Moments(np.array([[1.0, 0.9], [0.9, 1.0]]))
    >>> gptq(w, correlated, ones, None, "int4").ravel().tolist()
    [0, 1]
    """
    w, scale = np.asarray(w, np.float32), np.asarray(scale, np.float32)
    zero = np.zeros((len(w), 1)) if zero_point is None else zero_point
    if 0 in w.shape:
        return np.zeros(w.shape, FORMATS[qtype].byte_dtype)
    metric = damp(moments.gram, damping)
    order = np.argsort(-np.diagonal(moments.gram), kind="stable")
    reversed_order = order[::-1]  # as `inverse_factor` needs it
    lower = cholesky(metric[np.ix_(reversed_order, reversed_order)])
    w, scale, zero = w[order], scale[order], np.asarray(zero, np.float32)[order]
    codes, losses = _round_rows(w, scale, zero, inverse_factor(lower), qtype=qtype)
    nearest, reversed_errors = _round_to_nearest(w, scale, zero, qtype=qtype)
    is_better = _is_norm_above(lower, np.asarray(reversed_errors), losses)
    result = np.empty_like(codes)
    result[order] = np.where(is_better, codes, nearest)
    return result


def damp(gram: np.ndarray, damping: float) -> np.ndarray:
    """Return second moments in float64 after adding a constant to the diagonal.

    The constant is `damping` times the mean of the nonzero entries of the diagonal. A channel
    without activations gets a 1 on the diagonal, and 0 in the rest of its row and column.
    """
    metric = np.array(gram, float)
    diagonal = np.diagonal(metric)
    is_used = diagonal > 0
    mean = diagonal[is_used].mean() if is_used.any() else 0
    damped = np.where(is_used, diagonal + damping * mean, 1)
    metric[~is_used], metric[:, ~is_used] = 0, 0
    np.fill_diagonal(metric, damped)
    return metric


def inverse_factor(lower: np.ndarray) -> np.ndarray:
    """Return the upper triangular U with `U.T @ U = inv(M)`, for a positive definite matrix M.

    `lower` is the Cholesky factor L of `M[::-1, ::-1]`.
    """
    from scipy.linalg.lapack import dtrtri  # JAX depends on SciPy

    # R = L[::-1, ::-1] is upper triangular, and R @ R.T = M. So U = inv(R).
    upper, _ = dtrtri(np.asfortranarray(lower[::-1, ::-1]), lower=0, overwrite_c=1)
    return upper


def _round_rows(
    w: np.ndarray, scale: np.ndarray, zero: np.ndarray, upper: np.ndarray, *, qtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Round rows from the first to the last by GPTQ. Return a pair: the codes, and the losses.

    `w`, the scales `scale` and the zero points `zero` have one value per code, `[K, N]`. `upper` is
    the `inverse_factor` of the metric, `[K, K]`. The losses are per column, `[N]`.
    """
    from scipy.linalg.blas import sgemm

    # Pad the rows to whole blocks: `upper` with the identity, `scale` with 1, and others with 0.
    num_rows, padding = len(w), -len(w) % _BLOCK
    if padding:
        w, scale, zero, upper = (np.pad(x, [(0, padding), (0, 0)]) for x in (w, scale, zero, upper))
        upper = np.hstack([upper, np.eye(len(upper), padding, -num_rows)])
        scale[-padding:] = 1
    upper, compensated = upper.astype(np.float32), np.array(w)
    codes, errors = np.empty(w.shape, FORMATS[qtype].code_dtype), np.empty_like(compensated)

    def round_range(start: int, stop: int) -> None:
        """Round the rows from `start` to `stop`.

        If there are many, round the first half, compensate its errors in the second half, and then
        round the second half.
        """
        rows = slice(start, stop)
        if stop - start <= _PANEL:
            panel = compensated[rows], scale[rows], zero[rows], upper[rows, rows]
            codes[rows], errors[rows] = _round_panel(*panel, qtype=qtype)
            return
        middle = start + math.ceil((stop - start) / (2 * _PANEL)) * _PANEL
        round_range(start, middle)
        # Compensate the errors of the first half in the second: subtract `factors.T @ errors`.
        # BLAS needs Fortran order, so compute the transpose.
        factors, second = upper[start:middle, middle:stop], compensated[middle:stop]
        second[:] = sgemm(-1, errors[start:middle].T, factors, beta=1, c=second.T, overwrite_c=1).T
        round_range(middle, stop)

    round_range(0, len(w))
    return codes[:num_rows], np.einsum("kn,kn->n", errors, errors, dtype=float)


@functools.partial(jax.jit, static_argnames="qtype")
def _round_panel(
    w: jax.Array, scale: jax.Array, zero: jax.Array, upper: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Round a panel, which is a range of consecutive rows, in blocks of `_BLOCK` rows.

    `upper` is the part of `inverse_factor` for these rows and columns. Return the codes and the
    scaled errors: the rounding error of each row, divided by its entry on the diagonal of `upper`.
    The loss of a column is the sum of its squared scaled errors.
    """
    format, size = FORMATS[qtype], len(w)

    def round_block(
        w: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Round the block of rows at `start`, a step of a scan over blocks.

        Return `w`, whose later rows compensate the errors of the block, and `(codes, errors)`.
        """
        slice_rows = lambda x: lax.dynamic_slice_in_dim(x, start, _BLOCK)
        scales, zeros, upper_rows = slice_rows(scale), slice_rows(zero), slice_rows(upper)
        upper_block = lax.dynamic_slice_in_dim(upper_rows, start, _BLOCK, axis=1)

        def round_row(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
            """Round row `i` of the block, and compensate its error in the rows of the block."""
            rows, errors = carry
            code, value = _encode(rows[i], scales[i], zeros[i], qtype)
            error = _zero_nonfinite(rows[i] - value) / upper_block[i, i]
            # Earlier rows do not change, because `upper_block` is 0 below its diagonal.
            rows = rows - upper_block[i][:, None] * error
            return (rows, errors.at[i].set(error)), code

        carry = slice_rows(w), jnp.zeros((_BLOCK, w.shape[1]), w.dtype)
        (_, errors), codes = lax.scan(round_row, carry, jnp.arange(_BLOCK))
        later_columns = jnp.where(jnp.arange(size) >= start + _BLOCK, upper_rows, 0)
        return w - jnp.matmul(later_columns.T, errors, precision="highest"), (codes, errors)

    _, (codes, errors) = lax.scan(round_block, w, jnp.arange(0, size, _BLOCK))
    return codes.reshape(w.shape).astype(format.code_dtype), errors.reshape(w.shape)


@functools.partial(jax.jit, static_argnames="qtype")
def _round_to_nearest(
    w: jax.Array, scale: jax.Array, zero: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return the nearest codes, and the rounding errors with the last row first.

    `_is_norm_above` takes the errors in this order. All arrays are `[K, N]`.
    """
    codes, value = _encode(w, scale, zero, qtype)
    return codes.astype(FORMATS[qtype].code_dtype), _zero_nonfinite(w - value)[::-1]


def _is_norm_above(lower: np.ndarray, errors: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return whether the squared norm of each column of `lower.T @ errors` is above its limit.

    The squared norm is the loss of the rounding errors `errors`, `[K, N]`, if `lower` is the
    Cholesky factor of the metric. `limits` has one entry per column. Rows of `errors` are ordered
    by increasing activations.
    """
    norms, columns = np.zeros(errors.shape[1]), np.arange(errors.shape[1])
    # Add the norms of groups of rows, the last first. Stop adding columns above their limits.
    for stop in range(len(errors), 0, -_LOSS_ROWS):
        start = max(0, stop - _LOSS_ROWS)
        # Indexing by all columns would copy the array.
        selected = errors[start:] if len(columns) == len(norms) else errors[start:, columns]
        rows = lower[start:, start:stop].T.astype(np.float32) @ selected
        norms[columns] += np.einsum("kn,kn->n", rows, rows, dtype=float)
        columns = columns[~(norms[columns] > limits[columns])]
        if not columns.size:
            break
    return norms > limits


def _encode(
    w: jax.Array, scale: jax.Array, zero: jax.Array, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return a pair: the nearest codes of `w`, and the values that these codes represent."""
    codes = FORMATS[qtype].encode(w / scale + zero)
    return codes, (FORMATS[qtype].decode(codes, w.dtype) - zero) * scale


def _zero_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
