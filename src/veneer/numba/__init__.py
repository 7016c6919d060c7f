"""JAX functions compiled to native ones, whose call takes a microsecond."""

from .compiler import compile
from .registry import funcify, perform
from .testing import compare_jax_and_py, compare_numba_and_py

__all__ = ["compare_jax_and_py", "compare_numba_and_py", "compile", "funcify", "perform"]
