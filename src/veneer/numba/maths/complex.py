"""Functions of complex numbers, by those of their parts: all of complex128, to which others widen.

Branch cuts and infinities are those of C99, but where JAX takes a part that is -0 for 0. The
inverse sine and its kin are Kahan's ("Branch Cuts for Complex Elementary Functions", 1987), and so
is the tangent. Of complex128, exp2 of large numbers, and log1p where x and y**2 / 2 cancel, lose
digits, as they do in JAX.
"""

import numpy as np

from .elementary import exp_f64, expm1_f64, log, log1p
from .instructions import copysign, fabs, maximum, minimum, select, sqrt
from .libm import asinh, atan2, cos, cosh, sin, sinh, tan
from .scalar import scalar

log_f64, log1p_f64 = log.f64, log1p.f64
_LN_2, _LOG2_E = np.float64(0.69314718055994530942), np.float64(1.44269504088896340736)
_HALF_PI = np.float64(1.57079632679489661923)


@scalar
def _is_infinite(z):
    """Whether a part is."""
    return (fabs(z.real) == np.inf) | (fabs(z.imag) == np.inf)


@scalar
def _positive(x):
    """A part of a number, on the side of a branch cut where JAX has it: 0 for -0."""
    return x + np.float64(0)


@scalar
def _times(x, y):
    """The product, 0 of 0 even by infinity."""
    return select(x == np.float64(0), x, x * y)


@scalar
def _select(condition, z, w):
    """z where the condition holds, or else w."""
    return complex(select(condition, z.real, w.real), select(condition, z.imag, w.imag))


@scalar
def abs_c128(z):
    """The absolute value, a float64, with no square that overflows."""
    x, y = fabs(z.real), fabs(z.imag)
    most, least = maximum(x, y), minimum(x, y)
    ratio = select(most == np.float64(0), np.float64(0), least / most)
    length = most * sqrt(np.float64(1) + ratio * ratio)
    return select(_is_infinite(z), np.float64(np.inf), length)


@scalar
def sign_c128(z):
    """The number of length 1 in the same direction; 0 of 0."""
    length = abs_c128(z)
    of = select(length == np.float64(0), np.float64(1), length)
    return complex(z.real / of, z.imag / of)


@scalar
def sqrt_c128(z):
    """The square root with a real part that is not negative."""
    return _root(complex(z.real, _positive(z.imag)))


@scalar
def _root(z):
    """The square root as C99 has it, on both sides of its branch cut."""
    x, y = z.real, z.imag
    large = sqrt(fabs(x) * np.float64(0.5) + abs_c128(z) * np.float64(0.5))
    of = select(large == np.float64(0), np.float64(1), large)
    small = fabs(y) / of * np.float64(0.5)
    right, endless = x >= np.float64(0), fabs(y) == np.inf
    real = select(endless, fabs(y), select(right, large, small))
    return complex(real, copysign(select(endless, fabs(y), select(right, small, large)), y))


@scalar
def quotient_c128(z, w):
    """z / w by Smith's method ("Algorithm 116", 1962). Numba's own operator raises for w of 0."""
    x, y = w.real, w.imag
    steep = fabs(x) < fabs(y)
    large, small = select(steep, y, x), select(steep, x, y)
    ratio = select(large == np.float64(0), np.float64(0), small / large)
    divisor = large + small * ratio
    real = select(steep, z.real * ratio + z.imag, z.real + z.imag * ratio)
    imag = select(steep, z.imag * ratio - z.real, z.imag - z.real * ratio)
    result = complex(real / divisor, imag / divisor)
    endless, none = copysign(np.float64(np.inf), x), (x == np.float64(0)) & (y == np.float64(0))
    result = _select(none, complex(endless * z.real, endless * z.imag), result)
    # As C99 has it: an infinity by a number is one, and a number by an infinity is 0.
    a, b = _of_infinity(z.real), _of_infinity(z.imag)
    whole = complex(np.inf * (a * x + b * y), np.inf * (b * x - a * y))
    beyond = _is_infinite(z) & (fabs(x) + fabs(y) < np.inf) & (not none)
    result = _select(beyond, whole, result)
    c, d = _of_infinity(x), _of_infinity(y)
    finite = fabs(z.real) + fabs(z.imag) < np.inf
    real, imag = z.real * c + z.imag * d, z.imag * c - z.real * d
    nothing = complex(np.float64(0) * real, np.float64(0) * imag)
    return _select(_is_infinite(w) & finite, nothing, result)


