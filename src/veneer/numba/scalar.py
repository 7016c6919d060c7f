"""Functions of numbers that generated code calls: plain Python, which Numba compiles when it must.

A module that defines some does not import Numba: a program that is in the cache needs none.
"""

import dis
import functools
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
    >>> from veneer.numba.scalar import scalar
    >>> @scalar
    ... def softplus(x):
    ...     return np.log(np.float32(1) + np.exp(x))
    """
    plain = inspect.unwrap(function)  # tests wrap all functions, to check their annotations
    _scalars.add(plain)
    return plain


def instruction(function: F) -> F:
    """Makes a function one for which Numba is given the intrinsic of its name in `intrinsics`."""
    plain = inspect.unwrap(function)
    _instructions.add(plain)
    return plain


@functools.cache
def native(function: Callable[..., Any]) -> Any:
    """What Numba is given for such a function; any other object is given as it is."""
    if function in _instructions:
        from . import intrinsics

        name = function.__name__
        fortran = EXTERNAL.get(name, "").startswith("scipy.")
        return intrinsics.by_reference(name) if fortran else getattr(intrinsics, name)
    if function not in _scalars:
        return function
    from numba import njit

    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    return njit(_with_natives(function), error_model="numpy", fastmath={"contract"}, **options)


def _with_natives(function: Any) -> Callable[..., Any]:
    """The function, with natives in the place of what it calls."""
    found = {name: function.__globals__[name] for name in _global_names(function)}
    found = {name: native(x) if isinstance(x, FunctionType) else x for name, x in found.items()}
    return FunctionType(function.__code__, found, function.__name__, function.__defaults__)


def _global_names(function: Any) -> set[str]:
    """The names of its module that a function uses; attributes are none."""
    loaded = (i for i in dis.get_instructions(function.__code__) if i.opname == "LOAD_GLOBAL")
    return {i.argval for i in loaded} & function.__globals__.keys()


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What Python is given for it, where a program runs without Numba."""
    return getattr(function, "py_func", function)


def symbols_of(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """The names of functions of SciPy's, among `EXTERNAL`, that functions call."""
    found: set[str] = set()
    for function in functions:
        if function in _instructions:
            found |= {function.__name__} & EXTERNAL.keys()
        elif function in _scalars:
            found |= symbols_of(_called(function))
    return found


def source_of(function: Callable[..., Any]) -> str:
    """What compiled code depends on of a function; nothing of one of this package."""
    own = plain(function)
    if own.__module__.startswith("veneer."):
        return own.__qualname__
    constants = (own.__globals__[name] for name in sorted(_global_names(own)))
    texts = [inspect.getsource(own), repr(own.__defaults__), *map(_text_of, constants)]
    return "\n".join(texts)


def _text_of(constant: Any) -> str:
    """What compiled code has of what a function finds in its module, as it was when compiled."""
    if callable(constant) and isinstance(plain(constant), FunctionType):
        return source_of(constant)
    return repr(constant.tolist() if isinstance(constant, np.ndarray) else constant)


def _called(function: Any) -> Iterable[Callable[..., Any]]:
    values = (function.__globals__[name] for name in sorted(_global_names(function)))
    known = _scalars | _instructions
    return (value for value in values if isinstance(value, FunctionType) and value in known)
