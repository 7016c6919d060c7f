"""The function of a program that Python calls: it takes arrays, and makes those that it returns.

It is written in LLVM's terms, with what CPython and NumPy promise of how their objects lie in
memory, so that a call costs a tenth of a microsecond. Arguments of 64 bits, NumPy's defaults, it
converts as JAX does without x64. What else is not exactly the arrays that the program is for, it
hands to a function of Python's.
"""

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ...native.machine_code import load, register_symbol
from ..maths.scalar import EXTERNAL, symbols_of
from .cache import cached

if TYPE_CHECKING:
    from llvmlite import ir

    from ..codegen.program import Source

#: The names in an object file of the function for Python, and of the one for compiled code.
ENTRY, PROGRAM = "veneer_entry", "veneer_program"

# Where things are in objects of CPython with its lock, and of NumPy 2 (`PyArrayObject_fields`).
_TYPE, _SCALAR = 8, 16
_DATA, _NDIM, _DIMENSIONS, _DESCR, _FLAGS = 16, 24, 32, 56, 64
_CONTIGUOUS_ALIGNED = 0x1 | 0x100
_METH_FASTCALL_KEYWORDS = 0x80 | 0x2
_PYARRAY_EMPTY = 184  # its place in NumPy's table of functions

#: Work memory of so many bytes may be on the stack; and arguments that are converted there.
_MOST_STACK = 32768

#: What the table that the function is given starts with, by name.
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
_TABLE = ("slow", "array_type", "float_type", "PyArray_Empty", *_FUNCTIONS)


def _dtypes(source: "Source") -> list[np.dtype]:
    """Those of arguments and results, and those that are taken for them, each once."""
    exact = [memory.dtype for memory in (*source.inputs, *source.outputs)]
    wide = [source.wide(memory.dtype) for memory in source.inputs]
    return [*dict.fromkeys([*exact, *(dtype for dtype in wide if dtype is not None)])]


# Writing it.


class _Writer:
    """LLVM's builder, for addresses that are integers."""

    def __init__(self, builder: "ir.IRBuilder", table: Any, source: "Source"):
        from llvmlite import ir

        self.ir, self.builder, self.table = ir, builder, table
        self.word, self.int = ir.IntType(64), ir.IntType(32)
        names = [*_TABLE, *(f"dtype{n}" for n in range(len(_dtypes(source))))]
        names += [f"scalar{n}" for n in range(len(_dtypes(source)))]
        names += [f"constant{n}" for n in range(len(source.constants))]
        self._places = {name: 8 * n for n, name in enumerate(names)}

    def load(self, address: Any, offset: int = 0, type: Any = None) -> Any:
        type = type or self.word
        place = self.builder.add(address, self.word(offset)) if offset else address
        return self.builder.load(self.builder.inttoptr(place, type.as_pointer()))

    def entry(self, name: str) -> Any:
        return self.load(self.table, self._places[name])

    def call(self, function: Any, *args: Any) -> Any:
        type = self.ir.FunctionType(self.word, [arg.type for arg in args])
        return self.builder.call(self.builder.inttoptr(function, type.as_pointer()), args)

    def c_function(self, name: str, *args: Any) -> Any:
        module = self.builder.module
        function = module.globals.get(name) or self.ir.Function(
            module, self.ir.FunctionType(self.word, [arg.type for arg in args]), name
        )
        return self.builder.call(function, args)


