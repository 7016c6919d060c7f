"""Loading a compiled program: its object code in the disk cache, and the function that calls it.

The function is machine code that reads objects of CPython and NumPy by the offsets of their fields,
so that a call costs a tenth of a microsecond. `machine` writes it. If the offsets are not known to
be right in this process, ctypes calls the program instead. Nothing here imports Numba.
"""

import ctypes
import functools
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import numpy as np

from ..native.cache import Cache
from ..native.machine_code import load, register_symbol
from .codegen.program import Source
from .maths.instructions import EXTERNAL, symbols_of

_CACHE = Cache("veneer.numba")

#: The functions in an object file: one that Python calls, and one that compiled code calls.
ENTRY, PROGRAM = "veneer_entry", "veneer_program"


# Object code and its symbols.


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the object code for a key from the disk cache. If it is missing, store `make()`."""
    return _CACHE.cached(key[:32], make)


def register_symbols(functions: Iterable[Callable[..., Any]]) -> None:
    """Register the addresses of the library functions that `functions` call.

    Do so before code is loaded, because LLVM ends the process over an unknown symbol.
    """
    for name in symbols_of(functions):
        register_symbol(f"veneer_{name}", _symbol_address(name))


@functools.cache
def _symbol_address(name: str) -> int:
    """Return the address of a function in `EXTERNAL`, which is in SciPy or in this package."""
    if EXTERNAL[name].startswith("veneer."):
        make = lambda: import_module(EXTERNAL[name]).object_code()
        (address,) = load(cached(name, make), f"veneer_{name}")
        return address
    capsule = import_module(EXTERNAL[name]).__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, name_of(capsule))
    assert address is not None
    return int(address)


# The memory layout of objects of CPython and NumPy.

# Offsets of fields: the type of an object and the value of a scalar in CPython with a GIL, and
# the fields of `PyArrayObject_fields` in NumPy 2. `has_known_layout` checks them.
TYPE, SCALAR = 8, 16
DATA, NDIM, DIMENSIONS, DESCR, FLAGS = 16, 24, 32, 56, 64
CONTIGUOUS_ALIGNED = 0x1 | 0x100
# Indices in NumPy's table of C functions, which are fixed for an ABI version.
_PYARRAY_GET_ABI_VERSION, _PYARRAY_EMPTY = 0, 184
_NUMPY_ABI_VERSION = 0x02000000
#: The first CPython version that is known to have these offsets, and the first that is not.
_CPYTHON_VERSIONS = (3, 11), (3, 15)


@functools.cache
def has_known_layout() -> bool:
    """Return whether the fields of Python and NumPy objects are at the offsets in this module.

    Warn if not, because calls are slower then.
    """
    if _is_known_version() and _offsets_match():
        return True
    warnings.warn(
        "vn.numba does not know the memory layout of objects in Python "
        f"{sys.version.split()[0]} with NumPy {np.__version__}, so a call of a compiled function "
        "takes about ten microseconds longer.",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _is_known_version() -> bool:
    first, end = _CPYTHON_VERSIONS
    return (
        sys.implementation.name == "cpython"
        and first <= sys.version_info[:2] < end
        and sys.maxsize > 2**32
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and np.lib.NumpyVersion(np.__version__) >= "2.0.0"
        and ctypes.CFUNCTYPE(ctypes.c_uint)(_numpy_function(_PYARRAY_GET_ABI_VERSION))()
        == _NUMPY_ABI_VERSION
    )


def _offsets_match() -> bool:
    """Return whether the fields of some example objects are at the offsets in this module."""
    read = lambda x, offset, type: type.from_address(id(x) + offset).value
    word = ctypes.c_size_t
    array = np.zeros((2, 3), np.float32)
    c_order = lambda x: read(x, FLAGS, ctypes.c_int) & CONTIGUOUS_ALIGNED == CONTIGUOUS_ALIGNED
    return (
        read(array, TYPE, word) == id(np.ndarray)
        and read(array, DATA, word) == array.ctypes.data
        and read(array, NDIM, ctypes.c_int) == 2
        and read(array, DESCR, word) == id(array.dtype)
        and (c_order(array), c_order(array.T)) == (True, False)
        and read(1.5, SCALAR, ctypes.c_double) == 1.5
        and read(np.float32(1.5), SCALAR, ctypes.c_float) == 1.5
        and read(np.int64(-7), SCALAR, ctypes.c_int64) == -7
        and read(np.complex128(1.5), SCALAR, ctypes.c_double) == 1.5
        # Strides follow dimensions in memory. Read the pointer last, when other offsets are right.
        and read(array, DIMENSIONS, word) == read(array, DIMENSIONS + 8, word) - 16
        and [*(word * 2).from_address(read(array, DIMENSIONS, word))] == [2, 3]
    )


def _numpy_function(index: int) -> int:
    """Return the address of the function with an index in the C API table of NumPy 2."""
    api = import_module("numpy._core._multiarray_umath")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = pointer(api._ARRAY_API, None)
    return ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[index] or 0


# The function that Python calls.

#: The C functions in the table of a program, which is the `self` of the function.
_FUNCTIONS = (
    "PyTuple_New",
    "PyTuple_SetItem",
    "PyObject_Vectorcall",
    "PyErr_NoMemory",
    "Py_IncRef",
    "Py_DecRef",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
_FIRST = ("slow", "array_type", "float_type", "PyArray_Empty", *_FUNCTIONS)
_METH_FASTCALL_KEYWORDS = 0x80 | 0x2


def table_dtypes(source: Source) -> list[np.dtype]:
    """Return the distinct dtypes of the arguments and results of a program.

    They include the 64-bit dtypes that are accepted for 32-bit arguments. The table of a program
    has the address of each.
    """
    exact = [memory.dtype for memory in (*source.inputs, *source.outputs)]
    wide = [source.wide_dtype(memory.dtype) for memory in source.inputs]
    return [*dict.fromkeys([*exact, *(dtype for dtype in wide if dtype is not None)])]


def table_names(source: Source) -> list[str]:
    """Return the names of the addresses in the table of a program, in order.

    The table holds the addresses that the compiled code uses, 8 bytes each.
    """
    n_dtypes = range(len(table_dtypes(source)))
    names = [*_FIRST, *(f"dtype{n}" for n in n_dtypes), *(f"scalar{n}" for n in n_dtypes)]
    return [*names, *(f"constant{n}" for n in range(len(source.constants)))]


class _MethodDef(ctypes.Structure):
    """CPython's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_methods: list[_MethodDef] = []  # CPython reads them for as long as their functions live


