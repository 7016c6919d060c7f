"""`ObservedWeight`, which records its activations, and `Recording`, which adds them up.

In each product, the activations are reduced to sums and ranges on the device. A callback adds the
results to a `Recording` on the host. But if `observe` created a Box (`vn.hijax.Box`, a mutable
value on the device) for the weight, the results are added to the Box, without a callback. A
`Recording` holds `Totals` on the host: float64 NumPy arrays. A Box holds `Totals` on the device:
JAX arrays in float32, with int32 counts.
"""

import functools
import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._core.primitives.scopes import is_in_derivative_part, may_be_tangents
from .._core.primitives.sharding import replicate, replicated_sharding
from .._core.rules import register
from .._core.tree import static
from .activation_quantized import bind, sums_over_features
from .formats.tiles import Leaf, Shape
from .product_weights import Factors, ProductWeight, product_axes
from .statistics import ActivationStatistics

_UNUSED_RANGE = np.array([[np.inf], [-np.inf]])  # a minimum and a maximum of no values


class Totals(NamedTuple):
    """Sums and ranges of activations, as NumPy or JAX arrays.

    A stack is one of the weights that a stacked array holds, such as a layer. A channel is an index
    of the axes of the weight that products contract. A position is one channel of one stack. There
    are few arrays, because each is an operand of every program that updates a `vn.hijax.Box`.
    """

    counts: Any  # [positions], the number of values
    ends: Any  # [2, positions], the minimum and the maximum of all values
    sums: Any  # [3, positions], the sums of values, magnitudes and squares
    #: [3, 2, stacks], the minimum and the maximum: of the current batch, their sum over the earlier
    #: batches, and their moving average.
    ranges: Any
    batches: Any  # [stacks], the number of batches with activations
    gram: Any = None  # [stacks, K, K], sums of products of channels; None on the host

    def end_batch(self, decay: float, xp: ModuleType = jnp) -> "Totals":
        """Add the ranges of this batch to the sums and moving averages, and start a new batch.

        `xp` is `jax.numpy` or `numpy`, the module of the arrays.
        """
        batch, sums, averages = self.ranges
        is_used = ~(batch[0] > batch[1])  # an unused range is (inf, -inf); one with NaN is used
        moving = xp.where(self.batches == 0, batch, decay * averages + (1 - decay) * batch)
        unused = xp.broadcast_to(xp.array(_UNUSED_RANGE, batch.dtype), batch.shape)
        sums = xp.where(is_used, sums + batch, sums)
        return self._replace(
            ranges=xp.stack([unused, sums, xp.where(is_used, moving, averages)]),
            batches=self.batches + is_used,
        )


