"""Linear algebra of structured matrices: solves, determinants, inverses, traces.

`jnp.linalg.solve` factorises its matrix, and hands the factors to `custom_linear_solve` beside the
matrix itself. So a factorisation of a structured matrix is deferred; a solve by deferred factors is
the solve by the structure, and the factors are never computed. A program that reads them finds
those of the dense matrix.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._core.rules import register
from ..._core.surface.array import ImplicitArray
from ..._jax.primitives import split_list
from ..lazy import Lazy
from .by_vectors import ByVectors, by_vectors
from .matrix import Matrix, overrides

_FACTORISATIONS = ("lu", "cholesky")


def _full_precision() -> AbstractContextManager:
    """That of a factorisation, for the products by which a structure does without one."""
    return jax.default_matmul_precision("highest")


@register("lu")
def _lu(a: Matrix, **params: Any) -> Any:
    return Lazy.deferred("lu", [a], params) if overrides(a, "solve") else NotImplemented


@register("cholesky")
def _cholesky(a: Matrix, **params: Any) -> Any:
    return Lazy.deferred("cholesky", [a], params) if overrides(a, "solve") else NotImplemented


# JAX takes the triangle that it means of a Cholesky factor, and perhaps the transpose.


@register("select_n")
def _triangle(mask: ArrayLike, zeros: ArrayLike, factor: Lazy) -> Any:
    if not _is_deferred_factor(factor):
        return NotImplemented
    return Lazy.deferred("select_n", [mask, zeros, factor], {})


@register("transpose")
def _factor_transposed(factor: Lazy, *, permutation: Any) -> Any:
    lead = range(factor.ndim - 2)
    swaps = tuple(permutation) == (*lead, factor.ndim - 1, factor.ndim - 2)
    if not (swaps and _is_deferred_factor(factor)):
        return NotImplemented
    return Lazy(_matrix_transpose, factor)


def _matrix_transpose(x: Any) -> Any:
    return x.mT


@register("custom_linear_solve", precedence=1)
def _custom_linear_solve(
    *values: ArrayLike | ImplicitArray, const_lengths: Any, jaxprs: Any
) -> Any:
    consts, _, factors, _, right_sides = split_list(values, list(const_lengths))
    if not (len(right_sides) == len(consts) == 1 and isinstance(consts[0], Matrix)):
        return NotImplemented
    matrix: Any = consts[0]
    b: Any = right_sides[0]
    found = _product_with(matrix, jaxprs.matvec)
    if found is None or not any(map(_is_deferred_factor, factors)) or isinstance(b, ImplicitArray):
        return NotImplemented
    acting = matrix.transposed() if found.contraction.transposed else matrix
    if acting is NotImplemented:
        return NotImplemented
    with _full_precision():
        x = acting.solve(found.contraction.undo_result(b.transpose(found.undo)))
    if x is NotImplemented:
        return NotImplemented
    return [found.contraction.undo_vectors(x, like=jaxprs.matvec.in_avals[-1]).astype(b.dtype)]


def _is_deferred_factor(x: Any) -> bool:
    """Whether a value is a factor that was not computed, or what the rules above make of one."""
    if not isinstance(x, Lazy):
        return False
    primitive = getattr(x.function, "primitive", None)
    if primitive is None:
        return x.function is _matrix_transpose and _is_deferred_factor(*x.operands)
    if primitive.name == "select_n":
        return _is_deferred_factor(x.operands[-1])
    return primitive.name in _FACTORISATIONS


@dataclass(frozen=True)
class _MatrixProduct:
    """A program that multiplies a matrix and its operand, and permutes the axes of the result."""

    contraction: ByVectors
    undo: tuple[int, ...]  # the permutation that takes the axes back


def _product_with(matrix: Matrix, program: Any) -> _MatrixProduct | None:
    """What a linear program does, if it is a product with the matrix, its first operand."""
    jaxpr = program.jaxpr
    dot, *rest = jaxpr.eqns
    if dot.primitive.name != "dot_general" or len(jaxpr.invars) != 2:
        return None
    matrix_first = list(dot.invars) == list(jaxpr.invars)
    if not matrix_first and list(dot.invars) != list(reversed(jaxpr.invars)):
        return None
    dimension_numbers, x = dot.params["dimension_numbers"], jaxpr.invars[1].aval
    found = by_vectors(dimension_numbers, matrix.ndim, x.ndim, matrix_first=matrix_first)
    if found is None or not all(found.lead):
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
    if jaxpr.outvars != [result]:
        return None
    return _MatrixProduct(found, tuple(map(order.index, range(x.ndim))))


def _of_floats(function: Any) -> Callable[[Callable], Callable]:
    """Registers a rule for a function of which the result is floating, whatever its operand is."""

    def add(rule: Callable[[Matrix], Any]) -> Callable:
        @register(function)
        def of_a_matrix(a: Matrix) -> Any:
            if not jnp.issubdtype(a.dtype, jnp.inexact):
                return NotImplemented
            with _full_precision():
                return rule(a)

        return rule

    return add


@_of_floats(jnp.linalg.inv)
def _inv(a: Matrix) -> Any:
    return a.inverse()


@_of_floats(jnp.linalg.slogdet)
def _slogdet(a: Matrix) -> Any:
    return a.slogdet()


@_of_floats(jnp.linalg.det)
def _det(a: Matrix) -> Any:
    found = a.slogdet()
    if found is NotImplemented:
        return NotImplemented
    sign, logabsdet = found
    return sign * jnp.exp(logabsdet)


@_of_floats(jnp.linalg.cholesky)
def _symmetric_cholesky(a: Matrix) -> Any:
    return a.cholesky()


def _of_the_diagonal(function: Any, of: Callable[[Any], Any]) -> None:
    @register(function)
    def _(a: Matrix) -> Any:
        return _at_diagonal(a) if a.ndim == 2 else NotImplemented  # of the first two axes

    @register(functools.partial(function, axis1=-2, axis2=-1))
    def _(a: Matrix) -> Any:
        return _at_diagonal(a)

    def _at_diagonal(a: Matrix) -> Any:
        entries = a.main_diagonal()
        return entries if entries is NotImplemented else of(entries)


_of_the_diagonal(jnp.trace, lambda entries: entries.sum(-1))
_of_the_diagonal(jnp.diagonal, lambda entries: entries)
_of_the_diagonal(functools.partial(jnp.diagonal, offset=0), lambda entries: entries)
