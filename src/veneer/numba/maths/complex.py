"""Functions of complex128 numbers, computed from their real and imaginary parts.

Other complex dtypes are widened to complex128. Branch cuts and infinities follow C99, except where
JAX treats a part that is -0 as 0. The inverse trigonometric functions and the tangent are
from Kahan ("Branch Cuts for Complex Elementary Functions", 1987). As in JAX, exp2 of large numbers,
and log1p where x and y**2 / 2 cancel, lose digits.
"""

import numpy as np

from .elementary import exp_f64, expm1_f64, log, log1p
from .instructions import (
    asinh,
    atan2,
    copysign,
    cos,
    cosh,
    fabs,
    maximum,
    minimum,
    scalar,
    select,
    sin,
    sinh,
    sqrt,
    tan,
)

log_f64, log1p_f64 = log.f64, log1p.f64
_LN_2, _LOG2_E = np.float64(0.69314718055994530942), np.float64(1.44269504088896340736)
_HALF_PI = np.float64(1.57079632679489661923)


@scalar
def _is_infinite(z):
    """Return whether the real or the imaginary part is infinite."""
    return (fabs(z.real) == np.inf) | (fabs(z.imag) == np.inf)


@scalar
def _positive(x):
    """Return `x`, with 0 in place of -0, because JAX ignores the sign of a zero at branch cuts."""
    return x + np.float64(0)


@scalar
def _times(x, y):
    """Return `x * y`. If `x` is 0, return `x`, even if `y` is infinite."""
    return select(x == np.float64(0), x, x * y)


@scalar
def _select(condition, z, w):
    """Return `z` if `condition` is true, or else `w`."""
    return complex(select(condition, z.real, w.real), select(condition, z.imag, w.imag))


@scalar
def abs_c128(z):
    """Return the absolute value, a float64. No intermediate result overflows."""
    x, y = fabs(z.real), fabs(z.imag)
    most, least = maximum(x, y), minimum(x, y)
    ratio = select(most == np.float64(0), np.float64(0), least / most)
    length = most * sqrt(np.float64(1) + ratio * ratio)
    return select(_is_infinite(z), np.float64(np.inf), length)


@scalar
def sign_c128(z):
    """Return z / |z|, or 0 for 0."""
    length = abs_c128(z)
    divisor = select(length == np.float64(0), np.float64(1), length)
    return complex(z.real / divisor, z.imag / divisor)


@scalar
def sqrt_c128(z):
    """Return the square root whose real part is not negative."""
    return _root(complex(z.real, _positive(z.imag)))


@scalar
def _root(z):
    """Return the square root as in C99. The sign of a zero selects the side of the branch cut."""
    x, y = z.real, z.imag
    large = sqrt(fabs(x) * np.float64(0.5) + abs_c128(z) * np.float64(0.5))
    divisor = select(large == np.float64(0), np.float64(1), large)
    small = fabs(y) / divisor * np.float64(0.5)
    positive, infinite = x >= np.float64(0), fabs(y) == np.inf
    real = select(infinite, fabs(y), select(positive, large, small))
    return complex(real, copysign(select(infinite, fabs(y), select(positive, small, large)), y))


@scalar
def quotient_c128(z, w):
    """Return z / w by Smith's method ("Algorithm 116", 1962). Division by zero does not raise."""
    x, y = w.real, w.imag
    steep = fabs(x) < fabs(y)
    large, small = select(steep, y, x), select(steep, x, y)
    ratio = select(large == np.float64(0), np.float64(0), small / large)
    divisor = large + small * ratio
    real = select(steep, z.real * ratio + z.imag, z.real + z.imag * ratio)
    imag = select(steep, z.imag * ratio - z.real, z.imag - z.real * ratio)
    result = complex(real / divisor, imag / divisor)
    infinity, zero = copysign(np.float64(np.inf), x), (x == np.float64(0)) & (y == np.float64(0))
    result = _select(zero, complex(infinity * z.real, infinity * z.imag), result)
    # As in C99, infinity / finite is an infinity, and finite / infinity is 0.
    a, b = _sign_of_infinity(z.real), _sign_of_infinity(z.imag)
    infinite = complex(np.inf * (a * x + b * y), np.inf * (b * x - a * y))
    overflows = _is_infinite(z) & (fabs(x) + fabs(y) < np.inf) & (not zero)
    result = _select(overflows, infinite, result)
    c, d = _sign_of_infinity(x), _sign_of_infinity(y)
    finite = fabs(z.real) + fabs(z.imag) < np.inf
    real, imag = z.real * c + z.imag * d, z.imag * c - z.real * d
    vanishing = complex(np.float64(0) * real, np.float64(0) * imag)
    return _select(_is_infinite(w) & finite, vanishing, result)


@scalar
def _sign_of_infinity(x):
    """Return 1 or -1 if `x` is an infinity. Otherwise return a zero with the sign of `x`."""
    return copysign(select(fabs(x) == np.inf, np.float64(1), np.float64(0)), x)


@scalar
def rsqrt_c128(z):
    """Return 1 / sqrt(z)."""
    root, length = _root(z), abs_c128(z)
    divisor = select(length == np.inf, np.float64(1), length)
    scale = select(length == np.inf, np.float64(0), np.float64(1) / divisor)
    real = select(length == np.inf, np.float64(0), _times(root.real, scale))
    real = select(length == np.float64(0), np.float64(np.inf), real)
    imag = select(length == np.inf, copysign(np.float64(0), -z.imag), -root.imag * scale)
    return complex(real, imag)


@scalar
def exp_c128(z):
    x, y = z.real, z.imag
    half = exp_f64(x * np.float64(0.5))  # exp(x) can overflow where the result does not
    sine = select(y == np.float64(0), y, half * sin(y) * half)
    return complex(half * cos(y) * half, sine)


