"""Codebooks: the value of each code, where that is not the code itself."""

import numpy as np

# NormalFloat: quantiles of N(0, 1), normalised to [-1, 1], with an exact zero.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


# llama.cpp's integers for 4 bits: more of them where more values are.
IQ4_NL = tuple(
    map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
)

# bitsandbytes' fp4, by its bit patterns: a sign, two bits of exponent, one of mantissa; over 12.
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4_BNB = tuple(float(np.float32(sign * value / 12)) for sign in (1, -1) for value in _FP4)


def dynamic_map() -> tuple[float, ...]:
    """Returns bitsandbytes' 256 values for 8 bits, ascending: signed, an exponent of any width.

    A value has the sign, zeros, a one, and what is left as a fraction: 7 powers of ten, and of the
    i-th 2**i values that lie evenly from 0.1 to 1. They are computed in float32, as there by torch
    where a processor multiplies and adds in one step; where not, some differ in the last place.

    >>> from veneer.quant.formats.codebooks import dynamic_map
    >>> len(dynamic_map()), dynamic_map()[127], dynamic_map()[255]
    (256, 0.0, 1.0)
    """
    values = [0.0, 1.0]
    for i in range(7):
        count = 2**i + 1
        step = np.float64(np.float32(0.9) / np.float32(count - 1))
        # Each half of the bounds from its own end.
        near, far = np.arange(count), np.arange(count)[::-1]
        low = np.float32(0.1) + step * near
        high = np.float32(1.0) - step * far
        bounds = np.where(near < count // 2, low, high).astype(np.float32)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        of_power = np.float32(10.0 ** (i - 6)) * means
        values += [*map(float, of_power), *map(float, -of_power)]
    return tuple(sorted(values))


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int) -> tuple[float, ...]:
    """Returns the values of a float format without infinities and NaN, by their bit patterns.

    The highest bit is the sign, so the second half is the first one negated. An exponent of 0 is
    that of subnormal numbers.

    >>> from veneer.quant.formats.codebooks import minifloat
    >>> minifloat(exponent_bits=2, mantissa_bits=1, bias=1)[:8]
    (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    """
    positive = []
    for pattern in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(pattern, 2**mantissa_bits)
        fraction = mantissa / 2**mantissa_bits + (exponent > 0)
        positive.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return (*positive, *(-value for value in positive))