class Recording:
    """Sums and ranges of the activations of one weight.

    Layers or experts may be stacked along the leading axes of the weight (all before the last two).
    A *stack* is an index of the leading axes: one layer. A *channel* is an index of the contracted
    axes. A *position* is a stack and a channel. Sums are kept per position, and ranges per stack.

    If only index 0 of a leading axis gets activations, nothing is stacked along this axis.
    `statistics` then returns only this index.

    **Arguments:**

    - `shape`: the shape of the weight.
    - `contracting`: the axes that products with activations contract, counted from the end.
    - `gram`: also add up the products of any two channels.
    - `decay`: the weight of earlier batches in the exponential average of ranges.
    - `paired`: keep the activations of each batch. `add_cross` multiplies them by the activations
      of another version of the model.
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
        # The shape of the weight, with size 1 along all axes except `axes`.
        shape_along = lambda axes: tuple(n if axis in axes else 1 for axis, n in enumerate(shape))
        self.shape = shape_along(self.stacked_axes | contracted)
        self.ranges_shape, channels_shape = shape_along(self.stacked_axes), shape_along(contracted)
        num_positions, num_stacks = math.prod(self.shape), math.prod(self.ranges_shape)
        self.num_channels = math.prod(channels_shape)
        # For each position, the index of its stack and the index of its channel.
        indices = lambda sizes: np.arange(math.prod(sizes)).reshape(sizes)
        self.stack = np.broadcast_to(indices(self.ranges_shape), self.shape).ravel()
        self.channel = np.broadcast_to(indices(channels_shape), self.shape).ravel()
        self.decay = decay
        unused_ranges = np.repeat(_UNUSED_RANGE, num_stacks, 1)
        self.totals = Totals(
            counts=np.zeros(num_positions),
            ends=np.repeat(_UNUSED_RANGE, num_positions, 1),
            sums=np.zeros((3, num_positions)),
            ranges=np.stack([unused_ranges, *np.zeros((2, 2, num_stacks))]),
            batches=np.zeros(num_stacks),
        )
        # The sums of products of channels, by stack: within this model, and between this model and
        # another one. None if these sums are not recorded.
        self.grams: dict[int, np.ndarray] | None = {} if gram else None
        self._crosses: dict[int, np.ndarray] | None = {}
        self.paired = paired
        # The positions and operands of this batch, by the bytes of the positions.
        self._operands: dict[bytes, list[tuple[np.ndarray, np.ndarray]]] = {}
        self._other_axes: set[tuple[int, ...]] = set()  # the axes of products that are not recorded
        self._lock = threading.Lock()  # callbacks run on several threads

    @property
    def has_activations(self) -> bool:
        """True if any activations were recorded."""
        return bool(self.totals.counts.any())

    def positions(self) -> np.ndarray:
        """Return an array with an index 0, 1, ... for each position (a stack and a channel).

        `Totals` are indexed by these. The array has the shape of the weight, with size 1 along axes
        that are neither leading nor contracted.
        """
        return np.arange(len(self.stack), dtype=np.int32).reshape(self.shape)

    def note_other_axes(self, axes: Iterable[int]) -> None:
        """Remember that a product contracts other axes, so that its operand is not recorded.

        `explain_missing` names these axes. They are axes of the weight, counted from the end.
        """
        self._other_axes.add(tuple(axes))

    def explain_missing(self) -> str:
        """Return a text that says why the weight has no activations, and what to do."""
        if not self._other_axes:
            return "no product used it; pass batches that use it, or leave it out of the rules"
        axes = " and ".join(str(axes[0] if len(axes) == 1 else axes) for axes in self._other_axes)
        return f"products contract axis {axes}; set tile_axis of its rule to that"

    def add(
        self, num_rows: int, positions: Any, low: Any, high: Any, sums: Any, products: Any = None
    ) -> None:
        """Add the activations of one product, which are already reduced to sums and ranges.

        In the shapes below, all batch axes of the product are merged into one axis `batch`, and all
        contracted axes into `channels`.

        **Arguments:**

        - `num_rows`: the number of values per channel.
        - `positions`: for each channel, its index in the totals, as in the method `positions`.
          The shape is `[batch, channels]`.
        - `low`, `high`: the minimum and the maximum per channel, `[batch, channels]`.
        - `sums`: the sums of values, magnitudes and squares, `[3, batch, channels]`.
        - `products`: the products of any two channels, `[batch, channels, channels]`.
        """
        # XLA's reduction to a maximum may drop NaN.
        low, high = (np.where(np.isnan(sums[0]), np.nan, x).astype(float) for x in (low, high))
        index = positions.ravel()
        stack_index = self.stack[index]
        with self._lock, np.errstate(invalid="ignore"):  # static_range rejects NaN later
            np.add.at(self.totals.counts, index, num_rows)
            for ends, i in ((self.totals.ends, index), (self.totals.ranges[0], stack_index)):
                np.minimum.at(ends[0], i, low.ravel())
                np.maximum.at(ends[1], i, high.ravel())
            for total, new in zip(self.totals.sums, sums, strict=True):
                np.add.at(total, index, new.ravel().astype(float))
            if self.grams is not None and products is not None:
                for positions_of_batch, product in zip(positions, products, strict=True):
                    self._add_gram(self.grams, positions_of_batch, product)

    def add_on_device(
        self,
        totals: Totals,
        num_rows: int,
        positions: Any,
        low: Any,
        high: Any,
        sums: Any,
        products: Any = None,
    ) -> Totals:
        """Add the activations of one product to totals on the device, and return the new totals.

        The arguments after `totals` are as in `add`.
        """
        low, high, sums = (jnp.asarray(x, jnp.float32) for x in (low, high, sums))
        # XLA's reduction to a maximum may drop NaN.
        low, high = (jnp.where(jnp.isnan(sums[0]), jnp.nan, x) for x in (low, high))
        index, stack = positions.ravel(), jnp.asarray(self.stack)[positions]
        ranges = totals.ranges.at[0, 0, stack.ravel()].min(low.ravel())  # 0: the current batch
        counts = totals.counts.at[index].add(num_rows)
        counts = jnp.where(counts < totals.counts, jnp.iinfo(counts.dtype).max, counts)  # saturate
        gram = totals.gram
        if gram is not None and products is not None:
            channel = jnp.asarray(self.channel)[positions]
            is_same_stack = stack[:, :, None] == stack[:, None, :]
            entries = stack[:, :, None], channel[:, :, None], channel[:, None, :]
            gram = gram.at[entries].add(jnp.where(is_same_stack, products, 0).astype(gram.dtype))
        return Totals(
            counts=counts,
            ends=totals.ends.at[0, index].min(low.ravel()).at[1, index].max(high.ravel()),
            sums=totals.sums.at[:, index].add(sums.reshape(3, -1)),
            ranges=ranges.at[0, 1, stack.ravel()].max(high.ravel()),
            batches=totals.batches,
            gram=gram,
        )

    def keep_operand(self, positions: np.ndarray, x: np.ndarray) -> None:
        """Keep the activations `x`, `[batch, rows, channels]`, until `add_cross` is called.

        `positions` are the indices of the channels, as in `add`. Only a `paired` recording keeps
        activations.
        """
        with self._lock:
            self._operands.setdefault(positions.tobytes(), []).append((positions, x))

    def add_cross(self, other: "Recording") -> None:
        """Add the products `x.T @ y` for the kept operands: `x` of `self`, and `y` of `other`.

        `other` records the same weight in another version of the model, such as the dense model. If
        the operands cannot be paired, drop these products for all batches. This happens if one
        batch has several operands for the same positions, or the positions or shapes differ.
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
            products = np.matmul(x.swapaxes(1, 2), y)
            for positions_of_batch, product in zip(positions, products, strict=True):
                self._add_gram(self._crosses, positions_of_batch, product)

    def _add_gram(
        self, grams: dict[int, np.ndarray], positions: np.ndarray, product: np.ndarray
    ) -> None:
        """Add `product`, the products of any two channels, to the Gram matrices of stacks.

        `grams` is a dict from the index of each stack to its matrix, which is updated in place.
        `positions[i]` tells the stack and the channel of row and column `i` of `product`.
        """
        stacks, all_channels = self.stack[positions], np.arange(self.num_channels)
        for stack in np.unique(stacks).tolist():
            (rows,) = np.nonzero(stacks == stack)
            channels = self.channel[positions[rows]]
            if stack not in grams:
                grams[stack] = np.zeros((self.num_channels, self.num_channels))
            if len(rows) == len(positions) and np.array_equal(channels, all_channels):
                grams[stack] += product  # the frequent case, without indexing
            else:
                part = product[np.ix_(rows, rows)].astype(float)
                np.add.at(grams[stack], np.ix_(channels, channels), part)

    def end_batch(self) -> None:
        """Add the ranges of the current batch to the averages. Called after each batch."""
        with np.errstate(invalid="ignore"):
            self.totals = self.totals.end_batch(self.decay, np)

    def device_totals(self) -> Totals:
        """Return the totals of a new recording as JAX arrays, for a `vn.hijax.Box`."""
        totals = Totals(*(None if x is None else jnp.asarray(x, jnp.float32) for x in self.totals))
        shape = len(self.totals.batches), self.num_channels, self.num_channels
        return totals._replace(
            counts=totals.counts.astype(jnp.int32),
            batches=totals.batches.astype(jnp.int32),
            gram=None if self.grams is None else jnp.zeros(shape, jnp.float32),
        )

    def set_totals(self, totals: Totals) -> None:
        """Replace the totals of this recording by totals on the device, from a Box."""
        *arrays, gram = totals
        self.totals = Totals(*(np.asarray(x, float) for x in arrays))
        if gram is not None:
            used = np.flatnonzero(self.totals.batches)
            self.grams = {int(i): np.asarray(gram[i], float) for i in used}

    def statistics(self) -> ActivationStatistics:
        """Return the statistics of everything recorded so far."""
        counts, (minimum, maximum), sums, ranges, batches, _ = self.totals
        # If only index 0 of an axis has activations, return only this index.
        counts = counts.reshape(self.shape)
        used = tuple(
            slice(None) if counts.take(range(1, n), axis).any() else slice(0, 1)
            for axis, n in enumerate(self.shape)
        )
        per_channel = lambda x: x.reshape(self.shape)[used]
        per_stack = lambda x: np.where(batches, x, np.nan).reshape(self.ranges_shape)[used]
        with np.errstate(invalid="ignore"):  # positions without activations have the mean NaN
            averages = {"mean": ranges[1] / batches, "exponential": ranges[2]}
            mean, absmean, mean_square = (per_channel(x.reshape(self.shape) / counts) for x in sums)
        return ActivationStatistics(
            count=per_channel(counts),
            minimum=per_channel(minimum),
            maximum=per_channel(maximum),
            mean=mean,
            absmean=absmean,
            mean_square=mean_square,
            lows={name: per_stack(low) for name, (low, _) in averages.items()},
            highs={name: per_stack(high) for name, (_, high) in averages.items()},
            gram=self._mean_gram(self.grams, used) if self.grams else None,
            cross=self._mean_gram(self._crosses, used) if self._crosses else None,
        )

    def _mean_gram(self, grams: dict[int, np.ndarray], used: tuple[slice, ...]) -> np.ndarray:
        """Return the mean of the products of channels per stack, `[*stacks, K, K]`.

        `grams` is a dict from the index of each stack to the sums of these products. Stacks without
        an entry get NaN. `used` has a slice per axis, which selects the stacks to return.
        """
        stacks = np.arange(len(self.totals.batches)).reshape(self.ranges_shape)[used]
        # The channels of a stack can have different counts. The largest is the number of rows.
        num_rows = np.zeros(len(self.totals.batches))
        np.maximum.at(num_rows, self.stack, self.totals.counts)
        missing = np.full((self.num_channels, self.num_channels), np.nan)
        means = [
            grams[stack] / num_rows[stack] if stack in grams else missing
            for stack in stacks.ravel().tolist()
        ]
        leading = [n for axis, n in enumerate(stacks.shape) if axis in self.stacked_axes]
        return np.stack(means).reshape(*leading, self.num_channels, self.num_channels)


