"""Reductions, cumulative functions, products and sorts, of the valid entries."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._jax.primitives import find_primitive
from .array import Masked, filled_with, mask_of
from .sums import as_sum

# Reductions, and cumulative ones: invalid entries are replaced by what changes no result.


def _zero(dtype: Any) -> Any:
    return 0


def _one(dtype: Any) -> Any:
    return 1


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


def _all_ones(dtype: Any) -> Any:
    return True if jnp.issubdtype(dtype, jnp.bool_) else ~np.zeros((), dtype)


def _reduction(name: str, neutral: Callable[[Any], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, *, axes: Any, **params: Any) -> Any:
        filled = x.filled(neutral(x.dtype))
        out = Masked(primitive.bind(filled, axes=axes, **params), jnp.any(x.mask, axes))
        count = math.prod(x.shape[axis] for axis in axes) * getattr(x, "_entries", 1)
        return as_sum(out, count) if name == "reduce_sum" and count not in (0, 1) else out


def _cumulative(name: str, neutral: Callable[[Any], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, **params: Any) -> Any:
        return Masked(primitive.bind(x.filled(neutral(x.dtype)), **params), x.mask)


def _position(name: str, neutral: Callable[[Any], Any]) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: Masked, *, axes: Any, index_dtype: Any) -> Any:
        (axis,) = axes
        find = lambda of: primitive.bind(of, axes=axes, index_dtype=index_dtype)
        found = find(x.filled(neutral(x.dtype)))
        # An invalid one is found where no valid entry is better than its fill: then the first.
        index = jnp.expand_dims(found, axis)
        is_valid = jnp.take_along_axis(jnp.asarray(x.mask), index, axis).squeeze(axis)
        first = lax.argmax(jnp.asarray(x.mask), axis, index_dtype)
        return Masked(jnp.where(is_valid, found, first), jnp.any(x.mask, axis))


for _name, _neutral in {
    "reduce_sum": _zero,
    "reduce_prod": _one,
    "reduce_max": _lowest,
    "reduce_min": _highest,
    "reduce_and": _all_ones,
    "reduce_or": _zero,
    "reduce_xor": _zero,
}.items():
    _reduction(_name, _neutral)

for _name, _neutral in {
    "cumsum": _zero,
    "cumprod": _one,
    "cummax": _lowest,
    "cummin": _highest,
    "cumlogsumexp": _lowest,
}.items():
    _cumulative(_name, _neutral)

_position("argmax", _lowest)
_position("argmin", _highest)


@register("dot_general")
def _(
    x: Masked | ArrayLike,
    y: Masked | ArrayLike,
    *,
    dimension_numbers: Any,
    out_sharding: Any,
    **params: Any,
) -> Any:
    def dot(x: Any, y: Any, **params: Any) -> Any:
        return lax.dot_general(x, y, dimension_numbers, out_sharding=out_sharding, **params)

    count = dot(*(mask_of(v).astype(jnp.float32) for v in (x, y)))
    return Masked(dot(filled_with(x, 0), filled_with(y, 0), **params), count > 0)


@register("sort")
def _(*operands: Masked | ArrayLike, num_keys: int, **params: Any) -> list[Any]:
    # An invalid key is greater than any other: whether it is so is a key before it.
    keys: list[Any] = []
    rest: list[Any] = []
    for i, x in enumerate(operands):
        into = keys if i < num_keys else rest
        if isinstance(x, Masked):
            into.append(~mask_of(x))
        into.append(filled_with(x, 0))
    primitive = find_primitive("sort")
    out = iter(primitive.bind(*keys, *rest, num_keys=len(keys), **params))
    results: list[Any] = []
    for x in operands:
        invalid = next(out) if isinstance(x, Masked) else None
        results.append(next(out) if invalid is None else Masked(value=next(out), mask=~invalid))
    return results
