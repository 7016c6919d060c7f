"""`Recording`: what the host keeps of the activations that one weight meets, as they come."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..formats.tiles import Shape
from .statistics import ActivationStatistics


class Recording:
    """Sums, least and largest values of channels, and the averages of ranges over batches.

    A channel is a *position*: an index of the weight's contracting axes, and of those in front of
    the last two, along which layers or experts may be stacked. Whether they are is seen at the end:
    along an axis of which only the first index has met anything, nothing is stacked. What shares
    its place on the other axes makes a *stack*, whose channels have one range.

    **Arguments:**

    - `shape`: of the weight.
    - `contracting`: its axes that are contracted with activations, counted from the end.
    - `gram`: whether products of channels come along.
    - `decay`: of the exponential average.
    - `paired`: whether what comes is kept until `pair` is called, at the end of each batch.
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
        self.contracting = sorted(axis + ndim for axis in contracting)
        self.has_positions = {*range(ndim - 2), *self.contracting}
        self.shape = tuple(n if axis in self.has_positions else 1 for axis, n in enumerate(shape))
        self.ranges_shape = tuple(
            1 if axis in self.contracting else n for axis, n in enumerate(self.shape)
        )
        self.decay = decay
        self.other_axes: set[tuple[int, ...]] = set()
        size, stacks = int(np.prod(self.shape)), int(np.prod(self.ranges_shape))
        indices = np.indices(self.shape, sparse=True)
        at = [0 if axis in self.contracting else i for axis, i in enumerate(indices)]
        of_stack = np.ravel_multi_index(np.broadcast_arrays(*at), self.ranges_shape)
        self.stack = np.broadcast_to(of_stack, self.shape).ravel()
        order = np.argsort(self.stack, kind="stable")
        self.channel = np.empty(size, int)
        channels = size // max(stacks, 1)
        self.channel[order] = np.arange(size) % max(channels, 1)

        self.count = np.zeros(size)
        self.minimum, self.maximum = np.full(size, np.inf), np.full(size, -np.inf)
        self.sums = np.zeros((3, size))  # of values, magnitudes and squares
        self.grams: dict[int, np.ndarray] | None = {} if gram else None
        self.paired = paired
        self._kept: dict[bytes, list[tuple[np.ndarray, np.ndarray]]] = {}  # of this batch, by place
        self._crosses: dict[int, np.ndarray] | None = {}
        self.low, self.high = np.full(stacks, np.inf), np.full(stacks, -np.inf)  # of this batch
        self.met = np.zeros(stacks, bool)
        self.batches = np.zeros(stacks)
        self.total, self.moving = np.zeros((2, 2, stacks))
        self._lock = threading.Lock()

    @property
    def has_met(self) -> bool:
        """Whether there were any activations."""
        return bool(self.count.any())

    def positions(self) -> np.ndarray:
        """Returns the number of each position, in the shape of the weight but for free axes."""
        return np.arange(len(self.count), dtype=np.int32).reshape(self.shape)

    def met_along(self, axes: Iterable[int]) -> None:
        """Notes a product that contracts other axes, counted from the end."""
        self.other_axes.add(tuple(axes))

    def why_not(self) -> str:
        """Returns why there may have been no activations."""
        if not self.other_axes:
            return "no product used it; pass batches that use it, or leave it out of the rules"
        axes = " and ".join(str(axes[0] if len(axes) == 1 else axes) for axes in self.other_axes)
        return f"products contract axis {axes}; set tile_axis of its rule to that"

    def add(self, rows: int, positions: Any, low: Any, high: Any, *sums: Any) -> None:
        """Adds the activations of one product, already reduced.

        **Arguments:**

        - `rows`: how many there were of each channel.
        - `positions`, `low`, `high`: of channels, `[batch, channels]`.
        - `sums`: of values, magnitudes and squares, `[batch, channels]`, and of products of two
          channels, `[batch, channels, channels]`, if these are recorded.
        """
        # XLA's reduction to a maximum may drop NaN.
        low, high = (np.where(np.isnan(sums[0]), np.nan, x).astype(float) for x in (low, high))
        at = positions.ravel()
        stack = self.stack[at]
        with self._lock, np.errstate(invalid="ignore"):  # NaN stays, and is told of later
            np.add.at(self.count, at, rows)
            np.minimum.at(self.minimum, at, low.ravel())
            np.maximum.at(self.maximum, at, high.ravel())
            for total, part in zip(self.sums, sums[:3], strict=True):
                np.add.at(total, at, part.ravel().astype(float))
            self.met[stack] = True
            np.minimum.at(self.low, stack, low.ravel())
            np.maximum.at(self.high, stack, high.ravel())
            if self.grams is not None and len(sums) > 3:
                for at, product in zip(positions, sums[3], strict=True):
                    self._add_gram(self.grams, at, product)

    def keep(self, positions: np.ndarray, x: np.ndarray) -> None:
        """Keeps activations `[batch, rows, channels]` of a place until the batch is over."""
        with self._lock:
            self._kept.setdefault(positions.tobytes(), []).append((positions, x))

    def pair(self, other: "Recording") -> None:
        """Adds products of the channels of this batch with those that another recording has.

        Where a place meets several activations, or others, which belong together is not known:
        then there are none at all.
        """
        mine, theirs = self._kept, other._kept
        self._kept, other._kept = {}, {}
        sizes = lambda kept: {place: [x.shape for _, x in of] for place, of in kept.items()}
        if sizes(mine) != sizes(theirs) or any(len(of) > 1 for of in mine.values()):
            self._crosses = None
        if self._crosses is None:
            return
        for place, [(positions, x)] in mine.items():
            [(_, y)] = theirs[place]
            for at, product in zip(positions, np.matmul(x.swapaxes(1, 2), y), strict=True):
                self._add_gram(self._crosses, at, product)

    def _add_gram(
        self, grams: dict[int, np.ndarray], positions: np.ndarray, product: np.ndarray
    ) -> None:
        stacks, size = self.stack[positions], self.channel.max(initial=0) + 1
        for stack in np.unique(stacks).tolist():
            (members,) = np.nonzero(stacks == stack)
            at = self.channel[positions[members]]
            if stack not in grams:
                grams[stack] = np.zeros((size, size))
            if np.array_equal(at, np.arange(size)) and len(members) == len(positions):
                grams[stack] += product
            else:
                of_members = product[np.ix_(members, members)].astype(float)
                np.add.at(grams[stack], np.ix_(at, at), of_members)

    def end_batch(self) -> None:
        """Takes the ranges of a batch, which is over, into the averages."""
        met = self.met
        ends = np.stack([self.low, self.high])
        first = self.batches == 0
        moved = np.where(first, ends, self.decay * self.moving + (1 - self.decay) * ends)
        self.total[:, met] += ends[:, met]
        self.moving[:, met] = moved[:, met]
        self.batches += met
        self.low[:], self.high[:], self.met[:] = np.inf, -np.inf, False

    def statistics(self) -> ActivationStatistics:
        """Returns what has been recorded."""
        count = self.count.reshape(self.shape)
        used = [
            slice(None) if count.take(range(1, n), axis).any() else slice(0, 1)
            for axis, n in enumerate(self.shape)
        ]
        of_channels = lambda x: x.reshape(self.shape)[tuple(used)]
        of_ranges = lambda x: x.reshape(self.ranges_shape)[tuple(used)]
        with np.errstate(invalid="ignore"):  # what has met nothing has NaN for a mean
            mean, absmean, mean_square = (of_channels(x / self.count) for x in self.sums)
            ends = {"mean": self.total / self.batches, "exponential": self.moving}
            lows = {
                name: of_ranges(np.where(self.batches, x[0], np.nan)) for name, x in ends.items()
            }
            highs = {
                name: of_ranges(np.where(self.batches, x[1], np.nan)) for name, x in ends.items()
            }
        return ActivationStatistics(
            count=of_channels(self.count),
            minimum=of_channels(self.minimum),
            maximum=of_channels(self.maximum),
            mean=mean,
            absmean=absmean,
            mean_square=mean_square,
            lows=lows,
            highs=highs,
            gram=self._mean(self.grams, used) if self.grams else None,
            cross=self._mean(self._crosses, used) if self._crosses else None,
        )

    def _mean(self, grams: dict[int, np.ndarray], used: Sequence[slice]) -> np.ndarray:
        stacks = np.arange(len(self.batches)).reshape(self.ranges_shape)[tuple(used)]
        counts = self.count[np.argsort(self.stack, kind="stable")].reshape(len(self.batches), -1)
        size = counts.shape[1]
        nothing = np.full((size, size), np.nan)
        means = [
            grams[stack] / np.max(counts[stack]) if stack in grams else nothing
            for stack in stacks.ravel().tolist()
        ]
        stacked = self.has_positions.difference(self.contracting)
        leading = [n for axis, n in enumerate(stacks.shape) if axis in stacked]
        return np.stack(means).reshape(*leading, size, size)
