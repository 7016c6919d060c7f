"""Second moments of activations, and what the outputs of a weight lose by them."""

from typing import NamedTuple

import numpy as np


class Moments(NamedTuple):
    """Means over the rows x that a matrix `[K, N]` meets, in float64, `[K, K]` each.

    **Arguments:**

    - `gram`: of `x.T @ x`.
    - `cross`: of `x.T @ t`, where t are the rows that it would meet if nothing before it were
      rounded. None where those are x.
    - `target`: of `t.T @ t`; None likewise.
    """

    gram: np.ndarray
    cross: np.ndarray | None = None
    target: np.ndarray | None = None

    def loss(self, w: np.ndarray, rounded: np.ndarray) -> np.ndarray:
        """Returns the mean of `(t @ w - x @ rounded) ** 2` for each output, `[N]`."""
        if self.cross is None or self.target is None:
            lost = np.asarray(w, float) - np.asarray(rounded, float)
            return _of_columns(self.gram, lost, lost)
        w, rounded = np.asarray(w, float), np.asarray(rounded, float)
        crossed = _of_columns(self.cross, rounded, w)
        whole = _of_columns(self.target, w, w)
        return np.maximum(_of_columns(self.gram, rounded, rounded) - 2 * crossed + whole, 0)

    def power(self, w: np.ndarray) -> np.ndarray:
        """Returns the mean of `(t @ w) ** 2` for each output, `[N]`."""
        w = np.asarray(w, float)
        return _of_columns(self.gram if self.target is None else self.target, w, w)


def _of_columns(moment: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.einsum("kn,kn->n", left, moment @ right)
