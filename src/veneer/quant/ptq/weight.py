"""`RoundedWeight`, a weight that is rounded according to its activations.

The weight is a stack of matrices `[S, K, N]`, such as the layers of a model. Each matrix is rounded
with its own activations, and can have a low-rank correction.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.value import materialise_one
from ...types.basis import InBasis, Scaled
from ...types.lora import LoraArray
from ..arrays import QArray
from ..formats import get_format
from ..formats.tiles import over_tiles
from ..models.correction import LowRankAxes, add_correction
from ..models.rules import Rule, get_method
from ..statistics import ActivationStatistics
from .gptq import Moments, awq_factors, damp, gptq, low_rank_factors, smoothquant_factors
from .report import WeightLoss


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
        """Return an array of shape `shape` as matrices `[S, K, N]`."""
        return np.asarray(array).transpose(self._order).reshape(self.shape)

    def join(self, matrices: np.ndarray) -> np.ndarray:
        """Return matrices `[S, K, N]` as an array: the inverse of `split`."""
        stacked_sizes, contracted_sizes, free_sizes = self._sizes
        array = matrices.reshape(*stacked_sizes, *contracted_sizes, *free_sizes)
        return array.transpose(np.argsort(self._order))

    def join_channels(self, values: np.ndarray) -> np.ndarray:
        """Return values per channel, `[S, K]`, as an array that broadcasts against the weight.

        A channel is an index of the contracted axes.
        """
        stacked_sizes, contracted_sizes, free_sizes = self._sizes
        sizes = [*stacked_sizes, *contracted_sizes, *(1 for _ in free_sizes)]
        return values.reshape(sizes).transpose(np.argsort(self._order))

    def grams_in_basis(self, weight: InBasis, grams: np.ndarray) -> np.ndarray:
        """Transform second moments of activations, `[S, K, K]`, into the basis of `weight`.

        `weight` is stored in another basis along its contracted axes, for example rotated. GPTQ
        rounds the stored values, so it needs the second moments in that basis.
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
        """Compute the corrections of some matrices, and store them in the attribute `factors`.

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
        """Return the part of `gram` for one matrix of the weight, `[K, K]`.

        `gram` has the second moments of activations. If products also contract leading axes, it
        covers several matrices. `index` is the index of the matrix in the leading axes.
        """
        sizes = [self._weight_shape[axis] for axis in self._contracted]
        part = [index[i] if i < len(self._lead) else slice(None) for i in self._contracted]
        _, ins, outs = self._shape
        size = outs if self._axes.contracted == "out" else ins
        # Rows and columns of `gram` are the contracted axes, flattened.
        return gram.reshape(*sizes, *sizes)[(*part, *part)].reshape(size, size)

    def add_to(self, q: Any, dense: Any) -> Any:
        """Return the rounded weight `q` with its correction, as a `LoraArray`.

        If `compute` was never called, use the correction that is closest to the error `dense - q`.
        """
        if self.factors is None:
            return add_correction(q, dense, self._rank, self._axes)
        return self._axes.as_lora(q, *self.factors)


#: The calibration method for formats whose default method covers all values of a tile. It chooses
#: the scale with the least error to the power 2.4, as in the code of GPTQ.
SCALES = "mse,40,2.4"

#: A method is used only if its loss is below this fraction of the loss of rounding to nearest.
_WORTHWHILE = 0.999


class RoundedWeight:
    """A weight that is rounded by a rule, all at once or matrix by matrix.

    The weight is a stack of S matrices, `[S, K, N]`, such as the layers of a model. Products
    contract K. The attribute `values` is a dense array: the rounded values of the matrices that
    `round` has rounded, and the original values of the others.

    **Arguments:**

    - `dense`: the weight, of rank 2 or more.
    - `rule`: a rule with a format, whose `tile_axis` holds the contracted axes.
    - `axes`: the input and output axes for a low-rank correction. None without a correction.
    """

    def __init__(self, dense: Any, rule: Rule, axes: LowRankAxes | None = None):
        self._dense, self._contracting, self._rule = dense, rule.contracting(dense.ndim), rule
        # The array to round. It differs from `dense` if the weight compensates earlier errors.
        self._target = dense
        self._nearest = rule.quantize(dense)  # as in `quantize_tree`
        self._rule_in_basis = dataclasses.replace(_with_least_error(rule), rotate=False)
        self._rounded = self._quantize(rule.in_basis(dense))  # the result, before the correction
        self._method = "nearest"
        self._correction: Correction | None = None
        if rule.correction_rank is not None and axes is not None:
            args = dense.shape, rule.correction_rank, axes, self._contracting
            self._correction = Correction(*args)
        self._factors = np.ones((), np.float32)  # channel factors [S, K] of AWQ or SmoothQuant
        self._gptq_codes: dict[int, np.ndarray] = {}  # by the index of the matrix
        # The losses of `_nearest`, of the result, and of a weight of zeros.
        self._losses = np.zeros(3)
        self._stacked_axes: tuple[int, ...] = ()  # the axes that are merged into S
        self._done: set[int] = set()  # the indices of the rounded matrices
        self.values = dense

    @property
    def _matrices(self) -> MatrixStack:
        return MatrixStack(self._dense.shape, self._contracting, self._stacked_axes)

    def round(
        self,
        statistics: ActivationStatistics,
        *,
        method: str,
        damping: float,
        propagation: float = 0,
        stacks: Sequence[int] | None = None,
    ) -> None:
        """Round the weight, or some of its matrices.

        **Arguments:**

        - `statistics`: the statistics of the activations. If they have no second moments, as for
          the kernel of a convolution, round the weight to nearest.
        - `method`: a name in `ROUNDING_METHODS`.
        - `damping`, `propagation`: as in `calibrate`.
        - `stacks`: the indices of the matrices to round, from 0 to S - 1. None means all.
        """
        if statistics.gram is None or not self._dense.size:
            self.values = self.rounded_values()
            return
        self._stacked_axes = statistics.stacked_axes
        split = self._matrices.split
        moments = self._matrices.moments(statistics)
        stacks = range(len(moments)) if stacks is None else stacks
        if propagation and statistics.cross is not None:
            self._propagate_errors(statistics.cross, moments, stacks, damping, propagation)
        target = finite(split(self._target))
        # Scale the channels.
        factors_method = get_method(method).factors
        if factors_method is not None:
            if factors_method == "smoothquant":
                factors = smoothquant_factors(target, statistics.of_stacks(statistics.absmax))
            else:
                magnitudes = statistics.of_stacks(statistics.absmean)
                factors = awq_factors(target, moments, magnitudes, self._round_to_nearest)
            self._factors = np.broadcast_to(self._factors, factors.shape).copy()
            self._factors[stacks] = factors[stacks]
            self._rounded = self._quantize(self._scale_channels())
        # Choose the codes, and then the correction of the remaining error.
        if get_method(method).compensates:
            self._choose_codes(moments, stacks, damping)
        self._method = method
        if self._correction is not None:
            error = self._target - materialise_one(self._rounded)
            self._correction.compute(error, moments, self._stacked_axes, stacks)
        self._done.update(stacks)
        self._update_values()
        # Add the losses of these matrices.
        rounded, nearest = split(self.values), split(materialise_one(self._nearest))
        for i in stacks:
            losses = (moments[i].loss(target[i], finite(x[i])).sum() for x in (nearest, rounded))
            self._losses += [*losses, moments[i].power(target[i]).sum()]

    def rounded_values(self) -> jax.Array:
        """Return the dense array of the rounded weight, with its correction.

        Matrices that `round` has not rounded yet have the nearest codes, with scales of least
        error.
        """
        return materialise_one(self._with_correction(self._rounded))

    def state(self) -> dict[str, np.ndarray]:
        """Return the rounded matrices and their losses as named arrays, for `restore`."""
        state = {
            "stacked_axes": np.array(self._stacked_axes, int),
            "done": np.array(sorted(self._done), int),
            "lost": self._losses,
            "method": np.array(self._method),
            "factors": self._factors,
            "packed": np.frombuffer(np.asarray(_unwrap(self._rounded).packed).tobytes(), np.uint8),
        }
        if self._target is not self._dense:
            state["target"] = np.asarray(self._target)
        if self._correction is not None and self._correction.factors is not None:
            state["a"], state["b"] = self._correction.factors
        return state

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state`, which the method `state` returned for the same weight and rule."""
        self._stacked_axes = tuple(state["stacked_axes"].tolist())
        self._done, self._losses = set(state["done"].tolist()), state["lost"]
        if not self._done:
            self.values = self.rounded_values()
            return
        self._method, self._factors = str(state["method"]), state["factors"]
        if "target" in state:
            self._set_target(jnp.asarray(state["target"]))
        if self._factors.ndim:
            self._rounded = self._quantize(self._scale_channels())
        q = _unwrap(self._rounded)
        packed = np.frombuffer(state["packed"].tobytes(), q.packed.dtype).reshape(q.packed.shape)
        self._set_quantized(q.replace(packed=jnp.asarray(packed)))
        if get_method(self._method).compensates:
            codes = self._matrices.split(_unwrap(self._rounded).codes())
            self._gptq_codes = {i: codes[i] for i in self._done}
        if "a" in state and self._correction is not None:
            self._correction.factors = state["a"], state["b"]
        self._update_values()

    def result(self, path: str) -> tuple[Any, WeightLoss | None]:
        """Return a pair: the rounded weight, and its errors, or None if all activations are 0.

        `path` is the path of the weight, which the `WeightLoss` names.

        If the method did not reduce the loss, return the weight rounded to nearest instead. There
        are two exceptions. SmoothQuant also improves the activations, so its weight is always used.
        A correction is computed for the codes of the method, so these are always used.
        """
        nearest_loss, loss, loss_of_zeros = self._losses
        q, method = self._rounded, self._method
        if not loss_of_zeros:
            return self._with_correction(q), None
        has_correction = self._correction is not None and self._correction.factors is not None
        is_always_used = has_correction or get_method(method).factors == "smoothquant"
        if not is_always_used and not loss < _WORTHWHILE * nearest_loss:
            q, method, loss = self._nearest, "nearest", nearest_loss
        before, after = (float(np.sqrt(x / loss_of_zeros)) for x in (nearest_loss, loss))
        qtype, result = _unwrap(q).qtype, self._with_correction(q)
        rank = result.rank if isinstance(result, LoraArray) else None
        return result, WeightLoss(path, q.shape, qtype, before, after, method, rank)

    def _update_values(self) -> None:
        """Set the attribute `values` to the dense weight, with the rounded matrices in place."""
        matrices, done = self._matrices, sorted(self._done)
        values = matrices.split(self._dense).copy()
        values[done] = matrices.split(self.rounded_values())[done]
        self.values = jnp.asarray(matrices.join(values))

    def _propagate_errors(
        self,
        crosses: Any,
        moments: Sequence[Moments],
        stacks: Sequence[int],
        damping: float,
        propagation: float,
    ) -> None:
        """Change the matrices to round, so that they compensate the errors of their activations.

        Solve `x @ (w + change) = y @ w` for the change by least squares, and multiply the change by
        `propagation` (QEP, arXiv 2504.09629). `x` and `y` are the activations in the quantized and
        in the dense model. `crosses` holds the mean of `x.T @ y`, `[K, K]`, for each matrix.
        """
        targets = self._matrices.split(self._target).copy()
        _, size, _ = targets.shape
        for i, cross in enumerate(np.reshape(crosses, (-1, size, size))):
            gram = moments[i].gram
            if i in stacks and gram.any():
                right_side = propagation * (cross - gram) @ finite(targets[i])
                change = np.linalg.solve(damp(gram, damping), right_side)
                targets[i] += change.astype(targets.dtype)
        self._set_target(jnp.asarray(self._matrices.join(targets)))

    def _set_target(self, target: Any) -> None:
        """Set the array to round to `target`, a dense array, and round it to the nearest codes.

        The array to round differs from the weight if it compensates errors of earlier weights.
        """
        self._target = target
        self._rounded = self._quantize(self._rule.in_basis(target))

    def _quantize(self, array: Any) -> Any:
        """Quantize a dense array. If `array` is an `InBasis`, quantize the array that it stores."""
        q = self._rule_in_basis.quantize(_unwrap(array))
        return array.with_array(q) if isinstance(array, InBasis) else q

    def _round_to_nearest(self, w: np.ndarray) -> np.ndarray:
        """Quantize and dequantize matrices `[S, K, N]` with the default scales of the format."""
        rule, matrices = self._rule_in_basis, self._matrices
        rule = dataclasses.replace(rule, calibration_method=None)
        return matrices.split(materialise_one(rule.quantize(jnp.asarray(matrices.join(w)))))

    def _scale_channels(self) -> Scaled:
        """Return the array to round as a `Scaled`.

        It stores the array times the factors of AWQ or SmoothQuant, one per channel.
        """
        divisors = jnp.asarray(self._matrices.join_channels(1 / self._factors))
        unscaled = Scaled(self._target, divisors)
        return unscaled.with_array(unscaled.stored(self._target))

    def _choose_codes(
        self, moments: Sequence[Moments], stacks: Sequence[int], damping: float
    ) -> None:
        """Choose the codes of some matrices by GPTQ, with the current scales.

        `moments` has the second moments of all S matrices, and `stacks` the indices to choose.
        """
        q, matrices = _unwrap(self._rounded), self._matrices
        dense, grams = self._target, np.stack([moment.gram for moment in moments])
        if isinstance(self._rounded, InBasis):
            dense = self._rounded.stored(dense)
            grams = matrices.grams_in_basis(self._rounded, grams)
        dense = matrices.split(dense)
        # GPTQ takes the scale and zero point of each value instead of each tile.
        repeat = lambda x: matrices.split(over_tiles(jnp.add, jnp.zeros(q.shape, x.dtype), x))
        scale, zero_point = repeat(q.scales()), q.zero_points()
        zero_point = None if zero_point is None else repeat(zero_point)
        for i in stacks:
            zero = None if zero_point is None else zero_point[i]
            codes = gptq(dense[i], Moments(grams[i]), scale[i], zero, q.qtype, damping=damping)
            self._gptq_codes[i] = codes
        # Insert the codes of earlier calls, too. They are lost if `round` replaced `_rounded`.
        all_codes = matrices.split(q.codes()).copy()
        for i, codes in self._gptq_codes.items():
            all_codes[i] = codes
        self._set_quantized(q.with_codes(jnp.asarray(matrices.join(all_codes))))

    def _set_quantized(self, q: QArray) -> None:
        """Replace the quantized array in the rounded weight by `q`.

        If the rounded weight is stored in another basis, the basis stays the same.
        """
        rounded = self._rounded
        self._rounded = rounded.with_array(q) if isinstance(rounded, InBasis) else q

    def _with_correction(self, q: Any) -> Any:
        return q if self._correction is None else self._correction.add_to(q, self._dense)


@contextmanager
def name_errors(path: str) -> Iterator[None]:
    """Prefix the message of a `ValueError` in a `with` block with the path of a weight."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _with_least_error(rule: Rule) -> Rule:
    """Return `rule` with the calibration method `SCALES`, which minimizes the rounding error.

    Return `rule` unchanged if it sets a calibration method, or if the default method of the format
    is neither "absmax" nor "minmax".
    """
    assert rule.qtype is not None
    has_usual_default = get_format(rule.qtype).calibration in ("absmax", "minmax")
    if rule.calibration_method is not None or not has_usual_default:
        return rule
    return dataclasses.replace(rule, calibration_method=SCALES)


def _unwrap(x: Any) -> Any:
    """Return the stored array of an `InBasis`, such as a rotated weight, and `x` otherwise."""
    return x.array if isinstance(x, InBasis) else x
