"""Numba functions that need nothing of Python: compiled, and called as C's are.

`native` is how every function of a kernel is compiled; an `ObjectFile` has some of them as C
functions, and needs Numba no more.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target

from .memory import I64, intrinsic, pointer


def native(function: Callable[..., Any], **more_options: Any) -> Any:
    """Compiles a function of numbers that only compiled functions call.

    There is no way to call it from Python, which saves a third of the time that it takes to
    compile. It holds no lock of Python's, divides as C does, and raises nothing.
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
    options |= more_options
    # Tests wrap all functions, to check their annotations: that, Numba could not read.
    dispatcher: Any = njit(inspect.unwrap(function), nogil=True, error_model="numpy", **options)
    template = dispatcher.get_call_template

    def without_literals(arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        # Numba would compile it again for each number that it is called with.
        return template(tuple(map(_any_number, arguments)), keywords)

    add_overload = dispatcher.add_overload

    def without_annotations(result: Any) -> None:
        # They keep Numba's IR of the function in memory. Only `inspect_types` reads them.
        add_overload(result._replace(type_annotation=None))

    dispatcher.get_call_template = without_literals
    dispatcher.add_overload = without_annotations
    return dispatcher


def _any_number(type: Any) -> Any:
    return types.unliteral(type) if isinstance(type, types.IntegerLiteral) else type


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function of numbers as `native` does, but one that Python may call, too.

    So the functions of a kernel are: tests call them with no XLA between.
    """
    return njit(inspect.unwrap(function), nogil=True, error_model="numpy")


@intrinsic
def prevent_inlining(typing_context):
    """Keeps what LLVM makes of a function apart from its callers, where one copy will do.

    Numba optimises a function again with each that calls it.
    """

    def emit(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic(prefer_literal=True)
def c_function(typing_context, function, name):
    """The address of a C function of this name, which calls a native function of int64."""

    def emit(context, builder, signature, args):
        dispatcher = function.dispatcher
        count = dispatcher.py_func.__code__.co_argcount
        result = dispatcher.get_compile_result(types.int64(*[types.int64] * count))
        context.add_linking_libs([result.library])
        return builder.ptrtoint(c_wrapper(builder.module, result, name.literal_value), I64)

    return types.int64(function, name), emit


@intrinsic
def call(typing_context, function, arguments):
    """Calls the C function at an address, with a tuple of int64; pointers are int64, too."""

    def emit(context, builder, signature, args):
        function, values = args[0], cgutils.unpack_tuple(builder, args[1])
        type = ir.FunctionType(I64, [I64] * len(values))
        return builder.call(pointer(builder, function, type), values)

    return types.int64(function, arguments), emit


def c_wrapper(module: ir.Module, compiled: Any, name: str) -> ir.Function:
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
