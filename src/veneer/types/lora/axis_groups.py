"""Rules for primitives that change which axes come in and which go out."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._core.rules import register
from ..._core.transform import redispatch
from .array import LoraArray


@register("transpose")
def _transpose(x: LoraArray, *, permutation: Any) -> Any:
    return x.permuted(permutation)


@register("reshape")
def _reshape(x: LoraArray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> Any:
    """Of the leading axes; or of those that come in or go out, each among themselves."""
    if dimensions is not None or sharding is not None:
        return NotImplemented
    found = _regrouped(x, new_sizes)
    if found is None:
        return NotImplemented
    lead, ins, outs = found
    key, n = x.dropout_key, len(x.lead)
    ones = lambda sizes: (1,) * len(sizes)
    of_magnitude = (*ones(ins), *outs) if x.norm_axes == x.ins else (*ins, *ones(outs))
    magnitude = x.magnitude
    rank = x.a.shape[-1]
    return x.changed(
        w=redispatch(lambda w: w.reshape(*lead, *ins, *outs), x.w),
        a=jnp.reshape(x.a, (*lead, *ins, rank)),
        b=jnp.reshape(x.b, (*lead, rank, *outs)),
        magnitude=magnitude
        if magnitude is None
        else jnp.reshape(magnitude, (*lead, *of_magnitude)),
        dropout_key=None if key is None else key.reshape(*lead, *key.shape[n:]),
        in_ndim=len(ins),
        out_ndim=len(outs),
    )


Shape = tuple[int, ...]


def _regrouped(x: LoraArray, sizes: Sequence[int]) -> tuple[Shape, Shape, Shape] | None:
    """The new sizes of the leading axes, of those that come in, and of those that go out."""
    shape, sizes, n = x.shape, tuple(sizes), len(x.lead)
    inner, count = shape[n:], x.in_ndim
    if sizes[len(sizes) - len(inner) :] == inner and len(sizes) >= len(inner):
        return sizes[: len(sizes) - len(inner)], inner[:count], inner[count:]
    if sizes[:n] != shape[:n]:
        return None
    sizes = sizes[n:]
    old = math.prod(inner[:count]), math.prod(inner[count:])
    for i in range(1, len(sizes)):
        if (math.prod(sizes[:i]), math.prod(sizes[i:])) == old:
            return shape[:n], sizes[:i], sizes[i:]
    return None
