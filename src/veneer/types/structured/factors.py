"""What matrices do to vectors that are parts of another, and may be dense or of any type."""

from typing import Any

import jax.numpy as jnp

from ..._core.transform import redispatch
from .half_precision import computing_dtype


def applied(w: Any, x: Any, *, precision: Any = None) -> Any:
    """`w @ v` for each vector of x: `[*lead, k, n]` to `[*lead, k, m]`, accumulated in f32."""
    dtype = computing_dtype(w.dtype, x.dtype)

    def product(w: Any, x: Any) -> Any:
        return jnp.matmul(x, w.mT, precision=precision, preferred_element_type=dtype)

    return redispatch(product, w, x)


def solved(w: Any, b: Any) -> Any:
    """x such that `w @ x = v` for each vector v of b: `[*lead, k, n]`."""
    return redispatch(lambda w, b: jnp.linalg.solve(w, b.mT).mT, w, b)


def transposed(w: Any) -> Any:
    """The transpose `[*lead, n, m]`."""
    return redispatch(jnp.matrix_transpose, w)


def converted(w: Any, dtype: Any) -> Any:
    """The matrix in another dtype."""
    return redispatch(lambda w: w.astype(dtype), w)


def is_square(w: Any) -> bool:
    """Whether the last two axes are of the same size."""
    return w.shape[-2] == w.shape[-1]
