"""Functions of numbers that generated code calls: plain Python, which Numba compiles when it must.

A module that defines some does not import Numba: a program that is in the cache needs none.
"""

import dis
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

_scalars: set[Callable[..., Any]] = set()
_instructions: set[Callable[..., Any]] = set()


#: Functions of compiled libraries that instructions call: by their name, the module of SciPy's that
#: has their address, or the one of ours that makes their object file.
EXTERNAL: dict[str, str] = {}


def external(module: str) -> Callable[[F], F]:
    """Makes a function an instruction that calls the one of its name in a Cython module.

    All its arguments go by reference, as Fortran takes them: numbers as int32 and of their type of
    float, pointers as they are.
    """

    def decorate(function: F) -> F:
        EXTERNAL[function.__name__] = module
        return instruction(function)

    return decorate


def scalar(function: F) -> F:
    """Makes a function of numbers one that generated code may call, and functions like it.

    It is written without branches where a loop that calls it is to become vector instructions. It
    may multiply and add in one rounding.

    >>> import numpy as np
    >>> from veneer.numba.maths.scalar import scalar
    >>> @scalar
    ... def softplus(x):
    ...     return np.log(np.float32(1) + np.exp(x))
    """
    unwrapped = inspect.unwrap(function)  # tests wrap all functions, to check their annotations
    _scalars.add(unwrapped)
    return unwrapped


def instruction(function: F) -> F:
    """Makes a function one for which Numba is given the intrinsic of its name."""
    unwrapped = inspect.unwrap(function)
    _instructions.add(unwrapped)
    return unwrapped


def global_names(function: Any) -> set[str]:
    """The names of its module that a function uses; attributes are none."""
    loaded = (i for i in dis.get_instructions(function.__code__) if i.opname == "LOAD_GLOBAL")
    return {i.argval for i in loaded} & function.__globals__.keys()


def is_scalar(function: Any) -> bool:
    """Whether Numba is given it compiled."""
    return isinstance(function, FunctionType) and function in _scalars


def is_instruction(function: Any) -> bool:
    """Whether Numba is given an intrinsic in its place."""
    return isinstance(function, FunctionType) and function in _instructions


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What Python is given for it, where a program runs without Numba."""
    return getattr(function, "py_func", function)


def symbols_of(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """The names of functions of SciPy's, among `EXTERNAL`, that functions call."""
    names: set[str] = set()
    for function in functions:
        if is_instruction(function):
            names |= {function.__name__} & EXTERNAL.keys()
        elif is_scalar(function):
            names |= symbols_of(_called(function))
    return names


def key_of(function: Callable[..., Any]) -> str:
    """What compiled code depends on of a function; nothing of one of this package."""
    python = plain(function)
    if python.__module__.startswith("veneer."):
        return python.__qualname__
    constants = (python.__globals__[name] for name in sorted(global_names(python)))
    texts = [inspect.getsource(python), repr(python.__defaults__), *map(_text_of, constants)]
    return "\n".join(texts)


def _text_of(constant: Any) -> str:
    """What compiled code has of what a function finds in its module, as it was when compiled."""
    if callable(constant) and isinstance(plain(constant), FunctionType):
        return key_of(constant)
    return repr(constant.tolist() if isinstance(constant, np.ndarray) else constant)


def _called(function: Any) -> Iterable[Callable[..., Any]]:
    values = (function.__globals__[name] for name in sorted(global_names(function)))
    return (value for value in values if is_scalar(value) or is_instruction(value))
