"""Functions of the C library, which compiled code calls by name."""

import numpy as np

from .scalar import instruction

#: By their names in C, which for float32 have an f at the end.
NAMES = (
    "sinh cosh asinh acosh atanh sin cos tan asin acos atan cbrt erf erfc lgamma log2 atan2 pow "
    "fmod nextafter"
).split()


@instruction
def sinh(x):
    """The hyperbolic sine."""
    return np.sinh(x)


@instruction
def cosh(x):
    """The hyperbolic cosine."""
    return np.cosh(x)


@instruction
def asinh(x):
    """The inverse of the hyperbolic sine."""
    return np.arcsinh(x)


@instruction
def acosh(x):
    """The inverse of the hyperbolic cosine."""
    return np.arccosh(x)


@instruction
def atanh(x):
    """The inverse of the hyperbolic tangent."""
    return np.arctanh(x)


@instruction
def sin(x):
    """The sine."""
    return np.sin(x)


@instruction
def cos(x):
    """The cosine."""
    return np.cos(x)


@instruction
def tan(x):
    """The tangent."""
    return np.tan(x)


@instruction
def asin(x):
    """The inverse of the sine."""
    return np.arcsin(x)


@instruction
def acos(x):
    """The inverse of the cosine."""
    return np.arccos(x)


@instruction
def atan(x):
    """The inverse of the tangent."""
    return np.arctan(x)


@instruction
def cbrt(x):
    """The cubic root."""
    return np.cbrt(x)


@instruction
def log2(x):
    """The logarithm to base 2."""
    return np.log2(x)


@instruction
def atan2(y, x):
    """The angle of a point from the first axis."""
    return np.arctan2(y, x)


@instruction
def pow(x, y):
    """x to the power of y."""
    return np.power(x, y)


@instruction
def fmod(x, y):
    """What is left of x / y towards zero, of the sign of x."""
    return np.fmod(x, y)


@instruction
def nextafter(x, y):
    """The next float from x towards y."""
    return np.nextafter(x, y)


@instruction
def erf(x):
    """The error function."""
    return type(x)(_special("erf")(x))


@instruction
def erfc(x):
    """1 less the error function."""
    return type(x)(_special("erfc")(x))


@instruction
def lgamma(x):
    """The logarithm of the absolute value of the gamma function."""
    return type(x)(_special("gammaln")(x))


def _special(name):
    import scipy.special

    return getattr(scipy.special, name)
