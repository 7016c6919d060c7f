"""The functions of numbers that generated code calls: how to define one, and the smallest ones.

Each is plain Python on NumPy scalars, so that tests can run generated code without Numba. Compiled
code replaces an *instruction* by the LLVM intrinsic of the same name in `intrinsics`, and a *scalar
function* by its compiled version. This module does not import Numba: a cached program needs none.
"""

import dis
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

_scalars: set[Callable[..., Any]] = set()
_instructions: set[Callable[..., Any]] = set()

#: Functions of compiled libraries: the name of an instruction, and the Cython module of SciPy with
#: its address, or the module of this package that makes its object file.
EXTERNAL: dict[str, str] = {}


# Definition of functions. Tests wrap all functions to check annotations, so these unwrap them.


def scalar(function: F) -> F:
    """Register a function of numbers that generated code may call.

    It may call other such functions. Write it without branches if loops that call it should become
    vector instructions. Compiled code may compute a product and a sum with one rounding.

    >>> import numpy as np
    >>> from veneer.numba.maths.instructions import scalar
    >>> @scalar
    ... def softplus(x):
    ...     return np.log(np.float32(1) + np.exp(x))
    """
    unwrapped = inspect.unwrap(function)
    _scalars.add(unwrapped)
    return unwrapped


def instruction(function: F) -> F:
    """Register a function that compiled code replaces by an intrinsic of the same name."""
    unwrapped = inspect.unwrap(function)
    _instructions.add(unwrapped)
    return unwrapped


def external(module: str) -> Callable[[F], F]:
    """Return a decorator for an instruction that calls a compiled function of the same name.

    The decorated function does the same in Python. All arguments are passed by reference, as in
    Fortran, and integers as int32. Pointers are passed unchanged.

    **Arguments:**

    - `module`: the module with the compiled function: a Cython module of SciPy, or a module of this
      package with a function `object_code()`.
    """

    def decorate(function: F) -> F:
        EXTERNAL[function.__name__] = module
        return instruction(function)

    return decorate


class ByPrecision(NamedTuple):
    """A pair of values or functions: one for float32, one for float64."""

    f32: Any
    f64: Any

    def for_dtype(self, dtype: np.dtype) -> Any:
        """Return the function or value for numbers that are computed in `dtype`."""
        return self.f64 if dtype.itemsize == 8 else self.f32


def floats(f32: int | float, f64: int | float) -> Any:
    """Return a float32 and a float64 as a pair."""
    return ByPrecision(np.float32(f32), np.float64(f64))


def by_precision(function: Callable[..., Any]) -> Any:
    """Make two scalar functions of one: `..._f32` and `..._f64`.

    The first function uses the float32 member of each global name that is a `ByPrecision`, and the
    second its float64 member. The choice is made here, not when the functions run.

    >>> from veneer.numba.maths.instructions import by_precision, floats
    >>> LARGEST = floats(88, 709)
    >>> @by_precision
    ... def bounded(x):
    ...     return min(x, LARGEST)
    >>> print(bounded.f32(1000.0), bounded.f64(1000.0))
    88.0 709.0
    """
    template: Any = inspect.unwrap(function)
    instances = []
    for precision in ByPrecision._fields:
        names = {name: template.__globals__[name] for name in global_names(template)}
        for name, value in names.items():
            if isinstance(value, ByPrecision):
                names[name] = getattr(value, precision)
        instance = FunctionType(template.__code__, names, argdefs=template.__defaults__)
        instance.__name__ = instance.__qualname__ = f"{template.__name__}_{precision}"
        instance.__module__, instance.__doc__ = template.__module__, template.__doc__
        instances.append(scalar(instance))
    return ByPrecision(*instances)


# What compilation and the cache ask about a function.


def global_names(function: Any) -> set[str]:
    """Return the names of the globals of its module that a function uses."""
    loaded = (i for i in dis.get_instructions(function.__code__) if i.opname == "LOAD_GLOBAL")
    return {i.argval for i in loaded} & function.__globals__.keys()


def is_scalar(function: Any) -> bool:
    """Return whether `function` was registered with `scalar`."""
    return isinstance(function, FunctionType) and function in _scalars


def is_instruction(function: Any) -> bool:
    """Return whether `function` was registered with `instruction`."""
    return isinstance(function, FunctionType) and function in _instructions


def python_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Python function of a Numba dispatcher. Return other functions unchanged."""
    return getattr(function, "py_func", function)


def symbols_of(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """Return the names of the functions in `EXTERNAL` that functions call.

    This includes calls through other scalar functions.
    """
    names: set[str] = set()
    for function in functions:
        if is_instruction(function):
            names |= {function.__name__} & EXTERNAL.keys()
        elif is_scalar(function):
            called = (function.__globals__[name] for name in sorted(global_names(function)))
            names |= symbols_of(x for x in called if is_scalar(x) or is_instruction(x))
    return names


def key_of(function: Callable[..., Any]) -> str:
    """Return a text that changes when the compiled code of a function may change.

    It is the name of a function of this package, whose version is part of the cache. For another
    function it is the source, with the values of the global names that the function uses.
    """
    python = python_function(function)
    if python.__module__.startswith("veneer."):
        return python.__qualname__
    texts = [inspect.getsource(python), repr(python.__defaults__)]
    for name in sorted(global_names(python)):
        value = python.__globals__[name]
        if callable(value) and isinstance(python_function(value), FunctionType):
            texts.append(key_of(value))
        else:
            texts.append(repr(value.tolist() if isinstance(value, np.ndarray) else value))
    return "\n".join(texts)


# Instructions of the CPU. None of them branches.


def _named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instruction that has the name `name`, and calls `run` when Python executes it."""

    def call(*args):
        return run(*args)

    unwrapped = inspect.unwrap(call)
    unwrapped.__name__ = unwrapped.__qualname__ = name
    return instruction(unwrapped)


