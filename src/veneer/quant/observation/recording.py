"""Sums and ranges of the activations of one weight, while a model runs.

A `Recording` adds them up on the host, in NumPy arrays of float64. For a Box on the device, the
same `Totals` are JAX arrays, in float32 with int32 counts.
"""

import math
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..formats.tiles import Shape
from .statistics import ActivationStatistics


class Totals(NamedTuple):
    """Sums and ranges of activations, as NumPy or JAX arrays.

    Numbers of one kind share an array, because each array is an operand of every program that
    updates a Box. `Recording` explains positions and stacks.
    """

    counts: Any  # [positions], the number of values
    ends: Any  # [2, positions], the minimum and the maximum
    sums: Any  # [3, positions], of values, magnitudes and squares
    ranges: Any  # [3, 2, stacks]: of this batch, their sum over batches, their moving average
    batches: Any  # [stacks], the number of batches with activations
    gram: Any = None  # [stacks, K, K], sums of products of channels; on the host, see `grams`

    def end_batch(self, decay: float, xp: ModuleType = jnp) -> "Totals":
        """Add the ranges of a batch to their averages. `xp` is the module of the arrays."""
        ends, sums, averages = self.ranges
        used = ~(ends[0] > ends[1])  # an unused range is still (inf, -inf); one with NaN is used
        moved = xp.where(self.batches == 0, ends, decay * averages + (1 - decay) * ends)
        unused = xp.broadcast_to(xp.array([[np.inf], [-np.inf]], ends.dtype), ends.shape)
        sums = xp.where(used, sums + ends, sums)
        return self._replace(
            ranges=xp.stack([unused, sums, xp.where(used, moved, averages)]),
            batches=self.batches + used,
        )


