"""`Observed`: a weight that records its activations, and its rules for products.

They are recorded on the host, or where there is a Box for the weight, on the device.
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
from .recording import Recording
from .totals import added

tokens = itertools.count()
recordings_of: dict[int, dict[str, Recording]] = {}
boxes_of: dict[int, dict[str, Any]] = {}  # of those that record on the device


class Observed(ProductWeight):
    """A weight whose activations are recorded as they meet it in a product."""

    companions: ClassVar[tuple[str, ...]] = ("position",)

    array: Any  # [..., K, N]
    position: Leaf  # [..., K, 1], where in the weight as it was an entry is
    contracting: tuple[int, ...] = static()
    path: str = static()
    token: int = static()
    gram: bool = static()
    factors: tuple[Factors, ...] | None = static(default=None, repr=False, kw_only=True)

    @property
    def recording(self) -> Recording:
        """What it is recorded in."""
        return recordings_of[self.token][self.path]

    def record(
        self,
        x: jax.Array,
        x_axes: tuple[Sequence[int], Sequence[int]],
        axes: tuple[Sequence[int], Sequence[int]],
        *,
        gram: bool,
        whole: bool = False,
    ) -> None:
        """Records the operand of a product.

        **Arguments:**

        - `x`: the operand.
        - `x_axes`, `axes`: of the operand and of the weight, those of the batch, and those of the
          channels. Along other axes of the weight, every entry meets the same.
        - `gram`: whether products of channels are recorded.
        - `whole`: whether the recording takes the operand, too, if it is paired with another.
        """
        if x.size == 0:
            return
        groups = _groups(x.ndim, *x_axes)
        sizes = [math.prod(x.shape[axis] for axis in group) for group in groups]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = lax.transpose(x, [axis for group in groups for axis in group]).astype(wide)
        # Axes are joined after they are reduced: an explicit mesh may cut them.
        batch, over = range(len(groups[0])), range(len(groups[0]), len(groups[0]) + len(groups[1]))
        count, rows, channels = sizes
        joined = lambda x, *shape: replicated(x).reshape(shape)
        reduced = [x.min(over), x.max(over), x.sum(over), jnp.abs(x).sum(over)]
        reduced.append(jnp.square(x).sum(over))
        parts = [self._positions_of(*axes), *(joined(part, count, channels) for part in reduced)]
        if gram:
            products = lax.dot_general(
                x,
                x,
                ((over, over), (batch, batch)),
                precision=lax.Precision.HIGHEST,
                out_sharding=replicated_sharding(x),
            )
            parts.append(products.reshape(count, channels, channels))
        if self.token in boxes_of:
            boxes_of[self.token][self.path].update(
                lambda totals: added(totals, self.recording, rows, *parts)
            )
            return
        receive = functools.partial(_receive, self.token, self.path, rows)
        kept = joined(x, *sizes) if whole and self.recording.paired else None
        jax.debug.callback(receive, kept, *parts)

    def _positions_of(self, batch: Sequence[int], channels: Sequence[int]) -> jax.Array:
        """The positions of channels, `[batch, channels]`: of those along other axes, the first."""
        kept = (*batch, *channels)
        position = jnp.asarray(self.position)
        for axis in range(self.ndim):
            if axis not in kept:
                position = lax.slice_in_dim(position, 0, 1, axis=axis)
        sizes = [n if axis in kept else 1 for axis, n in enumerate(self.shape)]
        position = jnp.broadcast_to(position, sizes)
        order = [axis for group in _groups(self.ndim, batch, channels) for axis in group]
        return lax.transpose(position, order).reshape(
            math.prod(self.shape[axis] for axis in batch), -1
        )


def _groups(
    ndim: int, batch: Sequence[int], channels: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The axes of the batch, the others, and those of the channels."""
    return batch, [axis for axis in range(ndim) if axis not in (*batch, *channels)], channels


def _receive(token: int, path: str, rows: int, x: Any, *parts: Any) -> None:
    """What the host does: with arrays of NumPy's alone."""
    recording = recordings_of.get(token, {}).get(path)
    if recording is not None:
        recording.add(rows, *map(np.asarray, parts))
        if x is not None:
            recording.keep(np.asarray(parts[0]), np.asarray(x))


# Rules for products. Each is bound again, on the weight itself.


@register("dot_general")
def _dot_general(x: ArrayLike, w: Observed, **params: Any) -> Any:
    (summed, w_summed), (batch, w_batch) = params["dimension_numbers"]
    _record_product(x, w, (batch, summed), (w_batch, w_summed))
    return bind("dot_general", (x, w.array), params)


@register("dot_general")
def _dot_general_swapped(w: Observed, x: ArrayLike, **params: Any) -> Any:
    (w_summed, summed), (w_batch, batch) = params["dimension_numbers"]
    _record_product(x, w, (batch, summed), (w_batch, w_summed))
    return bind("dot_general", (w.array, x), params)


@register("ragged_dot_general")
def _ragged_dot_general(x: ArrayLike, w: Observed, group_sizes: ArrayLike, **params: Any) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (summed, w_summed), (batch, w_batch) = numbers.dot_dimension_numbers
    # Rows may go to other experts in another model, so that no two belong together.
    _record_product(x, w, (batch, summed), (w_batch, w_summed), whole=False)
    return bind("ragged_dot_general", (x, w.array, group_sizes), params)


def _record_product(
    x: ArrayLike, w: Observed, x_axes: Any, axes: Any, *, whole: bool = True
) -> None:
    if _are_of_derivative():
        return
    if not w.sums_over(axes[1]):
        w.recording.met_along(axis - w.ndim for axis in axes[1])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        w.record(jnp.asarray(x), x_axes, axes, gram=w.gram, whole=whole)


def _are_of_derivative() -> bool:
    """Return whether operands may be tangents or cotangents, and so no activations."""
    return may_be_tangents() or is_in_derivative_part()


@register("conv_general_dilated")
def _conv_general_dilated(x: ArrayLike, w: Observed, **params: Any) -> Any:
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    _, x_features, *_ = numbers.lhs_spec
    _, features, *_ = numbers.rhs_spec
    if _are_of_derivative():
        pass
    elif not sums_over_features(w, params):
        w.recording.met_along([features - w.ndim])
    elif jnp.issubdtype(jnp.result_type(x), jnp.floating):
        # Groups go side by side along the features, and channels are those of one.
        last = jnp.moveaxis(jnp.asarray(x), x_features, -1)
        last = last.reshape(*last.shape[:-1], groups, -1)
        w.record(last, ((), [last.ndim - 1]), ((), [features]), gram=False)
    return bind("conv_general_dilated", (x, w.array), params)
