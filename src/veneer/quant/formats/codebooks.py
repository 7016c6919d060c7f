"""Codebooks: the value of each code, where that is not the code itself."""

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
