"""Rules of JAX primitives for all structured matrices, in terms of the methods of `Matrix`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.transform import redispatch
from .matrix import Matrix, computing_dtype, has_method

# A rule of one type takes precedence over these rules.
_register_for_all = partial(register, precedence=-1)


@dataclass(frozen=True)
class VectorLayout:
    """A `dot_general` of a matrix and a dense array, as products of the matrix with vectors.

    The matrix `[*lead, m, n]` maps vectors `[*lead, k, n]` to products `[*lead, k, m]`. The free
    axes of the dense array, which are neither contracted nor batch axes, are flattened to `k`.
    """

    transposed: bool  # whether the transpose of the matrix maps the vectors
    lead: tuple[int, ...]  # the leading sizes of the vectors: 1 for axes that are not batch axes
    free: tuple[int, ...]  # the sizes of the free axes
    length: int  # the size of the contracted axis
    dense_axes: tuple[int, ...]  # axes of the dense array, in the order (batch, free, contracted)
    result_axes: tuple[int, ...]  # for each axis of the result, its place in (lead, free, m)

    def to_vectors(self, x: Any) -> Any:
        """Return the vectors in the dense operand."""
        x = lax.transpose(x, self.dense_axes)
        return x.reshape(*self.lead, math.prod(self.free), self.length)

    def to_result(self, products: Any) -> Any:
        """Return the result of the `dot_general` from the products of matrix and vectors."""
        y = products.reshape(*products.shape[:-2], *self.free, products.shape[-1])
        return lax.transpose(y, self.result_axes)

    def from_result(self, y: Any) -> Any:
        """Invert `to_result`."""
        y = lax.transpose(y, invert_permutation(self.result_axes))
        return y.reshape(*y.shape[: len(self.lead)], math.prod(self.free), y.shape[-1])

    def from_vectors(self, vectors: Any) -> Any:
        """Invert `to_vectors`, if all leading axes of the matrix are batch axes."""
        x = vectors.reshape(*self.lead, *self.free, self.length)
        return lax.transpose(x, invert_permutation(self.dense_axes))


def invert_permutation(permutation: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that `lax.transpose` needs to undo a permutation of axes."""
    return tuple(permutation.index(i) for i in range(len(permutation)))


def vector_layout(
    dimension_numbers: Any, matrix_ndim: int, dense_shape: Sequence[int], *, matrix_first: bool
) -> VectorLayout | None:
    """Return the layout for a `dot_general` that contracts one of the last two axes of a matrix.

    Return None if the `dot_general` contracts both, none, or a leading axis of the matrix.
    """
    contracted, batch = (tuple(map(tuple, pair)) for pair in dimension_numbers)
    if not matrix_first:
        contracted, batch = contracted[::-1], batch[::-1]
    (matrix_contracted, dense_contracted), (matrix_batch, dense_batch) = contracted, batch
    leading = range(matrix_ndim - 2)
    if len(matrix_contracted) != 1 or matrix_contracted[0] in leading:
        return None
    if not set(matrix_batch) <= set(leading):
        return None
    partner = dict(zip(matrix_batch, dense_batch, strict=True))
    free = [i for i in range(len(dense_shape)) if i not in (*dense_batch, *dense_contracted)]
    # The axes of the products, and their order in the result of the dot_general.
    axes = [("lead", i) for i in leading] + [("free", i) for i in free] + [("other", 0)]
    from_matrix = [("lead", i) for i in leading if i not in partner] + [("other", 0)]
    from_dense = [("free", i) for i in free]
    rest = from_matrix + from_dense if matrix_first else from_dense + from_matrix
    return VectorLayout(
        transposed=matrix_contracted[0] == matrix_ndim - 2,
        lead=tuple(dense_shape[partner[i]] if i in partner else 1 for i in leading),
        free=tuple(dense_shape[i] for i in free),
        length=dense_shape[dense_contracted[0]],
        dense_axes=(*(partner[i] for i in leading if i in partner), *free, *dense_contracted),
        result_axes=tuple(map(axes.index, [("lead", i) for i in matrix_batch] + rest)),
    )


