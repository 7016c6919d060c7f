"""The LLVM code of the instructions that generated code calls.

The function of the same name in `instructions` documents each intrinsic and runs in Python. This
module imports Numba, and is itself imported only to compile a program.
"""

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from ...native.functions import NATIVE_OPTIONS
from .instructions import C_LIBRARY, EXTERNAL, global_names, is_instruction, is_scalar

_LLVM: dict[Any, ir.Type] = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.boolean: ir.IntType(1),
}


def llvm_type(type: Any) -> ir.Type:
    """Return the LLVM type of a Numba type of numbers."""
    return _LLVM[type] if type in _LLVM else ir.IntType(type.bitwidth)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Do the same as `numba.extending.intrinsic`, also for functions that tests have wrapped."""
    return numba_intrinsic(inspect.unwrap(function))


def _operation(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Return an emitter that calls `emit(builder, *args)` with the LLVM builder and the arguments.

    An emitter is a function that writes LLVM code for a Numba intrinsic.
    """
    return lambda context, builder, signature, args: emit(builder, *args)


def _calling(name: str) -> Callable[..., Any]:
    """Return an emitter of LLVM code that calls the LLVM function `name`.

    All arguments must have the type of the result. The name of this type is added to `name`.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        suffix = f"{'f' if isinstance(kind, types.Float) else 'i'}{kind.bitwidth}"
        type = ir.FunctionType(llvm_type(kind), [llvm_type(kind)] * len(args))
        function = builder.module.globals.get(f"{name}.{suffix}")
        if function is None:
            function = ir.Function(builder.module, type, f"{name}.{suffix}")
        return builder.call(function, args)

    return emit


def _unary(name: str) -> Any:
    def unary(typing_context, x):
        return x(x), _calling(name)

    return intrinsic(unary)


floor, ceil, trunc, rint, fabs, sqrt, bit_count = map(
    _unary,
    "llvm.floor llvm.ceil llvm.trunc llvm.rint llvm.fabs llvm.sqrt llvm.ctpop".split(),
)


def _extreme(float_function: str, int_function: str) -> Any:
    def binary(typing_context, x, y):
        if isinstance(x, types.Float):
            return x(x, y), _calling(float_function)
        signed = "s" if getattr(x, "signed", False) else "u"
        return x(x, y), _calling(int_function.format(signed))

    return intrinsic(binary)


maximum = _extreme("llvm.maximum", "llvm.{}max")
minimum = _extreme("llvm.minimum", "llvm.{}min")


@intrinsic
def copysign(typing_context, x, y):
    return x(x, y), _calling("llvm.copysign")


@intrinsic
def polynomial(typing_context, x, coefficients):
    def emit(context, builder, signature, args):
        total, *rest = cgutils.unpack_tuple(builder, args[1])
        for coefficient in rest:
            total = builder.fadd(builder.fmul(total, args[0]), coefficient)
        return total

    return x(x, coefficients), emit


@intrinsic
def leading_zeros(typing_context, x):
    return x(x), _operation(lambda builder, x: builder.ctlz(x, ir.Constant(ir.IntType(1), 0)))


@intrinsic
def select(typing_context, condition, x, y):
    return x(types.boolean, x, x), _operation(lambda builder, *args: builder.select(*args))


@intrinsic
def reinterpreted(typing_context, x, like):
    emit = lambda builder, x, _: builder.bitcast(x, llvm_type(like))
    return like(x, like), _operation(emit)


@intrinsic
def add_in_any_order(typing_context, x, y):
    emit = lambda builder, x, y: builder.fadd(x, y, flags=("reassoc", "contract"))
    return x(x, x), _operation(emit)


@intrinsic
def multiply_in_any_order(typing_context, x, y):
    return x(x, x), _operation(lambda builder, x, y: builder.fmul(x, y, flags=("reassoc",)))


@intrinsic
def at(typing_context, pointer, offset):
    emit = lambda builder, pointer, offset: builder.gep(pointer, [offset])
    return pointer(pointer, types.intp), _operation(emit)


@intrinsic
def memory(typing_context, pointer, offset, dtype):
    def emit(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        return builder.bitcast(place, context.get_value_type(signature.return_type))

    result = types.CPointer(dtype)
    return result(pointer, types.intp, dtype), emit


@intrinsic
def no_aliases(typing_context):
    def emit(context, builder, signature, args):
        for argument in builder.function.args[2:]:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), emit


# Integer operations with the results of XLA. LLVM leaves some of the results undefined.


def _integer_intrinsic(emit: Callable[..., Any]) -> Any:
    def binary(typing_context, x, y):
        def generate(context, builder, signature, args):
            constant = lambda number: ir.Constant(args[0].type, number)
            return emit(builder, *args, signed=x.signed, constant=constant)

        return x(x, x), generate

    return intrinsic(binary)


def _safe_divisor(builder, x, y, signed, constant):
    """Return a divisor with which the CPU does not trap, whether `y` is 0, and whether it is -1.

    The divisor is 1 in these two cases, or else `y`.
    """
    is_zero = builder.icmp_unsigned("==", y, constant(0))
    is_minus_one = builder.icmp_unsigned("==", y, constant(-1)) if signed else ir.IntType(1)(0)
    divisor = builder.select(builder.or_(is_zero, is_minus_one), constant(1), y)
    return divisor, is_zero, is_minus_one


def _quotient(builder, x, y, signed, constant):
    divisor, is_zero, is_minus_one = _safe_divisor(builder, x, y, signed, constant)
    result = (builder.sdiv if signed else builder.udiv)(x, divisor)
    result = builder.select(is_minus_one, builder.sub(constant(0), x), result)
    return builder.select(is_zero, constant(-1), result)


def _remainder(builder, x, y, signed, constant):
    divisor, is_zero, _ = _safe_divisor(builder, x, y, signed, constant)
    result = (builder.srem if signed else builder.urem)(x, divisor)
    return builder.select(is_zero, x, result)


def _shift(kind: str) -> Any:
    def emit(builder, x, y, signed, constant):
        width = x.type.width
        inside = builder.icmp_unsigned("<", y, constant(width))
        if kind == "ashr":
            return builder.ashr(x, builder.select(inside, y, constant(width - 1)))
        moved = getattr(builder, kind)(x, builder.select(inside, y, constant(0)))
        return builder.select(inside, moved, constant(0))

    return _integer_intrinsic(emit)


quotient, remainder = _integer_intrinsic(_quotient), _integer_intrinsic(_remainder)
shift_left, shift_right_logical, shift_right_arithmetic = map(_shift, ("shl", "lshr", "ashr"))


# The C library. Its names for float32 end in an f.


def _c_intrinsic(name: str) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type = llvm_type(signature.return_type)
        symbol = name + ("f" if signature.return_type == types.float32 else "")
        function = builder.module.globals.get(symbol) or ir.Function(
            builder.module, ir.FunctionType(type, [type] * len(args)), symbol
        )
        return builder.call(function, args)

    def unary(typing_context, x):
        return x(x), emit

    def binary(typing_context, x, y):
        return x(x, x), emit

    return intrinsic(binary if name in ("atan2", "pow", "fmod", "nextafter") else unary)


globals().update({name: _c_intrinsic(name) for name in C_LIBRARY})


# Calls of functions whose addresses are registered before the code is loaded: BLAS, LAPACK, and
# the matrix product of this package.


def _call_symbol(builder: Any, result: Any, name: str, words: list[Any]) -> None:
    type = ir.FunctionType(result, [ir.IntType(64)] * len(words))
    module, symbol = builder.module, f"veneer_{name}"
    builder.call(module.globals.get(symbol) or ir.Function(module, type, symbol), words)


def by_reference(name: str) -> Any:
    """Return an intrinsic that calls `veneer_<name>` with the addresses of all its arguments.

    Integers are stored as int32, as BLAS and LAPACK read them.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[0])
        pairs = zip(values, signature.args[0], strict=True)
        _call_symbol(builder, ir.VoidType(), name, [_address(builder, *pair) for pair in pairs])
        return context.get_dummy_value()

    def call(typing_context, *args):
        return types.void(types.StarArgTuple(args)), generate

    return intrinsic(call)


