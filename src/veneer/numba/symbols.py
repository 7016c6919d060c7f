"""Addresses of functions of compiled libraries that SciPy has for Cython: BLAS and LAPACK."""

import ctypes
import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from ..native.machine_code import load, name_address
from .cache import cached
from .scalar import EXTERNAL, symbols_of


def name_symbols(functions: Iterable[Callable[..., Any]]) -> None:
    """Lets code that is loaded from now on call what functions call of compiled libraries.

    LLVM ends the process over code that calls what it does not know.
    """
    for name in symbols_of(functions):
        name_address(f"veneer_{name}", address_of(name))


@functools.cache
def address_of(name: str) -> int:
    """Where a function is in this process."""
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