def write_entry(module: "ir.Module", source: "Source", call: Callable[..., None]) -> None:
    """Writes the function `veneer_entry(table, args, nargs, names)` into a module of LLVM's.

    **Arguments:**

    - `call`: writes the call of the program, given a builder and the addresses of arguments,
        results, constants and work memory.
    """
    from llvmlite import ir

    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word] * 4), ENTRY)
    builder = ir.IRBuilder(function.append_basic_block())
    holder, args, n_args, names = function.args
    first = _Writer(builder, None, source)
    w = _Writer(builder, first.load(holder, _DATA), source)
    slow = function.append_basic_block("slow")
    _require(w, builder.icmp_unsigned("==", n_args, word(len(source.inputs))), slow)
    _require(w, builder.icmp_unsigned("==", names, word(0)), slow)  # of arguments given by name
    dtypes = _dtypes(source)
    inputs, room = [], _MOST_STACK
    for n, memory in enumerate(source.inputs):
        wide = source.wide(memory.dtype) if memory.nbytes <= room else None
        room -= memory.nbytes if wide is not None else 0
        inputs.append(_address(w, w.load(args, 8 * n), n, source, wide, slow))
    outputs: list[Any] = []
    for memory, shape in zip(source.outputs, source.output_shapes, strict=True):
        outputs.append(_new_array(w, dtypes.index(memory.dtype), shape, outputs))
    constants = [w.entry(f"constant{n}") for n in range(len(source.constants))]

    def no_memory() -> None:
        _release(w, outputs)
        builder.ret(w.call(w.entry("PyErr_NoMemory")))

    work, free = _work_memory(w, source.work_nbytes, no_memory)
    pointers = [*inputs, *(w.load(array, _DATA) for array in outputs), *constants, work]
    if source.is_long:
        state = w.call(w.entry("PyEval_SaveThread"))
        call(builder, pointers)
        w.call(w.entry("PyEval_RestoreThread"), state)
    else:
        call(builder, pointers)
    free()
    builder.ret(_result(w, outputs))
    builder.position_at_end(slow)
    builder.ret(w.call(w.entry("PyObject_Vectorcall"), w.entry("slow"), args, n_args, names))


def write_program(module: "ir.Module", source: "Source", call: Callable[..., None]) -> None:
    """Writes the function `veneer_program(table, *inputs, *outputs)` into a module of LLVM's.

    All its arguments are addresses. It returns 0, or 1 where there is too little memory.
    """
    from llvmlite import ir

    word = ir.IntType(64)
    n_arrays = len(source.inputs) + len(source.outputs)
    function = ir.Function(module, ir.FunctionType(word, [word] * (1 + n_arrays)), PROGRAM)
    builder = ir.IRBuilder(function.append_basic_block())
    table, *arrays = function.args
    w = _Writer(builder, table, source)
    constants = [w.entry(f"constant{n}") for n in range(len(source.constants))]
    work, free = _work_memory(w, source.work_nbytes, lambda: builder.ret(word(1)))
    call(builder, [*arrays, *constants, work])
    free()
    builder.ret(word(0))


def _require(w: _Writer, condition: Any, otherwise: Any) -> None:
    block = w.builder.append_basic_block()
    w.builder.cbranch(condition, block, otherwise)
    w.builder.position_at_end(block)


def _address(
    w: _Writer, x: Any, number: int, source: "Source", wide: np.dtype | None, slow: Any
) -> Any:
    """Where the entries of an argument are, if it is an array of its dtype and shape, or a wide."""
    builder, same, kind = w.builder, w.builder.icmp_unsigned, w.load(x, _TYPE)
    dtype, shape = source.inputs[number].dtype, source.input_shapes[number]
    n_of = _dtypes(source).index
    done = builder.append_basic_block()
    addresses = []

    def take(condition: Any, place: Any, actual: np.dtype) -> None:
        here, next_one = builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(condition, here, next_one)
        builder.position_at_end(here)
        address = place if actual == dtype else _narrowed(w, place, dtype, math.prod(shape), slow)
        addresses.append((address, builder.block))
        builder.branch(done)
        builder.position_at_end(next_one)

    dtypes = [dtype] if wide is None else [dtype, wide]
    arrays, numbers = builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(same("==", kind, w.entry("array_type")), arrays, numbers)
    builder.position_at_end(arrays)
    _require_layout(w, x, shape, slow)
    descr, data = w.load(x, _DESCR), w.load(x, _DATA)
    for actual in dtypes:
        take(same("==", descr, w.entry(f"dtype{n_of(actual)}")), data, actual)
    builder.branch(slow)
    builder.position_at_end(numbers)
    if not shape:
        place = builder.add(x, w.word(_SCALAR))
        for actual in dtypes:
            take(same("==", kind, w.entry(f"scalar{n_of(actual)}")), place, actual)
        if dtype in (np.float32, np.float64):  # as which a float of Python's is taken, always
            take(same("==", kind, w.entry("float_type")), place, np.dtype(np.float64))
    builder.branch(slow)
    builder.position_at_end(done)
    phi = builder.phi(w.word)
    for value, block in addresses:
        phi.add_incoming(value, block)
    return phi