floor, ceil, trunc = (_named(f.__name__, f) for f in (np.floor, np.ceil, np.trunc))
rint, sqrt, copysign = (_named(f.__name__, f) for f in (np.rint, np.sqrt, np.copysign))
fabs = _named("fabs", np.abs)


@instruction
def select(condition, x, y):
    """Return `x` if `condition` is true, or else `y`. Both have the same type."""
    return x if condition else y


@instruction
def reinterpreted(x, like):
    """Return the bits of `x` as a number of the type of `like`, which has the same size."""
    return np.asarray(x).view(np.asarray(like).dtype)[()]


@instruction
def maximum(x, y):
    """Return the larger number. NaN wins over any number, and 0.0 over -0.0."""
    if isinstance(x, np.floating) and x == y:
        return y if np.signbit(x) else x
    return np.maximum(x, y)


@instruction
def minimum(x, y):
    """Return the smaller number. NaN wins over any number, and -0.0 over 0.0."""
    if isinstance(x, np.floating) and x == y:
        return x if np.signbit(x) else y
    return np.minimum(x, y)


@instruction
def polynomial(x, coefficients):
    """Evaluate a polynomial by Horner's rule. The coefficient of the highest power is first."""
    total = coefficients[0]
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


@instruction
def add_in_any_order(x, y):
    """Return `x + y`. In a sum of many terms, the compiler may change the order of additions."""
    return x + y


@instruction
def multiply_in_any_order(x, y):
    """Return `x * y`. In a product of many factors, the compiler may change their order."""
    return x * y


@instruction
def bit_count(x):
    """Return the number of bits of an integer that are 1."""
    return type(x)(bin(_unsigned(x)).count("1"))


@instruction
def leading_zeros(x):
    """Return the number of zero bits of an integer that are above its highest one bit."""
    return type(x)(x.itemsize * 8 - _unsigned(x).bit_length())


@instruction
def at(pointer, offset):
    """Return a pointer to the entry that is `offset` entries after the entry at `pointer`."""
    return pointer[offset:]


@instruction
def memory(pointer, offset, dtype):
    """Return a pointer to the memory that starts `offset` bytes after `pointer`.

    The entries there have the type of the number `dtype`.
    """
    return pointer[offset:].view(np.asarray(dtype).dtype)


@instruction
def no_aliases():
    """Tell LLVM that no other argument of the kernel points to memory that the kernel writes."""


# Integer operations with the results of XLA. LLVM leaves some of the results undefined.


@instruction
def quotient(x, y):
    """Divide integers and round towards zero.

    `x / 0` has all bits set, which is -1, or the maximum of an unsigned type. The minimum divided
    by -1 is the minimum.
    """
    if y == 0:
        return type(x)(np.iinfo(type(x)).max if x.dtype.kind == "u" else -1)
    magnitude = abs(int(x)) // abs(int(y))
    return _wrapped(-magnitude if (x < 0) != (y < 0) else magnitude, type(x))


@instruction
def remainder(x, y):
    """Return the remainder of `quotient(x, y)`, with the sign of `x`. Return `x` if `y` is 0."""
    if y == 0:
        return x
    magnitude = abs(int(x)) % abs(int(y))
    return type(x)(-magnitude if x < 0 else magnitude)


@instruction
def shift_left(x, y):
    """Shift the bits of `x` up by `y`. Return 0 if `y` is the bit width or more."""
    return _wrapped(int(x) << int(y), type(x)) if 0 <= y < x.itemsize * 8 else type(x)(0)


@instruction
def shift_right_logical(x, y):
    """Shift the bits of `x` down by `y`, and fill with zeros.

    Return 0 if `y` is the bit width or more.
    """
    return _wrapped(_unsigned(x) >> int(y), type(x)) if 0 <= y < x.itemsize * 8 else type(x)(0)


@instruction
def shift_right_arithmetic(x, y):
    """Shift the bits of `x` down by `y`, and fill with copies of the highest bit."""
    bits, width = _unsigned(x), x.itemsize * 8
    signed = bits - (bits >> (width - 1) << width)  # of unsigned integers, too
    return _wrapped(signed >> (int(y) if 0 <= y < width else width), type(x))


def _unsigned(x):
    return int(x) & ((1 << x.itemsize * 8) - 1)


def _wrapped(number, kind):
    return np.asarray(number & ((1 << kind(0).itemsize * 8) - 1), np.uint64).astype(kind)[()]


# Functions of the C library.


def _scipy_function(name: str) -> Callable[..., Any]:
    def run(x):
        import scipy.special

        return type(x)(getattr(scipy.special, name)(x))

    return run


_PYTHON_VERSIONS: dict[str, Callable[..., Any]] = {
    "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "asin": np.arcsin,
    "acos": np.arccos, "atan": np.arctan, "cbrt": np.cbrt, "log2": np.log2, "atan2": np.arctan2,
    "pow": np.power, "fmod": np.fmod, "nextafter": np.nextafter, "erf": _scipy_function("erf"),
    "erfc": _scipy_function("erfc"), "lgamma": _scipy_function("gammaln"),
}  # fmt: skip

#: By their names in C, without the f at the end that the names for float32 have.
C_LIBRARY = {name: _named(name, run) for name, run in _PYTHON_VERSIONS.items()}
asinh, atan2, cos, cosh, sin, sinh, tan, erf, erfc = map(
    C_LIBRARY.__getitem__, "asinh atan2 cos cosh sin sinh tan erf erfc".split()
)