#: Each run of `observe` takes a number from `run_ids`. Weights hold this number instead of a
#: `Recording` or a Box, because their metadata must be hashable.
run_ids = itertools.count()
#: The recordings and Boxes of each run, by the path of the weight. Only some runs have Boxes.
recordings_by_run: dict[int, dict[str, Recording]] = {}
boxes_by_run: dict[int, dict[str, Any]] = {}


AxesPair = tuple[Sequence[int], Sequence[int]]  # axes of the operand, and axes of the weight


class ObservedWeight(ProductWeight):
    """A weight that records the activations that multiply it.

    The leaf `position` numbers the layers and channels of the weight. After a slice, it shows which
    layer and which channels the slice contains. `run_id` and `path` identify the `Recording` or the
    Box to which activations are added.
    """

    companions: ClassVar[tuple[str, ...]] = ("position",)

    array: Any  # [..., K, N]
    position: Leaf  # [..., K, 1], from Recording.positions
    contracting: tuple[int, ...] = static()  # the contracted axes, counted from the end
    path: str = static()
    run_id: int = static()
    factors: tuple[Factors, ...] | None = static(default=None, repr=False, kw_only=True)

    @property
    def recording(self) -> Recording:
        """The recording of this weight."""
        return recordings_by_run[self.run_id][self.path]

    def record(
        self,
        x: jax.Array,
        channel_axes: AxesPair,
        batch_axes: AxesPair = ((), ()),
        *,
        gram: bool,
        keep_operand: bool = False,
    ) -> None:
        """Record the operand `x` that multiplies the weight in a product.

        **Arguments:**

        - `channel_axes`, `batch_axes`: the contracted axes and the batch axes of the product. Each
          is a pair: axes of the operand, and axes of the weight.
        - `gram`: also record the products `x.T @ x` of channels.
        - `keep_operand`: also keep `x` for `Recording.add_cross`, if the recording is `paired`.
        """
        if x.size == 0:
            return
        (channels, w_channels), (batch, w_batch) = channel_axes, batch_axes
        rows = [axis for axis in range(x.ndim) if axis not in (*batch, *channels)]
        sizes = [math.prod(x.shape[axis] for axis in axes) for axes in (batch, rows, channels)]
        batch_size, num_rows, num_channels = sizes
        # Put batch axes first, channel axes last, and reduce the rows between them.
        x = lax.transpose(x, [*batch, *rows, *channels])
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        first_row = len(batch)
        rows = [first_row + i for i in range(len(rows))]
        # An explicit mesh may shard axes, so they are merged after the reductions.
        merge_axes = lambda x, *shape: replicate(x).reshape(shape)
        reductions = x.min(rows), x.max(rows), x.sum(rows), jnp.abs(x).sum(rows), (x * x).sum(rows)
        low, high, *sums = (merge_axes(y, batch_size, num_channels) for y in reductions)
        reduced = [self._channel_positions(w_batch, w_channels), low, high, jnp.stack(sums)]
        if gram:
            products = lax.dot_general(
                x,
                x,
                ((rows, rows), (range(first_row), range(first_row))),
                precision=lax.Precision.HIGHEST,
                out_sharding=replicated_sharding(x),
            )
            reduced.append(products.reshape(batch_size, num_channels, num_channels))
        if self.run_id in boxes_by_run:
            boxes_by_run[self.run_id][self.path].update(
                lambda totals: self.recording.add_on_device(totals, num_rows, *reduced)
            )
            return
        receive = functools.partial(_receive, self.run_id, self.path, num_rows)
        operand = merge_axes(x, *sizes) if keep_operand and self.recording.paired else None
        jax.debug.callback(receive, operand, *reduced)

    def _channel_positions(self, batch: Sequence[int], channels: Sequence[int]) -> jax.Array:
        """Return the entries of the leaf `position` for a product, as an array `[batch, channels]`.

        `batch` and `channels` are the batch axes and the contracted axes of the weight in the
        product. Each group is merged into one axis. The index along all other axes is 0.
        """
        position = jnp.asarray(self.position)
        others = [axis for axis in range(self.ndim) if axis not in (*batch, *channels)]
        for axis in others:
            position = lax.slice_in_dim(position, 0, 1, axis=axis)
        sizes = [1 if axis in others else n for axis, n in enumerate(self.shape)]
        position = lax.transpose(jnp.broadcast_to(position, sizes), [*batch, *others, *channels])
        return position.reshape(math.prod(self.shape[axis] for axis in batch), -1)


