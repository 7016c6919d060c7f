"""Object files: what Numba compiled, as C functions that are loaded without it."""

from collections.abc import Container, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from .functions import c_wrapper
from .machine_code import target_machine
from .memory import I64
from .unoptimised import modules_of, unoptimised

#: What native code may call outside itself. What LLVM calls besides (memcpy, memset, functions of
#: libm) is in every process.
_SCHEDULER = {"sched_yield", "sched_getcpu", "sched_getaffinity", "sched_setaffinity"}
_C_LIBRARY = {"malloc", "free", "clock_gettime", *_SCHEDULER}


class ObjectFile:
    """An object file in the making, of C functions whose arguments and results are int64.

    What they call is in it, too, or in the C library, or another object file.
    """

    def __init__(self) -> None:
        self._wrappers = ir.Module()
        self._compiled: list[Any] = []  # Numba's libraries
        self._imports: set[str] = set()

    def export(self, name: str, function: Any) -> None:
        """Adds a native function, by a name that it has in C."""
        arguments = (types.int64,) * function.py_func.__code__.co_argcount
        with unoptimised():
            function.compile(arguments)
        compiled = function.overloads[arguments]
        c_wrapper(self._wrappers, compiled, name)
        self._compiled.append(compiled.library)

    def export_call(self, name: str, called: str, arguments: Sequence[int | str]) -> None:
        """Adds a function of a word that calls another file's with it, and with constants.

        A constant is a number, or the name of a function whose address it is.
        """
        self._imports.add(called)
        type = ir.FunctionType(I64, [I64] * (1 + len(arguments)))
        callee = ir.Function(self._wrappers, type, called)
        function = ir.Function(self._wrappers, ir.FunctionType(I64, [I64]), name)
        builder = ir.IRBuilder(function.append_basic_block())
        constants = [
            builder.ptrtoint(self._wrappers.get_global(argument), I64)
            if isinstance(argument, str)
            else I64(argument)
            for argument in arguments
        ]
        builder.ret(builder.call(callee, [*function.args, *constants]))

    def code(self) -> bytes:
        """Returns what the file has.

        **Raises:** `ValueError` where it calls what is not there: Numba functions that raise do, or
        that make arrays or other objects of Python's.
        """
        exports = {
            function.name for function in self._wrappers.functions if not function.is_declaration
        }
        module = llvm.parse_assembly(str(self._wrappers))
        for other in modules_of(self._compiled):
            module.link_in(other, preserve=True)
        # Vectors are written out. Of other loops, LLVM would make scatters and gathers, as it does
        # not see that addresses that are int64 follow each other.
        code = compile_module(module, exports, vectorize_loops=False)
        called = {f.name for f in module.functions if f.is_declaration and f.name[:5] != "llvm."}
        if unknown := called - _C_LIBRARY - self._imports:
            raise ValueError(
                f"{', '.join(exports)} call {', '.join(unknown)}, which the C library does not have"
            )
        return code


def compile_module(module: Any, exports: Container[str], *, vectorize_loops: bool) -> bytes:
    """Optimize an LLVM module for the CPU that Numba compiles for, and return its object file.

    Functions that no exported function uses are removed from the module.
    """
    machine = target_machine()
    for function in module.functions:
        if not function.is_declaration and function.name not in exports:
            function.linkage = llvm.Linkage.internal
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = llvm.Linkage.internal
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = vectorize_loops
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, builder)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)
