"""Numba functions as native code: compiled without anything of Python, and called as C's are.

`native` is how every function of a kernel is compiled. An `ObjectFile` has some of them as C
functions, and needs Numba no more.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.core.registry import cpu_target

from .machine_code import target_machine
from .memory import I64, intrinsic, pointer


def native(function: Callable[..., Any]) -> Any:
    """Compiles a function of numbers that only compiled functions call.

    There is no way to call it from Python, which saves a third of the time that it takes to
    compile. It holds no lock of Python's, divides as C does, and raises nothing.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    # Tests wrap all functions, to check their annotations: that, Numba could not read.
    return njit(inspect.unwrap(function), nogil=True, error_model="numpy", **options)


#: What native code may call outside itself. What LLVM calls besides (memcpy, memset, functions of
#: libm) is in every process.
_C_LIBRARY = {"malloc", "free", "sched_yield"}


@intrinsic(prefer_literal=True)
def c_function(typing_context, function, name):
    """The address of a C function of this name, which calls a native function of an int64."""

    def emit(context, builder, signature, args):
        result = function.dispatcher.get_compile_result(types.int64(types.int64))
        context.add_linking_libs([result.library])
        return builder.ptrtoint(_exported(builder.module, result, name.literal_value), I64)

    return types.int64(function, name), emit


@intrinsic
def call(typing_context, function, arguments):
    """Calls the C function at an address, with a tuple of int64; pointers are int64, too."""

    def emit(context, builder, signature, args):
        function, values = args[0], cgutils.unpack_tuple(builder, args[1])
        type = ir.FunctionType(I64, [I64] * len(values))
        return builder.call(pointer(builder, function, type), values)

    return types.int64(function, arguments), emit


def _exported(module: ir.Module, compiled: Any, name: str) -> ir.Function:
    """Writes a C function that calls what Numba compiled, all whose arguments are int64."""
    signature = compiled.signature
    type = ir.FunctionType(I64, [I64] * len(signature.args))
    function = ir.Function(module, type, name)
    builder = ir.IRBuilder(function.append_basic_block())
    _, result = cpu_target.target_context.call_internal_no_propagate(
        builder, compiled.fndesc, signature, function.args
    )
    builder.ret(result if signature.return_type == types.int64 else I64(0))
    return function


class ObjectFile:
    """An object file in the making, of C functions whose arguments and results are int64.

    What they call is in it, too, or in the C library, or another object file.
    """

    def __init__(self) -> None:
        self._wrappers = ir.Module()
        self._compiled: list[str] = []
        self._imports: set[str] = set()

    def export(self, name: str, function: Any) -> None:
        """Adds a native function, by a name that it has in C."""
        arguments = (types.int64,) * function.py_func.__code__.co_argcount
        function.compile(arguments)
        _exported(self._wrappers, function.overloads[arguments], name)
        self._compiled.append(function.inspect_llvm(arguments))

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
        for other in self._compiled:
            module.link_in(llvm.parse_assembly(other))
        machine = _machine()
        _keep_only(module, machine, exports)
        called = {f.name for f in module.functions if f.is_declaration and f.name[:5] != "llvm."}
        if unknown := called - _C_LIBRARY - self._imports:
            raise ValueError(f"{', '.join(exports)} call {', '.join(unknown)}, which C has not")
        return machine.emit_object(module)


def _keep_only(module: Any, machine: Any, exports: Iterable[str]) -> None:
    """Removes what exported functions do not use."""
    for function in module.functions:
        if not function.is_declaration and function.name not in exports:
            function.linkage = llvm.Linkage.internal
    for variable in module.global_variables:
        variable.linkage = llvm.Linkage.internal
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, options))


def _machine() -> Any:
    """This CPU, or what Numba's settings say of it."""
    settings = vars(config)
    features = settings["CPU_FEATURES"]
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return target_machine(cpu=settings["CPU_NAME"] or llvm.get_host_cpu_name(), features=features)
