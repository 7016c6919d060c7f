"""`Matrix`: the base class of structured matrices, and decorators that register rules of its types.

A type implements methods of `Matrix`, such as `matvec`. The rules in the module `rules` compute
JAX primitives and functions of `jnp.linalg` with these methods.
"""

import dataclasses
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._core.trace import redispatch
from ..._core.value import Value
from ..elementwise import register_zero_preserving


class Matrix(ImplicitArray, abstract=True):
    """A structured matrix `[*lead, m, n]`.

    This is the base class. A type implements the methods that its structure supports. The methods
    of this class return `NotImplemented`: then the operation that called the method materializes
    the matrix, and reports show this.
    """

    #: Loops and branches that change static fields, such as a number of bands, materialize it.
    metadata_is_meaning: ClassVar[bool] = False

    #: The fields to multiply by a number in order to multiply the matrix by this number.
    linear_in: ClassVar[tuple[str, ...]] = ()

    #: Whether all matrices of the type are diagonal.
    is_diagonal: ClassVar[bool] = False

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
        """Apply `scale` to the fields in `linear_in`, to multiply the matrix by a number.

        In a batch, each matrix can be multiplied by its own number.

        **Arguments:**

        - `scale`: a function that multiplies a field `[*lead, ...]` by the number or numbers.
        """
        if not self.linear_in:
            return NotImplemented
        return dataclasses.replace(
            self, **{name: scale(getattr(self, name)) for name in self.linear_in}
        )

    def converted(self, dtype: Any) -> Any:
        """Return the matrix with its floating and complex fields converted to `dtype`."""

        def cast(x: Any) -> Any:
            is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            return redispatch(lambda x: x.astype(dtype), x) if is_inexact else x

        is_part = lambda x: x is not self and isinstance(x, Value)
        return jax.tree.map(cast, self, is_leaf=is_part)

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


def has_method(matrix: Matrix, name: str) -> bool:
    """Return whether the class of a matrix implements an optional method of `Matrix`."""
    return getattr(type(matrix), name) is not getattr(Matrix, name)


def computing_dtype(*operands: Any) -> Any:
    """Return the dtype that operands promote to, or float32 for 8-bit and 16-bit floats.

    XLA accumulates the matmuls of narrow floats in float32, too.
    """
    dtype = jnp.result_type(*operands)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype("float32") if is_narrow else dtype


def multiply_vectors(w: Any, x: Any, *, precision: Any = None) -> Any:
    """Multiply a dense or implicit matrix `w` `[*lead, m, n]` by the rows of `x` `[*lead, k, n]`.

    Return the products `[*lead, k, m]`, one per row. For 8-bit and 16-bit floats, they are float32.
    """
    dtype = computing_dtype(w.dtype, x.dtype)

    def multiply(w: Any, x: Any) -> Any:
        return jnp.matmul(x, w.mT, precision=precision, preferred_element_type=dtype)

    return redispatch(multiply, w, x)


def call_if_supported(function: Callable[..., Any], *values: Any) -> Any:
    """Return `function(*values)`, or NotImplemented if one of `values` is NotImplemented."""
    is_missing = any(value is NotImplemented for value in values)
    return NotImplemented if is_missing else function(*values)


def solve_implicitly(matrix: Matrix, b: Any, solve: Callable[[Any, Any], Any]) -> Any:
    """Solve `matrix @ x = v` for each row `v` of `b`, without differentiating the algorithm.

    The derivatives of the solution solve with the same matrix or its transpose instead.

    **Arguments:**

    - `matrix`, `b`: the matrix and the right-hand sides, as in `Matrix.solve`.
    - `solve`: the algorithm, a function of a matrix of the same type and of right-hand sides.
    """
    a = jax.tree.map(jax.lax.stop_gradient, matrix)
    return jax.lax.custom_linear_solve(
        matrix.matvec, b, lambda _, b: solve(a, b), lambda _, b: solve(a.transposed(), b)
    )


def is_square(w: Any) -> bool:
    """Return whether the last two axes have the same size."""
    return w.shape[-2] == w.shape[-1]


