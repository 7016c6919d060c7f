"""Rules for all structured matrices, in terms of the methods of `Matrix`.

The first part has rules of JAX primitives, such as `dot_general` and `mul`. The second part has
solves, determinants, inverses and traces.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.trace import redispatch
from ..._jax.primitives import split_list
from ..lazy import Lazy
from .matrix import Matrix, call_if_supported, computing_dtype, has_method

# A rule of one type takes precedence over these rules.
_register_for_all = partial(register, precedence=-1)


@dataclass(frozen=True)
class VectorLayout:
    """The conversion of a `dot_general` of a matrix and a dense array to matrix-vector products.

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
        """Return the vectors `[*lead, k, n]` in the dense operand."""
        x = lax.transpose(x, self.dense_axes)
        return x.reshape(*self.lead, math.prod(self.free), self.length)

    def to_result(self, products: Any) -> Any:
        """Return the result of the `dot_general` from the products of matrix and vectors."""
        y = products.reshape(*products.shape[:-2], *self.free, products.shape[-1])
        return lax.transpose(y, self.result_axes)

    def from_result(self, y: Any) -> Any:
        """Return the products of matrix and vectors, given the result of the `dot_general`.

        This is the inverse of `to_result`.
        """
        y = lax.transpose(y, invert_permutation(self.result_axes))
        return y.reshape(*y.shape[: len(self.lead)], math.prod(self.free), y.shape[-1])

    def from_vectors(self, vectors: Any) -> Any:
        """Return the dense operand, given its vectors `[*lead, k, n]`: the inverse of `to_vectors`.

        All leading axes of the matrix must be batch axes.
        """
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
    # The products are implicit if a leaf of the matrix is.
    to_result = partial(redispatch, lambda y: layout.to_result(y.astype(dtype)))
    return call_if_supported(to_result, products)


@_register_for_all("transpose")
def _transpose(x: Matrix, *, permutation: Any) -> Any:
    swaps_last_axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    return x.transposed() if tuple(permutation) == swaps_last_axes else NotImplemented


def _rescale(operation: Callable, x: Matrix, numbers: Any) -> Any:
    """Multiply or divide a matrix by a number, or each matrix of a batch by its own number.

    `operation` is `jnp.multiply` or `jnp.divide`. `numbers` is a number, or an array with one
    number per matrix, `[*lead, 1, 1]`. Return NotImplemented for any other array.
    """
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
    return call_if_supported(partial(redispatch, lax.add, x), negative)


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


# Linear algebra.
#
# `jnp.linalg.solve` factorizes its matrix, and passes the matrix and its factors to
# `custom_linear_solve`. So the factorization of a structured matrix returns deferred factors, and
# the rule of `custom_linear_solve` calls `Matrix.solve` instead of using them. The factors of the
# dense matrix are computed only if a program reads them.

# Products that replace a factorization have its full precision.
_full_precision = partial(jax.default_matmul_precision, "highest")


@register("lu")
def _(a: Matrix, **params: Any) -> Any:
    return Lazy.deferred("lu", [a], params) if has_method(a, "solve") else NotImplemented


@register("cholesky")
def _(a: Matrix, **params: Any) -> Any:
    return Lazy.deferred("cholesky", [a], params) if has_method(a, "solve") else NotImplemented


# JAX selects one triangle of a Cholesky factor, and may transpose it. The result is deferred, too.


@register("select_n")
def _select_triangle(mask: ArrayLike, zeros: ArrayLike, factor: Lazy) -> Any:
    if not _is_deferred_factor(factor):
        return NotImplemented
    return Lazy.deferred("select_n", [mask, zeros, factor], {})


@register("transpose")
def _transpose_factor(factor: Lazy, *, permutation: Any) -> Any:
    swaps_last_axes = (*range(factor.ndim - 2), factor.ndim - 1, factor.ndim - 2)
    if tuple(permutation) != swaps_last_axes or not _is_deferred_factor(factor):
        return NotImplemented
    return Lazy(_matrix_transpose, factor)


def _matrix_transpose(x: Any) -> Any:
    return x.mT


def _is_deferred_factor(x: Any) -> bool:
    """Return whether `x` is a `Lazy` LU or Cholesky factor, or a triangle or transpose of one.

    The rules of `lu` and `cholesky` defer these factorizations, because a structured matrix solves
    without them.
    """
    if not isinstance(x, Lazy):
        return False
    primitive = getattr(x.function, "primitive", None)
    if primitive is None:
        return x.function is _matrix_transpose and _is_deferred_factor(*x.operands)
    if primitive.name == "select_n":
        return _is_deferred_factor(x.operands[-1])
    return primitive.name in ("lu", "cholesky")


