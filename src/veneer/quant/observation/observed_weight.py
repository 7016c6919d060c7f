"""`ObservedWeight`: a weight that records the activations that multiply it.

The rules for products reduce the activations on the device. A callback adds the results to a
`Recording` on the host. If the weight has a Box, the results are added to it on the device.
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
from ..._core.rules import register
from ..._core.tree import static
from ..._jax.sharding import replicated, replicated_sharding
from ..formats.tiles import Leaf
from ..ops.activations import bind, sums_over_features
from ..weights.product_weights import Factors, ProductWeight
from .recording import Recording, add_to_totals

#: Each run of `observe` takes a token. Weights hold the token instead of a `Recording` or a Box,
#: because their metadata must be hashable.
tokens = itertools.count()
recordings_by_token: dict[int, dict[str, Recording]] = {}
boxes_by_token: dict[int, dict[str, Any]] = {}  # only of models that record on the device


class ObservedWeight(ProductWeight):
    """A weight that records the activations of its products."""

    companions: ClassVar[tuple[str, ...]] = ("position",)

    array: Any  # [..., K, N]
    position: Leaf  # [..., K, 1], from Recording.positions: it shows which layer a slice is
    contracting: tuple[int, ...] = static()
    path: str = static()
    token: int = static()
    factors: tuple[Factors, ...] | None = static(default=None, repr=False, kw_only=True)

    @property
    def recording(self) -> Recording:
        """The recording of this weight."""
        return recordings_by_token[self.token][self.path]

    def record(
        self,
        x: jax.Array,
        x_axes: tuple[Sequence[int], Sequence[int]],
        axes: tuple[Sequence[int], Sequence[int]],
        *,
        gram: bool,
        keep_operand: bool = False,
    ) -> None:
        """Record the operand of a product.

        **Arguments:**

        - `x`: the operand.
        - `x_axes`, `axes`: the batch axes and the channel axes, of the operand and of the weight.
        - `gram`: also record `x.T @ x`.
        - `keep_operand`: also send the operand itself to a recording that is paired with another.
        """
        if x.size == 0:
            return
        batch, channels = x_axes
        rows = [axis for axis in range(x.ndim) if axis not in (*batch, *channels)]
        sizes = [math.prod(x.shape[axis] for axis in group) for group in (batch, rows, channels)]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = lax.transpose(x, [*batch, *rows, *channels]).astype(wide)
        batch_axes, row_axes = range(len(batch)), range(len(batch), len(batch) + len(rows))
        # An explicit mesh may shard axes, so they are merged after the reductions.
        merge = lambda x, *shape: replicated(x).reshape(shape)
        reduced = [x.min(row_axes), x.max(row_axes), x.sum(row_axes), jnp.abs(x).sum(row_axes)]
        reduced.append(jnp.square(x).sum(row_axes))
        count, num_rows, num_channels = sizes
        parts = [merge(part, count, num_channels) for part in reduced]
        parts.insert(0, self._channel_positions(*axes))
        if gram:
            products = lax.dot_general(
                x,
                x,
                ((row_axes, row_axes), (batch_axes, batch_axes)),
                precision=lax.Precision.HIGHEST,
                out_sharding=replicated_sharding(x),
            )
            parts.append(products.reshape(count, num_channels, num_channels))
        if self.token in boxes_by_token:
            boxes_by_token[self.token][self.path].update(
                lambda totals: add_to_totals(totals, self.recording, num_rows, *parts)
            )
            return
        receive = functools.partial(_receive, self.token, self.path, num_rows)
        operand = merge(x, *sizes) if keep_operand and self.recording.paired else None
        jax.debug.callback(receive, operand, *parts)

    def _channel_positions(self, batch: Sequence[int], channels: Sequence[int]) -> jax.Array:
        """Return the positions of the channels, `[batch, channels]`, at index 0 of other axes."""
        position = jnp.asarray(self.position)
        others = [axis for axis in range(self.ndim) if axis not in (*batch, *channels)]
        for axis in others:
            position = lax.slice_in_dim(position, 0, 1, axis=axis)
        sizes = [1 if axis in others else n for axis, n in enumerate(self.shape)]
        position = lax.transpose(jnp.broadcast_to(position, sizes), [*batch, *others, *channels])
        return position.reshape(math.prod(self.shape[axis] for axis in batch), -1)


def _receive(token: int, path: str, rows: int, operand: Any, *parts: Any) -> None:
    """Add reduced activations to a recording, on the host.

    A callback must not run JAX, because JAX would wait for the thread that runs the callback.
    """
    recording = recordings_by_token.get(token, {}).get(path)
    if recording is not None:
        recording.add(rows, *map(np.asarray, parts))
        if operand is not None:
            recording.keep_operand(np.asarray(parts[0]), np.asarray(operand))


# Rules for products. Each records the operand, and then computes the product of the weight itself.


@register("dot_general")
def _dot_general(x: ArrayLike, w: ObservedWeight, **params: Any) -> Any:
    (x_axes, w_axes), (x_batch, w_batch) = params["dimension_numbers"]
    _record_product(x, w, (x_batch, x_axes), (w_batch, w_axes))
    return bind("dot_general", (x, w.array), params)


@register("dot_general")
def _dot_general_swapped(w: ObservedWeight, x: ArrayLike, **params: Any) -> Any:
    (w_axes, x_axes), (w_batch, x_batch) = params["dimension_numbers"]
    _record_product(x, w, (x_batch, x_axes), (w_batch, w_axes))
    return bind("dot_general", (w.array, x), params)


@register("ragged_dot_general")
def _ragged_dot_general(
    x: ArrayLike, w: ObservedWeight, group_sizes: ArrayLike, **params: Any
) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (x_axes, w_axes), (x_batch, w_batch) = numbers.dot_dimension_numbers
    # Another model may send a row to another expert, so rows of two models cannot be paired.
    _record_product(x, w, (x_batch, x_axes), (w_batch, w_axes), keep_operand=False)
    return bind("ragged_dot_general", (x, w.array, group_sizes), params)


def _record_product(
    x: ArrayLike, w: ObservedWeight, x_axes: Any, axes: Any, *, keep_operand: bool = True
) -> None:
    if _may_be_derivative():
        return
    if not w.sums_over(axes[1]):
        w.recording.note_other_axes(axis - w.ndim for axis in axes[1])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        has_gram = w.recording.grams is not None
        w.record(jnp.asarray(x), x_axes, axes, gram=has_gram, keep_operand=keep_operand)


def _may_be_derivative() -> bool:
    """Return whether operands may be tangents or cotangents instead of activations."""
    return may_be_tangents() or is_in_derivative_part()


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike, w: ObservedWeight, **params: Any) -> Any:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    x_features, w_features = numbers.lhs_spec[1], numbers.rhs_spec[1]
    if _may_be_derivative():
        pass
    elif not sums_over_features(w, params):
        w.recording.note_other_axes([w_features - w.ndim])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        # The kernel has the channels of one group. The groups of the operand share them.
        last = jnp.moveaxis(jnp.asarray(x), x_features, -1)
        last = last.reshape(*last.shape[:-1], groups, -1)
        w.record(last, ((), [last.ndim - 1]), ((), [w_features]), gram=False)
    return bind("conv_general_dilated", (x, w.array), params)
