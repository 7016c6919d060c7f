"""Rules for elementwise primitives on sparse arrays."""

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
from ..zero_preserving import LINEAR, NONLINEAR
from .array import SparseArray
from .axes import arranged, broadcast


def _of_entries(x: SparseArray, function: Callable, *others: Any) -> SparseArray:
    """x with other values of its entries: a function of them, and of others beside them.

    Padding goes through where the function is smooth, so that its derivative there is no NaN.
    """
    entries = x.entries()
    only = lambda values, instead: jnp.where(entries.is_entry, values, instead)
    smooth = jnp.asarray(0.5).astype(x.dtype)
    values = function(only(entries.data, smooth), *(only(y, jnp.ones_like(y)) for y in others))
    return SparseArray(only(values, jnp.zeros_like(values)), *x.pattern)


def _register_elementwise(name: str, *, linear: bool) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: SparseArray, **params: Any) -> SparseArray:
        x = x if linear else x.sum_duplicates()
        return _of_entries(x, lambda values: primitive.bind(values, **params))


for _name in LINEAR:
    _register_elementwise(_name, linear=True)
for _name in NONLINEAR:
    _register_elementwise(_name, linear=False)


@register("integer_pow")
def _integer_pow(x: SparseArray, *, y: int) -> Any:
    if y <= 0:
        return NotImplemented
    return _of_entries(x.sum_duplicates(), lambda values: lax.integer_pow(values, y))


@register("convert_element_type")
def _convert(x: SparseArray, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Any:
    if weak_type or sharding is not None or jnp.issubdtype(new_dtype, jnp.bool_):
        return NotImplemented
    floating = jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(new_dtype, jnp.floating)
    exact = floating and jnp.promote_types(x.dtype, new_dtype) == new_dtype
    x = x if exact else x.sum_duplicates()
    return _of_entries(x, lambda values: lax.convert_element_type(values, new_dtype))


def _by_dense(x: Any, y: Any, operation: Callable) -> Any:
    """A product or quotient, which is linear in x: y matters where x has an entry."""
    y = jnp.asarray(y)
    if not y.ndim:
        return _of_entries(x, operation, y)
    x = broadcast(x, jnp.broadcast_shapes(x.shape, y.shape))
    if not isinstance(x, SparseArray):
        return NotImplemented
    # Primitives broadcast axes of 1, as vmap makes them of a batch of scalars.
    alone = [axis for axis in range(x.ndim) if y.shape[axis] != x.shape[axis]]
    axes = [axis for axis in range(x.ndim) if axis not in alone]
    factors = x.entries().gathered(lax.squeeze(y, alone), axes)
    return _of_entries(x, operation, factors)


def _register_by_dense(name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: SparseArray, y: ArrayLike, **params: Any) -> Any:
        # Of integers, a quotient is truncated, and so not linear.
        x = x if name == "mul" or jnp.issubdtype(x.dtype, jnp.inexact) else x.sum_duplicates()
        return _by_dense(x, y, lambda *factors: primitive.bind(*factors, **params))


_register_by_dense("mul")
_register_by_dense("div")


@register("div")
def _div_sparse(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    div = find_primitive("div")
    return redispatch(div.bind, x, *make_dense(div, [y]), **params)


@register("mul")
def _mul_sparse(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    if (both := _alike(x.sum_duplicates(), y.sum_duplicates())) is None:
        return NotImplemented
    x, y = both
    factors = _partners(x, y)
    return _of_entries(x, lambda *both: find_primitive("mul").bind(*both, **params), factors)


def _alike(x: SparseArray, y: SparseArray) -> list[SparseArray] | None:
    """Return both in the shape that they broadcast to, with the same axes as batch axes.

    Return None if one of them is not sparse in that shape.
    """
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    both = [z for z in (broadcast(z, shape) for z in (x, y)) if isinstance(z, SparseArray)]
    if len(both) < 2:
        return None
    n_batch = min(z.n_batch for z in both)
    return [arranged(z, range(n_batch), range(n_batch, z.ndim)) for z in both]


def _partners(x: SparseArray, y: SparseArray) -> jax.Array:
    """What y has where x has its entries, by a sort of both: equal indices come to be neighbours.

    Each index is to be there once in x and once in y.
    """
    along = x.n_batch
    of_x, of_y = x.entries(), y.entries()
    # Sparse axes are enough: batches are sorted apart. The sort is stable, and x comes first.
    columns = [
        jnp.concatenate(pair, along)
        for pair in zip(of_x.columns[along:], of_y.columns[along:], strict=True)
    ]
    data = jnp.concatenate([jnp.zeros_like(of_x.data), of_y.data], along)
    order = lax.broadcasted_iota(jnp.int32, data.shape, along)
    *columns, order, data = lax.sort(
        (*columns, order, data), dimension=along, num_keys=len(columns), is_stable=True
    )
    next_of = lambda z: jnp.roll(z, -1, along)  # the one after the last is of x, or alone
    equal = jnp.stack([z == next_of(z) for z in columns]).all(0)
    found = jnp.where(equal, next_of(data), 0)
    _, found = lax.sort((order, found), dimension=along, num_keys=1)
    return lax.slice_in_dim(found, 0, x.nse, axis=along)


def _sum(x: SparseArray, y: SparseArray) -> Any:
    if (both := _alike(x, y)) is None:
        return NotImplemented
    x, y = both
    data = jnp.concatenate([x.data, y.data], -1)
    return SparseArray(data, jnp.concatenate([x.indices, y.indices], -2), x.sparse_shape)


def _any_given(params: dict[str, Any]) -> bool:
    return any(value is not None for value in params.values())


@register(["add", "add_any"])
def _add(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    return NotImplemented if _any_given(params) else _sum(x, y)


@register("sub")
def _sub(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    return NotImplemented if _any_given(params) else _sum(x, _of_entries(y, lax.neg))