class Recording:
    """Sums and ranges of the activations of one weight.

    Statistics are kept per *position*: an index of the contracted axes and of the leading axes (all
    before the last two), along which layers or experts may be stacked. A *stack* is an index of the
    leading axes alone. Its positions are the channels of one product, and share one range. If only
    index 0 of a leading axis gets activations, nothing is stacked along it, and `statistics`
    returns that index only.

    **Arguments:**

    - `shape`: the shape of the weight.
    - `contracting`: the axes contracted with activations, counted from the end.
    - `gram`: also add up products of channels.
    - `decay`: the weight of earlier batches in the exponential average of ranges.
    - `paired`: keep the operands of each batch, for `add_cross`.
    """

    def __init__(
        self,
        shape: Shape,
        contracting: Sequence[int],
        *,
        gram: bool,
        decay: float,
        paired: bool = False,
    ):
        ndim = len(shape)
        contracted = {axis + ndim for axis in contracting}
        self.stacked_axes = set(range(ndim - 2)) - contracted
        sizes_along = lambda axes: tuple(n if axis in axes else 1 for axis, n in enumerate(shape))
        self.shape = sizes_along(self.stacked_axes | contracted)
        self.ranges_shape, channels_shape = map(sizes_along, (self.stacked_axes, contracted))
        size, stacks = math.prod(self.shape), math.prod(self.ranges_shape)
        self.channels = math.prod(channels_shape)
        # The stack of each position, and its channel within the stack.
        self.stack, self.channel = (
            np.broadcast_to(np.arange(math.prod(part)).reshape(part), self.shape).ravel()
            for part in (self.ranges_shape, channels_shape)
        )
        unused = np.array([[np.inf], [-np.inf]])
        self.decay = decay
        self.totals = Totals(
            counts=np.zeros(size),
            ends=np.repeat(unused, size, 1),
            sums=np.zeros((3, size)),
            ranges=np.stack([np.repeat(unused, stacks, 1), *np.zeros((2, 2, stacks))]),
            batches=np.zeros(stacks),
        )
        # Sums of products of channels, by stack: of this model, and across two models.
        self.grams: dict[int, np.ndarray] | None = {} if gram else None
        self._crosses: dict[int, np.ndarray] | None = {}
        self.paired = paired
        self._operands: dict[bytes, list[tuple[np.ndarray, np.ndarray]]] = {}  # by positions
        self._other_axes: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()  # callbacks run on several threads

    @property
    def has_activations(self) -> bool:
        """Return whether any activations were recorded."""
        return bool(self.totals.counts.any())

    def positions(self) -> np.ndarray:
        """Return the index of each position, in the shape of the weight with free axes of 1."""
        return np.arange(len(self.stack), dtype=np.int32).reshape(self.shape)

    def note_other_axes(self, axes: Iterable[int]) -> None:
        """Note a product that contracts other axes, counted from the end."""
        self._other_axes.add(tuple(axes))

    def explain_missing(self) -> str:
        """Return why there may be no activations, and what to do."""
        if not self._other_axes:
            return "no product used it; pass batches that use it, or leave it out of the rules"
        axes = " and ".join(str(axes[0] if len(axes) == 1 else axes) for axes in self._other_axes)
        return f"products contract axis {axes}; set tile_axis of its rule to that"

    def add(self, rows: int, positions: Any, low: Any, high: Any, *sums: Any) -> None:
        """Add the reduced activations of one product.

        **Arguments:**

        - `rows`: the number of values per channel.
        - `positions`, `low`, `high`: the position, minimum and maximum per channel, `[batch,
          channels]`.
        - `sums`: the sums of values, magnitudes and squares, `[batch, channels]`. If Gram matrices
          are recorded, also the products of two channels, `[batch, channels, channels]`.
        """
        # XLA's reduction to a maximum may drop NaN.
        low, high = (np.where(np.isnan(sums[0]), np.nan, x).astype(float) for x in (low, high))
        at = positions.ravel()
        stack = self.stack[at]
        with self._lock, np.errstate(invalid="ignore"):  # static_range rejects NaN later
            np.add.at(self.totals.counts, at, rows)
            for ends, index in ((self.totals.ends, at), (self.totals.ranges[0], stack)):
                np.minimum.at(ends[0], index, low.ravel())
                np.maximum.at(ends[1], index, high.ravel())
            for total, part in zip(self.totals.sums, sums[:3], strict=True):
                np.add.at(total, at, part.ravel().astype(float))
            if self.grams is not None and len(sums) > 3:
                for at, product in zip(positions, sums[3], strict=True):
                    self._add_gram(self.grams, at, product)

    def keep_operand(self, positions: np.ndarray, x: np.ndarray) -> None:
        """Keep an operand, `[batch, rows, channels]`, until `add_cross` at the end of the batch."""
        with self._lock:
            self._operands.setdefault(positions.tobytes(), []).append((positions, x))

    def add_cross(self, other: "Recording") -> None:
        """Add `x.T @ y` of the operands of this batch, here and in the recording `other`.

        If a position has several operands in a batch, or the two recordings differ, it is unknown
        which operands belong together. Then nothing is recorded, in this batch and later.
        """
        mine, others = self._operands, other._operands
        self._operands, other._operands = {}, {}
        shapes = lambda kept: {key: [x.shape for _, x in pairs] for key, pairs in kept.items()}
        if shapes(mine) != shapes(others) or any(len(pairs) > 1 for pairs in mine.values()):
            self._crosses = None
        if self._crosses is None:
            return
        for key, [(positions, x)] in mine.items():
            [(_, y)] = others[key]
            for at, product in zip(positions, np.matmul(x.swapaxes(1, 2), y), strict=True):
                self._add_gram(self._crosses, at, product)

    def _add_gram(
        self, grams: dict[int, np.ndarray], positions: np.ndarray, product: np.ndarray
    ) -> None:
        stacks = self.stack[positions]
        for stack in np.unique(stacks).tolist():
            (members,) = np.nonzero(stacks == stack)
            at = self.channel[positions[members]]
            if stack not in grams:
                grams[stack] = np.zeros((self.channels, self.channels))
            if np.array_equal(at, np.arange(self.channels)) and len(members) == len(positions):
                grams[stack] += product
            else:
                part = product[np.ix_(members, members)].astype(float)
                np.add.at(grams[stack], np.ix_(at, at), part)

    def end_batch(self) -> None:
        """Add the ranges of the current batch to the averages."""
        with np.errstate(invalid="ignore"):
            self.totals = self.totals.end_batch(self.decay, np)

    def device_totals(self) -> Totals:
        """Return the totals of a new recording as JAX arrays, for a Box."""
        totals = Totals(*(None if x is None else jnp.asarray(x, jnp.float32) for x in self.totals))
        shape = len(self.totals.batches), self.channels, self.channels
        return totals._replace(
            counts=totals.counts.astype(jnp.int32),
            batches=totals.batches.astype(jnp.int32),
            gram=None if self.grams is None else jnp.zeros(shape, jnp.float32),
        )

    def set_totals(self, totals: Totals) -> None:
        """Take the totals from a Box."""
        *arrays, gram = totals
        self.totals = Totals(*(np.asarray(x, float) for x in arrays))
        if gram is not None:
            used = np.flatnonzero(self.totals.batches)
            self.grams = {int(i): np.asarray(gram[i], float) for i in used}

    def statistics(self) -> ActivationStatistics:
        """Return the statistics of everything recorded so far."""
        counts, (minimum, maximum), sums, ranges, batches, _ = self.totals
        counts = counts.reshape(self.shape)
        used = tuple(
            slice(None) if counts.take(range(1, n), axis).any() else slice(0, 1)
            for axis, n in enumerate(self.shape)
        )
        per_channel = lambda x: x.reshape(self.shape)[used]
        with np.errstate(invalid="ignore"):  # positions without activations have the mean NaN
            averages = {"mean": ranges[1] / batches, "exponential": ranges[2]}
            mean, absmean, mean_square = (per_channel(x.reshape(self.shape) / counts) for x in sums)
        lows, highs = (
            {
                name: np.where(batches, x[i], np.nan).reshape(self.ranges_shape)[used]
                for name, x in averages.items()
            }
            for i in range(2)
        )
        return ActivationStatistics(
            count=per_channel(counts),
            minimum=per_channel(minimum),
            maximum=per_channel(maximum),
            mean=mean,
            absmean=absmean,
            mean_square=mean_square,
            lows=lows,
            highs=highs,
            gram=self._mean_gram(self.grams, used) if self.grams else None,
            cross=self._mean_gram(self._crosses, used) if self._crosses else None,
        )

    def _mean_gram(self, grams: dict[int, np.ndarray], used: tuple[slice, ...]) -> np.ndarray:
        stacks = np.arange(len(self.totals.batches)).reshape(self.ranges_shape)[used]
        counts = np.zeros(len(self.totals.batches))
        np.maximum.at(counts, self.stack, self.totals.counts)
        missing = np.full((self.channels, self.channels), np.nan)
        means = [
            grams[stack] / counts[stack] if stack in grams else missing
            for stack in stacks.ravel().tolist()
        ]
        leading = [n for axis, n in enumerate(stacks.shape) if axis in self.stacked_axes]
        return np.stack(means).reshape(*leading, self.channels, self.channels)


