"""Object code of programs on disk, and the library functions that it calls."""

import ctypes
import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from ...native.cache import Cache
from ...native.machine_code import load, register_symbol
from ..maths.scalar import EXTERNAL, symbols_of

CACHE = Cache("veneer.numba")


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the object code under a key. Call `make` and store its result if it is missing."""
    return CACHE.cached(key[:32], make)


def register_symbols(functions: Iterable[Callable[..., Any]]) -> None:
    """Let code that is loaded later call the functions of libraries that `functions` call.

    LLVM ends the process over code that calls an unknown symbol.
    """
    for name in symbols_of(functions):
        register_symbol(f"veneer_{name}", symbol_address(name))


@functools.cache
def symbol_address(name: str) -> int:
    """Return the address of a function of BLAS or LAPACK that SciPy has for Cython, or of ours."""
    if EXTERNAL[name].startswith("veneer."):
        make = lambda: import_module(EXTERNAL[name]).object_code()
        (place,) = load(cached(name, make), f"veneer_{name}")
        return place
    capsule = import_module(EXTERNAL[name]).__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, name_of(capsule))
    assert address is not None
    return int(address)
