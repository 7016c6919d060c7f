"""Compile JAX functions to native functions of NumPy arrays, with small overhead per call.

The modules, in the order from a JAX function to machine code:

    compiler        `compile`: traces a function, generates its program, and loads the native code
    codegen         traces to primitives, and generates the source: kernels, and their calls
    ops             the rules of JAX primitives
    maths           scalar functions that generated code calls
    machine         compiles the source to an object file, with Numba and LLVM
    entry           the object files on disk, and the function that CPython calls
    testing         compares compiled programs with NumPy, and NumPy with JAX
"""

from importlib.util import find_spec

from .._core.errors import install_command

if find_spec("numba") is None:
    raise ImportError(
        f"vn.numba needs Numba. Install it with: {install_command('numba')}", name="numba"
    )

from .codegen.registry import funcify, perform
from .compiler import compile
from .testing import compare_jax_and_py, compare_numba_and_py

__all__ = ["compare_jax_and_py", "compare_numba_and_py", "compile", "funcify", "perform"]


def __dir__() -> list[str]:
    return __all__
