"""Exponentials, logarithms, sigmoids and other real functions, for loops that become vector code.

The functions by precision have no branches. Their errors, in units in the last place, are at most

- 2 for exp, exp2, log, log1p and rsqrt, also of denormals,
- 5 for expm1, tanh and logistic, and erf of float32,
- 6 for erf_inv of float64.

All are exact at infinities, zeros and NaN, and reach their limits at the same arguments as XLA. The
approximations are from Cephes (Moshier, 1989), and for tanh and erf of float32 from Eigen, as in
XLA. Primitives without a function here use the C library.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .instructions import (
    C_LIBRARY,
    ByPrecision,
    by_precision,
    copysign,
    erfc,
    fabs,
    floats,
    polynomial,
    reinterpreted,
    rint,
    scalar,
    select,
    sqrt,
    trunc,
)
from .instructions import erf as erf_f64

# Constants of the two precisions.

_FLOAT: Any = ByPrecision(np.float32, np.float64)
_INT: Any = ByPrecision(np.int32, np.int64)
_MANTISSA_BITS: Any = ByPrecision(np.int32(23), np.int64(52))
_BIAS: Any = ByPrecision(np.int32(127), np.int64(1023))
_ROOT_OF_HALF: Any = ByPrecision(np.int32(0x3F3504F3), np.int64(0x3FE6A09E667F3BCD))  # as bits
_SMALLEST_NORMAL = floats(1.17549435e-38, 2.2250738585072014e-308)
_TO_NORMAL, _TO_NORMAL_LOG2 = floats(2.0**23, 2.0**52), floats(23, 52)

# Below the low bounds results are 0 (of expm1 -1). Above the high bounds they are infinite.
_EXP_LOW, _EXP_HIGH = floats(-104, -746), floats(89, 710)
_EXP2_LOW, _EXP2_HIGH = floats(-151, -1076), floats(129, 1025)
_EXPM1_LOW = floats(-26, -56)
#: log1p(x) rounds to x below this magnitude.
_LOG1P_SMALL = floats(1e-10, 1e-20)

_LOG2_E = floats(1.44269504088896341, 1.4426950408889634073599)
_LN2 = floats(0.69314718055994530942, 0.69314718055994530942)
# ln(2) as a sum. The high part has few bits, so that its product with an integer k is exact.
_EXP_LN2_HIGH, _EXP_LN2_LOW = (
    floats(0.693359375, 6.93145751953125e-1),
    floats(-2.12194440e-4, 1.42860682030941723212e-6),
)
_LOG_LN2_HIGH, _LOG_LN2_LOW = (
    floats(0.693359375, 0.693359375),
    floats(-2.12194440e-4, -2.121944400546905827679e-4),
)


def _coefficients(dtype: type, *numbers: float) -> Any:
    return tuple(map(dtype, numbers))


# Polynomials, with the coefficient of the highest power first.
# float32: (exp(r) - 1 - r) / r**2. float64: exp(r) - 1 = 2 r P(r**2) / (Q(r**2) - r P(r**2)).
_EXP_P32 = _coefficients(
    np.float32,
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
_EXP_P64 = _coefficients(
    np.float64,
    1.26177193074810590878e-4, 3.02994407707441961300e-2, 9.99999999999999999910e-1,
)  # fmt: skip
_EXP_Q64 = _coefficients(
    np.float64,
    3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1,
    2.00000000000000000005,
)  # fmt: skip

# (log(1 + r) - r + r**2 / 2) / r**3: a polynomial for float32, and P / Q for float64.
_LOG_P32 = _coefficients(
    np.float32,
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LOG_P64 = _coefficients(
    np.float64,
    1.01875663804580931796e-4, 4.97494994976747001425e-1, 4.70579119878881725854,
    1.44989225341610930846e1, 1.79368678507819816313e1, 7.70838733755885391666,
)  # fmt: skip
_LOG_Q64 = _coefficients(
    np.float64,
    1.0, 1.12873587189167450590e1, 4.52279145837532221105e1, 8.29875266912776603211e1,
    7.11544750618563894466e1, 2.31251620126765340583e1,
)  # fmt: skip

# float32: tanh(x) / x and erf(x) / x are P / Q at x**2.
_TANH_P32 = _coefficients(
    np.float32,
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08,
    1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03,
)  # fmt: skip
_TANH_Q32 = _coefficients(
    np.float32,
    1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03,
)  # fmt: skip
_ERF_P32 = _coefficients(
    np.float32,
    0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145,
    1.128379143519084,
)  # fmt: skip
_ERF_Q32 = _coefficients(
    np.float32,
    -1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667,
    0.11098505178285362, 0.49746925110067538, 1.0,
)  # fmt: skip

# float32: erf_inv(x) / x, with w = -log(1 - x**2): polynomials in w - 5 / 2 for small w, and in
# sqrt(w) - 3 for large w (Giles, "Approximating the erfinv function", 2010).
_ERF_INV_NEAR32 = _coefficients(
    np.float32,
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_FAR32 = _coefficients(
    np.float32,
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


# The exponential: 2**k * exp(r), with |r| <= ln(2) / 2.


@by_precision
def power_of_two(k):
    """Return 2 to the power of an integer `k`. The result must be a normal float."""
    return reinterpreted(_INT((_INT(k) + _BIAS) << _MANTISSA_BITS), _FLOAT(0))


@scalar
def exp_less_1_f32(r):
    """Return exp(r) - 1 for |r| <= ln(2) / 2."""
    return polynomial(r, _EXP_P32) * (r * r) + r


@scalar
def exp_less_1_f64(r):
    """Return exp(r) - 1 for |r| <= ln(2) / 2."""
    z = r * r
    p = polynomial(z, _EXP_P64) * r
    return np.float64(2) * p / (polynomial(z, _EXP_Q64) - p)


_exp_less_1: Any = ByPrecision(exp_less_1_f32, exp_less_1_f64)


@by_precision
def exp(x):
    inside = select(x < _EXP_LOW, _EXP_LOW, select(x > _EXP_HIGH, _EXP_HIGH, x))
    k = rint(inside * _LOG2_E)
    r = inside - k * _EXP_LN2_HIGH
    r = r - k * _EXP_LN2_LOW
    half = trunc(k * _FLOAT(0.5))  # 2**k itself may be denormal or overflow
    p = _exp_less_1(r) + _FLOAT(1)
    return p * power_of_two(half) * power_of_two(k - half)


@by_precision
def exp2(x):
    inside = select(x < _EXP2_LOW, _EXP2_LOW, select(x > _EXP2_HIGH, _EXP2_HIGH, x))
    k = rint(inside)
    half = trunc(k * _FLOAT(0.5))
    p = _exp_less_1((inside - k) * _LN2) + _FLOAT(1)
    return p * power_of_two(half) * power_of_two(k - half)


@by_precision
def expm1(x):
    """Return exp(x) - 1, accurate near 0."""
    inside = select(x < _EXPM1_LOW, _EXPM1_LOW, select(x > _EXP_HIGH, _EXP_HIGH, x))
    k = rint(inside * _LOG2_E)
    r = inside - k * _EXP_LN2_HIGH
    r = r - k * _EXP_LN2_LOW
    scale = power_of_two(k - _FLOAT(1))
    p = _exp_less_1(r)
    return select(x == _FLOAT(0), x, (scale * p + (scale - _FLOAT(0.5))) * _FLOAT(2))


# The logarithm: k * ln(2) + log(m), with m between the roots of 1/2 and 2.


@scalar
def log_series_f32(r, z):
    """Return log(1 + r) - r + z / 2, with z = r**2."""
    return polynomial(r, _LOG_P32) * r * z


@scalar
def log_series_f64(r, z):
    """Return log(1 + r) - r + z / 2, with z = r**2."""
    return r * (z * polynomial(r, _LOG_P64) / polynomial(r, _LOG_Q64))


_log_series: Any = ByPrecision(log_series_f32, log_series_f64)


@by_precision
def log(x):
    denormal = x < _SMALLEST_NORMAL
    normal = select(denormal, x * _TO_NORMAL, x)
    bits = reinterpreted(normal, _INT(0))
    # Choose the exponent so that the mantissa is between the roots of 1/2 and 2.
    above = _INT(bits - _ROOT_OF_HALF)
    exponent = _INT(above >> _MANTISSA_BITS)
    m = reinterpreted(_INT(bits - _INT(exponent << _MANTISSA_BITS)), _FLOAT(0))
    k = _FLOAT(exponent) - select(denormal, _TO_NORMAL_LOG2, _FLOAT(0))
    r = m - _FLOAT(1)
    z = r * r
    y = _log_series(r, z) + k * _LOG_LN2_LOW - _FLOAT(0.5) * z
    result = (r + y) + k * _LOG_LN2_HIGH
    result = select(x == _FLOAT(np.inf), x, result)
    result = select(x == _FLOAT(0), _FLOAT(-np.inf), result)
    return select(x >= _FLOAT(0), result, _FLOAT(np.nan))


@by_precision
def log1p(x):
    """Return log(1 + x), accurate near 0."""
    u = _FLOAT(1) + x
    lost = (x - (u - _FLOAT(1))) / u  # the rounding error of u, relative to u
    is_finite = (u > _FLOAT(0)) & (u < _FLOAT(np.inf))
    result = log(u) + select(is_finite, lost, _FLOAT(0))
    return select(fabs(x) < _LOG1P_SMALL, x, result)


exp_f64, expm1_f64 = exp.f64, expm1.f64
log_f32, log1p_f32 = log.f32, log1p.f32


# Sigmoids.


@scalar
def tanh_f32(x):
    bound = np.float32(7.90531110763549805)
    c = select(x > bound, bound, select(x < -bound, -bound, x))
    z = c * c
    far = c * polynomial(z, _TANH_P32) / polynomial(z, _TANH_Q32)
    far = select(fabs(x) < np.float32(0.0004), x, far)
    return select(fabs(x) > np.float32(7.99881172180175781), copysign(np.float32(1), x), far)


@scalar
def tanh_f64(x):
    magnitude = fabs(x)
    e = expm1_f64(select(magnitude > np.float64(20), np.float64(40), np.float64(2) * magnitude))
    return copysign(select(x == x, e / (e + np.float64(2)), x), x)


@by_precision
def logistic(x):
    e = exp(-fabs(x))
    return select(x < _FLOAT(0), e, _FLOAT(1)) / (_FLOAT(1) + e)


@scalar
def erf_f32(x):
    bound = np.float32(3.7439211627767994)
    c = select(x > bound, bound, select(x < -bound, -bound, x))
    z = c * c
    near = c * polynomial(z, _ERF_P32) / polynomial(z, _ERF_Q32)
    return select(fabs(x) >= bound, copysign(np.float32(1), x), near)


@scalar
def erf_inv_f32(x):
    """Return the inverse error function of a float32."""
    rest = (np.float32(1) - x) * (np.float32(1) + x)  # 1 - x is exact near 1
    w = -select(fabs(x) < np.float32(0.5), log1p_f32(-x * x), log_f32(rest))
    near = polynomial(w - np.float32(2.5), _ERF_INV_NEAR32)
    far = polynomial(sqrt(w) - np.float32(3), _ERF_INV_FAR32)
    result = select(w < np.float32(5), near, far) * x
    return select(fabs(x) == np.float32(1), x * np.float32(np.inf), copysign(result, x))


@scalar
def erf_inv_f64(x):
    """Return the inverse error function of a float64, by Newton's method."""
    y = np.float64(erf_inv_f32(np.float32(x)))
    start = select(fabs(y) < np.float64(6), y, copysign(np.float64(5.4), x))
    y = start
    for _ in range(4):
        # Near 1, 1 - |x| is exact.
        error = (np.float64(1) - fabs(x)) - erfc(fabs(y))
        small = erf_f64(y) - x
        error = select(fabs(x) < np.float64(0.5), small, copysign(error, error * x))
        step = error * np.float64(0.88622692545275801365) * exp_f64(y * y)
        y = y - step / (np.float64(1) + y * step)
    y = select(fabs(x) == np.float64(1), x * np.float64(np.inf), copysign(y, x))
    return select(fabs(x) <= np.float64(1), y, np.float64(np.nan))


