"""A weight that is rounded by what it meets: one matrix, or a stack of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import get_format
from ..formats.tiles import tile_shape
from ..models.rules import Rule
from ..observation.statistics import ActivationStatistics
from ..qarray import QArray, pack_codes
from .gptq import gptq
from .moments import Moments
from .report import WeightLoss

#: How scales are found where no rule says it and the format takes the whole range of a tile: by the
#: least error to the power 2.4, as in GPTQ's own code.
SCALES = "mse,40,2.4"

#: What rounding to nearest loses times this is more than a method may lose.
_WORTH = 0.999


class MatrixStack:
    """An array as matrices `[S, K, N]`, of which a product contracts K.

    **Arguments:**

    - `shape`, `contracting`: of the array, and its axes that are contracted, from the end.
    - `stacked`: the axes along which there is one matrix beside the other, from the front.
    """

    def __init__(self, shape: Sequence[int], contracting: Sequence[int], stacked: Sequence[int]):
        contracted = sorted(axis % len(shape) for axis in contracting)
        free = [axis for axis in range(len(shape)) if axis not in (*stacked, *contracted)]
        self._order = [*stacked, *contracted, *free]
        self._sizes = [shape[axis] for axis in self._order]
        count = lambda axes: math.prod(shape[axis] for axis in axes)
        self.shape = count(stacked), count(contracted), count(free)

    def of(self, array: Any) -> np.ndarray:
        """Returns the matrices of an array."""
        return np.asarray(array).transpose(self._order).reshape(self.shape)

    def together(self, matrices: np.ndarray) -> np.ndarray:
        """Returns the array of matrices."""
        return matrices.reshape(self._sizes).transpose(np.argsort(self._order))


class RoundedWeight:
    """A weight that is being rounded, as a rule has it.

    **Arguments:**

    - `dense`: of two axes and more.
    - `rule`: with a format, and the axes that are contracted.

    `values` is what it is worth so far: as it was, where it has met nothing yet.
    """

    def __init__(self, dense: Any, rule: Rule):
        self._dense, self._contracting = dense, rule.contracting(dense.ndim)
        self._nearest = rule.quantize(dense)
        self._rounded: QArray = with_least_error(rule).quantize(dense)
        self._method = "nearest"
        self._lost = np.zeros(3)  # by rounding to nearest, as rounded, and all there is
        self.values = dense

    def round(
        self,
        statistics: ActivationStatistics,
        *,
        by_gptq: bool,
        damping: float,
        stacks: Sequence[int] | None = None,
    ) -> None:
        """Rounds the weight, or some of its matrices.

        **Arguments:**

        - `statistics`: of its activations; without second moments nothing is known.
        - `by_gptq`: whether to look for other codes than the nearest.
        - `damping`: of these.
        - `stacks`: the numbers of the matrices; None is all.
        """
        if statistics.gram is None or not self._dense.size:
            self.values = self.nearest()  # as the kernel of a convolution
            return
        matrices = MatrixStack(self._dense.shape, self._contracting, statistics.stacked_axes)
        moments = _moments(statistics, matrices)
        stacks = range(len(moments)) if stacks is None else stacks
        dense = matrices.of(self._dense)
        if by_gptq:
            self._rounded = _with_other_codes(
                self._rounded, dense, matrices, {i: moments[i] for i in stacks}, damping
            )
            self._method = "gptq"
        nearest, rounded = (matrices.of(q.dequantize()) for q in (self._nearest, self._rounded))
        values = matrices.of(self.values).copy()
        for i in stacks:
            w, values[i] = _finite(dense[i]), rounded[i]
            losses = (moments[i].loss(w, _finite(x[i])).sum() for x in (nearest, rounded))
            self._lost += [*losses, moments[i].power(w).sum()]
        self.values = jnp.asarray(matrices.together(values))

    def nearest(self) -> jax.Array:
        """Returns what it is worth with scales of the least error, each value to the nearest."""
        return self._rounded.dequantize()

    def result(self, path: str) -> tuple[QArray, WeightLoss | None]:
        """Returns the weight as rounded, or to nearest if that loses no more; and what it lost.

        Nothing is known of the latter where no activations were met, or zeros.
        """
        before, after, power = self._lost
        q, method = self._rounded, self._method
        if not power:
            return q, None
        if not after < _WORTH * before:
            q, method, after = self._nearest, "nearest", before
        share = lambda loss: float(np.sqrt(loss / power))
        return q, WeightLoss(path, q.shape, q.qtype, share(before), share(after), method)


def with_least_error(rule: Rule) -> Rule:
    """Returns a rule with the scales of the least error, unless it or its format says otherwise."""
    assert rule.qtype is not None
    takes_all = get_format(rule.qtype).calibration in ("absmax", "minmax")
    if rule.calibration_method is not None or not takes_all:
        return rule
    return dataclasses.replace(rule, calibration_method=SCALES)


def _moments(statistics: ActivationStatistics, matrices: MatrixStack) -> list[Moments]:
    """Those of each matrix; zeros for one that has met nothing, as an expert may."""
    count, size, _ = matrices.shape
    grams = np.reshape(statistics.gram, (count, size, size))
    met = statistics.of_stacks(statistics.count > 0).max(1)
    return [Moments(gram if m else np.zeros_like(gram)) for gram, m in zip(grams, met, strict=True)]


def _with_other_codes(
    q: QArray,
    dense: np.ndarray,
    matrices: MatrixStack,
    moments: dict[int, Moments],
    damping: float,
) -> QArray:
    """A quantised weight with codes of the same scales of which some matrices lose less."""
    scale = matrices.of(_of_entries(q.scales(), q.shape))
    zero = None if q.zero_point is None else matrices.of(_of_entries(q.zero_point, q.shape))
    codes = matrices.of(q.codes()).copy()
    for i, m in moments.items():
        z = None if zero is None else zero[i]
        codes[i] = gptq(dense[i], m, scale[i], z, q.qtype, damping=damping)
    packed, _ = pack_codes(jnp.asarray(matrices.together(codes)), q.format)
    return q.replace(packed=packed)


def _of_entries(part: Any, shape: Sequence[int]) -> np.ndarray:
    """What tiles have, for each entry of an array."""
    part = np.asarray(part)
    for axis, size in enumerate(tile_shape(tuple(shape), part.shape)):
        part = np.repeat(part, size, axis)
    return part


def _finite(x: np.ndarray) -> np.ndarray:
    """An array without what is no number, which spoils its own tile alone."""
    return np.nan_to_num(x.astype(np.float32), nan=0, posinf=0, neginf=0)