def _receive(run_id: int, path: str, num_rows: int, operand: Any, *reduced: Any) -> None:
    """Add sums and ranges, and an operand to keep, to a recording on the host.

    `run_id` and `path` identify the recording. If it no longer exists, do nothing. `num_rows` and
    `reduced` are the arguments of `Recording.add`. `operand` has the activations to keep for
    `Recording.add_cross`, or is None.

    A callback must not run JAX, because JAX would wait for the thread that runs the callback.
    """
    recording = recordings_by_run.get(run_id, {}).get(path)
    if recording is not None:
        recording.add(num_rows, *map(np.asarray, reduced))
        if operand is not None:
            positions = reduced[0]
            recording.keep_operand(np.asarray(positions), np.asarray(operand))


# Rules for products. Each records the operand, and then computes the product of the weight itself.


@register("dot_general")
def _dot_general(x: ArrayLike, w: ObservedWeight, **params: Any) -> Any:
    contracted, batch = params["dimension_numbers"]
    _record_product(x, w, contracted, batch)
    return bind("dot_general", (x, w.array), params)


@register("dot_general")
def _dot_general_swapped(w: ObservedWeight, x: ArrayLike, **params: Any) -> Any:
    (w_axes, x_axes), (w_batch, x_batch) = params["dimension_numbers"]
    _record_product(x, w, (x_axes, w_axes), (x_batch, w_batch))
    return bind("dot_general", (w.array, x), params)


