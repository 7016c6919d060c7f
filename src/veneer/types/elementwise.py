"""Elementwise primitives: each entry of the result is a function of the entries at its place."""

from .._jax.primitives import Primitive, find_primitive

UNARY = (
    *("abs", "cbrt", "ceil", "clz", "conj", "convert_element_type", "digamma", "exp", "exp2"),
    *("expm1", "floor", "imag", "integer_pow", "is_finite", "lgamma", "log", "log1p", "logistic"),
    *("neg", "not", "population_count", "real", "reduce_precision", "round", "rsqrt", "sign"),
    *("sqrt", "square", "bessel_i0e", "bessel_i1e", "erf", "erfc", "erf_inv", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)

BINARY = (
    *("add", "add_any", "sub", "mul", "div", "rem", "pow", "max", "min", "nextafter", "atan2"),
    *("complex", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "igamma", "igammac"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
)

#: Of these, the bounds and the choice may also be numbers beside arrays.
OTHERS = ("clamp", "select_n")


def primitives(*names: str) -> list[Primitive]:
    """The primitives of these names."""
    return [find_primitive(name) for name in names]


ELEMENTWISE = primitives(*UNARY, *BINARY, *OTHERS)
