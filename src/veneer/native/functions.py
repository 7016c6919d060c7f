"""Compile functions of numbers with Numba, and write them to object files as C functions.

Every function of a kernel is compiled by `native`, without Python objects. An `ObjectFile` exports
some of these functions as C functions. Processes that load the file run them without Numba.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target

from .machine_code import target_machine
from .memory import I64, intrinsic, pointer


class _UnoptimizedLibrary(CPUCodeLibrary):
    """The LLVM IR of one function, which is neither optimized nor turned into machine code.

    Numba optimizes a function together with all that it calls, again for each caller. An object
    file needs this only once, for the functions that it exports. Numba 0.68 has no such option.
    """

    def finalize(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return self  # Numba calls its `set_env`

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: the function uses no Python objects."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def own_module(self) -> Any:
        """Return the LLVM module of the function without its callees."""
        return super()._get_module_for_linking()

    def _get_module_for_linking(self) -> Any:
        """Return the module with all callees, for a caller that Numba itself optimizes."""
        module = self.own_module().clone()
        for callee in modules_of(self._linking_libraries):
            module.link_in(callee, preserve=True)
        return module


class Unoptimized(Compiler):
    """A Numba compiler that neither optimizes a function nor generates machine code for it.

    Both happen later, together with its caller: an object file, or a function of `numba.njit`.
    """

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile a function to LLVM code that is not optimized yet, as an `_UnoptimizedLibrary`.

        Numba calls this method of its compiler for each function.
        """
        self.state.library = _UnoptimizedLibrary(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


#: Options of `njit` for functions that Python does not call. They save a third of the time.
NATIVE_OPTIONS: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "pipeline_class": Unoptimized,
}


def modules_of(libraries: Iterable[Any]) -> list[Any]:
    """Return the LLVM modules of compiled functions and of their callees, each once."""
    modules: dict[int, Any] = {}
    pending = [*libraries]
    while pending:
        library = pending.pop()
        if id(library) in modules:
            continue
        if isinstance(library, _UnoptimizedLibrary):
            modules[id(library)] = library.own_module()
            pending += library._linking_libraries
        else:  # with its callees
            modules[id(library)] = library._get_module_for_linking()
    return [*modules.values()]


def native(function: Callable[..., Any], **options: Any) -> Any:
    """Decorate a function of numbers that only other compiled functions call.

    Numba compiles the function for them, and Python cannot call it. The compiled function does not
    hold Python's lock, divides as C does, and raises nothing. `options` are further options of
    `numba.njit`.
    """
    # Tests wrap all functions to check their annotations. Numba cannot compile the wrapper.
    function = inspect.unwrap(function)
    dispatcher: Any = njit(function, nogil=True, error_model="numpy", **(NATIVE_OPTIONS | options))
    get_call_template, add_overload = dispatcher.get_call_template, dispatcher.add_overload

    def without_literals(arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        # Numba would compile the function again for each constant argument.
        integers = [
            types.unliteral(type) if isinstance(type, types.IntegerLiteral) else type
            for type in arguments
        ]
        return get_call_template(tuple(integers), keywords)

    def without_annotations(result: Any) -> None:
        # They keep Numba's IR of the function in memory. Only `inspect_types` reads them.
        add_overload(result._replace(type_annotation=None))

    dispatcher.get_call_template = without_literals
    dispatcher.add_overload = without_annotations
    return dispatcher


@intrinsic
def prevent_inlining(typing_context):
    """Keep the function that calls this from being inlined, for example where that saves code."""

    def emit(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic(prefer_literal=True)
def c_function(typing_context, function, name):
    """Make a C function named `name` from a native function of int64, and return its address."""

    def emit(context, builder, signature, args):
        dispatcher = function.dispatcher
        count = dispatcher.py_func.__code__.co_argcount
        result = dispatcher.get_compile_result(types.int64(*[types.int64] * count))
        context.add_linking_libs([result.library])
        return builder.ptrtoint(c_wrapper(builder.module, result, name.literal_value), I64)

    return types.int64(function, name), emit


@intrinsic
def call(typing_context, function, arguments):
    """Call the C function at the address `function` with a tuple of int64. Return its int64."""

    def emit(context, builder, signature, args):
        function, values = args[0], cgutils.unpack_tuple(builder, args[1])
        type = ir.FunctionType(I64, [I64] * len(values))
        return builder.call(pointer(builder, function, type), values)

    return types.int64(function, arguments), emit


def c_wrapper(module: ir.Module, compiled: Any, name: str) -> ir.Function:
    """Add a C function named `name` to an LLVM module. It calls a compiled function of int64.

    The C function returns 0 if the compiled function returns nothing.
    """
    signature = compiled.signature
    type = ir.FunctionType(I64, [I64] * len(signature.args))
    function = ir.Function(module, type, name)
    builder = ir.IRBuilder(function.append_basic_block())
    _, result = cpu_target.target_context.call_internal_no_propagate(
        builder, compiled.fndesc, signature, function.args
    )
    builder.ret(result if signature.return_type == types.int64 else I64(0))
    return function


# Object files.

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

        An argument is a number, or the name of an exported function, whose address is passed.
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

    `exports` has the names of the functions that the object file exports. Functions that no
    exported function uses are removed from the module.
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