def make_entry(
    entry: int, program: int, name: str, source: Source, slow: Callable[..., Any]
) -> Any:
    """Return the function of a program that Python calls.

    Its `__self__` is the table of the program, which holds the addresses that the compiled code
    uses.

    **Arguments:**

    - `entry`, `program`: the addresses of `veneer_entry` and `veneer_program`.
    - `name`: the `__name__` of the function.
    - `slow`: called with the same arguments if they are not the arrays that the program takes.
    """
    has_layout = has_known_layout()
    addresses = [0] * len(_FIRST)
    if has_layout:
        addresses = [id(slow), id(np.ndarray), id(float), _numpy_function(_PYARRAY_EMPTY)]
        addresses += [
            ctypes.cast(getattr(ctypes.pythonapi, f), ctypes.c_void_p).value or 0
            for f in _FUNCTIONS
        ]
    addresses += [id(dtype) for dtype in table_dtypes(source)]
    addresses += [id(dtype.type) for dtype in table_dtypes(source)]
    addresses += [array.ctypes.data for array in source.constants]
    table = np.array(addresses, np.uint64)
    if not has_layout:
        return _make_ctypes_entry(program, name, source, slow, table)
    _methods.append(_MethodDef(name.encode(), entry, _METH_FASTCALL_KEYWORDS, None))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    # The third argument, `__module__`, keeps the objects in the table alive.
    return make(ctypes.addressof(_methods[-1]), table, (slow, *source.constants))


def _make_ctypes_entry(
    program: int, name: str, source: Source, slow: Callable[..., Any], table: np.ndarray
) -> Any:
    count = 1 + len(source.inputs) + len(source.outputs)
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * count)(program)
    expected = [
        (memory.dtype, shape)
        for memory, shape in zip(source.inputs, source.input_shapes, strict=True)
    ]

    def entry(*args: Any, **named: Any) -> Any:
        if named or len(args) != len(expected) or not all(map(is_exact, args, expected)):
            return slow(*args, **named)
        results = [
            np.empty(shape, memory.dtype)
            for memory, shape in zip(source.outputs, source.output_shapes, strict=True)
        ]
        if run(table.ctypes.data, *(x.ctypes.data for x in (*args, *results))):
            raise MemoryError
        return results[0] if len(results) == 1 else tuple(results)

    def is_exact(x: Any, layout: tuple[np.dtype, tuple[int, ...]]) -> bool:
        return (
            type(x) is np.ndarray
            and (x.dtype, x.shape) == layout
            and x.flags.c_contiguous
            and x.flags.aligned
        )

    entry.__name__ = name
    entry.__self__ = table  # type: ignore[attr-defined]
    return entry
