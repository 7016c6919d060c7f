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
from .moments import Moments

#: Of the mean of the diagonal of the moments: what is added to it (GPTQ, section 3.3).
DAMPING = 0.01
#: How much of the error of the activations is made up for (QEP, arXiv 2504.09629, section 5).
CORRECTION = 0.5
_BLOCK = 64


def gptq(
    w: np.ndarray,
    moments: Moments,
    scale: np.ndarray,
    zero_point: np.ndarray | None,
    qtype: str,
    *,
    damping: float = DAMPING,
    correction: float = CORRECTION,
) -> np.ndarray:
    """Returns codes for a matrix, by which its outputs lose least.

    Rows are rounded in the order of their second moments, the largest first. What no activation
    meets is rounded to the nearest, and so is each column that would lose more.

    **Arguments:**

    - `w`: the matrix `[K, N]`, of which a product contracts the first axis.
    - `moments`: of the activations that it meets; finite.
    - `scale`, `zero_point`: of each entry, `[K, N]`.
    - `qtype`: the format.
    - `damping`: what is added to the diagonal of the moments, as a part of its mean.
    - `correction`: the part of the error of the activations, where `moments` have any, that the
      matrix makes up for.

    **Returns:** the codes, a byte each, `[K, N]`.

    **Raises:** `ValueError` for moments that are not finite, as of activations with a NaN.

    >>> import numpy as np
    >>> from veneer.quant.ptq.gptq import gptq
    >>> from veneer.quant.ptq.moments import Moments
    >>> w, ones = np.full((2, 1), 0.4, np.float32), np.ones((2, 1), np.float32)
    >>> same = Moments(np.array([[1.0, 0.9], [0.9, 1.0]]))  # two activations that go together
    >>> gptq(w, same, ones, None, "int4").ravel().tolist()
    [0, 1]
    """
    w, scale = np.asarray(w, np.float32), np.asarray(scale, np.float32)
    zero = np.zeros_like(w) if zero_point is None else np.asarray(zero_point, np.float32)
    if not all(np.isfinite(moment).all() for moment in moments if moment is not None):
        raise ValueError(
            "the second moments of the activations have NaN or infinity in them: so had some "
            "activations, or their squares overflow"
        )
    if 0 in w.shape:
        return np.zeros(w.shape, FORMATS[qtype].byte_dtype)
    metric = damped(moments.gram, damping)
    order = np.argsort(-np.diagonal(moments.gram), kind="stable")
    upper = inverse_factor(metric[np.ix_(order, order)]).astype(np.float32)
    wanted = w if moments.cross is None else _corrected(w, moments, metric, correction)
    pad = [(0, -len(w) % _BLOCK), (0, 0)]
    rows = [
        np.pad(x[order], pad, constant_values=c) for x, c in ((wanted, 0), (scale, 1), (zero, 0))
    ]
    upper = np.pad(upper, [pad[0], pad[0]])
    upper[np.diag_indices(len(upper))] += np.arange(len(upper)) >= len(w)
    codes = np.empty(w.shape, FORMATS[qtype].code_dtype)
    codes[order] = np.asarray(_rounded(*rows, upper, qtype=qtype))[: len(w)]
    nearest, *values = map(np.asarray, _nearest(w, scale, zero, codes, qtype=qtype))
    before, after = (moments.loss(_finite(w), _finite(x)) for x in values)
    return np.where(after < before, codes, nearest)


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


def inverse_factor(metric: np.ndarray) -> np.ndarray:
    """Returns U, upper triangular, of which `U.T @ U` is the inverse of a positive matrix.

    More is put on the diagonal where the matrix, which is finite, is not positive to working
    precision.
    """
    from scipy.linalg.lapack import dpotrf, dtrtri  # of JAX's own dependencies

    turned = metric[::-1, ::-1]
    added = 0.0
    while True:
        lower, failed = dpotrf(turned + added * np.eye(len(turned)), lower=1, clean=1)
        if not failed:
            break
        added = max(10 * added, 1e-8 * np.diagonal(turned).max())
    upper, _ = dtrtri(np.asfortranarray(lower[::-1, ::-1]), lower=0)
    return upper


def _corrected(
    w: np.ndarray, moments: Moments, metric: np.ndarray, correction: float
) -> np.ndarray:
    """The matrix that gives on x what `w` gives on t, by least squares, or a part of the way."""
    from scipy.linalg import cho_factor, cho_solve

    assert moments.cross is not None
    wide = w.astype(float)
    missing = cho_solve(cho_factor(metric), (moments.cross - moments.gram) @ np.nan_to_num(wide))
    return (wide + correction * missing).astype(np.float32)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.nan_to_num(x, nan=0, posinf=0, neginf=0)


@functools.partial(jax.jit, static_argnames="qtype")
def _rounded(
    w: jax.Array, scale: jax.Array, zero: jax.Array, upper: jax.Array, *, qtype: str
) -> jax.Array:
    """Codes of rows, the first first: in whole blocks, `[K, N]`, of upper factors `[K, K]`."""
    format, size = FORMATS[qtype], len(w)

    def block(w: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_block = lambda x: lax.dynamic_slice_in_dim(x, start, _BLOCK)
        scales, zeros, factors = of_block(scale), of_block(zero), of_block(upper)
        own = lax.dynamic_slice_in_dim(factors, start, _BLOCK, axis=1)

        def row(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
            rows, errors = carry
            code, value = _encoded(rows[i], scales[i], zeros[i], qtype)
            lost = rows[i] - value
            error = jnp.where(jnp.isfinite(lost), lost, 0) / own[i, i]
            return (rows - own[i][:, None] * error, errors.at[i].set(error)), code

        carry = of_block(w), jnp.zeros((_BLOCK, w.shape[1]), w.dtype)
        (_, errors), codes = lax.scan(row, carry, jnp.arange(_BLOCK))
        later = jnp.where(jnp.arange(size) >= start + _BLOCK, factors, 0)
        return w - jnp.matmul(later.T, errors, precision="highest"), codes

    _, codes = lax.scan(block, w, jnp.arange(0, size, _BLOCK))
    return codes.reshape(w.shape).astype(format.code_dtype)


@functools.partial(jax.jit, static_argnames="qtype")
def _nearest(
    w: jax.Array, scale: jax.Array, zero: jax.Array, codes: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The nearest codes, what they are worth, and what others are."""
    nearest, value = _encoded(w, scale, zero, qtype)
    format = FORMATS[qtype]
    return nearest.astype(format.code_dtype), value, (format.decode(codes, w.dtype) - zero) * scale


def _encoded(
    w: jax.Array, scale: jax.Array, zero: jax.Array, qtype: str
) -> tuple[jax.Array, jax.Array]:
    format = FORMATS[qtype]
    codes = format.encode(w / scale + zero)
    return codes, (format.decode(codes, w.dtype) - zero) * scale
