"""A weight as a stack of matrices `[S, K, N]`, and the low-rank correction of each matrix."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...types.basis import InBasis
from ..models.correction import LowRankAxes, add_correction
from ..models.quantize_tree import ChosenRules
from ..models.rules import Rule
from ..observation.statistics import ActivationStatistics
from .moments import Moments, low_rank_factors


class MatrixStack:
    """The view of an array as a stack of matrices `[S, K, N]`, where products contract K.

    **Arguments:**

    - `shape`: the shape of the array.
    - `contracting`: the contracted axes, counted from the end.
    - `stacked`: the axes along which matrices have different activations, from the front.
    """

    def __init__(self, shape: Sequence[int], contracting: Sequence[int], stacked: Sequence[int]):
        contracted = sorted(axis % len(shape) for axis in contracting)
        free = [axis for axis in range(len(shape)) if axis not in (*stacked, *contracted)]
        self._order = [*stacked, *contracted, *free]
        self._sizes = [shape[axis] for axis in self._order]
        self._stacked, self._contracted = list(stacked), contracted
        count = lambda axes: math.prod(shape[axis] for axis in axes)
        self.shape = count(stacked), count(contracted), count(free)

    def split(self, array: Any) -> np.ndarray:
        """Return the matrices of an array."""
        return np.asarray(array).transpose(self._order).reshape(self.shape)

    def join(self, matrices: np.ndarray) -> np.ndarray:
        """Return the array that consists of some matrices."""
        return matrices.reshape(self._sizes).transpose(np.argsort(self._order))

    def join_channels(self, values: np.ndarray) -> np.ndarray:
        """Return values per channel, `[S, K]`, as an array that broadcasts against the weight."""
        start = len(self._stacked) + len(self._contracted)
        shape = [*self._sizes[:start], *[1] * (len(self._order) - start)]
        return values.reshape(shape).transpose(np.argsort(self._order))

    def grams_in_basis(self, basis: InBasis, grams: np.ndarray) -> np.ndarray:
        """Return the second moments `[S, K, K]` of activations in the basis of an array."""
        lead, count = len(self._stacked), len(self._contracted)
        sizes = self._sizes[lead : lead + count]
        moments = jnp.asarray(grams.reshape(*self._sizes[:lead], *sizes, *sizes))
        stacked = {axis: i for i, axis in enumerate(self._stacked)}
        for start in (lead, lead + count):
            places = {axis: start + i for i, axis in enumerate(self._contracted)}
            moments = basis.into_basis(moments, stacked | places)
        return np.asarray(moments, float).reshape(grams.shape)

    def moments(self, statistics: ActivationStatistics) -> list[Moments]:
        """Return the second moments of each matrix. Without activations, all of them are 0."""
        count, size, _ = self.shape
        grams = np.reshape(statistics.gram, (count, size, size))
        is_used = statistics.of_stacks(statistics.count > 0).max(1)
        pairs = zip(grams, is_used, strict=True)
        return [Moments(gram if used else np.zeros_like(gram)) for gram, used in pairs]


def product_axes(tree: ChosenRules, rules: Mapping[str, Rule]) -> dict[str, tuple[int, ...]]:
    """Return the contracted axes of each weight that has a rule with a format and is in a product.

    Both `rules` and the result are by path.
    """
    ndims, uses = dict(zip(tree.paths, map(np.ndim, tree.leaves), strict=True)), tree.uses or {}
    return {
        path: rule.contracting(ndims[path])
        for path, rule in rules.items()
        if rule.has_format and any(use.is_product for use in uses[path])
    }


def finite(x: np.ndarray) -> np.ndarray:
    """Return an array in float32, with 0 for NaN and infinity."""
    return np.nan_to_num(x.astype(np.float32), nan=0, posinf=0, neginf=0)


class Correction:
    """The low-rank correction of a weight, which can be computed for some matrices at a time.

    `factors` are the factors `[L, in, rank]` and `[L, rank, out]` of its matrices, where L counts
    the leading axes. They are None before the first `compute`, and 0 for other matrices.

    **Arguments:**

    - `shape`: the shape of the weight.
    - `rank`: the rank, which the sizes of the matrices limit.
    - `axes`: the axes of the correction.
    - `contracting`: the axes that products contract.
    """

    factors: tuple[np.ndarray, np.ndarray] | None = None

    def __init__(
        self, shape: Sequence[int], rank: int, axes: LowRankAxes, contracting: Sequence[int]
    ):
        self._weight_shape, self._axes = tuple(shape), axes
        self._contracted = sorted(axis % len(shape) for axis in contracting)
        self._lead, ins, outs = axes.split_shape(self._weight_shape)
        self._shape = math.prod(self._lead), math.prod(ins), math.prod(outs)
        self._rank = min(rank, *self._shape[1:])

    def compute(
        self,
        error: Any,
        moments: Sequence[Moments],
        stacked_axes: Sequence[int],
        stacks: Collection[int],
    ) -> None:
        """Compute the corrections of the matrices that have the activations of some stacks.

        **Arguments:**

        - `error`: the weight minus the rounded weight.
        - `moments`: the second moments of the activations of each stack.
        - `stacked_axes`: the axes along which the stacks lie, counted from the front.
        - `stacks`: the indices of the stacks.

        **Raises:** `ValueError` if activations differ along an axis that the correction contracts.
        """
        if any(axis >= len(self._lead) for axis in stacked_axes):
            raise ValueError(
                f"correction_rank does not support shape {list(self._weight_shape)}, because the "
                f"activations differ along the axes {list(stacked_axes)} of the weight. Leave out "
                "correction_rank for this weight"
            )
        error = finite(np.asarray(error, np.float32).reshape(self._shape))
        count, ins, outs = self._shape
        if self.factors is None:
            shapes = (count, ins, self._rank), (count, self._rank, outs)
            self.factors = np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)
        counts = [self._lead[axis] for axis in stacked_axes]
        contracts_outs = self._axes.contracted == "out"
        for i, index in enumerate(np.ndindex(self._lead)):
            stack_index = [index[axis] for axis in stacked_axes]
            stack = int(np.ravel_multi_index(stack_index, counts)) if counts else 0
            if stack not in stacks:
                continue
            gram = self._gram_of_matrix(moments[stack].gram, index)
            a, b = low_rank_factors(error[i].T if contracts_outs else error[i], gram, self._rank)
            self.factors[0][i], self.factors[1][i] = (b.T, a.T) if contracts_outs else (a, b)

    def _gram_of_matrix(self, gram: np.ndarray, index: Sequence[int]) -> np.ndarray:
        """Return the part of a gram that belongs to the matrix at `index` of the leading axes.

        A product can contract leading axes, too. Its gram then covers several matrices.
        """
        sizes = [self._weight_shape[axis] for axis in self._contracted]
        part = [index[i] if i < len(self._lead) else slice(None) for i in self._contracted]
        rows = self._shape[2 if self._axes.contracted == "out" else 1]
        return gram.reshape(*sizes, *sizes)[tuple(part * 2)].reshape(rows, rows)

    def add_to(self, q: Any, dense: Any) -> Any:
        """Return a rounded weight with the correction.

        Before the first `compute`, use the correction of least squared error.

        **Arguments:**

        - `q`: the rounded weight.
        - `dense`: the weight before rounding.
        """
        if self.factors is None:
            return add_correction(q, dense, self._rank, self._axes)
        return self._axes.as_lora(q, *self.factors)
