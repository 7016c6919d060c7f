"""Memory by address, in Numba: what a C programmer does with pointers.

An address is an int64. Nothing here checks anything.
"""

import platform
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature

#: What Numba calls by its annotations has one argument more than those who call it give.
intrinsic: Any = numba.extending.intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()

_LLVM = {types.int8: I8, types.uint8: I8, types.int32: I32, types.int64: I64, types.float32: F32}

#: Allocates bytes; 0 where there are none. And frees them.
malloc: Any = types.ExternalFunction("malloc", signature(types.int64, types.int64))
free: Any = types.ExternalFunction("free", signature(types.void, types.int64))


def pointer(builder: Any, address: Any, type: ir.Type) -> Any:
    """Returns an address as LLVM's pointer to a type."""
    return builder.inttoptr(address, type.as_pointer())


def _load(of: Any) -> Any:
    @intrinsic
    def load(typing_context, address):
        def emit(context, builder, signature, args):
            value = builder.load(pointer(builder, args[0], _LLVM[of]))
            value.align = 1
            return value

        return of(types.int64), emit

    return load


def _store(of: Any) -> Any:
    @intrinsic
    def store(typing_context, address, value):
        def emit(context, builder, signature, args):
            written = builder.store(args[1], pointer(builder, args[0], _LLVM[of]))
            written.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, of), emit

    return store


#: Reads a number at an address.
load_i8, load_u8, load_i32, load_i64, load_f32 = map(
    _load, (types.int8, types.uint8, types.int32, types.int64, types.float32)
)
#: Writes a number to an address.
store_i8, store_i32, store_i64, store_f32 = map(
    _store, (types.int8, types.int32, types.int64, types.float32)
)


@intrinsic
def word(typing_context, job, index):
    """Reads a word of a job: `word(job, M)`."""

    def emit(context, builder, signature, args):
        return builder.load(builder.gep(pointer(builder, args[0], I64), [args[1]]))

    return types.int64(types.int64, types.int64), emit


@intrinsic
def set_word(typing_context, job, index, value):
    """Writes a word of a job."""

    def emit(context, builder, signature, args):
        builder.store(args[2], builder.gep(pointer(builder, args[0], I64), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def fetch_add(typing_context, address, value):
    """Adds to an int64 that threads share, and returns what it was."""

    def emit(context, builder, signature, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def load_shared(typing_context, address):
    """Reads an int64 that threads share, and all that was written before it was."""

    def emit(context, builder, signature, args):
        return builder.load_atomic(pointer(builder, args[0], I64), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def replace_shared(typing_context, address, expected, value):
    """Writes an int64 that threads share, if it is as expected; and returns whether it was."""

    def emit(context, builder, signature, args):
        place = pointer(builder, args[0], I64)
        found = builder.cmpxchg(place, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@intrinsic(prefer_literal=True)
def shared(typing_context, name, size):
    """The address of so many bytes, 0 at first, that all functions of an object file share."""
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


#: LLVM's function that says so to a CPU, and its arguments.
_HINTS: dict[str, tuple[str, tuple[int, ...]]] = {
    **dict.fromkeys(("x86_64", "amd64"), ("llvm.x86.sse2.pause", ())),
    **dict.fromkeys(("aarch64", "arm64"), ("llvm.aarch64.hint", (1,))),
}


@intrinsic
def pause(typing_context):
    """Tells the CPU that this thread looks for something again and again."""

    def emit(context, builder, signature, args):
        if platform.machine().lower() in _HINTS:
            name, numbers = _HINTS[platform.machine().lower()]
            type = ir.FunctionType(ir.VoidType(), [I32] * len(numbers))
            hint = cgutils.get_or_insert_function(builder.module, type, name)
            builder.call(hint, [I32(number) for number in numbers])
        return context.get_dummy_value()

    return types.void(), emit


def _prefetch(locality: int) -> Any:
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


#: Asks for the cache line of an address, which may be anything at all: into all caches, or into
#: those but the first, which has no place for what is needed much later.
prefetch, prefetch_for_later = _prefetch(3), _prefetch(2)


@intrinsic(prefer_literal=True)
def stack(typing_context, size):
    """Returns the address of so many bytes, a constant, that last until the function returns."""
    count = size.literal_value

    def emit(context, builder, signature, args):
        with builder.goto_entry_block():  # else a loop would take more each time
            memory = builder.alloca(ir.ArrayType(I8, count))
        memory.align = 64  # a cache line
        return builder.ptrtoint(memory, I64)

    return types.int64(size), emit
