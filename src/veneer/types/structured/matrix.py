"""`Matrix`: the base of structured matrices, and the rules that they have in common.

A structured matrix is known by what it does to vectors. A type says that in a few methods, of which
`matvec` and `transposed` are enough for matmuls; the rules here turn primitives into calls of them.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.transform import redispatch
from ..._core.value import Value
from .by_vectors import accumulated, by_vectors
from .half_precision import computing_dtype


class Matrix(ImplicitArray, abstract=True):
    """A structured matrix `[*lead, m, n]`.

    A type implements the methods that its structure supports. If a method returns `NotImplemented`,
    as all of them do here, the operation materializes the matrix, and reports show it.
    """

    #: Which triangle or how many bands there are is a matter of storage: the dense matrix says all.
    metadata_is_meaning: ClassVar[bool] = False

    #: The leaves by which the matrix is multiplied if all of them are.
    linear_in: ClassVar[tuple[str, ...]] = ()

    def matvec(self, x: Any, *, precision: Any = None) -> Any:
        """Multiply the matrix `[*lead, m, n]` by `k` vectors.

        **Arguments:**

        - `x`: the vectors, a dense array `[*lead, k, n]` with one per row. Leading axes of size 1
          are broadcast.
        - `precision`: the precision of dense products, as in `jax.numpy.matmul`.

        **Returns:** the products `[*lead, k, m]`, one per row. For 16-bit floats, the result can be
        float32.
        """
        del x, precision
        return NotImplemented

    def transposed(self) -> Any:
        """Return the transpose, a structured matrix `[*lead, n, m]`."""
        return NotImplemented

    def rescaled(self, scale: Callable[[Any], Any]) -> Any:
        """Multiply the matrix by a number, or each matrix of a batch by its own number.

        **Arguments:**

        - `scale`: a function that takes a field `[*lead, ...]` and multiplies it by the number. In
          a batch, it multiplies the entries of each matrix by the number for that matrix. It is
          called with the fields that must be multiplied, and not with the dense matrix.
        """
        if not self.linear_in:
            return NotImplemented
        return dataclasses.replace(
            self, **{name: scale(getattr(self, name)) for name in self.linear_in}
        )

    def converted(self, dtype: Any) -> Any:
        """Convert the matrix to another floating dtype."""

        def cast(x: Any) -> Any:
            floating = jnp.issubdtype(x.dtype, jnp.inexact)
            return redispatch(lambda x: x.astype(dtype), x) if floating else x

        below = lambda x: x is not self and isinstance(x, Value)
        return jax.tree.map(cast, self, is_leaf=below)

    def solve(self, b: Any) -> Any:
        """Solve `self @ x = v` for each row `v` of `b`. The matrix must be square.

        **Arguments:**

        - `b`: the right-hand sides `[*lead, k, n]`, one per row.

        **Returns:** the solutions `[*lead, k, n]`, one per row.
        """
        del b
        return NotImplemented

    def inverse(self) -> Any:
        """Return the inverse as a structured matrix."""
        return NotImplemented

    def cholesky(self) -> Any:
        """Return the lower Cholesky factor `L`, with `L @ L.T = self`, as a structured matrix."""
        return NotImplemented

    def slogdet(self) -> Any:
        """Return the sign of the determinant and the log of its magnitude, as arrays `[*lead]`."""
        return NotImplemented

    def main_diagonal(self) -> Any:
        """Return the main diagonal, an array `[*lead, min(m, n)]`."""
        return NotImplemented


def overrides(matrix: Matrix, method: str) -> bool:
    """Whether a type has a way of its own to do something."""
    return getattr(type(matrix), method) is not getattr(Matrix, method)


# The rules of all matrices yield to those of a type.
_shared = partial(register, precedence=-1)


def _times(
    matrix: Matrix,
    x: Any,
    *,
    matrix_first: bool,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Any:
    found = by_vectors(dimension_numbers, matrix.ndim, jnp.ndim(x), matrix_first=matrix_first)
    if found is None or out_sharding is not None or not overrides(matrix, "matvec"):
        return NotImplemented
    acting = matrix.transposed() if found.transposed else matrix
    if acting is NotImplemented:
        return NotImplemented
    dtype = preferred_element_type or jnp.result_type(matrix.dtype, x)
    wide = accumulated(jnp.asarray(x), jnp.result_type(x), preferred_element_type)
    y = acting.matvec(found.vectors(wide), precision=precision)
    if y is NotImplemented:
        return y
    return redispatch(lambda y: found.result(y.astype(dtype), x), y)  # leaves may be implicit


@_shared("dot_general")
def _matrix_dense(w: Matrix, x: ArrayLike, **params: Any) -> Any:
    return _times(w, x, matrix_first=True, **params)


@_shared("dot_general")
def _dense_matrix(x: ArrayLike, w: Matrix, **params: Any) -> Any:
    return _times(w, x, matrix_first=False, **params)


def _of_precision(precision: Any) -> AbstractContextManager | None:
    """The context in which dense products have a precision, as dot_general has it, if it has one.

    None for two that differ, and for an algorithm.
    """
    if precision is None:
        return nullcontext()
    if not isinstance(precision, tuple) or precision[0] != precision[1]:
        return None
    return jax.default_matmul_precision(str(precision[0]).lower())


def product(rule: Callable, *, precedence: int = 0) -> Callable:
    """Registers what `x @ y` is for two types of matrices, which annotate the operands.

    The rule is called for `[*lead, m, k]` and `[*lead, k, n]`, whichever axes a dot_general
    contracts; it may return NotImplemented.
    """

    @register("dot_general", precedence=precedence)
    @wraps(rule)
    def dot_general(
        x: Any,
        y: Any,
        *,
        dimension_numbers: Any,
        precision: Any,
        preferred_element_type: Any,
        out_sharding: Any,
    ) -> Any:
        (x_contracted, y_contracted), batch = dimension_numbers
        lead = tuple(range(x.ndim - 2))
        plain = tuple(map(tuple, batch)) == (lead, lead) and x.ndim == y.ndim
        axes = (*x_contracted, *y_contracted)
        if not plain or len(axes) != 2 or min(axes) < len(lead) or out_sharding is not None:
            return NotImplemented
        left = x if axes[0] == x.ndim - 1 else x.transposed()
        right = y if axes[1] == y.ndim - 2 else y.transposed()
        if left is NotImplemented or right is NotImplemented:
            return NotImplemented
        matmuls = _of_precision(precision)
        if matmuls is None:
            return NotImplemented
        if type(left) is not type(x) or type(right) is not type(y):  # a rule of other types
            of_preferred = {"preferred_element_type": preferred_element_type}
            return redispatch(partial(jnp.matmul, precision=precision, **of_preferred), left, right)
        with matmuls:
            out = rule(*(_widened(one, preferred_element_type) for one in (left, right)))
        if out is NotImplemented or preferred_element_type in (None, out.dtype):
            return out
        return out.converted(preferred_element_type)

    return rule


def entrywise(name: str) -> Callable:
    """Register a rule of an elementwise primitive for two matrix types.

    The annotations of the rule's operands select the types. The rule is called for operands of the
    same shape: leading axes of size 1 are broadcast before. If the last two axes differ, JAX
    broadcasts them: a 1 x 1 matrix then acts as a matrix of equal entries, whatever its type, so
    the result is NotImplemented.
    """

    def decorate(rule: Callable) -> Callable:
        @register(name)
        @wraps(rule)
        def broadcast_first(x: Any, y: Any, **params: Any) -> Any:
            if x.shape[-2:] != y.shape[-2:]:
                return NotImplemented
            shape = jnp.broadcast_shapes(x.shape, y.shape)
            broadcast = lambda z: redispatch(lambda z: jnp.broadcast_to(z, shape), z)
            both = [z if z.shape == shape else broadcast(z) for z in (x, y)]
            if not all(isinstance(z, Matrix) for z in both):
                return NotImplemented
            return rule(*both, **params)

        return rule

    return decorate


def _widened(x: Matrix, preferred: Any) -> Matrix:
    """A factor in the dtype that a product is to have, lest that be rounded to a narrower one."""
    if preferred is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    dtype = jnp.promote_types(x.dtype, preferred)
    return x if dtype == x.dtype else x.converted(dtype)


@_shared("transpose")
def _transpose(x: Matrix, *, permutation: Any) -> Any:
    lead = tuple(range(x.ndim - 2))
    if tuple(permutation) != (*lead, x.ndim - 1, x.ndim - 2):
        return NotImplemented
    return x.transposed()


def _rescaled(operation: Callable, x: Matrix, by: Any) -> Any:
    shape = jnp.shape(by)
    if shape:  # a number for each matrix
        numbers = len(shape) == x.ndim and shape[-2:] == (1, 1)
        if not numbers or jnp.broadcast_shapes(shape, x.shape) != x.shape:
            return NotImplemented

    def scale(leaf: Any) -> Any:
        own = jnp.reshape(by, shape[:-2] + (1,) * (leaf.ndim - len(shape) + 2)) if shape else by
        return redispatch(operation, leaf, own)

    return x.rescaled(scale)


@_shared("mul")
def _matrix_number(x: Matrix, y: ArrayLike, **params: Any) -> Any:
    del params
    return _rescaled(jnp.multiply, x, y)


@_shared("div")
def _over_number(x: Matrix, y: ArrayLike, **params: Any) -> Any:
    del params
    if not jnp.issubdtype(x.dtype, jnp.inexact):  # integers are truncated, which is not linear
        return NotImplemented
    return _rescaled(jnp.divide, x, y)


@_shared("neg")
def _neg(x: Matrix, **params: Any) -> Any:
    del params
    return x.rescaled(partial(redispatch, jnp.negative))


@_shared("sub")
def _sub(x: Matrix, y: Matrix, **params: Any) -> Any:
    del params
    negative = y.rescaled(partial(redispatch, jnp.negative))
    return negative if negative is NotImplemented else redispatch(lax.add, x, negative)


@_shared("add_any")
def _add_any(x: Matrix, y: Matrix) -> Any:
    return redispatch(lax.add, x, y)


@_shared("convert_element_type")
def _convert(x: Matrix, *, new_dtype: Any, weak_type: bool, sharding: Any) -> Any:
    both_floating = jnp.issubdtype(new_dtype, jnp.floating) and jnp.issubdtype(
        x.dtype, jnp.floating
    )
    if not both_floating or weak_type or sharding is not None:
        return NotImplemented
    return x.converted(new_dtype)


@_shared("reduce_sum")
def _sum(x: Matrix, *, axes: Any, out_sharding: Any) -> Any:
    """Sums over an axis of the matrix, or over both: products with a vector of ones."""
    within = [axis for axis in axes if axis >= x.ndim - 2]
    if not within or not overrides(x, "matvec") or out_sharding is not None:
        return NotImplemented
    acting = x if x.ndim - 1 in within else x.transposed()
    if acting is NotImplemented:
        return NotImplemented
    ones = jnp.ones((*x.shape[:-2], 1, acting.shape[-1]), computing_dtype(x.dtype))
    sums = acting.matvec(ones, precision=lax.Precision.HIGHEST)  # as that of a sum
    if sums is NotImplemented:
        return NotImplemented
    sums = sums[..., 0, :].sum(-1) if len(within) == 2 else sums[..., 0, :]
    return sums.sum([axis for axis in axes if axis not in within]).astype(x.dtype)
