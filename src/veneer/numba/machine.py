"""Compiling a program to an object file: Numba compiles its functions, LLVM writes the file.

The file also has two functions in LLVM IR that call the program. `veneer_entry` is for CPython: it
reads array objects by the offsets in `entry`, converts 64-bit arguments as JAX does without x64,
and calls the Python function `slow` for all other arguments that are not exactly the arrays that
the program takes. `veneer_program` is for compiled code, and takes addresses.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.np.numpy_support import from_dtype

from ..native import functions
from .codegen.program import Function, Source
from .entry import (
    CONTIGUOUS_ALIGNED,
    DATA,
    DESCR,
    DIMENSIONS,
    ENTRY,
    FLAGS,
    NDIM,
    PROGRAM,
    SCALAR,
    TYPE,
    register_symbols,
    table_dtypes,
    table_names,
)
from .maths.intrinsics import native

#: A product and a sum may be computed with one rounding, as in XLA. Nothing else is reordered.
_OPTIONS: dict[str, Any] = {"fastmath": {"contract"}, "boundscheck": False}

#: The most bytes of work memory on the stack, and of converted arguments there.
_MAX_STACK_NBYTES = 32768


def _compile(source: Source) -> Any:
    """Compile the functions of a program with Numba. Return the dispatcher of the last one.

    The last function is `program`, which calls the others.
    """
    register_symbols(source.names.values())
    names: dict[str, Any] = {name: native(f) for name, f in source.names.items()} | {"np": np}
    exec(compile(source.text, "<vn.numba>", "exec"), names)
    for function in source.functions:
        names[function.name] = dispatcher = functions.native(names[function.name], **_OPTIONS)
        dispatcher.compile(_signature_of(function))
    return names["program"]


def _signature_of(function: Function) -> tuple[Any, ...]:
    return tuple(types.CPointer(from_dtype(dtype)) for dtype in function.dtypes)


def object_code(source: Source) -> bytes:
    """Compile a program. Return the bytes of its object file.

    The file has the functions `veneer_entry` and `veneer_program`, which call the program.
    """
    program = _compile(source)
    signature = _signature_of(source.functions[-1])
    result = program.overloads[signature]
    module = ir.Module()

    def call(builder: ir.IRBuilder, pointers: Iterable[ir.Value]) -> None:
        context = cpu_target.target_context
        values = [
            builder.inttoptr(pointer, context.get_value_type(type))
            for pointer, type in zip(pointers, signature, strict=True)
        ]
        context.call_internal_no_propagate(builder, result.fndesc, result.signature, values)

    _write_entry(module, source, call)
    _write_program(module, source, call)
    linked = llvm.parse_assembly(str(module))
    for library_module in functions.modules_of([result.library]):
        linked.link_in(library_module, preserve=True)
    code = functions.compile_module(linked, (ENTRY, PROGRAM), vectorize_loops=True)
    if any(".const.picklebuf" in variable.name for variable in linked.global_variables):
        raise NotImplementedError(
            "a compiled program must not raise an error, because nobody would see it. A rule "
            f"uses an operation in which Numba raises errors.\n{source.text}"
        )
    return code


# The functions that call the program.


class _Writer:
    """An LLVM IR builder with loads from integer addresses.

    It also loads items of the table of a program, which holds the addresses that the code uses.
    """

    def __init__(self, builder: ir.IRBuilder, table: Any, source: Source):
        self.builder, self.table = builder, table
        self.word, self.int = ir.IntType(64), ir.IntType(32)
        self._offsets = {name: 8 * n for n, name in enumerate(table_names(source))}

    def load(self, address: Any, offset: int = 0, type: Any = None) -> Any:
        type = type or self.word
        place = self.builder.add(address, self.word(offset)) if offset else address
        return self.builder.load(self.builder.inttoptr(place, type.as_pointer()))

    def entry(self, name: str) -> Any:
        return self.load(self.table, self._offsets[name])

    def call(self, function: Any, *args: Any) -> Any:
        type = ir.FunctionType(self.word, [arg.type for arg in args])
        return self.builder.call(self.builder.inttoptr(function, type.as_pointer()), args)

    def c_function(self, name: str, *args: Any) -> Any:
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(self.word, [arg.type for arg in args]), name
        )
        return self.builder.call(function, args)


def _write_entry(module: ir.Module, source: Source, call: Callable[..., None]) -> None:
    """Add the function `veneer_entry(self, args, nargs, kwnames)` to an LLVM module.

    **Arguments:**

    - `call`: emits the call of the program, given a builder and the addresses of arguments,
      results, constants and work memory.
    """
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word] * 4), ENTRY)
    builder = ir.IRBuilder(function.append_basic_block())
    holder, args, n_args, names = function.args
    first = _Writer(builder, None, source)
    w = _Writer(builder, first.load(holder, DATA), source)
    slow = function.append_basic_block("slow")
    _require(w, builder.icmp_unsigned("==", n_args, word(len(source.inputs))), slow)
    _require(w, builder.icmp_unsigned("==", names, word(0)), slow)  # no keyword arguments
    dtypes = table_dtypes(source)
    inputs, room = [], _MAX_STACK_NBYTES
    for n, memory in enumerate(source.inputs):
        wide = source.wide_dtype(memory.dtype) if memory.nbytes <= room else None
        room -= memory.nbytes if wide is not None else 0
        inputs.append(_input_address(w, w.load(args, 8 * n), n, source, wide, slow))
    outputs: list[Any] = []
    for memory, shape in zip(source.outputs, source.output_shapes, strict=True):
        outputs.append(_new_array(w, dtypes.index(memory.dtype), shape, outputs))
    constants = [w.entry(f"constant{n}") for n in range(len(source.constants))]

    def no_memory() -> None:
        _release(w, outputs)
        builder.ret(w.call(w.entry("PyErr_NoMemory")))

    work, free = _allocate(w, source.work_nbytes, no_memory)
    pointers = [*inputs, *(w.load(array, DATA) for array in outputs), *constants, work]
    if source.is_long:
        state = w.call(w.entry("PyEval_SaveThread"))
        call(builder, pointers)
        w.call(w.entry("PyEval_RestoreThread"), state)
    else:
        call(builder, pointers)
    free()
    builder.ret(_pack_results(w, outputs))
    builder.position_at_end(slow)
    builder.ret(w.call(w.entry("PyObject_Vectorcall"), w.entry("slow"), args, n_args, names))


def _write_program(module: ir.Module, source: Source, call: Callable[..., None]) -> None:
    """Add the function `veneer_program(table, *inputs, *outputs)` to an LLVM module.

    All its arguments are addresses. It returns 0, or 1 if there is too little memory.
    """
    word = ir.IntType(64)
    n_arrays = len(source.inputs) + len(source.outputs)
    function = ir.Function(module, ir.FunctionType(word, [word] * (1 + n_arrays)), PROGRAM)
    builder = ir.IRBuilder(function.append_basic_block())
    table, *arrays = function.args
    w = _Writer(builder, table, source)
    constants = [w.entry(f"constant{n}") for n in range(len(source.constants))]
    work, free = _allocate(w, source.work_nbytes, lambda: builder.ret(word(1)))
    call(builder, [*arrays, *constants, work])
    free()
    builder.ret(word(0))


def _require(w: _Writer, condition: Any, otherwise: Any) -> None:
    """Emit a branch to the block `otherwise`, which is taken if `condition` is false."""
    block = w.builder.append_basic_block()
    w.builder.cbranch(condition, block, otherwise)
    w.builder.position_at_end(block)


def _input_address(
    w: _Writer, x: Any, number: int, source: Source, wide: np.dtype | None, slow: Any
) -> Any:
    """Emit code that finds the address of the entries of the argument `x`. Return the address.

    If `x` has the dtype `wide`, its entries are converted first. The code branches to the block
    `slow` unless `x` has the shape of input `number` of the program, and its dtype or the dtype
    `wide`.
    """
    builder, same, kind = w.builder, w.builder.icmp_unsigned, w.load(x, TYPE)
    dtype, shape = source.inputs[number].dtype, source.input_shapes[number]
    n_of = table_dtypes(source).index
    done = builder.append_basic_block()
    addresses = []

    def take(condition: Any, place: Any, actual: np.dtype) -> None:
        here, next_one = builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(condition, here, next_one)
        builder.position_at_end(here)
        address = place if actual == dtype else _narrow(w, place, dtype, math.prod(shape), slow)
        addresses.append((address, builder.block))
        builder.branch(done)
        builder.position_at_end(next_one)

    dtypes = [dtype] if wide is None else [dtype, wide]
    arrays, numbers = builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(same("==", kind, w.entry("array_type")), arrays, numbers)
    builder.position_at_end(arrays)
    _require_layout(w, x, shape, slow)
    descr, data = w.load(x, DESCR), w.load(x, DATA)
    for actual in dtypes:
        take(same("==", descr, w.entry(f"dtype{n_of(actual)}")), data, actual)
    builder.branch(slow)
    builder.position_at_end(numbers)
    if not shape:
        place = builder.add(x, w.word(SCALAR))
        for actual in dtypes:
            take(same("==", kind, w.entry(f"scalar{n_of(actual)}")), place, actual)
        if dtype in (np.float32, np.float64):  # for which JAX takes a Python float
            take(same("==", kind, w.entry("float_type")), place, np.dtype(np.float64))
    builder.branch(slow)
    builder.position_at_end(done)
    phi = builder.phi(w.word)
    for value, block in addresses:
        phi.add_incoming(value, block)
    return phi


def _narrow(w: _Writer, place: Any, dtype: np.dtype, size: int, slow: Any) -> Any:
    """Emit code that copies `size` 64-bit numbers at the address `place` to 32-bit numbers.

    The numbers are copied to the stack, and get the dtype `dtype`. Return the address of the copy.
    The code branches to the block `slow` if an integer does not fit.
    """
    builder = w.builder
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
    """Emit a branch to the block `slow`, for arrays that the compiled code cannot read.

    It is taken unless the array has the shape `shape`, and is C-contiguous and aligned.
    """
    builder, same = w.builder, w.builder.icmp_unsigned
    _require(w, same("==", w.load(array, NDIM, w.int), w.int(len(shape))), slow)
    flags = builder.and_(w.load(array, FLAGS, w.int), w.int(CONTIGUOUS_ALIGNED))
    good = same("==", flags, w.int(CONTIGUOUS_ALIGNED))
    if shape:
        dimensions = w.load(array, DIMENSIONS)
        for axis, n in enumerate(shape):
            good = builder.and_(good, same("==", w.load(dimensions, 8 * axis), w.word(n)))
    _require(w, good, slow)


def _new_array(w: _Writer, dtype: int, shape: Sequence[int], others: Sequence[Any]) -> Any:
    """Emit code that creates a NumPy array. Return the address of the object.

    `dtype` is an index in `table_dtypes`. If NumPy fails, the code releases the arrays `others` and
    returns from the function.
    """
    builder = w.builder
    descr = w.entry(f"dtype{dtype}")
    w.call(w.entry("Py_IncRef"), descr)  # PyArray_Empty steals a reference
    type = ir.ArrayType(w.word, max(1, len(shape)))
    with builder.goto_entry_block():
        dimensions = builder.alloca(type)
    builder.store(type([*shape] or [0]), dimensions)
    empty, address = w.entry("PyArray_Empty"), builder.ptrtoint(dimensions, w.word)
    array = w.call(empty, w.int(len(shape)), address, descr, w.int(0))
    _require_object(w, array, others)
    return array


def _require_object(w: _Writer, made: Any, others: Sequence[Any]) -> None:
    """Emit code that returns NULL if the object `made` is NULL, which means an error.

    Before that, the code releases the arrays `others`.
    """
    builder = w.builder
    success, failure = builder.append_basic_block(), builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("!=", made, w.word(0)), success, failure)
    builder.position_at_end(failure)
    _release(w, others)
    builder.ret(w.word(0))
    builder.position_at_end(success)


def _release(w: _Writer, arrays: Sequence[Any]) -> None:
    for array in arrays:
        w.call(w.entry("Py_DecRef"), array)


def _allocate(w: _Writer, nbytes: int, fail: Callable[[], Any]) -> tuple[Any, Callable[[], Any]]:
    """Emit code that allocates work memory. Return its address and a callback that emits the free.

    `fail` emits a return from the function, for the case that there is too little memory.
    """
    builder = w.builder
    if nbytes <= _MAX_STACK_NBYTES:
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(ir.IntType(8), max(1, nbytes)))
            memory.align = 64
        return builder.ptrtoint(memory, w.word), lambda: None
    block = w.c_function("malloc", w.word(nbytes + 64))
    failure = builder.append_basic_block()
    _require(w, builder.icmp_unsigned("!=", block, w.word(0)), failure)
    success = builder.block
    builder.position_at_end(failure)
    fail()
    builder.position_at_end(success)
    aligned = builder.and_(builder.add(block, w.word(63)), w.word(-64))
    return aligned, lambda: w.c_function("free", block)


def _pack_results(w: _Writer, arrays: Sequence[Any]) -> Any:
    """Emit code for the object to return: the only array, or a new tuple of several arrays."""
    if len(arrays) == 1:
        return arrays[0]
    result = w.call(w.entry("PyTuple_New"), w.word(len(arrays)))
    _require_object(w, result, arrays)
    for n, array in enumerate(arrays):
        w.call(w.entry("PyTuple_SetItem"), result, w.word(n), array)
    return result
