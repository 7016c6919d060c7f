"""Operators and array methods of implicit arrays at top level: `implicit` of JAX's own."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from .transform import implicit
from .value import ImplicitArray, materialise_one

_BINARY = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq ne"
).split()
_REFLECTED = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
).split()
_UNARY = "neg pos abs invert".split()
_METHODS = (
    "all any argmax argmin argsort astype clip conj conjugate copy cumprod cumsum diagonal dot "
    "flatten max mean min prod ptp ravel repeat reshape round sort squeeze std sum swapaxes take "
    "trace transpose var __getitem__ __round__ __divmod__ __rdivmod__"
).split()
_PROPERTIES = "T mT real imag".split()
_SCALARS = {"bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index}


def _binary(function: Callable) -> Callable:
    return lambda self, other: implicit(function)(self, other)


def _reflected(function: Callable) -> Callable:
    return lambda self, other: implicit(function)(other, self)


def _unary(function: Callable) -> Callable:
    return lambda self: implicit(function)(self)


def _method(name: str) -> Callable:
    def method(self: ImplicitArray, *args: Any, **kwargs: Any) -> Any:
        return implicit(lambda x, args, kwargs: getattr(x, name)(*args, **kwargs))(
            self, args, kwargs
        )

    return method


def _property(name: str) -> property:
    return property(lambda self: implicit(lambda x: getattr(x, name))(self))


def _scalar(convert: Callable) -> Callable:
    return lambda self: convert(materialise_one(self))


def _len(self: ImplicitArray) -> int:
    if not self.shape:
        raise TypeError("len() of unsized object")
    return self.shape[0]


def _iter(self: ImplicitArray) -> Iterator[Any]:
    return (self[i] for i in range(_len(self)))


def _array(self: ImplicitArray, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    if copy is False:
        raise ValueError(f"{self!r} has no dense array to share; allow a copy.")
    return np.asarray(materialise_one(self), dtype)


def _block_until_ready(self: ImplicitArray) -> ImplicitArray:
    return jax.block_until_ready(self)


def add_operators(cls: type) -> None:
    """Gives a class the operators, methods and properties of `jax.Array`."""
    table: dict[str, Any] = {
        **{f"__{n.rstrip('_')}__": _binary(getattr(operator, n)) for n in _BINARY},
        **{f"__r{n.rstrip('_')}__": _reflected(getattr(operator, n)) for n in _REFLECTED},
        **{f"__{n}__": _unary(getattr(operator, n)) for n in _UNARY},
        **{n: _method(n) for n in _METHODS},
        **{n: _property(n) for n in _PROPERTIES},
        **{f"__{n}__": _scalar(convert) for n, convert in _SCALARS.items()},
        "__len__": _len,
        "__iter__": _iter,
        "__array__": _array,
        "block_until_ready": _block_until_ready,
    }
    for name, attribute in table.items():
        function = attribute.fget if isinstance(attribute, property) else attribute
        function.__name__ = name
        function.__qualname__ = f"{cls.__name__}.{name}"
        function.__doc__ = f"`jax.Array.{name}`, with the rules in force."
        setattr(cls, name, attribute)


add_operators(ImplicitArray)
