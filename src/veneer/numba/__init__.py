"""JAX functions compiled to native ones, whose call takes a microsecond.

On the way from a function of JAX to machine code, and beside it:

    compiler        `compile`: from a function of JAX to one of NumPy arrays
    front           a function as a graph of primitives
    registry        `funcify` and `perform`: the rules, by primitive
    ops             the rules
    codegen         a graph as source: kernels, and the program that calls them
    maths           functions of numbers that generated code calls
    backend         source as machine code, and what stands between that and Python
    reference       programs run by NumPy
    testing         compiled programs compared with NumPy, and that with JAX
"""

from .compiler import compile
from .registry import funcify, perform
from .testing import compare_jax_and_py, compare_numba_and_py

__all__ = ["compare_jax_and_py", "compare_numba_and_py", "compile", "funcify", "perform"]
