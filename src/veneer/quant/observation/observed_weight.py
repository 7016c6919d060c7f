"""`ObservedWeight`: a weight that records the activations that multiply it.

In each product, the activations are reduced to sums and ranges on the device. A callback adds the
results to a `Recording` on the host. But if `observe` created a Box for the weight, the results are
added to the Box, without a callback.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core.primitives.scopes import is_in_derivative_part, may_be_tangents
from ..._core.primitives.sharding import replicate, replicated_sharding
from ..._core.rules import register
from ..._core.tree import static
from ..formats.tiles import Leaf
from ..weights.activations import bind, sums_over_features
from ..weights.product_weights import Factors, ProductWeight
from .recording import Recording, add_to_totals

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
    layer and which channels the slice contains.
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
        - `keep_operand`: also keep `x` in the recording for `add_cross`, if it is `paired`.
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
                lambda totals: add_to_totals(totals, self.recording, num_rows, *reduced)
            )
            return
        receive = functools.partial(_receive, self.run_id, self.path, num_rows)
        operand = merge_axes(x, *sizes) if keep_operand and self.recording.paired else None
        jax.debug.callback(receive, operand, *reduced)

    def _channel_positions(self, batch: Sequence[int], channels: Sequence[int]) -> jax.Array:
        """Return the entries of the leaf `position` as an array `[batch, channels]`.

        `batch` and `channels` are axes of the weight. The index along all other axes is 0.
        """
        position = jnp.asarray(self.position)
        others = [axis for axis in range(self.ndim) if axis not in (*batch, *channels)]
        for axis in others:
            position = lax.slice_in_dim(position, 0, 1, axis=axis)
        sizes = [1 if axis in others else n for axis, n in enumerate(self.shape)]
        position = lax.transpose(jnp.broadcast_to(position, sizes), [*batch, *others, *channels])
        return position.reshape(math.prod(self.shape[axis] for axis in batch), -1)


def _receive(run_id: int, path: str, num_rows: int, operand: Any, *reduced: Any) -> None:
    """Add sums and ranges (`reduced`) to the recording on the host, if it still exists.

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
    contracted, batch = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
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
    """
    if _may_be_derivative():
        return
    if not w.sums_over(contracted[1]):
        w.recording.note_other_axes(axis - w.ndim for axis in contracted[1])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        has_gram = w.recording.grams is not None
        w.record(jnp.asarray(x), contracted, batch, gram=has_gram, keep_operand=keep_operand)


def _may_be_derivative() -> bool:
    """Return whether an operand may be a tangent or a cotangent instead of an activation."""
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
