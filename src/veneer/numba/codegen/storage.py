"""Dtypes: how an entry is stored in memory, and the type that it is computed in.

A bool is stored as a byte. float16 and bfloat16 are stored as their bits and computed in float32,
and results are rounded when they are stored. Functions that take or return a `str` here work on
expressions of the generated code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ..maths.instructions import reinterpreted, scalar, select

if TYPE_CHECKING:
    from .loop_nest import LoopNest


# Conversions, which generated code calls.


@scalar
def byte_to_bool(byte):
    """Convert a byte of memory to a bool."""
    return byte != np.uint8(0)


@scalar
def bool_to_byte(value):
    """Convert a bool to a byte of memory."""
    return select(value, np.uint8(1), np.uint8(0))


@scalar
def bfloat16_to_float(bits):
    """Convert the bits of a bfloat16 to float32."""
    return reinterpreted(np.uint32(np.uint32(bits) << np.uint32(16)), np.float32(0))


@scalar
def float_to_bfloat16(x):
    """Round a float32 to the bits of the nearest bfloat16, with ties to even."""
    bits = reinterpreted(x, np.uint32(0))
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32((np.int64(bits) + np.int64(32767) + np.int64(odd)) >> np.int64(16))
    nan = np.uint32(np.uint32(bits >> np.uint32(16)) | np.uint32(64))
    return np.uint16(select(x == x, rounded, nan))


@scalar
def half_to_float(bits):
    """Convert the bits of a float16 to float32."""
    sign = np.uint32(np.uint32(np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    rest = np.uint32(np.uint32(np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    # The power of two corrects the exponent bias, also of denormals, but not of infinity and NaN.
    scaled = reinterpreted(rest, np.float32(0)) * np.float32(2.0**112)
    special = np.uint32(rest | np.uint32(0x7F800000))
    magnitude = select(rest >= np.uint32(0x0F800000), special, reinterpreted(scaled, np.uint32(0)))
    return reinterpreted(np.uint32(magnitude | sign), np.float32(0))


@scalar
def float_to_half(x):
    """Round a float32 to the bits of the nearest float16, with ties to even."""
    bits = reinterpreted(x, np.uint32(0))
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    absolute = reinterpreted(magnitude, np.float32(0))
    # The addition of 0.5 rounds a denormal, because 0.5 has the last bit of a denormal float16.
    small = reinterpreted(absolute + np.float32(0.5), np.uint32(0))
    denormal = np.uint32(np.int64(small) - np.int64(0x3F000000))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    biased = np.int64(magnitude) - np.int64(112 << 23) + np.int64(0xFFF) + np.int64(odd)
    normal = np.uint32(biased >> np.int64(13))
    finite = select(absolute < np.float32(2.0**-14), denormal, normal)
    large = select(absolute >= np.float32(65520.0), np.uint32(0x7C00), finite)
    return np.uint16(sign | select(x == x, large, np.uint32(0x7E00)))


@scalar
def clip_float(x, low, high):
    """Clip a float to the range from `low` to `high`. NaN becomes `low`."""
    return select(x > low, select(x < high, x, high), low)


@scalar
def saturate(truncated, x, low, high, least, most):
    """Convert a float `x` to an integer: 0 for NaN, `least` below `low`, and `most` above `high`.

    For other `x`, return `truncated`, which must be `x` without its fractional part, as an integer.
    """
    ended = select(x > high, most, select(x < low, least, truncated))
    return select(x == x, ended, truncated - truncated)


# Dtypes that are stored as another dtype.


@dataclass(frozen=True)
class _Storage:
    """The storage of a dtype: in memory its entries have another dtype than in computations.

    `load` and `store` convert an entry from the stored to the computed dtype, and back.
    """

    stored: Any
    computed: Any
    load: Callable[..., Any]
    store: Callable[..., Any]


_CONVERTED = {
    np.dtype(bool): _Storage(np.uint8, np.bool_, byte_to_bool, bool_to_byte),
    np.dtype(np.float16): _Storage(np.uint16, np.float32, half_to_float, float_to_half),
    np.dtype(jnp.bfloat16): _Storage(np.uint16, np.float32, bfloat16_to_float, float_to_bfloat16),
}
_NATIVE = {np.dtype(name) for name in "f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 c8 c16".split()}

#: The 64-bit dtypes that JAX without x64 converts to 32 bits. They are NumPy's defaults.
WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {"i4": "i8", "u4": "u8", "f4": "f8", "c8": "c16"}.items()
}


def is_supported(dtype: Any) -> bool:
    """Return whether a program may have arrays of a dtype."""
    return isinstance(dtype, np.dtype) and (dtype in _NATIVE or dtype in _CONVERTED)


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which memory holds the entries of an array of `dtype`."""
    return np.dtype(_CONVERTED[dtype].stored) if dtype in _CONVERTED else dtype