def _narrowed(w: _Writer, place: Any, dtype: np.dtype, size: int, slow: Any) -> Any:
    """Entries of 64 bits as such of 32, on the stack; integers that do not fit are none."""
    ir, builder = w.ir, w.builder
    floats = dtype.kind in "fc"
    size *= 2 if dtype.kind == "c" else 1
    narrow, wide = (ir.FloatType(), ir.DoubleType()) if floats else (w.int, w.word)
    with builder.goto_entry_block():
        slot = builder.alloca(ir.ArrayType(narrow, max(1, size)))
    start, address = builder.block, builder.ptrtoint(slot, w.word)
    head, body, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    i, fit = builder.phi(w.word), builder.phi(ir.IntType(1))
    builder.cbranch(builder.icmp_unsigned("<", i, w.word(size)), body, after)
    builder.position_at_end(body)
    x = w.load(builder.add(place, builder.mul(i, w.word(8))), 0, wide)
    cut = builder.fptrunc(x, narrow) if floats else builder.trunc(x, narrow)
    to = builder.add(address, builder.mul(i, w.word(4)))
    builder.store(cut, builder.inttoptr(to, narrow.as_pointer()))
    if floats:
        same = ir.IntType(1)(1)
    else:
        again = (builder.sext if dtype.kind == "i" else builder.zext)(cut, wide)
        same = builder.icmp_unsigned("==", again, x)
    for phi, first, later in (
        (i, w.word(0), builder.add(i, w.word(1))),
        (fit, ir.IntType(1)(1), builder.and_(fit, same)),
    ):
        phi.add_incoming(first, start)
        phi.add_incoming(later, body)
    builder.branch(head)
    builder.position_at_end(after)
    _require(w, fit, slow)
    return address


def _require_layout(w: _Writer, array: Any, shape: Sequence[int], slow: Any) -> None:
    builder, same = w.builder, w.builder.icmp_unsigned
    _require(w, same("==", w.load(array, _NDIM, w.int), w.int(len(shape))), slow)
    flags = builder.and_(w.load(array, _FLAGS, w.int), w.int(_CONTIGUOUS_ALIGNED))
    good = same("==", flags, w.int(_CONTIGUOUS_ALIGNED))
    if shape:
        dimensions = w.load(array, _DIMENSIONS)
        for axis, n in enumerate(shape):
            good = builder.and_(good, same("==", w.load(dimensions, 8 * axis), w.word(n)))
    _require(w, good, slow)


def _new_array(w: _Writer, dtype: int, shape: Sequence[int], others: Sequence[Any]) -> Any:
    """A new array; `others` are released if it cannot be had."""
    builder, ir = w.builder, w.ir
    descr = w.entry(f"dtype{dtype}")
    w.call(w.entry("Py_IncRef"), descr)  # which the array takes
    type = ir.ArrayType(w.word, max(1, len(shape)))
    with builder.goto_entry_block():
        dimensions = builder.alloca(type)
    builder.store(type([*shape] or [0]), dimensions)
    empty, address = w.entry("PyArray_Empty"), builder.ptrtoint(dimensions, w.word)
    array = w.call(empty, w.int(len(shape)), address, descr, w.int(0))
    _require_object(w, array, others)
    return array


def _require_object(w: _Writer, made: Any, others: Sequence[Any]) -> None:
    """Ends the call if an object could not be made, for which an exception is set."""
    builder = w.builder
    got, none = builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("!=", made, w.word(0)), got, none)
    builder.position_at_end(none)
    _release(w, others)
    builder.ret(w.word(0))
    builder.position_at_end(got)


