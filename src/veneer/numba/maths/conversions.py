"""Numbers of one dtype as numbers of another."""

import numpy as np

from .instructions import reinterpreted, select
from .scalar import scalar


@scalar
def byte_to_bool(byte):
    """A byte of memory as a bool."""
    return byte != np.uint8(0)


@scalar
def bool_to_byte(value):
    """A bool as a byte of memory."""
    return select(value, np.uint8(1), np.uint8(0))


@scalar
def bfloat16_to_float(bits):
    """The float32 whose upper half has these bits."""
    return reinterpreted(np.uint32(np.uint32(bits) << np.uint32(16)), np.float32(0))


@scalar
def float_to_bfloat16(x):
    """The bits of the nearest bfloat16, the even one of two."""
    bits = reinterpreted(x, np.uint32(0))
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32((np.int64(bits) + np.int64(32767) + np.int64(odd)) >> np.int64(16))
    nan = np.uint32(np.uint32(bits >> np.uint32(16)) | np.uint32(64))
    return np.uint16(select(x == x, rounded, nan))


@scalar
def half_to_float(bits):
    """The float32 that is equal to the float16 of these bits."""
    sign = np.uint32(np.uint32(np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    rest = np.uint32(np.uint32(np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    # A power of two makes up for the other bias, of denormals too; infinity and NaN have bits apart
    scaled = reinterpreted(rest, np.float32(0)) * np.float32(2.0**112)
    special = np.uint32(rest | np.uint32(0x7F800000))
    magnitude = select(rest >= np.uint32(0x0F800000), special, reinterpreted(scaled, np.uint32(0)))
    return reinterpreted(np.uint32(magnitude | sign), np.float32(0))


@scalar
def float_to_half(x):
    """The bits of the nearest float16, the even one of two."""
    bits = reinterpreted(x, np.uint32(0))
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    absolute = reinterpreted(magnitude, np.float32(0))
    # A denormal is rounded by the addition of a number whose last bit is worth as much as its own.
    small = reinterpreted(absolute + np.float32(0.5), np.uint32(0))
    denormal = np.uint32(np.int64(small) - np.int64(0x3F000000))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    biased = np.int64(magnitude) - np.int64(112 << 23) + np.int64(0xFFF) + np.int64(odd)
    normal = np.uint32(biased >> np.int64(13))
    finite = select(absolute < np.float32(2.0**-14), denormal, normal)
    large = select(absolute >= np.float32(65520.0), np.uint32(0x7C00), finite)
    return np.uint16(sign | select(x == x, large, np.uint32(0x7E00)))


@scalar
def clipped(x, low, high):
    """A float within bounds; NaN as the lower one."""
    return select(x > low, select(x < high, x, high), low)


@scalar
def saturated(whole, x, low, high, least, most):
    """A whole number, or the ends of its type where `x` lies beyond them, or 0 where it is NaN."""
    ended = select(x > high, most, select(x < low, least, whole))
    return select(x == x, ended, whole - whole)


@scalar
def next_bits(bits, other, x, y):
    """The bits of the next float of 16 bits from x towards y, of the bits of both."""
    from_zero = np.uint16(select(y < x, np.uint16(0x8001), np.uint16(1)))
    step = select((x < y) == (x > np.float32(0)), np.int64(1), np.int64(-1))
    moved = select(x == np.float32(0), from_zero, np.uint16(np.int64(bits) + step))
    return select(x == y, other, moved)
