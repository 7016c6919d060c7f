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
from .moments import Moments, cholesky, squares

#: Of the mean of the diagonal of the moments: what is added to it (GPTQ, section 3.3).
DAMPING = 0.01
_BLOCK, _PANEL = 32, 512  # of rows, the one within the other


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
    zero = np.zeros_like(w) if zero_point is None else np.asarray(zero_point, np.float32)
    if 0 in w.shape:
        return np.zeros(w.shape, FORMATS[qtype].byte_dtype)
    metric = damped(moments.gram, damping)
    order = np.argsort(-np.diagonal(moments.gram), kind="stable")
    lower = cholesky(metric[np.ix_(order[::-1], order[::-1])])
    w, scale, zero = w[order], scale[order], zero[order]
    rounded, after = _rounded(w, scale, zero, inverse_factor(lower), qtype=qtype)
    nearest, lost = map(np.asarray, _nearest(w, scale, zero, qtype=qtype))
    before = squares(lower.T.astype(np.float32), lost)
    codes = np.empty_like(rounded)
    codes[order] = np.where(after < before, rounded, nearest)
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

    What a panel of rows has lost is made up for in all the rows that follow at once.
    """
    missing = -len(w) % _BLOCK
    if missing:
        w, scale, zero, upper = (np.pad(x, [(0, missing), (0, 0)]) for x in (w, scale, zero, upper))
        upper = np.hstack([upper, np.eye(len(upper), missing, missing - len(upper))])
        scale[-missing:] = 1
    codes, lost = np.empty(w.shape, FORMATS[qtype].code_dtype), np.zeros(w.shape[1])
    upper, later = upper.astype(np.float32), jnp.asarray(w)
    for start in range(0, len(w), _PANEL):
        panel = slice(start, start + _PANEL)
        rows = (x[panel] for x in (scale, zero, upper[:, panel]))
        codes[panel], errors = _rounded_panel(later[:_PANEL], *rows, qtype=qtype)
        later = _made_up(later[_PANEL:], upper[panel, start + _PANEL :], errors)
        lost += jnp.square(errors).sum(0)
    return codes[: len(w) - missing], lost


@jax.jit
def _made_up(rows: jax.Array, factors: jax.Array, errors: jax.Array) -> jax.Array:
    return rows - jnp.matmul(factors.T, errors, precision="highest")


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
        return _made_up(w, later, errors), (codes, errors)

    _, (codes, errors) = lax.scan(block, w, jnp.arange(0, size, _BLOCK))
    return codes.reshape(w.shape).astype(format.code_dtype), errors.reshape(w.shape)


@functools.partial(jax.jit, static_argnames="qtype")
def _nearest(
    w: jax.Array, scale: jax.Array, zero: jax.Array, *, qtype: str
) -> tuple[jax.Array, jax.Array]:
    """The nearest codes, and what rows lose by them, the last first."""
    codes, value = _encoded(w, scale, zero, qtype)
    return codes.astype(FORMATS[qtype].code_dtype), _finite(w - value)[::-1]


def _encoded(
    w: jax.Array, scale: jax.Array, zero: jax.Array, qtype: str
) -> tuple[jax.Array, jax.Array]:
    format = FORMATS[qtype]
    codes = format.encode(w / scale + zero)
    return codes, (format.decode(codes, w.dtype) - zero) * scale


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
