"""GPTQ: choose the codes of a matrix row by row, so that each row compensates earlier errors.

Source: Frantar et al., arXiv 2310.17323. Each column of a matrix `[K, N]` is a separate problem: to
find the codes nearest to a vector, in the metric of the second moments of the activations. LAPACK
factorizes the metric in float64, and compiled JAX code rounds blocks of rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import FORMATS
from .moments import Moments, cholesky

#: The damping, as a fraction of the mean of the diagonal of the second moments (section 3.3).
DAMPING = 0.01
#: The numbers of rows in a block and in a panel of blocks, which fit in the caches of a core.
_BLOCK, _PANEL = 8, 64
#: The number of rows whose losses are added at a time.
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
    """Choose the codes of a matrix that minimize the loss of its outputs.

    Rows are rounded in the order of their second moments, the largest first. Rows without
    activations get the nearest codes. So does each column whose (damped) loss would be larger.

    **Arguments:**

    - `w`: the matrix `[K, N]`. Products contract K.
    - `moments`: the second moments of its activations.
    - `scale`, `zero_point`: one value per entry, `[K, N]`.
    - `qtype`: the format.
    - `damping`: the fraction of the mean of the diagonal of the moments that is added to it.

    **Returns:** the codes, one per byte, `[K, N]`.

    >>> import numpy as np
    >>> from veneer.quant.ptq.gptq import gptq
    >>> from veneer.quant.ptq.moments import Moments
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
    lower = cholesky(metric[np.ix_(order[::-1], order[::-1])])
    w, scale, zero = w[order], scale[order], np.asarray(zero, np.float32)[order]
    rounded, losses = _round_rows(w, scale, zero, inverse_factor(lower), qtype=qtype)
    nearest, errors = map(np.asarray, _round_to_nearest(w, scale, zero, qtype=qtype))
    codes = np.empty_like(rounded)
    codes[order] = np.where(_is_loss_above(lower, errors, losses), rounded, nearest)
    return codes


def damp(gram: np.ndarray, damping: float) -> np.ndarray:
    """Return second moments in float64 with a damped diagonal. It is 1 for unused channels."""
    metric = np.array(gram, float)
    at = np.diag_indices(len(metric))
    diagonal = metric[at]
    alive = diagonal > 0
    metric[~alive], metric[:, ~alive] = 0, 0
    mean = diagonal[alive].mean() if alive.any() else 0
    metric[at] = np.where(alive, diagonal + damping * mean, 1)
    return metric


def inverse_factor(lower: np.ndarray) -> np.ndarray:
    """Return the upper triangular U for which `U.T @ U` is the inverse of a positive matrix.

    **Arguments:**

    - `lower`: the Cholesky factor of the matrix with its rows and columns in reverse order.
    """
    from scipy.linalg.lapack import dtrtri  # JAX depends on SciPy

    upper, _ = dtrtri(np.asfortranarray(lower[::-1, ::-1]), lower=0, overwrite_c=1)
    return upper


def _round_rows(
    w: np.ndarray, scale: np.ndarray, zero: np.ndarray, upper: np.ndarray, *, qtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Round rows from the first to the last. Return their codes, and the loss of each column.

    The second half of the rows compensates all errors of the first half at once, and each half does
    the same within itself. These are products of large matrices, computed by BLAS.

    **Arguments:**

    - `upper`: the `inverse_factor` of the metric, `[K, K]`.
    """
    from scipy.linalg.blas import sgemm

    count, missing = len(w), -len(w) % _BLOCK
    if missing:
        w, scale, zero, upper = (np.pad(x, [(0, missing), (0, 0)]) for x in (w, scale, zero, upper))
        upper = np.hstack([upper, np.eye(len(upper), missing, missing - len(upper))])
        scale[-missing:] = 1
    upper, remaining = upper.astype(np.float32), np.array(w)
    codes, errors = np.empty(w.shape, FORMATS[qtype].code_dtype), np.empty_like(remaining)

    def round_range(start: int, stop: int) -> None:
        rows = slice(start, stop)
        if stop - start <= _PANEL:
            panel = remaining[rows], scale[rows], zero[rows], upper[rows, rows]
            codes[rows], errors[rows] = _round_panel(*panel, qtype=qtype)
            return
        middle = start + -(-(stop - start) // (2 * _PANEL)) * _PANEL
        round_range(start, middle)
        factors, second = upper[start:middle, middle:stop], remaining[middle:stop]
        second[:] = sgemm(-1, errors[start:middle].T, factors, beta=1, c=second.T, overwrite_c=1).T
        round_range(middle, stop)

    round_range(0, len(w))
    return codes[:count], np.einsum("kn,kn->n", errors, errors, dtype=float)


@functools.partial(jax.jit, static_argnames="qtype")
def _round_panel(
    w: jax.Array, scale: jax.Array, zero: jax.Array, upper: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Round a panel of rows. Return the codes, and the scaled error of each entry."""
    format, size = FORMATS[qtype], len(w)

    def round_block(
        w: jax.Array, start: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        slice_rows = lambda x: lax.dynamic_slice_in_dim(x, start, _BLOCK)
        scales, zeros, factors = slice_rows(scale), slice_rows(zero), slice_rows(upper)
        own = lax.dynamic_slice_in_dim(factors, start, _BLOCK, axis=1)

        def round_row(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
            rows, errors = carry
            code, value = _encode(rows[i], scales[i], zeros[i], qtype)
            error = _zero_nonfinite(rows[i] - value) / own[i, i]
            return (rows - own[i][:, None] * error, errors.at[i].set(error)), code

        carry = slice_rows(w), jnp.zeros((_BLOCK, w.shape[1]), w.dtype)
        (_, errors), codes = lax.scan(round_row, carry, jnp.arange(_BLOCK))
        later = jnp.where(jnp.arange(size) >= start + _BLOCK, factors, 0)
        return w - jnp.matmul(later.T, errors, precision="highest"), (codes, errors)

    _, (codes, errors) = lax.scan(round_block, w, jnp.arange(0, size, _BLOCK))
    return codes.reshape(w.shape).astype(format.code_dtype), errors.reshape(w.shape)


@functools.partial(jax.jit, static_argnames="qtype")
def _round_to_nearest(
    w: jax.Array, scale: jax.Array, zero: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return the nearest codes, and the rounding errors of the rows in reverse order."""
    codes, value = _encode(w, scale, zero, qtype)
    return codes.astype(FORMATS[qtype].code_dtype), _zero_nonfinite(w - value)[::-1]


def _is_loss_above(lower: np.ndarray, errors: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return whether the squared norm of each column of `lower.T @ errors` is above its limit.

    Rows are added from the last, where activations are largest. A column whose sum is above the
    limit is left out of the remaining products.
    """
    sums, left = np.zeros(errors.shape[1]), np.arange(errors.shape[1])
    for stop in range(len(errors), 0, -_LOSS_ROWS):
        start = max(0, stop - _LOSS_ROWS)
        columns = errors[start:] if len(left) == len(sums) else errors[start:, left]
        part = lower[start:, start:stop].T.astype(np.float32) @ columns
        sums[left] += np.einsum("kn,kn->n", part, part, dtype=float)
        left = left[~(sums[left] > limits[left])]
        if not left.size:
            break
    return sums > limits


def _encode(
    w: jax.Array, scale: jax.Array, zero: jax.Array, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Return the nearest codes, and the values that they represent."""
    codes = FORMATS[qtype].encode(w / scale + zero)
    return codes, (FORMATS[qtype].decode(codes, w.dtype) - zero) * scale


def _zero_nonfinite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