def slogdet_of_diagonal(entries: Any) -> Any:
    """Return the `slogdet` of a matrix from its eigenvalues or diagonal `[*lead, n]`."""
    return jnp.sign(entries).prod(-1), jnp.log(jnp.abs(entries)).sum(-1)


def matmul_rule(rule: Callable, *, precedence: int = 0) -> Callable:
    """Register a rule that multiplies two matrix types, which annotate its operands.

    The rule takes `x` `[*lead, m, k]` and `y` `[*lead, k, n]`, and returns `x @ y` or
    NotImplemented. If a `dot_general` contracts other axes, it transposes the operands first.
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
        is_matmul = tuple(map(tuple, batch)) == (lead, lead) and x.ndim == y.ndim
        axes = (*x_contracted, *y_contracted)
        if not is_matmul or len(axes) != 2 or min(axes) < len(lead) or out_sharding is not None:
            return NotImplemented
        left = x if axes[0] == x.ndim - 1 else x.transposed()
        right = y if axes[1] == y.ndim - 2 else y.transposed()
        if left is NotImplemented or right is NotImplemented:
            return NotImplemented
        matmul_precision = _matmul_precision(precision)
        if matmul_precision is None:
            return NotImplemented
        dtype = preferred_element_type
        if type(left) is not type(x) or type(right) is not type(y):
            # The transpose has another type, which has other rules.
            matmul = partial(jnp.matmul, precision=precision, preferred_element_type=dtype)
            return redispatch(matmul, left, right)
        with matmul_precision:
            out = rule(*(_widen(factor, dtype) for factor in (left, right)))
        return out if out is NotImplemented or dtype in (None, out.dtype) else out.converted(dtype)

    return rule


def _matmul_precision(precision: Any) -> AbstractContextManager | None:
    """Return a context that applies the `precision` of a `dot_general` to all dense matmuls.

    Return None if `precision` is an algorithm, such as a `jax.lax.DotAlgorithmPreset`, or has
    different precisions for the two operands.
    """
    if precision is None:
        return nullcontext()
    if not isinstance(precision, tuple) or precision[0] != precision[1]:
        return None
    return jax.default_matmul_precision(str(precision[0]).lower())


def _widen(x: Matrix, dtype: Any) -> Matrix:
    """Convert `x`, a factor of a product, to `dtype`, the dtype of the product, if it is wider.

    Return `x` unchanged if it is not floating or `dtype` is None.
    """
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    dtype = jnp.promote_types(x.dtype, dtype)
    return x if dtype == x.dtype else x.converted(dtype)


def elementwise_rule(name: str) -> Callable:
    """Register a rule of an elementwise primitive for two matrix types.

    The annotations of the rule's operands select the types. The rule is called for operands of the
    same shape, after leading axes of size 1 are broadcast. If the last two axes differ, the result
    is NotImplemented: JAX broadcasts a 1 x 1 matrix to equal entries, which have no structure.
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
            return rule(*both) if all(isinstance(z, Matrix) for z in both) else NotImplemented

        return rule

    return decorate


_M = TypeVar("_M", bound=type[Matrix])


def register_elementwise(cls: _M) -> _M:
    """Register rules of a type for elementwise functions that map 0 to 0, such as `sqrt`.

    The rules call `cls.rescaled` with the function in place of a scaling, so `rescaled` must apply
    it to all stored entries. If the type sets `linear_in`, also register a rule that adds two
    matrices of the type by adding the fields in `linear_in`. Return `cls`.
    """
    register_zero_preserving(cls, lambda x, function: x.rescaled(partial(redispatch, function)))

    if cls.linear_in:

        @elementwise_rule("add")
        def _(x: cls, y: cls) -> Any:  # type: ignore[valid-type]
            pairs = {name: (getattr(x, name), getattr(y, name)) for name in cls.linear_in}
            if any(a.shape != b.shape for a, b in pairs.values()):
                return NotImplemented
            sums = {name: redispatch(operator.add, *pair) for name, pair in pairs.items()}
            return dataclasses.replace(x, **sums)

    return cls