@register("custom_linear_solve", precedence=1)
def _solve(*values: ArrayLike | ImplicitArray, const_lengths: Any, jaxprs: Any) -> Any:
    consts, _, factors, _, right_sides = split_list(values, list(const_lengths))
    if not (len(right_sides) == len(consts) == 1 and isinstance(consts[0], Matrix)):
        return NotImplemented
    matrix: Any = consts[0]
    b: Any = right_sides[0]
    product = _parse_product(matrix, jaxprs.matvec)
    is_deferred = any(map(_is_deferred_factor, factors))
    if product is None or not is_deferred or isinstance(b, ImplicitArray):
        return NotImplemented
    layout, order = product
    acting = matrix.transposed() if layout.transposed else matrix
    if acting is NotImplemented:
        return NotImplemented
    with _full_precision():
        x = acting.solve(layout.from_result(b.transpose(invert_permutation(order))))
    return x if x is NotImplemented else [layout.from_vectors(x).astype(b.dtype)]


def _parse_product(matrix: Matrix, program: Any) -> tuple[VectorLayout, Sequence[int]] | None:
    """Analyze the jaxpr `program` of a solve: it multiplies `matrix` by a dense array.

    **Returns:** the layout of its `dot_general`, and the permutation that the program then applies
    to the axes of the product. None if the program has other equations or contracts other axes.
    """
    jaxpr = program.jaxpr
    dot, *rest = jaxpr.eqns
    if dot.primitive.name != "dot_general" or len(jaxpr.invars) != 2:
        return None
    matrix_first = list(dot.invars) == list(jaxpr.invars)
    if not matrix_first and list(dot.invars) != list(reversed(jaxpr.invars)):
        return None
    dimension_numbers, x = dot.params["dimension_numbers"], jaxpr.invars[1].aval
    layout = vector_layout(dimension_numbers, matrix.ndim, x.shape, matrix_first=matrix_first)
    if layout is None or len(dimension_numbers[1][0]) != len(layout.lead):
        return None
    (result,) = dot.outvars
    order = list(range(x.ndim))
    for equation in rest:
        if equation.invars != [result]:
            return None
        if equation.primitive.name == "transpose":
            order = [order[i] for i in equation.params["permutation"]]
        elif equation.primitive.name != "reduce_sum" or equation.params["axes"]:
            return None
        (result,) = equation.outvars
    return (layout, order) if jaxpr.outvars == [result] else None


def _register_linalg(function: Any, method: Callable[[Any], Any]) -> None:
    """Register a rule of a jitted function, such as `jnp.linalg.inv`, for structured matrices.

    `method` is a function that returns the result for a floating or complex `Matrix`. Integer
    matrices are materialized, because the result of `function` is floating.
    """

    @register(function)
    def _(a: Matrix) -> Any:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return NotImplemented
        with _full_precision():
            return method(a)


_register_linalg(jnp.linalg.inv, lambda a: a.inverse())
_register_linalg(jnp.linalg.slogdet, lambda a: a.slogdet())
_register_linalg(
    jnp.linalg.det,
    lambda a: call_if_supported(lambda result: result[0] * jnp.exp(result[1]), a.slogdet()),
)
_register_linalg(jnp.linalg.cholesky, lambda a: a.cholesky())


def _register_on_diagonal(function: Any, compute: Callable[[Any], Any]) -> None:
    """Register rules of a function that uses only the main diagonal, such as `jnp.trace`.

    `compute` returns the result for the entries `[..., n]` of the main diagonal.
    """

    @register(partial(function, axis1=-2, axis2=-1))
    def last_axes(a: Matrix) -> Any:
        return call_if_supported(compute, a.main_diagonal())

    @register(function)
    def _(a: Matrix) -> Any:
        # Without axis1 and axis2, JAX takes the diagonal of the first two axes.
        return last_axes(a) if a.ndim == 2 else NotImplemented


_register_on_diagonal(jnp.trace, lambda entries: entries.sum(-1))
_register_on_diagonal(jnp.diagonal, lambda entries: entries)
_register_on_diagonal(partial(jnp.diagonal, offset=0), lambda entries: entries)
