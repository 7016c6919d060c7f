"""A weight that is rounded by what it meets: one matrix, or a stack of them."""

import dataclasses
import math
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
from ..formats.tiles import tile_shape
from ..models.correction import LowRankAxes, add_correction
from ..models.rules import Rule, get_method
from ..observation.statistics import ActivationStatistics
from .factors import awq_factors, smoothquant_factors
from .gptq import damped, gptq
from .low_rank import Correction
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
        self._stacks, self._met = len(stacked), len(stacked) + len(contracted)

    def of(self, array: Any) -> np.ndarray:
        """Returns the matrices of an array."""
        return np.asarray(array).transpose(self._order).reshape(self.shape)

    def together(self, matrices: np.ndarray) -> np.ndarray:
        """Returns the array of matrices."""
        return matrices.reshape(self._sizes).transpose(np.argsort(self._order))

    def channels(self, of_channels: np.ndarray) -> np.ndarray:
        """Returns what channels have, `[S, K]`, in the rank of the array."""
        free = len(self._order) - self._met
        shape = [*self._sizes[: self._met], *[1] * free]
        return of_channels.reshape(shape).transpose(np.argsort(self._order))

    def grams_in(self, basis: InBasis, grams: np.ndarray) -> np.ndarray:
        """Returns second moments of activations as they are when taken into a basis, `[S, K, K]`.

        **Arguments:**

        - `basis`: of an array of this shape.
        """
        stacked, sizes = self._sizes[: self._stacks], self._sizes[self._stacks : self._met]
        moments = jnp.asarray(grams.reshape(*stacked, *sizes, *sizes))
        for first in (self._stacks, self._met):
            places = dict(zip(self._order, range(self._stacks), strict=False))
            contracted = self._order[self._stacks : self._met]
            places |= {axis: first + i for i, axis in enumerate(contracted)}
            moments = basis.into_basis(moments, places)
        return np.asarray(moments, float).reshape(grams.shape)