@scalar
def exp2_c128(z):
    """Return 2 to the power of `z`."""
    return exp_c128(complex(z.real * _LN_2, z.imag * _LN_2))


@scalar
def expm1_c128(z):
    """Return exp(z) - 1, accurate near 0."""
    x, y = z.real, z.imag
    half = sin(y * np.float64(0.5))
    less = expm1_f64(x) * cos(y) - np.float64(2) * half * half
    return complex(less, exp_c128(z).imag)


@scalar
def log_c128(z):
    """Return the natural logarithm, with an imaginary part from -pi to pi."""
    x, y = fabs(z.real), fabs(z.imag)
    most, least = maximum(x, y), minimum(x, y)
    near = (most > np.float64(0.5)) & (most < np.float64(1.5))  # where log|z| may be small
    square_less_1 = (most - np.float64(1)) * (most + np.float64(1)) + least * least
    ratio = select(most == np.float64(0), np.float64(0), least / most)
    length = log_f64(most) + np.float64(0.5) * log1p_f64(ratio * ratio)
    length = select(near, np.float64(0.5) * log1p_f64(square_less_1), length)
    length = select(_is_infinite(z), np.float64(np.inf), length)
    return complex(length, atan2(z.imag, z.real))


@scalar
def log1p_c128(z):
    """Return log(1 + z), accurate near 0."""
    x, y = z.real, z.imag
    small = fabs(x) + fabs(y) < np.float64(0.5)
    near = np.float64(0.5) * log1p_f64(x * (np.float64(2) + x) + y * y)
    far = log_c128(complex(np.float64(1) + x, y))
    return complex(select(small, near, far.real), far.imag)


@scalar
def log2_c128(z):
    """Return the logarithm to base 2."""
    natural = log_c128(z)
    return complex(natural.real * _LOG2_E, natural.imag * _LOG2_E)


@scalar
def logistic_c128(z):
    """Return 1 / (1 + exp(-z))."""
    right = z.real >= np.float64(0)
    e = exp_c128(complex(-fabs(z.real), select(right, -z.imag, z.imag)))  # |e| <= 1
    x, y = np.float64(1) + e.real, e.imag
    square = x * x + y * y
    real = select(right, x, e.real * x + e.imag * y) / square
    return complex(real, select(right, -y, e.imag * x - e.real * y) / square)


@scalar
def pow_c128(z, w):
    """Return z to the power of w.

    The result is 1 if `z` is 1 or `w` is 0. If `z` is 0, the result is 0 if `w` is real and
    positive, and NaN for all other `w` except 0.
    """
    x, a, b = log_c128(z), w.real, w.imag
    result = exp_c128(complex(a * x.real - _times(b, x.imag), a * x.imag + _times(b, x.real)))
    at_zero = select((a > np.float64(0)) & (b == np.float64(0)), np.float64(0), np.float64(np.nan))
    zero = (z.real == np.float64(0)) & (z.imag == np.float64(0))
    result = _select(zero, complex(at_zero, at_zero), result)
    is_one = (z.real == np.float64(1)) & (z.imag == np.float64(0))
    has_zero_power = (a == np.float64(0)) & (b == np.float64(0))
    return _select(is_one | has_zero_power, complex(np.float64(1), np.float64(0)), result)


@scalar
def sin_c128(z):
    x, y = z.real, z.imag
    return complex(_times(sin(x), cosh(y)), cos(x) * sinh(y))


@scalar
def cos_c128(z):
    x, y = z.real, z.imag
    return complex(cos(x) * cosh(y), -_times(sin(x), sinh(y)))


@scalar
def sinh_c128(z):
    x, y = z.real, z.imag
    return complex(sinh(x) * cos(y), _times(sin(y), cosh(x)))


@scalar
def cosh_c128(z):
    x, y = z.real, z.imag
    return complex(cosh(x) * cos(y), _times(sin(y), sinh(x)))


@scalar
def tanh_c128(z):
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
    turned = tanh_c128(complex(-z.imag, z.real))
    return complex(turned.imag, -turned.real)


@scalar
def asin_c128(z):
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
    turned = asin_c128(complex(-z.imag, z.real))
    return complex(turned.imag, -turned.real)


@scalar
def acosh_c128(z):
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
    x, y = fabs(z.real), z.imag
    less = np.float64(1) - x
    square = less * less + y * y
    real = np.float64(0.25) * log1p_f64(np.float64(4) * x / square)
    imag = np.float64(0.5) * atan2(np.float64(2) * y, less * (np.float64(1) + x) - y * y)
    infinite = _is_infinite(z)
    real = copysign(select(infinite, np.float64(0), real), _positive(z.real))
    return complex(real, select(infinite, copysign(_HALF_PI, y), imag))


@scalar
def atan_c128(z):
    turned = atanh_c128(complex(-z.imag, z.real))
    return complex(turned.imag, -turned.real)


#: Functions of one number, by the names of JAX primitives.
FUNCTIONS = {
    "abs": abs_c128, "acos": acos_c128, "acosh": acosh_c128, "asin": asin_c128,
    "asinh": asinh_c128, "atan": atan_c128, "atanh": atanh_c128, "cos": cos_c128,
    "cosh": cosh_c128, "exp": exp_c128, "exp2": exp2_c128, "expm1": expm1_c128, "log": log_c128,
    "log1p": log1p_c128, "log2": log2_c128, "logistic": logistic_c128, "rsqrt": rsqrt_c128,
    "sign": sign_c128, "sin": sin_c128, "sinh": sinh_c128, "sqrt": sqrt_c128, "tan": tan_c128,
    "tanh": tanh_c128,
}  # fmt: skip
