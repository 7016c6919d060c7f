"""What generated code calls that Numba has no name for, as LLVM's instructions.

Imported when something is compiled; `maths.instructions` says what each does, in plain Python.
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
from ..maths import libm
from ..maths.scalar import EXTERNAL, global_names, is_instruction, is_scalar

_LLVM: dict[Any, ir.Type] = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.boolean: ir.IntType(1),
}


def llvm_type(type: Any) -> ir.Type:
    """What LLVM calls a type of numbers."""
    return _LLVM[type] if type in _LLVM else ir.IntType(type.bitwidth)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's, for functions that tests have wrapped."""
    return numba_intrinsic(inspect.unwrap(function))


def _calling(name: str) -> Callable[..., Any]:
    """An emitter of a call of one of LLVM's functions, whose arguments are of one type."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of = signature.return_type
        suffix = f"{'f' if isinstance(of, types.Float) else 'i'}{of.bitwidth}"
        type = ir.FunctionType(llvm_type(of), [llvm_type(of)] * len(args))
        function = builder.module.globals.get(f"{name}.{suffix}")
        if function is None:
            function = ir.Function(builder.module, type, f"{name}.{suffix}")
        return builder.call(function, args)

    return emit


def _unary(name: str) -> Any:
    def one(typing_context, x):
        return x(x), _calling(name)

    return intrinsic(one)


floor, ceil, trunc, rint, fabs, sqrt, bit_count = map(
    _unary,
    "llvm.floor llvm.ceil llvm.trunc llvm.rint llvm.fabs llvm.sqrt llvm.ctpop".split(),
)


def _extreme(of_floats: str, of_ints: str) -> Any:
    def two(typing_context, x, y):
        if isinstance(x, types.Float):
            return x(x, y), _calling(of_floats)
        signed = "s" if getattr(x, "signed", False) else "u"
        return x(x, y), _calling(of_ints.format(signed))

    return intrinsic(two)


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
    def emit(context, builder, signature, args):
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return x(x), emit


@intrinsic
def select(typing_context, condition, x, y):
    def emit(context, builder, signature, args):
        return builder.select(*args)

    return x(types.boolean, x, x), emit


@intrinsic
def reinterpreted(typing_context, x, like):
    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], llvm_type(signature.return_type))

    return like(x, like), emit


@intrinsic
def add_in_any_order(typing_context, x, y):
    def emit(context, builder, signature, args):
        return builder.fadd(*args, flags=("reassoc", "contract"))

    return x(x, x), emit


@intrinsic
def multiply_in_any_order(typing_context, x, y):
    def emit(context, builder, signature, args):
        return builder.fmul(*args, flags=("reassoc",))

    return x(x, x), emit


@intrinsic
def at(typing_context, pointer, offset):
    def emit(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), emit


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


# Integers, as XLA has them: LLVM leaves open what some of these are.


def _of_integers(emit: Callable[..., Any]) -> Any:
    def two(typing_context, x, y):
        def generate(context, builder, signature, args):
            constant = lambda number: ir.Constant(args[0].type, number)
            return emit(builder, *args, signed=x.signed, constant=constant)

        return x(x, x), generate

    return intrinsic(two)


def _divided(builder, x, y, signed, constant):
    """The divisor that no CPU stops at, and whether the true one was 0, or -1."""
    zero = builder.icmp_unsigned("==", y, constant(0))
    minus = builder.icmp_unsigned("==", y, constant(-1)) if signed else ir.IntType(1)(0)
    return builder.select(builder.or_(zero, minus), constant(1), y), zero, minus


def _quotient(builder, x, y, signed, constant):
    divisor, zero, minus = _divided(builder, x, y, signed, constant)
    whole = (builder.sdiv if signed else builder.udiv)(x, divisor)
    whole = builder.select(minus, builder.sub(constant(0), x), whole)
    return builder.select(zero, constant(-1), whole)


def _remainder(builder, x, y, signed, constant):
    divisor, zero, _ = _divided(builder, x, y, signed, constant)
    rest = (builder.srem if signed else builder.urem)(x, divisor)
    return builder.select(zero, x, rest)


def _shift(kind: str) -> Any:
    def emit(builder, x, y, signed, constant):
        width = x.type.width
        inside = builder.icmp_unsigned("<", y, constant(width))
        if kind == "ashr":
            return builder.ashr(x, builder.select(inside, y, constant(width - 1)))
        moved = getattr(builder, kind)(x, builder.select(inside, y, constant(0)))
        return builder.select(inside, moved, constant(0))

    return _of_integers(emit)


quotient, remainder = _of_integers(_quotient), _of_integers(_remainder)
shift_left, shift_right_logical, shift_right_arithmetic = map(_shift, ("shl", "lshr", "ashr"))


# Functions of the C library; those of float32 have an f at the end of their names.


def _of_c_library(name: str) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        type = llvm_type(signature.return_type)
        symbol = name + ("f" if signature.return_type == types.float32 else "")
        function = builder.module.globals.get(symbol) or ir.Function(
            builder.module, ir.FunctionType(type, [type] * len(args)), symbol
        )
        return builder.call(function, args)

    def one(typing_context, x):
        return x(x), emit

    def two(typing_context, x, y):
        return x(x, x), emit

    return intrinsic(two if name in ("atan2", "pow", "fmod", "nextafter") else one)


globals().update({name: _of_c_library(name) for name in libm.NAMES})


# Functions of BLAS and LAPACK, whose addresses are given to who loads the code.


def by_reference(name: str) -> Any:
    """A call of a function that takes the addresses of all its arguments."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        places = [
            _place(builder, value, type)
            for value, type in zip(args, signature.args[0], strict=True)
        ]
        function = builder.module.globals.get(f"veneer_{name}") or ir.Function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [word] * len(places)),
            f"veneer_{name}",
        )
        builder.call(function, places)
        return context.get_dummy_value()

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[0])
        return emit(context, builder, signature, values)

    def call(typing_context, *args):
        return types.void(types.StarArgTuple(args)), generate

    return intrinsic(call)


