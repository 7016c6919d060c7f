"""Corrections of low rank of what rounding lost, in the metric of the activations that it meets.

Of `E = W - Q` and second moments G, the matrix C of rank r by which outputs lose least is the one
with the least trace of `(E - C).T @ G @ (E - C)`. With V the right singular vectors of the r
largest singular values of `G^(1/2) @ E` it is `E @ V @ V.T`: what QERA has as
`G^(-1/2) @ svd_r(G^(1/2) @ E)` (Zhang et al., arXiv 2410.06040, theorem 1), without an inverse, so
that G may be singular.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..models.correction import LowRankAxes, balance_factors
from .moments import Moments


class Correction:
    """The correction of a weight, of which some matrices are found at a time; zeros before.

    **Arguments:**

    - `shape`: of the weight.
    - `rank`: at most.
    - `axes`: of the correction.
    - `contracting`: the axes that products contract.

    `factors` are those of its matrices, `[S, in, rank]` and `[S, rank, out]`.
    """

    def __init__(
        self, shape: Sequence[int], rank: int, axes: LowRankAxes, contracting: Sequence[int]
    ):
        lead, ins, outs = axes.split_shape(tuple(shape))
        self._of_weight, self._axes, self._lead = tuple(shape), axes, lead
        self._contracted = sorted(axis % len(shape) for axis in contracting)
        self._shape = math.prod(lead), math.prod(ins), math.prod(outs)
        self._rank = min(rank, *self._shape[1:])
        self.factors = (
            np.zeros((*self._shape[:2], self._rank), np.float32),
            np.zeros((self._shape[0], self._rank, self._shape[2]), np.float32),
        )

    def find(
        self,
        lost: Any,
        moments: Sequence[Moments],
        stacked_axes: Sequence[int],
        stacks: Collection[int],
    ) -> None:
        """Finds the matrices that belong to some stacks.

        **Arguments:**

        - `lost`: what the weight is worth less as it is rounded, in its shape.
        - `moments`: of the activations of each stack.
        - `stacked_axes`: the axes along which those are, from the front.
        - `stacks`: their numbers.

        **Raises:** `ValueError` where activations differ along an axis that the correction sums.
        """
        if any(axis >= len(self._lead) for axis in stacked_axes):
            raise ValueError(
                f"correction_rank does not support shape {list(self._of_weight)}, because the "
                f"activations differ along the axes {list(stacked_axes)} of the weight. Leave out "
                "correction_rank for this weight"
            )
        lost = np.asarray(lost, np.float32).reshape(self._shape)
        lost = np.nan_to_num(lost, nan=0, posinf=0, neginf=0)
        counts = [self._lead[axis] for axis in stacked_axes]
        turned = self._axes.contracted == "out"
        for i, at in enumerate(np.ndindex(self._lead)):
            places = [at[axis] for axis in stacked_axes]
            stack = int(np.ravel_multi_index(places, counts)) if counts else 0
            if stack not in stacks:
                continue
            gram = self._gram(moments[stack].gram, at)
            a, b = low_rank_factors(lost[i].T if turned else lost[i], gram, self._rank)
            self.factors[0][i], self.factors[1][i] = (b.T, a.T) if turned else (a, b)

    def _gram(self, gram: np.ndarray, at: Sequence[int]) -> np.ndarray:
        """The moments of the rows that one matrix has, of those of all that a product contracts."""
        sizes = [self._of_weight[axis] for axis in self._contracted]
        count = len(self._lead)
        where = tuple(at[axis] if axis < count else slice(None) for axis in self._contracted)
        rows = self._shape[2 if self._axes.contracted == "out" else 1]
        return gram.reshape(*sizes, *sizes)[where * 2].reshape(rows, rows)

    def held(self, q: Any) -> Any:
        """Returns a weight with the correction."""
        return self._axes.as_lora(q, *self.factors)


def low_rank_factors(
    lost: np.ndarray, gram: np.ndarray, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matrix of a rank by which outputs lose least, as `a @ b`, in float64.

    Where no activations were met, and G is zeros, the one of the least sum of squares.

    **Arguments:**

    - `lost`: E, `[K, N]`.
    - `gram`: G, the second moments of activations, `[K, K]`.
    - `rank`: r, no more than K and N.

    **Returns:** `[K, r]` and `[r, N]`, of which columns and rows have the same norms.

    >>> import numpy as np
    >>> from veneer.quant.ptq.low_rank import low_rank_factors
    >>> lost, gram = np.diag([1.0, 2.0, 3.0]), np.diag([100.0, 1.0, 1.0])
    >>> a, b = low_rank_factors(lost, gram, 1)  # the channel of the largest activations
    >>> abs((a @ b).round(6)).diagonal().tolist()
    [1.0, 0.0, 0.0]
    """
    lost, gram = np.asarray(lost, float), np.asarray(gram, float)
    if not gram.any():
        gram = np.eye(len(gram))
    if lost.shape[1] <= lost.shape[0]:
        right = _largest(lost.T @ gram @ lost, rank)
    else:
        values, vectors = np.linalg.eigh(gram)
        weighted = np.sqrt(np.maximum(values, 0))[:, None] * (vectors.T @ lost)
        right, _ = np.linalg.qr(weighted.T @ _largest(weighted @ weighted.T, rank))
    return balance_factors(lost @ right, right.T)


def _largest(metric: np.ndarray, count: int) -> np.ndarray:
    """The eigenvectors of the largest eigenvalues, `[n, count]`."""
    from scipy.linalg import eigh  # of JAX's own dependencies

    n = len(metric)
    return eigh(metric, subset_by_index=[n - count, n - 1])[1]
