"""Functions of mathematics, for loops that become vector instructions.

Those whose names end with `_f32` and `_f64` have no branches. exp, exp2, log, log1p and rsqrt lie
within 2 units in the last place of the exact result, denormals included; expm1, tanh and logistic
within 5, and so do erf of float32 and erf_inv of float64 within 6. All are exact at infinities,
zeros and NaN. Others are those of the C library. The polynomials and rational functions are those
of Cephes (Moshier, 1989), and for tanh and erf of float32 those that XLA has from Eigen.
"""

import numpy as np

from .instructions import copysign, fabs, reinterpreted, rint, select, sqrt, trunc
from .libm import erf, erfc
from .scalar import scalar

# The exponential: 2**k * exp(r), with |r| <= ln(2) / 2.


@scalar
def _power_of_two_f32(k):
    """2 to the power of a whole number from -126 to 127."""
    return reinterpreted(np.int32((np.int32(k) + np.int32(127)) << np.int32(23)), np.float32(0))


@scalar
def _power_of_two_f64(k):
    """2 to the power of a whole number from -1022 to 1023."""
    return reinterpreted(np.int64((np.int64(k) + np.int64(1023)) << np.int64(52)), np.float64(0))


@scalar
def _exp_less_1_f32(r):
    """exp(r) - 1 of a small number."""
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return p * (r * r) + r


@scalar
def _exp_less_1_f64(r):
    """exp(r) - 1 of a small number."""
    z = r * r
    p = np.float64(1.26177193074810590878e-4) * z + np.float64(3.02994407707441961300e-2)
    p = (p * z + np.float64(9.99999999999999999910e-1)) * r
    q = np.float64(3.00198505138664455042e-6) * z + np.float64(2.52448340349684104192e-3)
    q = q * z + np.float64(2.27265548208155028766e-1)
    q = q * z + np.float64(2.00000000000000000005)
    return np.float64(2) * p / (q - p)


@scalar
def exp_f32(x):
    """The exponential of a float32."""
    low, high = np.float32(-104), np.float32(89)
    inside = select(x < low, low, select(x > high, high, x))
    k = rint(inside * np.float32(1.44269504088896341))
    r = inside - k * np.float32(0.693359375)
    r = r - k * np.float32(-2.12194440e-4)
    half = trunc(k * np.float32(0.5))  # 2**k alone may be a denormal, or too great
    p = _exp_less_1_f32(r) + np.float32(1)
    return p * _power_of_two_f32(half) * _power_of_two_f32(k - half)


@scalar
def exp_f64(x):
    """The exponential of a float64."""
    low, high = np.float64(-746), np.float64(710)
    inside = select(x < low, low, select(x > high, high, x))
    k = rint(inside * np.float64(1.4426950408889634073599))
    r = inside - k * np.float64(6.93145751953125e-1)
    r = r - k * np.float64(1.42860682030941723212e-6)
    half = trunc(k * np.float64(0.5))
    p = _exp_less_1_f64(r) + np.float64(1)
    return p * _power_of_two_f64(half) * _power_of_two_f64(k - half)


@scalar
def exp2_f32(x):
    """2 to the power of a float32."""
    low, high = np.float32(-151), np.float32(129)
    inside = select(x < low, low, select(x > high, high, x))
    k = rint(inside)
    half = trunc(k * np.float32(0.5))
    p = _exp_less_1_f32((inside - k) * np.float32(0.69314718055994530942)) + np.float32(1)
    return p * _power_of_two_f32(half) * _power_of_two_f32(k - half)


@scalar
def exp2_f64(x):
    """2 to the power of a float64."""
    low, high = np.float64(-1076), np.float64(1025)
    inside = select(x < low, low, select(x > high, high, x))
    k = rint(inside)
    half = trunc(k * np.float64(0.5))
    p = _exp_less_1_f64((inside - k) * np.float64(0.69314718055994530942)) + np.float64(1)
    return p * _power_of_two_f64(half) * _power_of_two_f64(k - half)


@scalar
def expm1_f32(x):
    """The exponential of a float32, less 1."""
    low, high = np.float32(-26), np.float32(89)
    inside = select(x < low, low, select(x > high, high, x))
    k = rint(inside * np.float32(1.44269504088896341))
    r = inside - k * np.float32(0.693359375)
    r = r - k * np.float32(-2.12194440e-4)
    scale = _power_of_two_f32(k - np.float32(1))
    p = _exp_less_1_f32(r)
    return select(x == np.float32(0), x, (scale * p + (scale - np.float32(0.5))) * np.float32(2))


@scalar
def expm1_f64(x):
    """The exponential of a float64, less 1."""
    low, high = np.float64(-56), np.float64(710)
    inside = select(x < low, low, select(x > high, high, x))
    k = rint(inside * np.float64(1.4426950408889634073599))
    r = inside - k * np.float64(6.93145751953125e-1)
    r = r - k * np.float64(1.42860682030941723212e-6)
    scale = _power_of_two_f64(k - np.float64(1))
    p = _exp_less_1_f64(r)
    return select(x == np.float64(0), x, (scale * p + (scale - np.float64(0.5))) * np.float64(2))


