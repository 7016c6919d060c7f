"""Compile functions of numbers with Numba, without Python objects, and call them as C functions.

Every function of a kernel is compiled by `native`. An `ObjectFile` exports some of them as C
functions, which then run without Numba.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target

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
        """Return the module with all callees, which a caller that Numba optimizes links in."""
        module = self.own_module().clone()
        for callee in modules_of(self._linking_libraries):
            module.link_in(callee, preserve=True)
        return module


class Unoptimized(Compiler):
    """A Numba compiler that neither optimizes a function nor generates machine code for it.

    Whatever calls the function, an object file or a function of `njit`, does both for it.
    """

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile a function into an `_UnoptimizedLibrary`."""
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
    """Compile a function of numbers that only compiled functions call.

    It does not hold Python's lock, divides as C does, and raises nothing.
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


def compile_for_python(function: Callable[..., Any]) -> Any:
    """Compile a function of numbers that Python can call. Tests call kernels without XLA by it."""
    return njit(inspect.unwrap(function), nogil=True, error_model="numpy")


@intrinsic
def prevent_inlining(typing_context):
    """Keep the function that calls this from being inlined, for example where that saves code."""

    def emit(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic(prefer_literal=True)
def c_function(typing_context, function, name):
    """Return the address of a C function named `name` that calls a native function of int64."""

    def emit(context, builder, signature, args):
        dispatcher = function.dispatcher
        count = dispatcher.py_func.__code__.co_argcount
        result = dispatcher.get_compile_result(types.int64(*[types.int64] * count))
        context.add_linking_libs([result.library])
        return builder.ptrtoint(c_wrapper(builder.module, result, name.literal_value), I64)

    return types.int64(function, name), emit


@intrinsic
def call(typing_context, function, arguments):
    """Call the C function at an address with a tuple of int64, and return its int64."""

    def emit(context, builder, signature, args):
        function, values = args[0], cgutils.unpack_tuple(builder, args[1])
        type = ir.FunctionType(I64, [I64] * len(values))
        return builder.call(pointer(builder, function, type), values)

    return types.int64(function, arguments), emit


def c_wrapper(module: ir.Module, compiled: Any, name: str) -> ir.Function:
    """Add a C function to a module that calls a compiled function of int64 arguments.

    It returns 0 if the compiled function returns nothing.
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
