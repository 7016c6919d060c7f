"""Lists of elementwise primitives, and rules for primitives that map 0 to 0."""

from collections.abc import Callable
from typing import Any

from jax import lax

from .._core.rules import register
from .._jax.primitives import find_primitive

_UNARY = (
    "abs cbrt ceil clz conj convert_element_type digamma exp exp2 expm1 floor imag integer_pow "
    "is_finite lgamma log log1p logistic neg not population_count real reduce_precision round "
    "rsqrt sign sqrt square bessel_i0e bessel_i1e erf erfc erf_inv sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh"
)
_BINARY = (
    "add add_any sub mul div rem pow max min nextafter atan2 complex eq ne lt le gt ge and or xor "
    "igamma igammac shift_left shift_right_arithmetic shift_right_logical"
)
_OTHER = "clamp select_n"  # they also take scalars next to arrays

#: All elementwise primitives.
ELEMENTWISE = [find_primitive(name) for name in f"{_UNARY} {_BINARY} {_OTHER}".split()]

#: Unary primitives that map 0 to 0 and are linear: `f(a + b) == f(a) + f(b)`.
LINEAR = ("neg", "real", "imag", "conj")

#: Other unary primitives that map 0 to 0. `integer_pow` and `convert_element_type` are not in the
#: list, because they map 0 to 0 only with some parameters.
NONLINEAR = tuple(
    "abs sign floor ceil round square sqrt cbrt sin tan asin atan sinh tanh asinh atanh expm1 "
    "log1p erf erf_inv".split()
)


def register_unary(cls: Any, name: str, apply: Callable[..., Any]) -> None:
    """Register a rule of a type for a unary primitive, such as `sqrt`.

    **Arguments:**

    - `cls`: an implicit type, or a union of implicit types.
    - `name`: the name of the primitive.
    - `apply`: a function `apply(x, f)`. It applies `f`, the primitive with its parameters, to the
      leaves of `x`, an array of the type `cls`, and returns the result of the rule.
    """
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: cls, **params: Any) -> Any:
        return apply(x, lambda leaf: primitive.bind(leaf, **params))


def register_zero_preserving(
    cls: Any, apply: Callable[..., Any], apply_linear: Callable[..., Any] | None = None
) -> None:
    """Register rules for the unary primitives that map 0 to 0, for a type that stores no zeros.

    `cls` and `apply` are the same as in `register_unary`. If `apply_linear` is given, it replaces
    `apply` for the primitives in `LINEAR`, such as `neg`.
    """
    for name in LINEAR:
        register_unary(cls, name, apply_linear or apply)
    for name in NONLINEAR:
        register_unary(cls, name, apply)

    @register("integer_pow")
    def _(x: cls, *, y: int) -> Any:
        return apply(x, lambda leaf: lax.integer_pow(leaf, y)) if y > 0 else NotImplemented