# The logarithm: k * ln(2) + log(m), with m between the roots of 1/2 and 2.


@scalar
def log_f32(x):
    """The natural logarithm of a float32."""
    denormal = x < np.float32(1.17549435e-38)
    normal = select(denormal, x * np.float32(8388608), x)
    bits = reinterpreted(normal, np.int32(0))
    # The exponent is taken from where a mantissa is the root of 1/2.
    above = np.int32(bits - np.int32(0x3F3504F3))
    exponent = np.int32(above >> np.int32(23))
    m = reinterpreted(np.int32(bits - np.int32(exponent << np.int32(23))), np.float32(0))
    k = np.float32(exponent) - select(denormal, np.float32(23), np.float32(0))
    r = m - np.float32(1)
    z = r * r
    p = np.float32(7.0376836292e-2) * r + np.float32(-1.1514610310e-1)
    p = p * r + np.float32(1.1676998740e-1)
    p = p * r + np.float32(-1.2420140846e-1)
    p = p * r + np.float32(1.4249322787e-1)
    p = p * r + np.float32(-1.6668057665e-1)
    p = p * r + np.float32(2.0000714765e-1)
    p = p * r + np.float32(-2.4999993993e-1)
    p = p * r + np.float32(3.3333331174e-1)
    y = p * r * z + k * np.float32(-2.12194440e-4) - np.float32(0.5) * z
    result = (r + y) + k * np.float32(0.693359375)
    result = select(x == np.float32(np.inf), x, result)
    result = select(x == np.float32(0), np.float32(-np.inf), result)
    return select(x >= np.float32(0), result, np.float32(np.nan))


@scalar
def log_f64(x):
    """The natural logarithm of a float64."""
    denormal = x < np.float64(2.2250738585072014e-308)
    normal = select(denormal, x * np.float64(4503599627370496), x)
    bits = reinterpreted(normal, np.int64(0))
    exponent = (bits - np.int64(0x3FE6A09E667F3BCD)) >> np.int64(52)
    m = reinterpreted(bits - (exponent << np.int64(52)), np.float64(0))
    k = np.float64(exponent) - select(denormal, np.float64(52), np.float64(0))
    r = m - np.float64(1)
    z = r * r
    p = np.float64(1.01875663804580931796e-4) * r + np.float64(4.97494994976747001425e-1)
    p = p * r + np.float64(4.70579119878881725854)
    p = p * r + np.float64(1.44989225341610930846e1)
    p = p * r + np.float64(1.79368678507819816313e1)
    p = p * r + np.float64(7.70838733755885391666)
    q = r + np.float64(1.12873587189167450590e1)
    q = q * r + np.float64(4.52279145837532221105e1)
    q = q * r + np.float64(8.29875266912776603211e1)
    q = q * r + np.float64(7.11544750618563894466e1)
    q = q * r + np.float64(2.31251620126765340583e1)
    y = r * (z * p / q) + k * np.float64(-2.121944400546905827679e-4) - np.float64(0.5) * z
    result = (r + y) + k * np.float64(0.693359375)
    result = select(x == np.float64(np.inf), x, result)
    result = select(x == np.float64(0), np.float64(-np.inf), result)
    return select(x >= np.float64(0), result, np.float64(np.nan))


@scalar
def log1p_f32(x):
    """The natural logarithm of 1 and a float32."""
    u = np.float32(1) + x
    lost = (x - (u - np.float32(1))) / u  # what rounding took from the sum
    usual = (u > np.float32(0)) & (u < np.float32(np.inf))
    result = log_f32(u) + select(usual, lost, np.float32(0))
    return select(fabs(x) < np.float32(1e-10), x, result)


@scalar
def log1p_f64(x):
    """The natural logarithm of 1 and a float64."""
    u = np.float64(1) + x
    lost = (x - (u - np.float64(1))) / u
    usual = (u > np.float64(0)) & (u < np.float64(np.inf))
    result = log_f64(u) + select(usual, lost, np.float64(0))
    return select(fabs(x) < np.float64(1e-20), x, result)


# Sigmoids.


@scalar
def tanh_f32(x):
    """The hyperbolic tangent of a float32."""
    bound = np.float32(7.90531110763549805)
    c = select(x > bound, bound, select(x < -bound, -bound, x))
    z = c * c
    p = np.float32(-2.76076847742355e-16) * z + np.float32(2.00018790482477e-13)
    p = p * z + np.float32(-8.60467152213735e-11)
    p = p * z + np.float32(5.12229709037114e-08)
    p = p * z + np.float32(1.48572235717979e-05)
    p = p * z + np.float32(6.37261928875436e-04)
    p = p * z + np.float32(4.89352455891786e-03)
    q = np.float32(1.19825839466702e-06) * z + np.float32(1.18534705686654e-04)
    q = q * z + np.float32(2.26843463243900e-03)
    q = q * z + np.float32(4.89352518554385e-03)
    return select(fabs(x) < np.float32(0.0004), x, c * p / q)