@register("ragged_dot_general")
def _ragged_dot_general(
    x: ArrayLike, w: ObservedWeight, group_sizes: ArrayLike, **params: Any
) -> Any:
    contracted, batch = product_axes("ragged_dot_general", params)
    # The quantized and the dense model may choose different experts, so rows cannot be paired.
    _record_product(x, w, contracted, batch, keep_operand=False)
    return bind("ragged_dot_general", (x, w.array, group_sizes), params)


def _record_product(
    x: ArrayLike,
    w: ObservedWeight,
    contracted: AxesPair,
    batch: AxesPair,
    *,
    keep_operand: bool = True,
) -> None:
    """Record the operand `x` of a product, unless `x` belongs to a derivative or holds integers.

    If the product contracts other axes than `w.contracting`, only note these axes, for a warning.
    `contracted` and `batch` are the contracted axes and the batch axes of the product. Each is a
    pair: axes of `x`, and axes of `w`. `keep_operand` is as in `ObservedWeight.record`.
    """
    if _may_be_derivative():
        return
    if not w.sums_over(contracted[1]):
        w.recording.note_other_axes(axis - w.ndim for axis in contracted[1])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        has_gram = w.recording.grams is not None
        w.record(jnp.asarray(x), contracted, batch, gram=has_gram, keep_operand=keep_operand)


def _may_be_derivative() -> bool:
    """Return whether the current product may be part of a derivative.

    Its operand may then be a tangent or a cotangent instead of an activation.
    """
    return may_be_tangents() or is_in_derivative_part()


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike, w: ObservedWeight, **params: Any) -> Any:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    # The feature axis is the second entry of each spec, after the batch or output axis.
    x_features, w_features = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if _may_be_derivative():
        pass
    elif not sums_over_features(w, params):
        w.recording.note_other_axes([w_features - w.ndim])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        # The kernel has the channels of one group. Each group of the operand counts as a row.
        x_by_group = jnp.moveaxis(jnp.asarray(x), x_features, -1)
        x_by_group = x_by_group.reshape(*x_by_group.shape[:-1], groups, -1)
        w.record(x_by_group, ([x_by_group.ndim - 1], [w_features]), gram=False)
    return bind("conv_general_dilated", (x, w.array), params)