def computed_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of local variables that hold entries of an array of `dtype`."""
    return np.dtype(_CONVERTED[dtype].computed) if dtype in _CONVERTED else dtype


def decode(k: "LoopNest", text: str, dtype: np.dtype) -> str:
    """Convert the expression `text` of an entry in memory to the dtype that it is computed in."""
    return k.call(_CONVERTED[dtype].load, text) if dtype in _CONVERTED else text


def encode(k: "LoopNest", text: str, dtype: np.dtype) -> str:
    """Convert the expression `text` of a computed entry to the dtype that memory holds."""
    return k.call(_CONVERTED[dtype].store, text) if dtype in _CONVERTED else text


def round_to(k: "LoopNest", text: str, dtype: np.dtype) -> str:
    """Round the value of the expression `text` to a number that `dtype` can represent."""
    if dtype not in _CONVERTED or dtype.kind == "b":
        return text
    return decode(k, encode(k, text, dtype), dtype)


def type_name(dtype: np.dtype) -> str:
    """Return the name of the type in generated code that entries of `dtype` are computed in."""
    computed = computed_dtype(dtype)
    return "np.bool_" if computed.kind == "b" else f"np.{computed.name}"


def wrap(text: str, dtype: np.dtype) -> str:
    """Convert an integer expression to `dtype`, because Numba computes with 64 bits.

    A value that does not fit wraps around. An expression of another dtype is returned unchanged.
    """
    return f"{type_name(dtype)}({text})" if dtype.kind in "iu" else text


def literal(value: Any, dtype: np.dtype) -> str:
    """Return an expression for the number `value`, in the type that `dtype` is computed in."""
    name = type_name(dtype)
    number = np.asarray(value).astype(dtype)[()]
    if dtype.kind == "b":
        return str(bool(number))
    if dtype.kind in "iu":
        return f"{name}({int(number)})"
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        real, imag = (literal(x, part) for x in (number.real, number.imag))
        return f"{name}(complex({real}, {imag}))"
    wide = float(number)
    if np.isfinite(wide):
        return f"{name}({wide!r})"
    return f"{name}({'np.nan' if np.isnan(wide) else 'np.inf' if wide > 0 else '-np.inf'})"


def cast(k: "LoopNest", text: str, source: np.dtype, target: np.dtype) -> str:
    """Convert the expression `text` from the dtype `source` to the dtype `target`, as JAX does.

    A float is rounded towards zero to an integer and saturates, and NaN becomes 0. A complex number
    becomes its real part.
    """
    if source == target:
        return text
    if source.kind == "c" and target.kind != "c" and target.kind != "b":
        source, text = np.dtype(f"f{source.itemsize // 2}"), f"{text}.real"
    was, will = computed_dtype(source), computed_dtype(target)
    if target.kind == "b":
        return text if was.kind == "b" else f"({text} != {literal(0, source)})"
    if was.kind == "f" and will.kind in "iu":
        return _to_integer(k, text, was, will)
    if was != will:
        text = f"{type_name(target)}({text})"
    return round_to(k, text, target)


def _to_integer(k: "LoopNest", text: str, source: np.dtype, target: np.dtype) -> str:
    limits = np.iinfo(target)
    low = source.type(limits.min)
    high = source.type(limits.max)
    if int(high) > limits.max:
        high = np.nextafter(high, source.type(0))
    bounds = [literal(low, source), literal(high, source)]
    ends = [literal(limits.min, target), literal(limits.max, target)]
    inside = k.call(clip_float, text, *bounds)
    truncated = f"{type_name(target)}({inside})"
    return k.call(saturate, truncated, text, *bounds, *ends)