def _place(builder: Any, value: Any, type: Any) -> Any:
    word = ir.IntType(64)
    if isinstance(type, types.CPointer):
        return builder.ptrtoint(value, word)
    if value.type == word:
        value = builder.trunc(value, ir.IntType(32))
    with builder.goto_entry_block():
        slot = builder.alloca(value.type)
    builder.store(value, slot)
    return builder.ptrtoint(slot, word)


def _of_words(name: str) -> Any:
    """A call of a function of ours that takes addresses and sizes, each an int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        values = [
            builder.ptrtoint(value, word) if isinstance(value.type, ir.PointerType) else value
            for value in cgutils.unpack_tuple(builder, args[0])
        ]
        type = ir.FunctionType(word, [word] * len(values))
        module, symbol = builder.module, f"veneer_{name}"
        function = module.globals.get(symbol) or ir.Function(module, type, symbol)
        builder.call(function, values)
        return context.get_dummy_value()

    def call(typing_context, *args):
        return types.void(types.StarArgTuple(args)), generate

    return intrinsic(call)


matrix_product = _of_words("matrix_product")


@intrinsic
def call_address(typing_context, *args):
    return types.int64(types.StarArgTuple(args)), _call_of_python


def _call_of_python(context: Any, builder: Any, signature: Any, args: Any) -> Any:
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


# What Numba is given for functions that generated code calls.


@functools.cache
def native(function: Callable[..., Any]) -> Any:
    """The intrinsic of an instruction, a scalar function compiled; any other object as it is."""
    if is_instruction(function):
        name = function.__name__
        fortran = EXTERNAL.get(name, "").startswith("scipy.")
        return by_reference(name) if fortran else globals()[name]
    if not is_scalar(function):
        return function
    options = {"error_model": "numpy", "fastmath": {"contract"}, **NATIVE_OPTIONS}
    return njit(_with_natives(function), **options)


def _with_natives(function: Any) -> Callable[..., Any]:
    """The function, with natives in the place of what it calls."""
    names = {name: function.__globals__[name] for name in global_names(function)}
    names = {name: native(x) if isinstance(x, FunctionType) else x for name, x in names.items()}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)