class RoundedWeight:
    """A weight that is being rounded, as a rule has it.

    **Arguments:**

    - `dense`: of two axes and more.
    - `rule`: with a format, and the axes that are contracted.
    - `axes`: of its correction of low rank; None where the rule asks for none.

    `values` is what it is worth so far: as it was, where it has met nothing yet.
    """

    def __init__(self, dense: Any, rule: Rule, axes: LowRankAxes | None = None):
        self._dense, self._contracting, self._rule = dense, rule.contracting(dense.ndim), rule
        self._target = dense  # that is rounded: of matrices that make up for others, another one
        self._stored_by = dataclasses.replace(with_least_error(rule), rotate=False)
        self._nearest = rule.quantize(dense)
        self._rounded = self._quantized(rule.in_basis(dense))
        self._method = "nearest"
        rank = rule.correction_rank
        self._low_rank = None if rank is None or axes is None else (rank, axes)
        self._correction: Correction | None = None  # of the activations met, once there are any
        self._factors = np.ones((), np.float32)  # of channels, `[S, K]`
        self._codes: dict[int, np.ndarray] = {}  # that make up for others, of each matrix
        self._lost = np.zeros(3)  # by rounding to nearest, as rounded, and all there is
        self._stacked_axes: tuple[int, ...] = ()
        self._done: set[int] = set()  # the matrices that are rounded
        self.values = dense

    def round(
        self,
        statistics: ActivationStatistics,
        *,
        method: str,
        damping: float,
        propagation: float = 0,
        stacks: Sequence[int] | None = None,
    ) -> None:
        """Rounds the weight, or some of its matrices.

        **Arguments:**

        - `statistics`: of its activations; without second moments nothing is known.
        - `method`: how, of `METHODS`.
        - `damping`: of second moments.
        - `propagation`: by how much it makes up for what activations have lost.
        - `stacks`: the numbers of the matrices; None is all.
        """
        if statistics.gram is None or not self._dense.size:
            self.values = self.nearest()  # as the kernel of a convolution
            return
        self._stacked_axes = statistics.stacked_axes
        matrices = self._matrices()
        moments = moments_of(statistics, matrices)
        stacks = range(len(moments)) if stacks is None else stacks
        if propagation and statistics.cross is not None:
            self._aim(matrices, statistics.cross, moments, stacks, damping, propagation)
        target, of = finite(matrices.of(self._target)), get_method(method)
        if of.factors is not None:
            factors = self._found_factors(of.factors, statistics, matrices, moments)
            self._factors = np.broadcast_to(self._factors, factors.shape).copy()
            self._factors[stacks] = factors[stacks]
            self._rounded = self._quantized(self._scaled(matrices))
        if of.compensates:
            self._make_up(matrices, moments, stacks, damping)
        self._method = method
        self._correct(moments, stacks)
        self._done.update(stacks)
        self._take_values(matrices)
        rounded, nearest = matrices.of(self.values), matrices.of(_dense(self._nearest))
        for i in stacks:
            losses = (moments[i].loss(target[i], finite(x[i])).sum() for x in (nearest, rounded))
            self._lost += [*losses, moments[i].power(target[i]).sum()]

    def nearest(self) -> jax.Array:
        """Returns what it is worth with scales of the least error, each value to the nearest."""
        return _dense(self._corrected(self._rounded))

    def state(self) -> dict[str, np.ndarray]:
        """Returns what was found so far, as arrays, by names, of which another is `restore`d."""
        state = {
            "stacked_axes": np.array(self._stacked_axes, int),
            "done": np.array(sorted(self._done), int),
            "lost": self._lost,
            "method": np.array(self._method),
            "factors": self._factors,
            "packed": np.frombuffer(np.asarray(_stored(self._rounded).packed).tobytes(), np.uint8),
        }
        if self._target is not self._dense:
            state["target"] = np.asarray(self._target)
        found = None if self._correction is None else self._correction.factors
        return state if found is None else state | {"a": found[0], "b": found[1]}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes over the `state` of a weight of the same values, rule and axes."""
        self._stacked_axes = tuple(state["stacked_axes"].tolist())
        self._done, self._lost = set(state["done"].tolist()), state["lost"]
        if not self._done:
            self.values = self.nearest()
            return
        self._method, self._factors = str(state["method"]), state["factors"]
        matrices = self._matrices()
        if "target" in state:
            self._take_target(jnp.asarray(state["target"]))
        if self._factors.ndim:
            self._rounded = self._quantized(self._scaled(matrices))
        packed = _stored(self._rounded).packed
        self._pack(np.frombuffer(state["packed"].tobytes(), packed.dtype).reshape(packed.shape))
        codes = matrices.of(_stored(self._rounded).codes())
        self._codes = {i: codes[i] for i in self._done if get_method(self._method).compensates}
        if "a" in state:
            self._correction = self._no_correction()
            self._correction.factors = state["a"], state["b"]
        self._take_values(matrices)

    def result(self, path: str) -> tuple[Any, WeightLoss | None]:
        """Returns the weight as rounded, or to nearest if that loses no more; and what it lost.

        Nothing is known of the latter where no activations were met, or zeros. What SmoothQuant
        gains is in activations, so that what weights lose is no reason to leave it; and a
        correction is of the codes that it was found for.
        """
        before, after, power = self._lost
        q, method = self._rounded, self._method
        if not power:
            return self._corrected(q), None
        keeps = self._correction is not None or get_method(method).factors == "smoothquant"
        if not keeps and not after < _WORTH * before:
            q, method, after = self._nearest, "nearest", before
        share = lambda loss: float(np.sqrt(loss / power))
        qtype, found = _stored(q).qtype, self._corrected(q)
        rank = found.rank if isinstance(found, LoraArray) else None
        return found, WeightLoss(path, q.shape, qtype, share(before), share(after), method, rank)

    def _matrices(self) -> MatrixStack:
        return MatrixStack(self._dense.shape, self._contracting, self._stacked_axes)

    def _take_values(self, matrices: MatrixStack) -> None:
        """Takes the values of the matrices that are rounded."""
        rounded, values = matrices.of(self.nearest()), matrices.of(self._dense).copy()
        done = sorted(self._done)
        values[done] = rounded[done]
        self.values = jnp.asarray(matrices.together(values))

    def _aim(
        self,
        matrices: MatrixStack,
        crosses: Any,
        moments: Sequence[Moments],
        stacks: Sequence[int],
        damping: float,
        share: float,
    ) -> None:
        """Has some matrices be those that make up for what activations lost, by least squares.

        **Arguments:**

        - `crosses`: means of products of activations and what they are in the dense model,
          `[S, K, K]` or of more axes.
        - `share`: of what was lost.
        """
        target = matrices.of(self._target).copy()
        for i, cross in enumerate(np.reshape(crosses, (len(moments), *[len(target[0])] * 2))):
            gram = moments[i].gram
            if i in stacks and gram.any():
                lost = share * (cross - gram) @ finite(target[i])
                target[i] += np.linalg.solve(damped(gram, damping), lost).astype(target.dtype)
        self._take_target(jnp.asarray(matrices.together(target)))

    def _take_target(self, target: Any) -> None:
        self._target = target
        self._rounded = self._quantized(self._rule.in_basis(target))

    def _scaled(self, matrices: MatrixStack) -> Scaled:
        """The weight, dense, with its factors."""
        basis = Scaled(self._target, jnp.asarray(matrices.channels(1 / self._factors)))
        return basis.with_array(basis.stored(self._target))

    def _pack(self, packed: Any) -> None:
        """Takes codes, packed, of the scales that there are."""
        q = _stored(self._rounded).replace(packed=jnp.asarray(packed))
        in_basis = self._rounded
        self._rounded = in_basis.with_array(q) if isinstance(in_basis, InBasis) else q

    def _no_correction(self) -> Correction:
        assert self._low_rank is not None
        return Correction(self._dense.shape, *self._low_rank, self._contracting)

    def _correct(self, moments: Sequence[Moments], stacks: Sequence[int]) -> None:
        """Finds the correction of some matrices, as they are rounded."""
        if self._low_rank is None:
            return
        if self._correction is None:
            self._correction = self._no_correction()
        lost = self._target - _dense(self._rounded)
        self._correction.find(lost, moments, self._stacked_axes, stacks)

    def _corrected(self, q: Any) -> Any:
        """A rounded weight with its correction, which is that of least squares without moments."""
        if self._low_rank is None:
            return q
        if self._correction is None:
            return add_correction(q, self._dense, *self._low_rank)
        return self._correction.held(q)

    def _quantized(self, in_basis: Any) -> Any:
        """A QArray, or one in the basis that a dense array is in."""
        q = self._stored_by.quantize(_stored(in_basis))
        return in_basis.with_array(q) if isinstance(in_basis, InBasis) else q

    def _found_factors(
        self,
        kind: str,
        statistics: ActivationStatistics,
        matrices: MatrixStack,
        moments: Sequence[Moments],
    ) -> np.ndarray:
        dense = finite(matrices.of(self._target))
        if kind == "smoothquant":
            return smoothquant_factors(dense, statistics.of_stacks(statistics.absmax))
        plain = dataclasses.replace(self._stored_by, calibration_method=None)
        rounded = lambda w: matrices.of(_dense(plain.quantize(jnp.asarray(matrices.together(w)))))
        return awq_factors(dense, moments, statistics.of_stacks(statistics.absmean), rounded)

    def _make_up(
        self,
        matrices: MatrixStack,
        moments: Sequence[Moments],
        stacks: Sequence[int],
        damping: float,
    ) -> None:
        """Finds codes, of the scales that there are, of which some matrices lose less."""
        basis, q = self._rounded, _stored(self._rounded)
        scale = matrices.of(_of_entries(q.scales(), q.shape))
        zero = q.zero_points()
        zero = None if zero is None else matrices.of(_of_entries(zero, q.shape))
        dense, grams = self._target, np.stack([moment.gram for moment in moments])
        if isinstance(basis, InBasis):
            dense = basis.stored(dense)
            grams = matrices.grams_in(basis, grams)
        dense = matrices.of(dense)
        for i in stacks:
            z = None if zero is None else zero[i]
            moment = Moments(grams[i])
            self._codes[i] = gptq(dense[i], moment, scale[i], z, q.qtype, damping=damping)
        codes = matrices.of(q.codes()).copy()
        for i, of_matrix in self._codes.items():
            codes[i] = of_matrix
        self._pack(pack_codes(jnp.asarray(matrices.together(codes)), q.format)[0])


def _stored(x: Any) -> Any:
    return x.array if isinstance(x, InBasis) else x


def _dense(x: Any) -> jax.Array:
    return materialise_one(x)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Has the path of a weight in the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_least_error(rule: Rule) -> Rule:
    """Returns a rule with the scales of the least error, unless it or its format says otherwise."""
    assert rule.qtype is not None
    takes_all = get_format(rule.qtype).calibration in ("absmax", "minmax")
    if rule.calibration_method is not None or not takes_all:
        return rule
    return dataclasses.replace(rule, calibration_method=SCALES)


def moments_of(statistics: ActivationStatistics, matrices: MatrixStack) -> list[Moments]:
    """Returns those of each matrix; zeros for one that has met nothing, as an expert may."""
    count, size, _ = matrices.shape
    grams = np.reshape(statistics.gram, (count, size, size))
    met = statistics.of_stacks(statistics.count > 0).max(1)
    return [Moments(gram if m else np.zeros_like(gram)) for gram, m in zip(grams, met, strict=True)]


def _of_entries(part: Any, shape: Sequence[int]) -> np.ndarray:
    """What tiles have, for each entry of an array."""
    part = np.asarray(part)
    for axis, size in enumerate(tile_shape(tuple(shape), part.shape)):
        part = np.repeat(part, size, axis)
    return part


def finite(x: np.ndarray) -> np.ndarray:
    """Returns an array without what is no number, which spoils its own tile alone."""
    return np.nan_to_num(x.astype(np.float32), nan=0, posinf=0, neginf=0)