# Any float.


@by_precision
def rsqrt(x):
    return _FLOAT(1) / sqrt(x)


@scalar
def round_away(x):
    """Round a float to the nearest integer, and ties away from zero."""
    whole = trunc(x)
    one = copysign(whole * np.float32(0) + np.float32(1), x)
    rounded = select(fabs(x - whole) >= np.float32(0.5), whole + one, whole)
    return copysign(select(whole == x, whole, rounded), x)


@by_precision
def sign(x):
    """Return -1 or 1 with the sign of `x`. Zeros and NaN are returned unchanged."""
    return select(fabs(x) > _FLOAT(0), copysign(_FLOAT(1), x), x)


# Integers of any width. Numba computes with 64 bits, and callers convert to the width.


@scalar
def abs_int(x):
    """Return the absolute value of an integer. The minimum of the type is returned unchanged."""
    return select(x < 0, -np.int64(x), np.int64(x))


@scalar
def sign_int(x):
    """Return -1, 0 or 1: the sign of an integer."""
    return np.int64(x > 0) - np.int64(x < 0)


#: Functions by the names of JAX primitives.
FUNCTIONS: dict[str, ByPrecision] = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log1p": log1p, "logistic": logistic,
    "tanh": ByPrecision(tanh_f32, tanh_f64), "erf": ByPrecision(erf_f32, erf_f64),
    "erf_inv": ByPrecision(erf_inv_f32, erf_inv_f64), "rsqrt": rsqrt, "sign": sign,
    "sqrt": ByPrecision(sqrt, sqrt),
}  # fmt: skip


def functions_of(name: str) -> dict[np.dtype, Callable[..., Any]]:
    """Return the functions that compute a JAX primitive, by dtype: float32 and float64."""
    functions = FUNCTIONS[name] if name in FUNCTIONS else (C_LIBRARY[name],) * 2
    return dict(zip(map(np.dtype, _FLOAT), functions, strict=True))