def _release(w: _Writer, arrays: Sequence[Any]) -> None:
    for array in arrays:
        w.call(w.entry("Py_DecRef"), array)


def _work_memory(w: _Writer, nbytes: int, fail: Callable[[], Any]) -> tuple[Any, Callable[[], Any]]:
    """The address of memory, and what writes that it is no more needed."""
    builder, ir = w.builder, w.ir
    if nbytes <= _MOST_STACK:
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), max(1, nbytes)))
            memory.align = 64
        return builder.ptrtoint(memory, w.word), lambda: None
    block = w.c_function("malloc", w.word(nbytes + 64))
    got = builder.append_basic_block()
    none = builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("!=", block, w.word(0)), got, none)
    builder.position_at_end(none)
    fail()
    builder.position_at_end(got)
    aligned = builder.and_(builder.add(block, w.word(63)), w.word(-64))
    return aligned, lambda: w.c_function("free", block)


def _result(w: _Writer, arrays: Sequence[Any]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    result = w.call(w.entry("PyTuple_New"), w.word(len(arrays)))
    _require_object(w, result, arrays)
    for n, array in enumerate(arrays):
        w.call(w.entry("PyTuple_SetItem"), result, w.word(n), array)
    return result


# Making it an object of Python's.


class _MethodDef(ctypes.Structure):
    """CPython's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_methods: list[_MethodDef] = []  # CPython reads them for as long as their functions live


def function_at(address: int, name: str, source: "Source", slow: Callable[..., Any]) -> Any:
    """The function of Python's for the one at an address.

    **Arguments:**

    - `slow`: is called with what it is called with, where that is not what the program is for.
    """
    _check_layout_of_objects()
    kept = [slow, *source.constants]
    addresses = [id(slow), id(np.ndarray), id(float), _numpy_function(_PYARRAY_EMPTY)]
    addresses += [
        ctypes.cast(getattr(ctypes.pythonapi, f), ctypes.c_void_p).value or 0 for f in _FUNCTIONS
    ]
    addresses += [id(dtype) for dtype in _dtypes(source)]
    addresses += [id(dtype.type) for dtype in _dtypes(source)]
    addresses += [array.ctypes.data for array in source.constants]
    table = np.array(addresses, np.uint64)
    _methods.append(_MethodDef(name.encode(), address, _METH_FASTCALL_KEYWORDS, None))
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object]
    return make(ctypes.addressof(_methods[-1]), table, tuple(kept))


def _numpy_function(number: int) -> int:
    api = import_module("numpy._core._multiarray_umath")  # where NumPy 2 has its C API

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype = ctypes.c_void_p
    pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    table = pointer(api._ARRAY_API, None)
    return ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))[number] or 0


def _check_layout_of_objects() -> None:
    """Refuses a Python whose objects lie otherwise."""
    array = np.zeros((2, 3), np.float32)
    words = lambda offset, type: type.from_address(id(array) + offset).value
    actual = (
        words(_TYPE, ctypes.c_size_t),
        words(_DATA, ctypes.c_size_t),
        words(_NDIM, ctypes.c_int),
        words(_DESCR, ctypes.c_size_t),
        words(_FLAGS, ctypes.c_int) & _CONTIGUOUS_ALIGNED,
    )
    expected = (id(np.ndarray), array.ctypes.data, 2, id(array.dtype), _CONTIGUOUS_ALIGNED)
    if sys.maxsize < 2**32 or actual != expected:
        raise NotImplementedError(
            f"vn.numba does not know how objects lie in memory in {sys.version} with NumPy "
            f"{np.__version__}."
        )


# Functions of compiled libraries that SciPy has for Cython, BLAS and LAPACK, and of ours.


def name_symbols(functions: Iterable[Callable[..., Any]]) -> None:
    """Lets code that is loaded from now on call what functions call of compiled libraries.

    LLVM ends the process over code that calls what it does not know.
    """
    for name in symbols_of(functions):
        register_symbol(f"veneer_{name}", address_of(name))


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