@scalar
def _of_infinity(x):
    """1 or -1 of an infinite part, and 0 of another, with its sign."""
    return copysign(select(fabs(x) == np.inf, np.float64(1), np.float64(0)), x)


@scalar
def rsqrt_c128(z):
    """1 over the square root."""
    root, length = _root(z), abs_c128(z)
    of = select(length == np.inf, np.float64(1), length)
    scale = select(length == np.inf, np.float64(0), np.float64(1) / of)
    real = select(length == np.inf, np.float64(0), _times(root.real, scale))
    real = select(length == np.float64(0), np.float64(np.inf), real)
    imag = select(length == np.inf, copysign(np.float64(0), -z.imag), -root.imag * scale)
    return complex(real, imag)


@scalar
def exp_c128(z):
    """The exponential."""
    x, y = z.real, z.imag
    half = exp_f64(x * np.float64(0.5))  # exp(x) may overflow where the result does not
    sine = select(y == np.float64(0), y, half * sin(y) * half)
    return complex(half * cos(y) * half, sine)


@scalar
def exp2_c128(z):
    """2 to the power of a number."""
    return exp_c128(complex(z.real * _LN_2, z.imag * _LN_2))


@scalar
def expm1_c128(z):
    """The exponential less 1."""
    x, y = z.real, z.imag
    half = sin(y * np.float64(0.5))
    less = expm1_f64(x) * cos(y) - np.float64(2) * half * half
    return complex(less, exp_c128(z).imag)


@scalar
def log_c128(z):
    """The logarithm, with an imaginary part from -pi to pi."""
    x, y = fabs(z.real), fabs(z.imag)
    most, least = maximum(x, y), minimum(x, y)
    near = (most > np.float64(0.5)) & (most < np.float64(1.5))  # where log|z| may be small
    beyond = (most - np.float64(1)) * (most + np.float64(1)) + least * least
    ratio = select(most == np.float64(0), np.float64(0), least / most)
    length = log_f64(most) + np.float64(0.5) * log1p_f64(ratio * ratio)
    length = select(near, np.float64(0.5) * log1p_f64(beyond), length)
    length = select(_is_infinite(z), np.float64(np.inf), length)
    return complex(length, atan2(z.imag, z.real))


@scalar
def log1p_c128(z):
    """The logarithm of 1 more than a number."""
    x, y = z.real, z.imag
    small = fabs(x) + fabs(y) < np.float64(0.5)
    near = np.float64(0.5) * log1p_f64(x * (np.float64(2) + x) + y * y)
    far = log_c128(complex(np.float64(1) + x, y))
    return complex(select(small, near, far.real), far.imag)


@scalar
def log2_c128(z):
    """The logarithm to base 2."""
    of = log_c128(z)
    return complex(of.real * _LOG2_E, of.imag * _LOG2_E)


@scalar
def logistic_c128(z):
    """1 / (1 + exp(-z))."""
    right = z.real >= np.float64(0)
    of = exp_c128(complex(-fabs(z.real), select(right, -z.imag, z.imag)))  # less than 1
    x, y = np.float64(1) + of.real, of.imag
    square = x * x + y * y
    real = select(right, x, of.real * x + of.imag * y) / square
    return complex(real, select(right, -y, of.imag * x - of.real * y) / square)


@scalar
def pow_c128(z, w):
    """z to the power of w: 1 of 1, and for a power of 0; of 0 NaN but for positive powers."""
    of, a, b = log_c128(z), w.real, w.imag
    result = exp_c128(complex(a * of.real - _times(b, of.imag), a * of.imag + _times(b, of.real)))
    at_zero = select((a > np.float64(0)) & (b == np.float64(0)), np.float64(0), np.float64(np.nan))
    zero = (z.real == np.float64(0)) & (z.imag == np.float64(0))
    result = _select(zero, complex(at_zero, at_zero), result)
    is_one = (z.real == np.float64(1)) & (z.imag == np.float64(0))
    none = (a == np.float64(0)) & (b == np.float64(0))
    return _select(is_one | none, complex(np.float64(1), np.float64(0)), result)


@scalar
def sin_c128(z):
    """The sine."""
    x, y = z.real, z.imag
    return complex(_times(sin(x), cosh(y)), cos(x) * sinh(y))


@scalar
def cos_c128(z):
    """The cosine."""
    x, y = z.real, z.imag
    return complex(cos(x) * cosh(y), -_times(sin(x), sinh(y)))


