"""Elementwise functions of masked arrays: valid where all operands are."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._jax.primitives import Primitive
from ..elementwise import ELEMENTWISE
from .array import Masked, is_inexact, mask_of, value_of
from .sums import as_sum, refuse_mean

# Elementwise. Invalid entries are first replaced by one where every function and its derivative are
# finite: a NaN there would pass the mask in a derivative, as 0 times NaN.

_INSIDE = {"acosh": 2}


def _elementwise(primitive: Primitive) -> None:
    inside = _INSIDE.get(primitive.name, 0.5)

    @register(primitive)
    def _(*operands: Masked | ArrayLike, **params: Any) -> Any:
        if primitive is lax.div_p:
            refuse_mean(*operands)
        shape = jnp.broadcast_shapes(*map(jnp.shape, map(value_of, operands)))
        mask = jnp.ones(shape, bool)
        for x in operands:
            if isinstance(x, Masked):
                mask = mask & _leading_ones(x.mask, shape)
        safe = []
        for x in operands:
            valid = mask if jnp.shape(value_of(x)) == shape else mask_of(x)
            fill = jnp.array(inside if is_inexact(value_of(x)) else 1)
            safe.append(jnp.where(valid, value_of(x), fill.astype(value_of(x).dtype)))
        out = Masked(primitive.bind(*safe, **primitive.get_bind_params(params)), mask)
        still_a_sum = primitive.name in ("convert_element_type", "neg")
        return as_sum(out, getattr(operands[0], "_entries", None) if still_a_sum else None)


def _leading_ones(mask: Any, shape: Sequence[int]) -> Any:
    return jnp.reshape(mask, (1,) * (len(shape) - jnp.ndim(mask)) + jnp.shape(mask))


for _primitive in ELEMENTWISE:
    if _primitive is not lax.select_n_p:
        _elementwise(_primitive)


@register("select_n")
def _(which: Masked | ArrayLike, *cases: Masked | ArrayLike) -> Any:
    value = lax.select_n(value_of(which), *map(value_of, cases))
    mask = lax.select_n(value_of(which), *map(mask_of, cases))
    return Masked(value, mask & mask_of(which))
