"""Write native functions to object files, as C functions that are loaded without Numba."""

from collections.abc import Container, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from .functions import c_wrapper, modules_of
from .machine_code import target_machine
from .memory import I64

#: The functions of the C library that native code may call. LLVM itself adds calls of others, such
#: as memcpy and functions of libm, which every process has.
_C_LIBRARY = {"malloc", "free", "clock_gettime", "sched_yield"}


class ObjectFile:
    """A builder of an object file of C functions whose arguments and results are int64.

    The file contains all that the functions call, except functions of the C library and of other
    object files.
    """

    def __init__(self) -> None:
        self._wrappers = ir.Module()
        self._libraries: list[Any] = []  # of Numba
        self._imports: set[str] = set()

    def export(self, name: str, function: Any) -> None:
        """Add a native function of int64 arguments as a C function named `name`."""
        arguments = (types.int64,) * function.py_func.__code__.co_argcount
        function.compile(arguments)
        compiled = function.overloads[arguments]
        c_wrapper(self._wrappers, compiled, name)
        self._libraries.append(compiled.library)

    def export_call(self, name: str, called: str, arguments: Sequence[int | str]) -> None:
        """Add a C function `name(x)` that returns `called(x, *arguments)` of another file.

        An argument is a number, or the name of an exported function, which stands for its address.
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
        """Compile the functions and return the bytes of the object file.

        **Raises:** `ValueError` if a function calls a symbol that not every process has, as code
        that creates arrays or Python objects does.
        """
        exports = {
            function.name for function in self._wrappers.functions if not function.is_declaration
        }
        module = llvm.parse_assembly(str(self._wrappers))
        for library_module in modules_of(self._libraries):
            module.link_in(library_module, preserve=True)
        # Kernels contain vector instructions. LLVM would turn their scalar loops into scatters and
        # gathers, because it does not see that consecutive int64 addresses are contiguous.
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