@scalar
def sinh_c128(z):
    """The hyperbolic sine."""
    x, y = z.real, z.imag
    return complex(sinh(x) * cos(y), _times(sin(y), cosh(x)))


@scalar
def cosh_c128(z):
    """The hyperbolic cosine."""
    x, y = z.real, z.imag
    return complex(cosh(x) * cos(y), _times(sin(y), sinh(x)))


@scalar
def tanh_c128(z):
    """The hyperbolic tangent."""
    x, y = z.real, z.imag
    far = fabs(x) > np.float64(20)
    near_x = select(far, np.float64(0), x)
    t, s = tan(y), sinh(near_x)
    beta = np.float64(1) + t * t
    rho, divisor = sqrt(np.float64(1) + s * s), np.float64(1) + beta * s * s
    decay = exp_f64(np.float64(-2) * fabs(x))
    tiny = _times(decay, np.float64(4) * sin(y) * cos(y))
    one = copysign(np.float64(1), x) + select(fabs(x) == np.inf, np.float64(0), np.float64(0) * t)
    real = select(far, one, beta * rho * s / divisor)
    return complex(real, select(far, tiny, t / divisor))


@scalar
def tan_c128(z):
    """The tangent."""
    of = tanh_c128(complex(-z.imag, z.real))
    return complex(of.imag, -of.real)


@scalar
def asin_c128(z):
    """The inverse of the sine."""
    x, y = z.real, _positive(z.imag)
    below, above = _root(complex(np.float64(1) - x, -y)), _root(complex(np.float64(1) + x, y))
    real = below.real * above.real - below.imag * above.imag
    imag = below.real * above.imag - below.imag * above.real
    return _select(
        _is_infinite(z),
        complex(atan2(x, fabs(y)), copysign(np.float64(np.inf), y)),
        complex(atan2(x, real), asinh(imag)),
    )


@scalar
def acos_c128(z):
    """The inverse of the cosine."""
    x, y = z.real, _positive(z.imag)
    below, above = _root(complex(np.float64(1) - x, -y)), _root(complex(np.float64(1) + x, y))
    imag = above.real * below.imag - above.imag * below.real
    return _select(
        _is_infinite(z),
        complex(atan2(fabs(y), x), -copysign(np.float64(np.inf), y)),
        complex(np.float64(2) * atan2(below.real, above.real), asinh(imag)),
    )


@scalar
def asinh_c128(z):
    """The inverse of the hyperbolic sine."""
    of = asin_c128(complex(-z.imag, z.real))
    return complex(of.imag, -of.real)


@scalar
def acosh_c128(z):
    """The inverse of the hyperbolic cosine."""
    x, y = z.real, _positive(z.imag)
    below, above = _root(complex(x - np.float64(1), y)), _root(complex(x + np.float64(1), y))
    real = below.real * above.real + below.imag * above.imag
    return _select(
        _is_infinite(z),
        complex(np.float64(np.inf), atan2(y, x)),
        complex(asinh(real), np.float64(2) * atan2(below.imag, above.real)),
    )


@scalar
def atanh_c128(z):
    """The inverse of the hyperbolic tangent."""
    x, y = fabs(z.real), z.imag
    less = np.float64(1) - x
    square = less * less + y * y
    real = np.float64(0.25) * log1p_f64(np.float64(4) * x / square)
    imag = np.float64(0.5) * atan2(np.float64(2) * y, less * (np.float64(1) + x) - y * y)
    endless = _is_infinite(z)
    real = copysign(select(endless, np.float64(0), real), _positive(z.real))
    return complex(real, select(endless, copysign(_HALF_PI, y), imag))


@scalar
def atan_c128(z):
    """The inverse of the tangent."""
    of = atanh_c128(complex(-z.imag, z.real))
    return complex(of.imag, -of.real)


#: Those of one number, by the names of primitives.
FUNCTIONS = {
    "abs": abs_c128, "acos": acos_c128, "acosh": acosh_c128, "asin": asin_c128,
    "asinh": asinh_c128, "atan": atan_c128, "atanh": atanh_c128, "cos": cos_c128,
    "cosh": cosh_c128, "exp": exp_c128, "exp2": exp2_c128, "expm1": expm1_c128, "log": log_c128,
    "log1p": log1p_c128, "log2": log2_c128, "logistic": logistic_c128, "rsqrt": rsqrt_c128,
    "sign": sign_c128, "sin": sin_c128, "sinh": sinh_c128, "sqrt": sqrt_c128, "tan": tan_c128,
    "tanh": tanh_c128,
}  # fmt: skip
