"""JAX functions compiled to native functions, which take a microsecond per call.

The steps from a JAX function to machine code, and what belongs to them:

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

from importlib.util import find_spec

from .._install import install_command

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
