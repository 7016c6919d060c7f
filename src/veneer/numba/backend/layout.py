"""The memory layout of objects of CPython and NumPy, and the check that it is right here."""

import ctypes
import functools
import sys
import sysconfig
import warnings
from importlib import import_module

import numpy as np

# Offsets of fields in objects of CPython with its global lock (of all objects, and of scalars), and
# of NumPy 2 (`PyArrayObject_fields`). `has_known_layout` checks them.
TYPE, SCALAR = 8, 16
DATA, NDIM, DIMENSIONS, DESCR, FLAGS = 16, 24, 32, 56, 64
CONTIGUOUS_ALIGNED = 0x1 | 0x100
# Indices in NumPy's table of C functions, which are fixed for an ABI version.
_PYARRAY_GET_ABI_VERSION, PYARRAY_EMPTY = 0, 184
_NUMPY_ABI_VERSION = 0x02000000
#: The first CPython versions that are known to have these offsets, and that are not.
_CPYTHON_VERSIONS = (3, 11), (3, 15)


@functools.cache
def has_known_layout() -> bool:
    """Return whether objects of this Python and NumPy have the offsets above. Warn if not."""
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
        and ctypes.CFUNCTYPE(ctypes.c_uint)(numpy_function(_PYARRAY_GET_ABI_VERSION))()
        == _NUMPY_ABI_VERSION
    )


def _offsets_match() -> bool:
    """Compare the fields of some objects with their values."""
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


def numpy_function(index: int) -> int:
    """Return the address of a function in the C API of NumPy 2."""
    api = import_module("numpy._core._multiarray_umath")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = pointer(api._ARRAY_API, None)
    return ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[index] or 0
