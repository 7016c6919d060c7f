"""What moves entries about does the same to the mask."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._jax.primitives import find_primitive
from ..._jax.tracing import vary_together
from .array import Masked, mask_of, value_of
from .sums import as_sum

# Layout: the same of the mask.


def _layout(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, *indices: ArrayLike, **params: Any) -> Any:
        arrays = [vary_together([jnp.asarray(v), *indices]) for v in (x.value, x.mask)]
        both = [primitive.bind(*operands, **params) for operands in arrays]
        if primitive.multiple_results:
            return [Masked(*pair) for pair in zip(*both, strict=True)]
        return as_sum(Masked(*both), getattr(x, "_entries", None))


def _of_several(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(*operands: Masked | ArrayLike, **params: Any) -> Any:
        # Indices come last, and are the same for both.
        arrays = operands if name != "dynamic_update_slice" else operands[:2]
        indices = operands[len(arrays) :]
        if any(isinstance(i, Masked) for i in indices):
            return NotImplemented
        value = primitive.bind(*map(value_of, arrays), *indices, **params)
        return Masked(value, primitive.bind(*map(mask_of, arrays), *indices, **params))


for _name in (
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "tile"),
    *("slice", "dynamic_slice", "split", "unstack"),
):
    _layout(_name)

for _name in ("concatenate", "stack", "pad", "dynamic_update_slice"):
    _of_several(_name)


@register("gather")
def _(x: Masked, indices: ArrayLike, *, fill_value: Any, **params: Any) -> Any:
    bind = find_primitive("gather").bind
    value = bind(jnp.asarray(x.value), indices, fill_value=fill_value, **params)
    return Masked(value, bind(jnp.asarray(x.mask), indices, fill_value=False, **params))


@register("scatter")
def _(
    x: Masked | ArrayLike,
    indices: ArrayLike,
    updates: Masked | ArrayLike,
    *,
    dimension_numbers: Any,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: Any,
    **params: Any,
) -> Any:
    def write(into: Any, entries: Any) -> Any:
        return lax.scatter(
            into,
            indices,
            entries,
            dimension_numbers,
            indices_are_sorted=indices_are_sorted,
            unique_indices=unique_indices,
            mode=mode,
        )

    return Masked(write(value_of(x), value_of(updates)), write(mask_of(x), mask_of(updates)))
