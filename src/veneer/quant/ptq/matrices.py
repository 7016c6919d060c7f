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
    """A conversion between an array and a stack of S matrices, `[S, K, N]`.

    Products contract K. Each of the S matrices is multiplied by its own activations.

    **Arguments:**

    - `shape`: the shape of the array.
    - `contracting`: the axes that are merged into K, counted from the end.
    - `stacked`: the axes that are merged into S, counted from the front.
    """

    def __init__(self, shape: Sequence[int], contracting: Sequence[int], stacked: Sequence[int]):
        contracted = sorted(axis % len(shape) for axis in contracting)
        free = [axis for axis in range(len(shape)) if axis not in (*stacked, *contracted)]
        self._axes = [*stacked], contracted, free
        self._order = [*stacked, *contracted, *free]
        self._sizes = [[shape[axis] for axis in axes] for axes in self._axes]
        self.shape = tuple(map(math.prod, self._sizes))

    def split(self, array: Any) -> np.ndarray:
        """Return an array as matrices `[S, K, N]`."""
        return np.asarray(array).transpose(self._order).reshape(self.shape)

    def join(self, matrices: np.ndarray) -> np.ndarray:
        """Return matrices `[S, K, N]` as an array: the inverse of `split`."""
        stacked_sizes, contracted_sizes, free_sizes = self._sizes
        array = matrices.reshape(*stacked_sizes, *contracted_sizes, *free_sizes)
        return array.transpose(np.argsort(self._order))

    def join_channels(self, values: np.ndarray) -> np.ndarray:
        """Return values per channel, `[S, K]`, as an array that broadcasts against the weight."""
        stacked_sizes, contracted_sizes, free_sizes = self._sizes
        sizes = [*stacked_sizes, *contracted_sizes, *(1 for _ in free_sizes)]
        return values.reshape(sizes).transpose(np.argsort(self._order))

    def grams_in_basis(self, weight: InBasis, grams: np.ndarray) -> np.ndarray:
        """Transform second moments of activations, `[S, K, K]`, into the basis of `weight`.

        `weight` is stored in another basis along its contracted axes, for example rotated.
        """
        stacked, contracted, _ = self._axes
        stacked_sizes, contracted_sizes, _ = self._sizes
        moments = jnp.asarray(grams.reshape(*stacked_sizes, *contracted_sizes, *contracted_sizes))
        # Transform the rows of each matrix of second moments, and then the columns. A dict maps
        # axes of the weight to axes of `moments`.
        to_stacked = {axis: i for i, axis in enumerate(stacked)}
        for start in (len(stacked), len(stacked) + len(contracted)):
            to_contracted = {axis: start + i for i, axis in enumerate(contracted)}
            moments = weight.into_basis(moments, to_stacked | to_contracted)
        return np.asarray(moments, float).reshape(grams.shape)

    def moments(self, statistics: ActivationStatistics) -> list[Moments]:
        """Return the second moments of the activations of each of the S matrices.

        A matrix without activations, such as an expert that no token selected, has moments of 0.
        """
        num_matrices, size, _ = self.shape
        grams = np.reshape(statistics.gram, (num_matrices, size, size))
        has_activations = statistics.of_stacks(statistics.count).max(1) > 0
        pairs = zip(grams, has_activations, strict=True)
        return [Moments(gram if used else np.zeros_like(gram)) for gram, used in pairs]


def product_axes(tree: ChosenRules, rules: Mapping[str, Rule]) -> dict[str, tuple[int, ...]]:
    """Return a dict from the path of each quantized weight to the axes that its products contract.

    `rules` holds the rule of each weight, by path. Weights that no product uses are left out.
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
    """The low-rank correction of a weight: two small matrices for each matrix of the weight.

    The weight is a stack of L matrices, `[L, in, out]`, where L is the product of the leading axes.
    Each call of `compute` sets some of the L corrections in the attribute `factors`: the arrays
    `[L, in, rank]` and `[L, rank, out]`. Other corrections are 0. Before the first call, the
    attribute is None.

    **Arguments:**

    - `shape`: the shape of the weight.
    - `rank`: the maximum rank. The rank is smaller if `in` or `out` is smaller.
    - `axes`: the numbers of input and output axes, and whether products contract "in" or "out".
    - `contracting`: the axes of the weight that products contract.
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
        """Compute the factors of some matrices, and store them in `factors`.

        **Arguments:**

        - `error`: the weight minus the rounded weight.
        - `moments`: a list of second moments, one per combination of indices of `stacked_axes`.
        - `stacked_axes`: the axes of the weight along which the activations differ, counted from
          the front.
        - `stacks`: the indices in `moments` of the matrices to compute.

        **Raises:** `ValueError` if activations differ along an axis that the correction contracts.
        """
        if any(axis >= len(self._lead) for axis in stacked_axes):
            raise ValueError(
                f"correction_rank does not support shape {list(self._weight_shape)}, because the "
                f"activations differ along the axes {list(stacked_axes)} of the weight. Leave out "
                "correction_rank for this weight"
            )
        errors = finite(np.asarray(error, np.float32).reshape(self._shape))
        count, ins, outs = self._shape
        if self.factors is None:
            shapes = (count, ins, self._rank), (count, self._rank, outs)
            self.factors = np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)
        # For each matrix, its index in `moments`. Matrices that share activations share an index.
        sizes = [n if axis in stacked_axes else 1 for axis, n in enumerate(self._lead)]
        stack_indices = np.broadcast_to(np.arange(len(moments)).reshape(sizes), self._lead)
        # A matrix is stored as [in, out] or [out, in]. `low_rank_factors` contracts the rows.
        is_transposed = self._axes.contracted == "out"
        for i, (index, stack) in enumerate(np.ndenumerate(stack_indices)):
            if stack in stacks:
                gram = self._gram_of_matrix(moments[int(stack)].gram, index)
                matrix = errors[i].T if is_transposed else errors[i]
                a, b = low_rank_factors(matrix, gram, self._rank)
                self.factors[0][i], self.factors[1][i] = (b.T, a.T) if is_transposed else (a, b)

    def _gram_of_matrix(self, gram: np.ndarray, index: Sequence[int]) -> np.ndarray:
        """Return the second moments of the activations that multiply one matrix.

        `index` is the index of the matrix in the leading axes. If products also contract leading
        axes, the second moments `gram` cover several matrices.
        """
        sizes = [self._weight_shape[axis] for axis in self._contracted]
        part = [index[i] if i < len(self._lead) else slice(None) for i in self._contracted]
        _, ins, outs = self._shape
        size = outs if self._axes.contracted == "out" else ins
        # Rows and columns of `gram` are the contracted axes, flattened.
        return gram.reshape(*sizes, *sizes)[(*part, *part)].reshape(size, size)

    def add_to(self, q: Any, dense: Any) -> Any:
        """Return the rounded weight `q` with its correction.

        Before the first `compute`, use the correction that is closest to the error `dense - q`.
        """
        if self.factors is None:
            return add_correction(q, dense, self._rank, self._axes)
        return self._axes.as_lora(q, *self.factors)
