"""Complex numbers and their parts; `complex_maths` has functions of them."""

from typing import Any

import numpy as np

from .. import storage
from ..builder import Builder
from ..registry import fused, perform
from ..values import Value
from .elementwise import entrywise


@fused("complex")
def _(b: Builder, real: Value, imag: Value) -> Value:
    name = storage.type_name(np.dtype(b.out.dtype))
    return entrywise(b, lambda k, x, y: f"{name}(complex({x}, {y}))", real, imag)


@fused("real")
def _(b: Builder, x: Value) -> Value:
    return entrywise(b, lambda k, x: f"{x}.real", x, cost=0)


@fused("imag")
def _(b: Builder, x: Value) -> Value:
    return entrywise(b, lambda k, x: f"{x}.imag", x, cost=0)


@fused("conj")
def _(b: Builder, x: Value, *, input_dtype: Any) -> Value:
    name = storage.type_name(np.dtype(b.out.dtype))
    if x.dtype.kind != "c":
        return entrywise(b, lambda k, x: f"{name}(complex({x}, 0.0))", x)
    return entrywise(b, lambda k, x: f"{name}(complex({x}.real, -{x}.imag))", x)


@perform.register("complex")
def _(real: Any, imag: Any) -> Any:
    out = np.empty(np.broadcast_shapes(np.shape(real), np.shape(imag)), np.result_type(real, 1j))
    out.real, out.imag = real, imag
    return out


@perform.register("real")
def _(x: Any) -> Any:
    return np.real(x)


@perform.register("imag")
def _(x: Any) -> Any:
    return np.imag(x)


@perform.register("conj")
def _(x: Any, *, input_dtype: Any) -> Any:
    return np.conj(x).astype(np.result_type(x, np.complex64))
