"""Loads, stores and atomic operations at addresses, for Numba functions.

An address is an int64. No function checks bounds.
"""

import platform
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature

#: Numba's decorator. Its annotation counts the typing context as an argument of the caller.
intrinsic: Any = numba.extending.intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()

_LLVM = {types.int8: I8, types.int32: I32, types.int64: I64, types.float32: F32}

#: The C functions. `malloc(size)` returns 0 if there is too little memory.
malloc: Any = types.ExternalFunction("malloc", signature(types.int64, types.int64))
free: Any = types.ExternalFunction("free", signature(types.void, types.int64))


def pointer(builder: Any, address: Any, type: ir.Type) -> Any:
    """Convert an address to an LLVM pointer to `type`."""
    return builder.inttoptr(address, type.as_pointer())


def _create_load(number: Any) -> Any:
    @intrinsic
    def load(typing_context, address):
        def emit(context, builder, signature, args):
            value = builder.load(pointer(builder, args[0], _LLVM[number]))
            value.align = 1
            return value

        return number(types.int64), emit

    return load


def _create_store(number: Any) -> Any:
    @intrinsic
    def store(typing_context, address, value):
        def emit(context, builder, signature, args):
            store = builder.store(args[1], pointer(builder, args[0], _LLVM[number]))
            store.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, number), emit

    return store


#: `load_i8(address)` returns the int8 at an address, which need not be aligned, and so on.
load_i8, load_i32, load_i64, load_f32 = map(
    _create_load, (types.int8, types.int32, types.int64, types.float32)
)
#: `store_i8(address, value)` writes an int8 to an address, which need not be aligned, and so on.
store_i8, store_i32, store_i64, store_f32 = map(
    _create_store, (types.int8, types.int32, types.int64, types.float32)
)


@intrinsic
def word(typing_context, job, index):
    """Return the int64 at `job + 8 * index`, for an array of int64 at the address `job`."""

    def emit(context, builder, signature, args):
        return builder.load(builder.gep(pointer(builder, args[0], I64), [args[1]]))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def set_word(typing_context, job, index, value):
    """Write an int64 to `job + 8 * index`, for an array of int64 at the address `job`."""

    def emit(context, builder, signature, args):
        builder.store(args[2], builder.gep(pointer(builder, args[0], I64), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def fetch_add(typing_context, address, value):
    """Add to the int64 at an address atomically, and return its previous value."""

    def emit(context, builder, signature, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_shared(typing_context, address):
    """Return the int64 at an address, by an atomic load with acquire ordering."""

    def emit(context, builder, signature, args):
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def replace_shared(typing_context, address, expected, value):
    """Write `value` to an address atomically if it holds `expected`. Return whether it did."""

    def emit(context, builder, signature, args):
        place = pointer(builder, args[0], I64)
        result = builder.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def shared(typing_context, name, size):
    """Return the address of `size` bytes, initially 0, that all functions of an object file share.

    `name` identifies the memory: all calls with the same name return the same address. `name` and
    `size` are constants.
    """
    label, count = f"veneer_{name.literal_value}", size.literal_value

    def emit(context, builder, signature, args):
        type = ir.ArrayType(I8, count)
        memory = builder.module.globals.get(label)
        if memory is None:
            memory = ir.GlobalVariable(builder.module, type, label)
            memory.linkage, memory.align = "linkonce_odr", 64
            memory.initializer = ir.Constant(type, None)
        return builder.ptrtoint(memory, I64)

    return types.int64(name, size), emit


#: The LLVM function that hints at a spin loop, and its arguments, by machine.
_SPIN_HINTS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(("x86_64", "amd64"), ("llvm.x86.sse2.pause", ())),
    **dict.fromkeys(("aarch64", "arm64"), ("llvm.aarch64.hint", (1,))),
}


@intrinsic
def pause(typing_context):
    """Tell the CPU that this thread is in a spin loop."""

    def emit(context, builder, signature, args):
        if platform.machine().lower() in _SPIN_HINTS:
            name, numbers = _SPIN_HINTS[platform.machine().lower()]
            type = ir.FunctionType(ir.VoidType(), [I32] * len(numbers))
            hint = cgutils.get_or_insert_function(builder.module, type, name)
            builder.call(hint, [I32(number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), emit


def _create_prefetch(locality: int) -> Any:
    @intrinsic
    def prefetch(typing_context, address):
        def emit(context, builder, signature, args):
            byte = I8.as_pointer()
            type = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
            fetch = cgutils.get_or_insert_function(builder.module, type, "llvm.prefetch.p0")
            to_read, data = I32(0), I32(1)
            place = builder.inttoptr(args[0], byte)
            builder.call(fetch, [place, to_read, I32(locality), data])
            return context.get_dummy_value()

        return types.void(types.int64), emit

    return prefetch


#: Prefetch the cache line of an address, which may be invalid: into all caches, or, for data that
#: is needed much later, into all but the first-level cache.
prefetch, prefetch_for_later = _create_prefetch(3), _create_prefetch(2)


@intrinsic(prefer_literal=True)
def stack(typing_context, size):
    """Return the address of `size` bytes on the stack, aligned to a cache line.

    `size` is a constant.
    """
    count = size.literal_value

    def emit(context, builder, signature, args):
        with builder.goto_entry_block():  # in a loop, each iteration would allocate
            memory = builder.alloca(ir.ArrayType(I8, count))
        memory.align = 64  # a cache line
        return builder.ptrtoint(memory, I64)

    return types.int64(size), emit
