"""Rows of a `LoraArray` looked up, as those of an embedding are: `w[ids] + scale * a[ids] @ b`."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._core.value import materialise_one
from ..._jax.primitives import find_primitive
from .array import LoraArray, scaled
from .labels import RANK, Labels, arrange, contract
from .magnitude import norm_of_sum, over_norm


@register("gather")
def _gather(
    x: LoraArray,
    indices: ArrayLike,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    fill_value: Any,
    **params: Any,
) -> Any:
    """A look-up has no operand to drop parts of, so dropout has no part in it."""
    numbers, ndim = dimension_numbers, jnp.ndim(indices) - 1 + x.out_ndim
    at = len(x.lead)
    plain = (
        x.in_ndim == 1
        and tuple(numbers.start_index_map) == tuple(numbers.collapsed_slice_dims) == (at,)
        and tuple(numbers.operand_batching_dims) == x.lead
        and tuple(slice_sizes) == (*[1] * (at + 1), *x.shape[at + 1 :])
        and tuple(numbers.offset_dims) == tuple(range(ndim - x.out_ndim, ndim))
        and (x.magnitude is None or (x.norm_axes == x.ins and _is_nan(fill_value)))
    )
    if not plain:
        return NotImplemented
    # Of the result: each axis of the indices is one of the batch's, or its own.
    batch = dict(zip(numbers.start_indices_batching_dims, x.lead, strict=True))
    looked_up: Labels = tuple(batch.get(i, ("x", i)) for i in range(jnp.ndim(indices) - 1))

    def rows(leaf: Any, sizes: tuple[int, ...], fill: Any) -> Any:
        own = range(len(looked_up), len(looked_up) + len(sizes))
        return find_primitive("gather").bind(
            leaf,
            indices,
            dimension_numbers=numbers._replace(offset_dims=tuple(own)),
            slice_sizes=(*[1] * (at + 1), *sizes),
            fill_value=fill,
            **params,
        )

    sizes = x.shape[at + 1 :]
    of_w = redispatch(lambda w: rows(w, sizes, fill_value), x.w)
    of_w = jnp.asarray(materialise_one(of_w))  # the rows alone, where w is quantised
    # What is filled in is not updated.
    rank = x.a.shape[-1:]
    low = redispatch(lambda a: rows(scaled(jnp.asarray(a), x.scale), rank, 0), x.a)
    update, labels = contract(low, (*looked_up, RANK), x.b, x.b_labels, [RANK])
    wanted = (*looked_up, *x.outs)
    out = of_w + arrange(update, labels, wanted).astype(of_w.dtype)
    if x.magnitude is None:
        return out
    factor = lax.squeeze(over_norm(x.magnitude, norm_of_sum(x)), x.norm_axes)
    return (out * arrange(factor, (*x.lead, *x.outs), wanted)).astype(out.dtype)


def _is_nan(fill_value: Any) -> bool:
    """Whether rows out of bounds are NaN, and so they are times anything; None says so too."""
    return fill_value is None or bool(fill_value != fill_value)