@scalar
def tanh_f64(x):
    """The hyperbolic tangent of a float64."""
    magnitude = fabs(x)
    e = expm1_f64(select(magnitude > np.float64(20), np.float64(40), np.float64(2) * magnitude))
    return copysign(select(x == x, e / (e + np.float64(2)), x), x)


@scalar
def logistic_f32(x):
    """1 / (1 + exp(-x)) of a float32."""
    e = exp_f32(-fabs(x))
    return select(x < np.float32(0), e, np.float32(1)) / (np.float32(1) + e)


@scalar
def logistic_f64(x):
    """1 / (1 + exp(-x)) of a float64."""
    e = exp_f64(-fabs(x))
    return select(x < np.float64(0), e, np.float64(1)) / (np.float64(1) + e)


@scalar
def erf_f32(x):
    """The error function of a float32."""
    bound = np.float32(3.7439211627767994)
    c = select(x > bound, bound, select(x < -bound, -bound, x))
    z = c * c
    p = np.float32(0.00022905065861350646) * z + np.float32(0.0034082910107109506)
    p = p * z + np.float32(0.050955695062380861)
    p = p * z + np.float32(0.18520832239976145)
    p = p * z + np.float32(1.128379143519084)
    q = np.float32(-1.1791602954361697e-7) * z + np.float32(0.000023547966471313185)
    q = q * z + np.float32(0.0010179625278914885)
    q = q * z + np.float32(0.014070470171167667)
    q = q * z + np.float32(0.11098505178285362)
    q = q * z + np.float32(0.49746925110067538)
    q = q * z + np.float32(1)
    return c * p / q


@scalar
def erf_inv_f32(x):
    """The inverse of the error function, of a float32 (Giles, 2010)."""
    rest = (np.float32(1) - x) * (np.float32(1) + x)  # 1 - x is exact where x is near 1
    w = -select(fabs(x) < np.float32(0.5), log1p_f32(-x * x), log_f32(rest))
    near, far = w - np.float32(2.5), sqrt(w) - np.float32(3)
    p = np.float32(2.81022636e-08) * near + np.float32(3.43273939e-07)
    p = p * near + np.float32(-3.5233877e-06)
    p = p * near + np.float32(-4.39150654e-06)
    p = p * near + np.float32(0.00021858087)
    p = p * near + np.float32(-0.00125372503)
    p = p * near + np.float32(-0.00417768164)
    p = p * near + np.float32(0.246640727)
    p = p * near + np.float32(1.50140941)
    q = np.float32(-0.000200214257) * far + np.float32(0.000100950558)
    q = q * far + np.float32(0.00134934322)
    q = q * far + np.float32(-0.00367342844)
    q = q * far + np.float32(0.00573950773)
    q = q * far + np.float32(-0.0076224613)
    q = q * far + np.float32(0.00943887047)
    q = q * far + np.float32(1.00167406)
    q = q * far + np.float32(2.83297682)
    result = select(w < np.float32(5), p, q) * x
    return select(fabs(x) == np.float32(1), x * np.float32(np.inf), copysign(result, x))


@scalar
def erf_inv_f64(x):
    """The inverse of the error function, of a float64: Newton's method from that of float32."""
    y = np.float64(erf_inv_f32(np.float32(x)))
    start = select(fabs(y) < np.float64(6), y, copysign(np.float64(5.4), x))
    y = start
    for _ in range(4):
        # Near 1, what is missing to it is exact.
        error = (np.float64(1) - fabs(x)) - erfc(fabs(y))
        small = erf(y) - x
        error = select(fabs(x) < np.float64(0.5), small, copysign(error, error * x))
        step = error * np.float64(0.88622692545275801365) * exp_f64(y * y)
        y = y - step / (np.float64(1) + y * step)
    y = select(fabs(x) == np.float64(1), x * np.float64(np.inf), copysign(y, x))
    return select(fabs(x) <= np.float64(1), y, np.float64(np.nan))


# Of any float.


@scalar
def rsqrt_f32(x):
    """One over the square root of a float32."""
    return np.float32(1) / sqrt(x)


@scalar
def rsqrt_f64(x):
    """One over the square root of a float64."""
    return np.float64(1) / sqrt(x)


@scalar
def round_away(x):
    """The nearest whole number, the one away from zero of two."""
    whole = trunc(x)
    one = copysign(whole * np.float32(0) + np.float32(1), x)
    more = select(fabs(x - whole) >= np.float32(0.5), whole + one, whole)
    return copysign(select(whole == x, whole, more), x)


@scalar
def sign_f32(x):
    """-1 or 1; zeros and NaN are themselves."""
    return select(fabs(x) > np.float32(0), copysign(np.float32(1), x), x)


@scalar
def sign_f64(x):
    """-1 or 1; zeros and NaN are themselves."""
    return select(fabs(x) > np.float64(0), copysign(np.float64(1), x), x)


# Of integers of any width: Numba computes in 64 bits, and callers cut to the width.


@scalar
def abs_int(x):
    """The absolute value; the least number is its own."""
    return select(x < 0, -np.int64(x), np.int64(x))


@scalar
def sign_int(x):
    """-1, 0 or 1."""
    return np.int64(x > 0) - np.int64(x < 0)
