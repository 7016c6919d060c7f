"""A convolution by a kernel with a low-rank update: one by `a`, and a matmul of its channels."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._jax.primitives import find_primitive
from .array import LoraArray, scaled
from .dropout import drop_any
from .labels import RANK, Labels, arrange, contract, widened
from .magnitude import norm_of_sum, over_norm


@register("conv_general_dilated")
def _conv(
    x: ArrayLike,
    kernel: LoraArray,
    *,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
    preferred_element_type: Any,
    **params: Any,
) -> Any:
    """Of a kernel of which the output channels are all that goes out, or all that comes in."""
    channels, feature = dimension_numbers.rhs_spec[0], dimension_numbers.out_spec[1]
    if kernel.outs == (channels,):
        near, far, far_labels, side = kernel.a, kernel.b, kernel.b_labels, "in"
    elif kernel.ins == (channels,):
        near, far, far_labels, side = kernel.b, kernel.a, kernel.a_labels, "out"
    else:
        return NotImplemented
    grouped = feature_group_count != 1 or batch_group_count != 1
    if grouped or kernel.lead or channels in kernel.norm_axes:
        return NotImplemented
    if kernel.drops and kernel.dropped != side:
        return NotImplemented

    def conv(x: Any, kernel: Any) -> Any:
        return find_primitive("conv_general_dilated").bind(
            x,
            kernel,
            dimension_numbers=dimension_numbers,
            feature_group_count=1,
            batch_group_count=1,
            precision=precision,
            preferred_element_type=widened(preferred_element_type, x.dtype),
            **params,
        )

    x = jnp.asarray(x)
    out = redispatch(conv, x, kernel.w)
    dtype = jnp.result_type(x, near)
    x = drop_any(x, kernel) if kernel.drops else x
    low = conv(x.astype(dtype), jnp.asarray(near, dtype))
    labels: Labels = tuple(RANK if i == feature else ("x", i) for i in range(low.ndim))
    update, found = contract(
        scaled(low, kernel.scale),
        labels,
        far,
        far_labels,
        [RANK],
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    wanted = tuple(channels if label == RANK else label for label in labels)
    out += arrange(update, found, wanted).astype(out.dtype)
    if kernel.magnitude is None:
        return out
    factor = over_norm(kernel.magnitude, norm_of_sum(kernel))
    factor = arrange(lax.squeeze(factor, kernel.norm_axes), (channels,), wanted)
    return (out * factor).astype(out.dtype)