def _address(builder: Any, value: Any, type: Any) -> Any:
    word = ir.IntType(64)
    if isinstance(type, types.CPointer):
        return builder.ptrtoint(value, word)
    if value.type == word:
        value = builder.trunc(value, ir.IntType(32))
    with builder.goto_entry_block():
        slot = builder.alloca(value.type)
    builder.store(value, slot)
    return builder.ptrtoint(slot, word)


def _by_word(name: str) -> Any:
    """Return an intrinsic that calls `veneer_<name>` with pointers and integers as 64-bit words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        values = [
            builder.ptrtoint(value, word) if isinstance(value.type, ir.PointerType) else value
            for value in cgutils.unpack_tuple(builder, args[0])
        ]
        _call_symbol(builder, word, name, values)
        return context.get_dummy_value()

    def call(typing_context, *args):
        return types.void(types.StarArgTuple(args)), generate

    return intrinsic(call)


matrix_product = _by_word("matrix_product")


@intrinsic
def call_address(typing_context, *args):
    return types.int64(types.StarArgTuple(args)), _emit_call_address


def _emit_call_address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    callback, *pointers = cgutils.unpack_tuple(builder, args[0])
    word, zero = ir.IntType(64), ir.IntType(32)(0)
    with builder.goto_entry_block():
        words = builder.alloca(ir.ArrayType(word, 1 + len(pointers)))
    values = [word(0), *(builder.ptrtoint(pointer, word) for pointer in pointers)]
    places = [builder.gep(words, [zero, ir.IntType(32)(n)]) for n in range(len(values))]
    for place, value in zip(places, values, strict=True):
        builder.store(value, place)
    type = ir.FunctionType(ir.VoidType(), [word])
    function = builder.inttoptr(builder.load(callback), type.as_pointer())
    builder.call(function, [builder.ptrtoint(words, word)])
    return builder.load(places[0])


# The table that compilation uses.


@functools.cache
def native(function: Callable[..., Any]) -> Any:
    """Return the object that Numba compiles in place of a function that generated code calls.

    It is an intrinsic for an instruction, and a Numba dispatcher for a scalar function. Other
    objects are returned unchanged.
    """
    if is_instruction(function):
        name = function.__name__
        fortran = EXTERNAL.get(name, "").startswith("scipy.")
        return by_reference(name) if fortran else globals()[name]
    if not is_scalar(function):
        return function
    options = {"error_model": "numpy", "fastmath": {"contract"}, **NATIVE_OPTIONS}
    names = {name: function.__globals__[name] for name in global_names(function)}
    names = {name: native(x) if isinstance(x, FunctionType) else x for name, x in names.items()}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    return njit(copy, **options)