def add_to_totals(
    totals: Totals, recording: Recording, rows: int, positions: Any, low: Any, high: Any, *sums: Any
) -> Totals:
    """Return the totals plus the activations of one product, with the arguments of `add`."""
    low, high, *parts = (jnp.asarray(x, jnp.float32) for x in (low, high, *sums))
    # XLA's reduction to a maximum may drop NaN.
    low, high = (jnp.where(jnp.isnan(parts[0]), jnp.nan, x) for x in (low, high))
    at, stack = positions.ravel(), jnp.asarray(recording.stack)[positions]
    ranges = totals.ranges.at[0, 0, stack.ravel()].min(low.ravel())
    counts = totals.counts.at[at].add(rows)
    counts = jnp.where(counts < totals.counts, jnp.iinfo(counts.dtype).max, counts)  # overflow
    gram = totals.gram
    if gram is not None and len(parts) > 3:
        channel = jnp.asarray(recording.channel)[positions]
        same_stack = stack[:, :, None] == stack[:, None, :]
        entries = stack[:, :, None], channel[:, :, None], channel[:, None, :]
        gram = gram.at[entries].add(jnp.where(same_stack, parts[3], 0))
    return Totals(
        counts=counts,
        ends=totals.ends.at[0, at].min(low.ravel()).at[1, at].max(high.ravel()),
        sums=totals.sums.at[:, at].add(jnp.stack([part.ravel() for part in parts[:3]])),
        ranges=ranges.at[0, 1, stack.ravel()].max(high.ravel()),
        batches=totals.batches,
        gram=gram,
    )
