"""`dot_general` with a sparse operand: a gather, a product, and a scatter."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.primitives.labels import dense_unless
from ..._core.rules import register
from ..._core.transform import redispatch
from ..._jax.primitives import find_primitive
from .array import SparseArray


@register("dot_general")
def _sparse_dense(x: SparseArray, y: ArrayLike, *, dimension_numbers: Any, **params: Any) -> Any:
    contracted, batch = dimension_numbers
    out = _product(x, jnp.asarray(y), contracted, batch, **params)
    return NotImplemented if out is None else out


@register("dot_general")
def _dense_sparse(x: ArrayLike, y: SparseArray, *, dimension_numbers: Any, **params: Any) -> Any:
    contracted, batch = (pair[::-1] for pair in dimension_numbers)
    out = _product(y, jnp.asarray(x), contracted, batch, **params)
    if out is None:
        return NotImplemented
    first, own = len(batch[0]), y.ndim - len(contracted[0])  # axes from the batch, and from y
    return lax.transpose(out, (*range(first), *range(own, out.ndim), *range(first, own)))


@register("dot_general")
def _sparse_sparse(x: SparseArray, y: SparseArray, **params: Any) -> Any:
    smaller = min(x, y, key=lambda z: z.size)
    primitive = find_primitive("dot_general")
    x, y = dense_unless(lambda z: z is not smaller, primitive, [x, y])
    return redispatch(primitive.bind, x, y, **params)


def _product(
    x: SparseArray,
    y: jax.Array,
    contracted: Any,
    batch: Any,
    *,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Any:
    """A dot_general of x and y; None if it is none for a gather and a scatter.

    Not by bcoo_dot_general: of batches its gradient by the data makes a dense array (JAX 0.12), and
    it sums bf16 in bf16.
    """
    del precision  # products are exact, of which the sums are in f32 at least
    dtype = jnp.result_type(x.dtype, y.dtype)
    out_dtype = dtype if preferred_element_type is None else preferred_element_type
    if out_sharding is not None or jnp.dtype(out_dtype) == jnp.bool_:
        return None
    wide = jnp.promote_types(dtype, out_dtype)
    if jnp.issubdtype(wide, jnp.inexact):
        wide = jnp.promote_types(wide, jnp.float32)
    x_axes, y_axes = (*batch[0], *contracted[0]), (*batch[1], *contracted[1])
    y_free = [axis for axis in range(y.ndim) if axis not in y_axes]
    x_free = [axis for axis in range(x.ndim) if axis not in x_axes]

    entries = x.entries()
    vectors = entries.gathered(lax.transpose(y, (*y_axes, *y_free)).astype(wide), x_axes)
    products = (
        lax.expand_dims(
            entries.data.astype(wide), range(x.n_batch + 1, x.n_batch + 1 + len(y_free))
        )
        * vectors
    )
    return entries.scattered(products, (*batch[0], *x_free)).astype(out_dtype)
