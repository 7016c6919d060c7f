"""Elementwise primitives that give 0 for 0: what a type with zeros that it does not store keeps."""

#: Also linear: `f(a + b) == f(a) + f(b)`, so they may act on summands of an entry.
LINEAR = ("neg", "real", "imag", "conj")

#: The others, which act on entries alone. `integer_pow` and `convert_element_type` are of them too,
#: for some of their parameters.
NONLINEAR = (
    *("abs", "sign", "floor", "ceil", "round", "square", "sqrt", "cbrt"),
    *("sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh"),
    *("expm1", "log1p", "erf", "erf_inv"),
)