@_register_for_all("dot_general")
def _dot_general(
    x: Matrix | ArrayLike,
    y: Matrix | ArrayLike,
    *,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Any:
    matrix_first = isinstance(x, Matrix)
    w: Any = x if matrix_first else y
    other: Any = y if matrix_first else x
    if isinstance(other, Matrix) or not has_method(w, "matvec") or out_sharding is not None:
        return NotImplemented
    dense = jnp.asarray(other)
    layout = vector_layout(dimension_numbers, w.ndim, dense.shape, matrix_first=matrix_first)
    acting = w.transposed() if layout and layout.transposed else w
    if layout is None or acting is NotImplemented:
        return NotImplemented
    dtype = preferred_element_type or jnp.result_type(w.dtype, other)
    if preferred_element_type is not None:
        dense = dense.astype(jnp.promote_types(dense.dtype, preferred_element_type))
    products = acting.matvec(layout.to_vectors(dense), precision=precision)
    if products is NotImplemented:
        return NotImplemented
    # The products are implicit if a leaf of the matrix is.
    return redispatch(lambda y: layout.to_result(y.astype(dtype)), products)


@_register_for_all("transpose")
def _transpose(x: Matrix, *, permutation: Any) -> Any:
    swaps_last_axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return x.transposed() if tuple(permutation) == swaps_last_axes else NotImplemented


def _rescale(operation: Callable, x: Matrix, numbers: Any) -> Any:
    """Multiply or divide a matrix by a number, or each matrix of a batch by its own number."""
    shape = jnp.shape(numbers)
    if shape:
        is_one_per_matrix = len(shape) == x.ndim and shape[-2:] == (1, 1)
        if not is_one_per_matrix or jnp.broadcast_shapes(shape, x.shape) != x.shape:
            return NotImplemented

    def scale(leaf: Any) -> Any:
        number = numbers
        if shape:
            number = jnp.reshape(numbers, shape[:-2] + (1,) * (leaf.ndim - len(shape) + 2))
        return redispatch(operation, leaf, number)

    return x.rescaled(scale)


@_register_for_all("mul")
def _mul(x: Matrix, y: ArrayLike, **params: Any) -> Any:
    return _rescale(jnp.multiply, x, y)


@_register_for_all("div")
def _div(x: Matrix, y: ArrayLike, **params: Any) -> Any:
    # Integer division truncates, so it is not linear.
    is_linear = jnp.issubdtype(x.dtype, jnp.inexact)
    return _rescale(jnp.divide, x, y) if is_linear else NotImplemented


@_register_for_all("neg")
def _neg(x: Matrix, **params: Any) -> Any:
    return x.rescaled(partial(redispatch, jnp.negative))


@_register_for_all("sub")
def _sub(x: Matrix, y: Matrix, **params: Any) -> Any:
    negative = y.rescaled(partial(redispatch, jnp.negative))
    return negative if negative is NotImplemented else redispatch(lax.add, x, negative)


@_register_for_all("add_any")
def _add_any(x: Matrix, y: Matrix) -> Any:
    return redispatch(lax.add, x, y)


@_register_for_all("convert_element_type")
def _convert(x: Matrix, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Any:
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (x.dtype, new_dtype))
    if not are_floats or weak_type or sharding is not None:
        return NotImplemented
    return x.converted(new_dtype)


@_register_for_all("reduce_sum")
def _sum(x: Matrix, *, axes: Any, out_sharding: Any) -> Any:
    """Sum over one or both of the last two axes by a product with a vector of ones."""
    matrix_axes = [axis for axis in axes if axis >= x.ndim - 2]
    if not matrix_axes or not has_method(x, "matvec") or out_sharding is not None:
        return NotImplemented
    acting = x if x.ndim - 1 in matrix_axes else x.transposed()
    if acting is NotImplemented:
        return NotImplemented
    ones = jnp.ones((*x.shape[:-2], 1, acting.shape[-1]), computing_dtype(x.dtype))
    sums = acting.matvec(ones, precision=lax.Precision.HIGHEST)  # a sum has full precision
    if sums is NotImplemented:
        return NotImplemented
    sums = sums[..., 0, :]
    if len(matrix_axes) == 2:
        sums = sums.sum(-1)
    return sums.sum([axis for axis in axes if axis not in matrix_axes]).astype(x.dtype)
