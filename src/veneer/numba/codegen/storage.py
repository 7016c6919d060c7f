"""Dtypes: how an entry is kept in memory, and what it is computed in.

A bool is a byte in memory. float16 and bfloat16 are bits in memory, and computed in float32, of
which each result that is stored is rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ..maths import conversions

if TYPE_CHECKING:
    from .loop_nest import LoopNest


@dataclass(frozen=True)
class Storage:
    """How a dtype is kept, what it is computed in, and functions from one to the other."""

    stored: Any
    computed: Any
    load: Callable[..., Any] | None = None
    store: Callable[..., Any] | None = None


_OTHERS = {
    np.dtype(bool): Storage(np.uint8, np.bool_, conversions.byte_to_bool, conversions.bool_to_byte),
    np.dtype(np.float16): Storage(
        np.uint16, np.float32, conversions.half_to_float, conversions.float_to_half
    ),
    np.dtype(jnp.bfloat16): Storage(
        np.uint16, np.float32, conversions.bfloat16_to_float, conversions.float_to_bfloat16
    ),
}
_NATIVE = {np.dtype(name) for name in "f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 c8 c16".split()}


#: What JAX without 64 bits takes for arrays of a dtype: NumPy's numbers are of these by default.
WIDE = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {"i4": "i8", "u4": "u8", "f4": "f8", "c8": "c16"}.items()
}


def supported(dtype: Any) -> bool:
    """Whether arrays of a dtype may be in a program."""
    return isinstance(dtype, np.dtype) and (dtype in _NATIVE or dtype in _OTHERS)


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of the memory of arrays of a dtype."""
    return np.dtype(_OTHERS[dtype].stored) if dtype in _OTHERS else dtype


def computed_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of local variables with entries of a dtype."""
    return np.dtype(_OTHERS[dtype].computed) if dtype in _OTHERS else dtype


def loaded(k: "LoopNest", text: str, dtype: np.dtype) -> str:
    """An expression for what is computed with, of one for what is in memory."""
    load = _OTHERS[dtype].load if dtype in _OTHERS else None
    return text if load is None else k.call(load, text)


def stored(k: "LoopNest", text: str, dtype: np.dtype) -> str:
    """An expression for what is put in memory, of one for what is computed with."""
    store = _OTHERS[dtype].store if dtype in _OTHERS else None
    return text if store is None else k.call(store, text)


def type_name(dtype: np.dtype) -> str:
    """The name in generated code of the type that entries are computed in."""
    computed = computed_dtype(dtype)
    return "np.bool_" if computed.kind == "b" else f"np.{computed.name}"


def wrapped(text: str, dtype: np.dtype) -> str:
    """An expression in the bits of the dtype: of integers, Numba computes in 64."""
    return f"{type_name(dtype)}({text})" if dtype.kind in "iu" else text


def literal(value: Any, dtype: np.dtype) -> str:
    """A number as an expression of the type that entries of a dtype are computed in."""
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
    """An expression converted from one dtype to another, as JAX does it.

    Towards zero from a float to an integer, to the nearest that there is; NaN becomes 0. From a
    complex number its real part.
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
    if target.kind == "V" or (target.kind == "f" and target.itemsize == 2):
        return rounded(k, text if was == will else f"{type_name(target)}({text})", target)
    return text if was == will else f"{type_name(target)}({text})"


def rounded(k: "LoopNest", text: str, dtype: np.dtype) -> str:
    """An expression rounded to a dtype, of one for what is computed with."""
    return (
        text
        if dtype not in _OTHERS or dtype.kind == "b"
        else loaded(k, stored(k, text, dtype), dtype)
    )


def _to_integer(k: "LoopNest", text: str, source: np.dtype, target: np.dtype) -> str:
    limits = np.iinfo(target)
    low = source.type(limits.min)
    high = source.type(limits.max)
    if int(high) > limits.max:
        high = np.nextafter(high, source.type(0))
    bounds = [literal(low, source), literal(high, source)]
    ends = [literal(limits.min, target), literal(limits.max, target)]
    inside = k.call(conversions.clipped, text, *bounds)
    whole = f"{type_name(target)}({inside})"
    return k.call(conversions.saturated, whole, text, *bounds, *ends)
