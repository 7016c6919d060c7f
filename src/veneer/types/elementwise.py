"""The elementwise primitives, and those of them that map 0 to 0."""

from collections.abc import Callable
from typing import Any

from jax import lax

from .._core.rules import register
from .._jax.primitives import Primitive, find_primitive

_UNARY = (
    *("abs", "cbrt", "ceil", "clz", "conj", "convert_element_type", "digamma", "exp", "exp2"),
    *("expm1", "floor", "imag", "integer_pow", "is_finite", "lgamma", "log", "log1p", "logistic"),
    *("neg", "not", "population_count", "real", "reduce_precision", "round", "rsqrt", "sign"),
    *("sqrt", "square", "bessel_i0e", "bessel_i1e", "erf", "erfc", "erf_inv", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)

_BINARY = (
    *("add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "nextafter", "atan2"),
    *("complex", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "igamma", "igammac"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
)

#: All elementwise primitives. `clamp` and `select_n` also take scalars next to arrays.
ELEMENTWISE = [find_primitive(name) for name in (*_UNARY, *_BINARY, "clamp", "select_n")]

#: Unary primitives that map 0 to 0 and are linear: `f(a + b) == f(a) + f(b)`.
LINEAR = ("neg", "real", "imag", "conj")

#: Other unary primitives that map 0 to 0. `integer_pow` and `convert_element_type` are not in the
#: list, because they map 0 to 0 only with some parameters.
NONLINEAR = (
    *("abs", "sign", "floor", "ceil", "round", "square", "sqrt", "cbrt"),
    *("sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh"),
    *("expm1", "log1p", "erf", "erf_inv"),
)


def register_zero_preserving(cls: type, apply: Callable[[Any, Callable], Any]) -> None:
    """Register rules of a type for the unary elementwise primitives that map 0 to 0.

    **Arguments:**

    - `cls`: an implicit type that does not store some entries, because they are 0.
    - `apply`: a function that takes an array of this type and a function of a dense array, and
      applies the function to the stored entries.
    """
    for name in (*LINEAR, *NONLINEAR):
        _register_on_entries(cls, apply, find_primitive(name))

    @register("integer_pow")
    def _(x: cls, *, y: int) -> Any:  # type: ignore[valid-type]
        return apply(x, lambda entries: lax.integer_pow(entries, y)) if y > 0 else NotImplemented


def _register_on_entries(cls: type, apply: Callable, primitive: Primitive) -> None:
    @register(primitive)
    def _(x: cls, **params: Any) -> Any:  # type: ignore[valid-type]
        return apply(x, lambda entries: primitive.bind(entries, **params))
