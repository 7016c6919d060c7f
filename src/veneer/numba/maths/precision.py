"""A function written once for float32 and float64, by names that stand for something of each.

It becomes two functions where it is defined: each has in the place of such a name what that stands
for. So Numba knows all of it when it compiles, and nothing is chosen when they run.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from .scalar import global_names, scalar


class ByPrecision(NamedTuple):
    """What is one thing for float32, and another for float64."""

    f32: Any
    f64: Any

    def of(self, dtype: np.dtype) -> Any:
        """That for numbers which are computed in a dtype."""
        return self.f64 if dtype.itemsize == 8 else self.f32


def floats(f32: int | float, f64: int | float) -> Any:
    """A number for each precision, as one of it."""
    return ByPrecision(np.float32(f32), np.float64(f64))


def by_precision(function: Callable[..., Any]) -> Any:
    """Makes a function two scalar ones, called `..._f32` and `..._f64`: see `scalar`.

    >>> from veneer.numba.maths.precision import by_precision, floats
    >>> LARGEST = floats(88, 709)
    >>> @by_precision
    ... def bounded(x):
    ...     return min(x, LARGEST)
    >>> print(bounded.f32(1000.0), bounded.f64(1000.0))
    88.0 709.0
    """
    template = inspect.unwrap(function)  # tests wrap all functions, to check their annotations
    return ByPrecision(*(_instance(template, precision) for precision in ByPrecision._fields))


def _instance(template: Any, precision: str) -> Callable[..., Any]:
    names = {name: template.__globals__[name] for name in global_names(template)}
    for name, value in names.items():
        if isinstance(value, ByPrecision):
            names[name] = getattr(value, precision)
    function = FunctionType(template.__code__, names, argdefs=template.__defaults__)
    function.__name__ = function.__qualname__ = f"{template.__name__}_{precision}"
    function.__module__, function.__doc__ = template.__module__, template.__doc__
    return scalar(function)
