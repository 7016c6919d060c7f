"""Compile JAX functions to native functions of NumPy arrays, with small overhead per call.

The modules, in the order from a JAX function to machine code:

    compiler        `compile`: a JAX function as a native function of NumPy arrays
    front           traces a function to a graph of primitives
    registry        `funcify` and `perform`: the registries of rules
    ops             the rules of JAX primitives
    codegen         generates the source: kernels, and the program that calls them
    maths           scalar functions that generated code calls
    backend         compiles the source to machine code, and makes it callable from Python
    reference       runs a graph with the NumPy rules
    testing         compares compiled programs with NumPy, and NumPy with JAX
"""

from importlib.util import find_spec

from .._core.errors import install_command

if find_spec("numba") is None:
    raise ImportError(
        f"vn.numba needs Numba. Install it with: {install_command('numba')}", name="numba"
    )

from .compiler import compile
from .registry import funcify, perform
from .testing import compare_jax_and_py, compare_numba_and_py

__all__ = ["compare_jax_and_py", "compare_numba_and_py", "compile", "funcify", "perform"]


def __dir__() -> list[str]:
    return __all__
