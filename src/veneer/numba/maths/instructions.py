"""Instructions of numbers, as plain Python on NumPy's scalars.

Compiled code has for each of them the intrinsic of its name in `intrinsics`, which is one of LLVM's
instructions, and makes no branch.
"""

import numpy as np

from .scalar import instruction


@instruction
def select(condition, x, y):
    """`x` where the condition holds, or else `y`: both of one type."""
    return x if condition else y


@instruction
def reinterpreted(x, like):
    """The bits of a number as a number of the type of another of its size."""
    return np.asarray(x).view(np.asarray(like).dtype)[()]


@instruction
def maximum(x, y):
    """The greater; NaN if either is, and 0.0 of -0.0 and 0.0."""
    if isinstance(x, np.floating) and x == y:
        return y if np.signbit(x) else x
    return np.maximum(x, y)


@instruction
def minimum(x, y):
    """The smaller; NaN if either is, and -0.0 of -0.0 and 0.0."""
    if isinstance(x, np.floating) and x == y:
        return x if np.signbit(x) else y
    return np.minimum(x, y)


@instruction
def floor(x):
    """The greatest whole number that is not greater."""
    return np.floor(x)


@instruction
def ceil(x):
    """The smallest whole number that is not smaller."""
    return np.ceil(x)


@instruction
def trunc(x):
    """The whole number towards zero."""
    return np.trunc(x)


@instruction
def rint(x):
    """The nearest whole number, the even one of two."""
    return np.rint(x)


@instruction
def fabs(x):
    """The absolute value of a float."""
    return np.abs(x)


@instruction
def sqrt(x):
    """The square root, rounded correctly."""
    return np.sqrt(x)


@instruction
def copysign(x, y):
    """The absolute value of x with the sign of y."""
    return np.copysign(x, y)


@instruction
def polynomial(x, coefficients):
    """That of a number by Horner's rule; the coefficient of the highest power is first."""
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


@instruction
def add_in_any_order(x, y):
    """A term of a sum whose terms may be grouped in any way."""
    return x + y


@instruction
def multiply_in_any_order(x, y):
    """A factor of a product whose factors may be grouped in any way."""
    return x * y


@instruction
def bit_count(x):
    """How many bits are 1."""
    return type(x)(bin(_unsigned(x)).count("1"))


@instruction
def leading_zeros(x):
    """How many of the highest bits are 0."""
    return type(x)(x.itemsize * 8 - _unsigned(x).bit_length())


def _unsigned(x):
    return int(x) & ((1 << x.itemsize * 8) - 1)


@instruction
def at(pointer, offset):
    """The memory from an offset on."""
    return pointer[offset:]


@instruction
def memory(pointer, offset, dtype):
    """The memory from an offset in bytes on, as entries of a dtype given as an example of it."""
    return pointer[offset:].view(np.asarray(dtype).dtype)


@instruction
def no_aliases():
    """Says that what a kernel writes to, none of its other arguments points to."""


# Integers, as XLA has them.


@instruction
def quotient(x, y):
    """`x / y` towards zero; all bits are 1 where `y` is 0, and the least over -1 is itself."""
    if y == 0:
        return type(x)(np.iinfo(type(x)).max if x.dtype.kind == "u" else -1)
    whole = abs(int(x)) // abs(int(y))
    return _wrapped(-whole if (x < 0) != (y < 0) else whole, type(x))


@instruction
def remainder(x, y):
    """What is left by `quotient`, of the sign of `x`; `x` where `y` is 0."""
    if y == 0:
        return x
    rest = abs(int(x)) % abs(int(y))
    return type(x)(-rest if x < 0 else rest)


@instruction
def shift_left(x, y):
    """Bits moved up; none is left of a number moved by its width or more."""
    return _wrapped(int(x) << int(y), type(x)) if 0 <= y < _width(x) else type(x)(0)


@instruction
def shift_right_logical(x, y):
    """Bits moved down, with zeros above."""
    return _wrapped(_unsigned(x) >> int(y), type(x)) if 0 <= y < _width(x) else type(x)(0)


@instruction
def shift_right_arithmetic(x, y):
    """Bits moved down, with the sign above."""
    number, width = _unsigned(x), _width(x)
    signed = number - (number >> (width - 1) << width)  # the highest bit is one, of unsigned too
    return _wrapped(signed >> (int(y) if 0 <= y < width else width), type(x))


def _width(x):
    return x.itemsize * 8


def _wrapped(number, kind):
    return np.asarray(number & ((1 << kind(0).itemsize * 8) - 1), np.uint64).astype(kind)[()]
