"""GPTQ: codes of a matrix, one row after the other, each making up for those before.

Frantar et al., arXiv 2210.17323. Of a matrix `[K, N]`, each column is a problem of its own: the
codes next to a real vector, in a metric that the activations give. The factors of the metric are
found by LAPACK in float64, and rows are rounded in compiled JAX, blocks of them at a time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import FORMATS
from .moments import Moments, cholesky

#: Of the mean of the diagonal of the moments: what is added to it (GPTQ, section 3.3).
DAMPING = 0.01
_BLOCK, _PANEL = 8, 64  # of rows, the one within the other: they fit in caches of a core
_SUMMED = 512  # rows of which losses are summed at a time


def gptq(
    w: np.ndarray,
    moments: Moments,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    qtype: str,
    *,
    damping: float = DAMPING,
) -> np.ndarray:
    """Returns codes for a matrix, by which its outputs lose least.

    Rows are rounded in the order of their second moments, the largest first. What no activation
    meets is rounded to the nearest, and so is each column that would lose more, with the damping.

    **Arguments:**

    - `w`: the matrix `[K, N]`, of which a product contracts the first axis.
    - `moments`: of the activations that it meets.
    - `scale`, `zero_point`: of each entry, `[K, N]`.
    - `qtype`: the format.
    - `damping`: what is added to the diagonal of the moments, as a part of its mean.

    **Returns:** the codes, a byte each, `[K, N]`.

    >>> import numpy as np
    >>> from veneer.quant.ptq.gptq import gptq
    >>> from veneer.quant.ptq.moments import Moments
    >>> w, ones = np.full((2, 1), 0.4, np.float32), np.ones((2, 1), np.float32)
    >>> same = Moments(np.array([[1.0, 0.9], [0.9, 1.0]]))  # two activations that go together
    >>> gptq(w, same, ones, None, "int4").ravel().tolist()
    [0, 1]
    """
    w, scale = np.asarray(w, np.float32), np.asarray(scale, np.float32)
    zero = np.zeros((len(w), 1)) if zero_point is None else zero_point
    if 0 in w.shape:
        return np.zeros(w.shape, FORMATS[qtype].byte_dtype)
    metric = damped(moments.gram, damping)
    order = np.argsort(-np.diagonal(moments.gram), kind="stable")
    lower = cholesky(metric[np.ix_(order[::-1], order[::-1])])
    w, scale, zero = w[order], scale[order], np.asarray(zero, np.float32)[order]
    rounded, after = _rounded(w, scale, zero, inverse_factor(lower), qtype=qtype)
    nearest, lost = map(np.asarray, _nearest(w, scale, zero, qtype=qtype))
    codes = np.empty_like(rounded)
    codes[order] = np.where(_are_more(lower, lost, after), rounded, nearest)
    return codes


def damped(gram: np.ndarray, damping: float) -> np.ndarray:
    """Returns second moments with more on the diagonal, in float64; 1 where there are none."""
    metric = np.array(gram, float)
    at = np.diag_indices(len(metric))
    diagonal = metric[at]
    alive = diagonal > 0
    metric[~alive], metric[:, ~alive] = 0, 0
    metric[at] = np.where(
        alive, diagonal + damping * diagonal[alive].mean() if alive.any() else 0, 1
    )
    return metric


def inverse_factor(lower: np.ndarray) -> np.ndarray:
    """Returns U, upper triangular, of which `U.T @ U` is the inverse of a positive matrix.

    **Arguments:**

    - `lower`: the factor of Cholesky of that matrix, with rows and columns from the last to the
      first.
    """
    from scipy.linalg.lapack import dtrtri  # of JAX's own dependencies

    upper, _ = dtrtri(np.asfortranarray(lower[::-1, ::-1]), lower=0, overwrite_c=1)
    return upper


def _rounded(
    w: np.ndarray, scale: np.ndarray, zero: np.ndarray, upper: np.ndarray, *, qtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Codes of rows, the first first, and what each column loses, by an upper factor `[K, K]`.

    What the first half of rows has lost is made up for in all of the second at once, and so within
    each half: products of large matrices, by BLAS.
    """
    from scipy.linalg.blas import sgemm  # of JAX's own dependencies

    count, missing = len(w), -len(w) % _BLOCK
    if missing:
        w, scale, zero, upper = (np.pad(x, [(0, missing), (0, 0)]) for x in (w, scale, zero, upper))
        upper = np.hstack([upper, np.eye(len(upper), missing, missing - len(upper))])
        scale[-missing:] = 1
    upper, later = upper.astype(np.float32), np.array(w)
    codes, errors = np.empty(w.shape, FORMATS[qtype].code_dtype), np.empty_like(later)

    def do(start: int, stop: int) -> None:
        rows = slice(start, stop)
        if stop - start <= _PANEL:
            own = later[rows], scale[rows], zero[rows], upper[rows, rows]
            codes[rows], errors[rows] = _rounded_panel(*own, qtype=qtype)
            return
        middle = start + -(-(stop - start) // (2 * _PANEL)) * _PANEL
        do(start, middle)
        factors, second = upper[start:middle, middle:stop], later[middle:stop]
        second[:] = sgemm(-1, errors[start:middle].T, factors, beta=1, c=second.T, overwrite_c=1).T
        do(middle, stop)

    do(0, len(w))
    return codes[:count], np.einsum("kn,kn->n", errors, errors, dtype=float)


@functools.partial(jax.jit, static_argnames="qtype")
def _rounded_panel(
    w: jax.Array, scale: jax.Array, zero: jax.Array, upper: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """Codes of a panel of rows, and the error of each."""
    format, size = FORMATS[qtype], len(w)

    def block(w: jax.Array, start: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        of_block = lambda x: lax.dynamic_slice_in_dim(x, start, _BLOCK)
        scales, zeros, factors = of_block(scale), of_block(zero), of_block(upper)
        own = lax.dynamic_slice_in_dim(factors, start, _BLOCK, axis=1)

        def row(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
            rows, errors = carry
            code, value = _encoded(rows[i], scales[i], zeros[i], qtype)
            error = _finite(rows[i] - value) / own[i, i]
            return (rows - own[i][:, None] * error, errors.at[i].set(error)), code

        carry = of_block(w), jnp.zeros((_BLOCK, w.shape[1]), w.dtype)
        (_, errors), codes = lax.scan(row, carry, jnp.arange(_BLOCK))
        later = jnp.where(jnp.arange(size) >= start + _BLOCK, factors, 0)
        made_up = w - jnp.matmul(later.T, errors, precision="highest")
        return made_up, (codes, errors)

    _, (codes, errors) = lax.scan(block, w, jnp.arange(0, size, _BLOCK))
    return codes.reshape(w.shape).astype(format.code_dtype), errors.reshape(w.shape)


@functools.partial(jax.jit, static_argnames="qtype")
def _nearest(
    w: jax.Array, scale: jax.Array, zero: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """The nearest codes, and what rows lose by them, the last first."""
    codes, value = _encoded(w, scale, zero, qtype)
    return codes.astype(FORMATS[qtype].code_dtype), _finite(w - value)[::-1]


def _are_more(lower: np.ndarray, lost: np.ndarray, than: np.ndarray) -> np.ndarray:
    """Whether the sum of squares of each column of `lower.T @ lost` is more than a number, `[N]`.

    They are summed from the end, where activations are largest, for as long as it is not known.
    """
    sums, left = np.zeros(lost.shape[1]), np.arange(lost.shape[1])
    for stop in range(len(lost), 0, -_SUMMED):
        start = max(0, stop - _SUMMED)
        of_left = lost[start:] if len(left) == len(sums) else lost[start:, left]
        part = lower[start:, start:stop].T.astype(np.float32) @ of_left
        sums[left] += np.einsum("kn,kn->n", part, part, dtype=float)
        left = left[~(sums[left] > than[left])]
        if not left.size:
            break
    return sums > than


def _encoded(
    w: jax.Array, scale: jax.Array, zero: jax.Array, qtype: str
) -> tuple[jax.Array, jax.Array]:
    format = FORMATS[qtype]
    codes = format.encode(w / scale + zero)
    return codes, (format.decode(codes, w.dtype) - zero) * scale


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
