"""Rules of sparse arrays for elementwise primitives."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._core.value import make_dense
from ..._jax.primitives import find_primitive
from ..elementwise import LINEAR, NONLINEAR, register_unary
from .array import SparseArray
from .axes import broadcast, rearrange
from .nm_sparse import NMSparse

Sparse = SparseArray | NMSparse


def _map_entries(x: Any, function: Callable, *others: Any) -> Any:
    """Replace the stored entries of `x` by `function(entries, *others)`.

    `others` are numbers, or arrays with one value per stored entry.
    """
    if isinstance(x, NMSparse):
        return dataclasses.replace(x, values=redispatch(function, x.values, *others))
    # In place of padding, compute at 0.5 and 1, where derivatives are finite. Otherwise 0 * NaN
    # could make derivatives of other entries NaN.
    entries = x.entries()
    replace_padding = lambda values, fill: jnp.where(entries.is_entry, values, fill)
    data = replace_padding(entries.data, jnp.asarray(0.5).astype(x.dtype))
    values = function(data, *(replace_padding(y, jnp.ones_like(y)) for y in others))
    return SparseArray(replace_padding(values, jnp.zeros_like(values)), *x.pattern)


def _sum_duplicates(x: Any) -> Any:
    return x.sum_duplicates() if isinstance(x, SparseArray) else x


for _name in LINEAR:
    register_unary(Sparse, _name, _map_entries)
for _name in NONLINEAR:
    register_unary(Sparse, _name, lambda x, function: _map_entries(_sum_duplicates(x), function))


@register("integer_pow")
def _(x: Sparse, *, y: int) -> Any:
    if y <= 0:
        return NotImplemented
    return _map_entries(_sum_duplicates(x), lambda values: lax.integer_pow(values, y))


@register("convert_element_type")
def _(x: Sparse, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Any:
    if weak_type or sharding is not None:
        return NotImplemented
    if isinstance(x, SparseArray):
        if jnp.issubdtype(new_dtype, jnp.bool_):
            return NotImplemented
        floating = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(new_dtype, jnp.floating)
        is_exact = floating and jnp.promote_types(x.dtype, new_dtype) == new_dtype
        x = x if is_exact else x.sum_duplicates()
    return _map_entries(x, lambda values: lax.convert_element_type(values, new_dtype))


def _register_by_dense(name: str) -> None:
    """Register rules for products with a dense array ("mul"), or quotients by it ("div")."""
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: SparseArray, y: ArrayLike, **params: Any) -> Any:
        y = jnp.asarray(y)
        if name == "div" and not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.sum_duplicates()  # a quotient of integers is truncated, so it is not linear
        operation = lambda *factors: primitive.bind(*factors, **params)
        if not y.ndim:
            return _map_entries(x, operation, y)
        broadcasted = broadcast(x, jnp.broadcast_shapes(x.shape, y.shape))
        if not isinstance(broadcasted, SparseArray):
            return NotImplemented
        # y can have axes of size 1, for example in a vmap over scalars.
        shape = broadcasted.shape
        kept = [axis for axis in range(len(shape)) if y.shape[axis] == shape[axis]]
        squeezed = lax.squeeze(y, [axis for axis in range(y.ndim) if axis not in kept])
        return _map_entries(broadcasted, operation, broadcasted.entries().gather(squeezed, kept))

    @register(primitive)
    def _(x: NMSparse, y: ArrayLike, **params: Any) -> Any:
        y = jnp.asarray(y)
        if jnp.broadcast_shapes(x.shape, y.shape) != x.shape:
            return NotImplemented
        is_number_per_matrix = set(y.shape[-2:]) <= {1}
        factors = y if is_number_per_matrix else x.kept(jnp.broadcast_to(y, x.shape))
        return _map_entries(x, lambda *factors: primitive.bind(*factors, **params), factors)


for _name in ("mul", "div"):
    _register_by_dense(_name)


@register("div")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    div = find_primitive("div")
    return redispatch(div.bind, x, *make_dense(div, [y]), **params)


@register("mul")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    pair = _align(x.sum_duplicates(), y.sum_duplicates())
    if pair is None:
        return NotImplemented
    multiply = lambda *factors: find_primitive("mul").bind(*factors, **params)
    return _map_entries(pair[0], multiply, _values_at(*pair))


def _align(x: SparseArray, y: SparseArray) -> list[Any] | None:
    """Broadcast `x` and `y` to one shape, with the same axes as batch axes.

    Return None if `broadcast` makes one of them dense.
    """
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    pair = [z for z in (broadcast(z, shape) for z in (x, y)) if isinstance(z, SparseArray)]
    if len(pair) < 2:
        return None
    n_batch = min(z.n_batch for z in pair)
    return [rearrange(z, range(n_batch), range(n_batch, z.ndim)) for z in pair]


def _values_at(x: SparseArray, y: SparseArray) -> jax.Array:
    """Return the values of `y` at the indices of `x`, and 0 where `y` stores no entry.

    `x` and `y` have no duplicates. A stable sort of the entries of both by their index places the
    entry of `y` directly after the entry of `x` with the same index.
    """
    axis = x.n_batch
    x_entries, y_entries = x.entries(), y.entries()
    columns = [
        jnp.concatenate(pair, axis)
        for pair in zip(x_entries.columns[axis:], y_entries.columns[axis:], strict=True)
    ]
    data = jnp.concatenate([jnp.zeros_like(x_entries.data), y_entries.data], axis)
    order = lax.broadcasted_iota(jnp.int32, data.shape, axis)
    *columns, order, data = lax.sort(
        (*columns, order, data), dimension=axis, num_keys=len(columns), is_stable=True
    )
    # The roll appends the first entry, which is of x or differs from the last.
    next_entry = lambda z: jnp.roll(z, -1, axis)
    is_equal = jnp.stack([z == next_entry(z) for z in columns]).all(0)
    values = jnp.where(is_equal, next_entry(data), 0)
    _, values = lax.sort((order, values), dimension=axis, num_keys=1)
    return lax.slice_in_dim(values, 0, x.nse, axis=axis)


@register(["add", "add_any"])
def _add(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    pair = _align(x, y)
    if pair is None or any(value is not None for value in params.values()):
        return NotImplemented
    x, y = pair
    data = jnp.concatenate([x.data, y.data], -1)
    return SparseArray(data, jnp.concatenate([x.indices, y.indices], -2), x.sparse_shape)


@register("sub")
def _(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    return _add(x, _map_entries(y, lax.neg), **params)
