"""`RoundedWeight`, a weight that is rounded according to its activations."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.value import materialise_one
from ...types.basis import InBasis, Scaled
from ...types.lora import LoraArray
from ..arrays.qarray import pack_codes
from ..formats import get_format
from ..formats.tiles import over_tiles
from ..models.correction import LowRankAxes
from ..models.rules import Rule, get_method
from ..observation.statistics import ActivationStatistics
from .gptq import damp, gptq
from .matrices import Correction, MatrixStack, finite
from .moments import Moments, awq_factors, smoothquant_factors
from .report import WeightLoss

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
        - `stacks`: the indices of the matrices. None means all.
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
        old = _unwrap(self._rounded).packed
        packed = np.frombuffer(state["packed"].tobytes(), old.dtype)
        self._set_packed(packed.reshape(old.shape))
        if get_method(self._method).compensates:
            codes = self._matrices.split(_unwrap(self._rounded).codes())
            self._gptq_codes = {i: codes[i] for i in self._done}
        if "a" in state and self._correction is not None:
            self._correction.factors = state["a"], state["b"]
        self._update_values()

    def result(self, path: str) -> tuple[Any, WeightLoss | None]:
        """Return the rounded weight and its loss. The loss is None if all activations are 0.

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
        """Set `values` to the dense weight, with the rounded matrices in place."""
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
        """Replace the array to round by `target`, and quantize `target` to the nearest codes."""
        self._target = target
        self._rounded = self._quantize(self._rule.in_basis(target))

    def _quantize(self, array: Any) -> Any:
        """Quantize a dense array. If `array` is an `InBasis`, quantize the array that it stores."""
        q = self._rule_in_basis.quantize(_unwrap(array))
        return array.with_array(q) if isinstance(array, InBasis) else q

    def _round_to_nearest(self, w: np.ndarray) -> np.ndarray:
        """Quantize and dequantize matrices with the default scales of the format."""
        rule, matrices = self._rule_in_basis, self._matrices
        rule = dataclasses.replace(rule, calibration_method=None)
        return matrices.split(materialise_one(rule.quantize(jnp.asarray(matrices.join(w)))))

    def _scale_channels(self) -> Scaled:
        """Return the array to round as a `Scaled`: stored after multiplying by channel factors."""
        divisors = jnp.asarray(self._matrices.join_channels(1 / self._factors))
        unscaled = Scaled(self._target, divisors)
        return unscaled.with_array(unscaled.stored(self._target))

    def _choose_codes(
        self, moments: Sequence[Moments], stacks: Sequence[int], damping: float
    ) -> None:
        """Choose the codes of some matrices by GPTQ, with the current scales."""
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
        self._set_packed(pack_codes(jnp.asarray(matrices.join(all_codes)), q.format)[0])

    def _set_packed(self, packed: Any) -> None:
        """Replace the packed codes of the rounded weight."""
        q = _unwrap(self._rounded).replace(packed=jnp.asarray(packed))
        rounded = self._rounded
        self._rounded = rounded.with_array(q) if isinstance(rounded, InBasis) else q

    def _with_correction(self, q: Any) -> Any:
        return q if self._correction is None else self._correction.add_to(q, self._dense)


@contextmanager
def name_errors(path: str) -> Iterator[None]:
    """Prefix the message of a `ValueError` with the path of a weight."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _with_least_error(rule: Rule) -> Rule:
    """Return `rule` with the calibration method `SCALES`, which minimizes the error of the scales.

    A method that `rule` sets stays, and so does a special default method of the format.
    """
    assert rule.qtype is not None
    has_usual_default = get_format(rule.qtype).calibration in ("absmax", "minmax")
    if rule.calibration_method is not None or not has_usual_default:
        return rule
    return dataclasses.replace(rule, calibration_method=SCALES)


def _unwrap(x: Any) -> Any:
    """Return the array that `x` stores if it is an `InBasis`, or else `x`."""
    return x.array if isinstance(x, InBasis) else x
