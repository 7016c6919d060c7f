"""Rules for linear algebra on structured matrices: solves, determinants, inverses, traces.

`jnp.linalg.solve` factorizes its matrix, and passes the matrix and its factors to
`custom_linear_solve`. So the factorization of a structured matrix returns deferred factors, and the
rule of `custom_linear_solve` calls `Matrix.solve` instead of using them. The factors of the dense
matrix are computed only if a program reads them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._jax.primitives import split_list
from ..lazy import Lazy
from .matrix import Matrix, has_method
from .rules import VectorLayout, invert_permutation, vector_layout

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
    """Return whether a value is a deferred factor, or a triangle or the transpose of one."""
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
    """Analyze the program that multiplies `matrix`, its first operand, and a dense array.

    Return the layout of its `dot_general`, and the permutation that the program then applies to the
    axes. Return None for other programs.
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
    """Register a rule of a jitted function for matrices of floats or complex numbers.

    Integer matrices are materialized, because the result of the function is a float.
    """

    @register(function)
    def _(a: Matrix) -> Any:
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            return NotImplemented
        with _full_precision():
            return method(a)


def _det(a: Matrix) -> Any:
    result = a.slogdet()
    if result is NotImplemented:
        return NotImplemented
    sign, logabsdet = result
    return sign * jnp.exp(logabsdet)


_register_linalg(jnp.linalg.inv, lambda a: a.inverse())
_register_linalg(jnp.linalg.slogdet, lambda a: a.slogdet())
_register_linalg(jnp.linalg.det, _det)
_register_linalg(jnp.linalg.cholesky, lambda a: a.cholesky())


def _register_on_diagonal(function: Any, compute: Callable[[Any], Any]) -> None:
    """Register rules of a function that uses only the main diagonal, such as `jnp.trace`.

    `compute` returns the result for the entries `[..., n]` of the main diagonal.
    """

    def apply(a: Any) -> Any:
        entries = a.main_diagonal()
        return entries if entries is NotImplemented else compute(entries)

    @register(function)
    def _(a: Matrix) -> Any:
        # Without axis1 and axis2, JAX takes the diagonal of the first two axes.
        return apply(a) if a.ndim == 2 else NotImplemented

    @register(partial(function, axis1=-2, axis2=-1))
    def _(a: Matrix) -> Any:
        return apply(a)


_register_on_diagonal(jnp.trace, lambda entries: entries.sum(-1))
_register_on_diagonal(jnp.diagonal, lambda entries: entries)
_register_on_diagonal(partial(jnp.diagonal, offset=0), lambda entries: entries)
