"""Operators and array methods of implicit arrays at top level: JAX's own, under `implicit`."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .transform import implicit


def _unary(function: Callable) -> Callable[[Any], Any]:
    return lambda self: implicit(function)(self)


def _binary(function: Callable) -> Callable[[Any, Any], Any]:
    return lambda self, other: implicit(function)(self, other)


def _reflected(function: Callable) -> Callable[[Any, Any], Any]:
    return lambda self, other: implicit(function)(other, self)


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = implicit(lambda x, args, kwargs: getattr(x, name)(*args, **kwargs))
        return call(self, args, kwargs)

    return method


def _property(name: str) -> property:
    return property(lambda self: implicit(operator.attrgetter(name))(self))


def _scalar(convert: Callable) -> Callable[[Any], Any]:
    return lambda self: convert(self.materialise())


class ArrayOperators:
    """The operators of `jax.Array`, and its methods for arithmetic, shape and reductions."""

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)

    __add__ = _binary(operator.add)
    __sub__ = _binary(operator.sub)
    __mul__ = _binary(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __divmod__ = _binary(divmod)
    __pow__ = _binary(operator.pow)
    __matmul__ = _binary(operator.matmul)
    __and__ = _binary(operator.and_)
    __or__ = _binary(operator.or_)
    __xor__ = _binary(operator.xor)
    __lshift__ = _binary(operator.lshift)
    __rshift__ = _binary(operator.rshift)

    __radd__ = _reflected(operator.add)
    __rsub__ = _reflected(operator.sub)
    __rmul__ = _reflected(operator.mul)
    __rtruediv__ = _reflected(operator.truediv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __rmod__ = _reflected(operator.mod)
    __rdivmod__ = _reflected(divmod)
    __rpow__ = _reflected(operator.pow)
    __rmatmul__ = _reflected(operator.matmul)
    __rand__ = _reflected(operator.and_)
    __ror__ = _reflected(operator.or_)
    __rxor__ = _reflected(operator.xor)
    __rlshift__ = _reflected(operator.lshift)
    __rrshift__ = _reflected(operator.rshift)

    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __hash__ = None  # type: ignore[assignment]  # as jax.Array: equality is elementwise

    __bool__ = _scalar(bool)
    __int__ = _scalar(int)
    __float__ = _scalar(float)
    __complex__ = _scalar(complex)
    __index__ = _scalar(operator.index)

    __array_priority__ = 1000
    __array_ufunc__ = None  # numpy_array @ implicit_array is ours to compute, not NumPy's

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self!r} has no dense array to share; allow a copy.")
        return np.asarray(self.materialise(), dtype)  # type: ignore[attr-defined]

    __getitem__ = _method("__getitem__")

    def __len__(self) -> int:
        if not self.shape:  # type: ignore[attr-defined]
            raise TypeError("len() of unsized object")
        return self.shape[0]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    T = _property("T")
    mT = _property("mT")
    real = _property("real")
    imag = _property("imag")

    all = _method("all")
    any = _method("any")
    argmax = _method("argmax")
    argmin = _method("argmin")
    argsort = _method("argsort")
    astype = _method("astype")
    clip = _method("clip")
    conj = _method("conj")
    conjugate = _method("conjugate")
    copy = _method("copy")
    cumprod = _method("cumprod")
    cumsum = _method("cumsum")
    diagonal = _method("diagonal")
    dot = _method("dot")
    flatten = _method("flatten")
    max = _method("max")
    mean = _method("mean")
    min = _method("min")
    prod = _method("prod")
    ptp = _method("ptp")
    ravel = _method("ravel")
    repeat = _method("repeat")
    reshape = _method("reshape")
    round = _method("round")
    sort = _method("sort")
    squeeze = _method("squeeze")
    std = _method("std")
    sum = _method("sum")
    swapaxes = _method("swapaxes")
    take = _method("take")
    trace = _method("trace")
    transpose = _method("transpose")
    var = _method("var")
