"""Read a call of an FFI handler by XLA, and call functions of XLA, from Numba functions.

XLA calls a handler as `XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)`. The frame has the buffers
of the arguments and results, and a table of functions of XLA. The offsets of the members come from
the header that JAX ships (`ffi_header.py`).
"""

import functools

from numba import types

from .ffi_header import MAJOR_VERSION, header
from .functions import call, native
from .memory import I64, intrinsic, load_i32, load_i64, stack, store_i32, store_i64, word

_frame = functools.partial(header().offset, "XLA_FFI_CallFrame")
_buffer = functools.partial(header().offset, "XLA_FFI_Buffer")
_api = functools.partial(header().offset, "XLA_FFI_Api")

F32, F16, BF16, E8M0, S8, U8, S32 = (
    header().value(f"XLA_FFI_DataType_{name}")
    for name in ("F32", "F16", "BF16", "F8E8M0FNU", "S8", "U8", "S32")
)
INVALID_ARGUMENT = header().value("XLA_FFI_Error_Code_INVALID_ARGUMENT")
RESOURCE_EXHAUSTED = header().value("XLA_FFI_Error_Code_RESOURCE_EXHAUSTED")


@intrinsic(prefer_literal=True)
def _c_string(typing_context, text):
    """Return the address of a constant string."""

    def emit(context, builder, signature, args):
        constant = context.insert_const_string(builder.module, text.literal_value)
        return builder.ptrtoint(constant, I64)

    return types.int64(text), emit


# XLA asks a handler once for the version of its interface, by an extension of an empty frame.

_EXTENSION, _API = _frame("extension_start"), _frame("api")
_TYPE = header().offset("XLA_FFI_Metadata_Extension", "extension_base.type")
_METADATA = header().offset("XLA_FFI_Metadata_Extension", "metadata")
_MAJOR = header().offset("XLA_FFI_Metadata", "api_version.major_version")
_MINOR = header().offset("XLA_FFI_Metadata", "api_version.minor_version")
_TRAITS = header().offset("XLA_FFI_Metadata", "traits")
_MINOR_VERSION = header().minor_version
_IS_METADATA = header().value("XLA_FFI_Extension_Metadata")


@native
def answer_metadata_query(frame):
    """Write the handler's metadata if XLA asks for it. Return whether it does."""
    extension = load_i64(frame + _EXTENSION)
    if extension == 0 or load_i32(extension + _TYPE) != _IS_METADATA:
        return False
    metadata = load_i64(extension + _METADATA)
    store_i32(metadata + _MAJOR, MAJOR_VERSION)
    store_i32(metadata + _MINOR, _MINOR_VERSION)
    store_i32(metadata + _TRAITS, 0)
    return True


# Arguments and results are arrays of pointers to buffers.

_ARGUMENTS, _ARGUMENT_COUNT = _frame("args.args"), _frame("args.size")
_RESULTS, _RESULT_COUNT = _frame("rets.rets"), _frame("rets.size")
_DTYPE, _DATA, _RANK, _DIMS = map(_buffer, ("dtype", "data", "rank", "dims"))


@native
def argument_count(frame):
    """Return the number of arguments of a call."""
    return load_i64(frame + _ARGUMENT_COUNT)


@native
def result_count(frame):
    """Return the number of results of a call."""
    return load_i64(frame + _RESULT_COUNT)


@native
def has_buffers(frame, arguments, results):
    """Return whether a call has these numbers of arguments and results."""
    return argument_count(frame) == arguments and result_count(frame) == results


@native
def argument_buffer(frame, index):
    """Return the address of the buffer of an argument."""
    return word(load_i64(frame + _ARGUMENTS), index)


@native
def result_buffer(frame, index):
    """Return the address of the buffer of a result."""
    return word(load_i64(frame + _RESULTS), index)


@native
def data(buffer):
    """Return the address of the first entry of a buffer."""
    return load_i64(buffer + _DATA)


@native
def dtype(buffer):
    """Return the dtype of a buffer: `F32`, `F16`, `S8` and so on, or another number."""
    return load_i32(buffer + _DTYPE)


@native
def rank(buffer):
    """Return the number of axes of a buffer."""
    return load_i64(buffer + _RANK)


@native
def dim(buffer, axis):
    """Return the size of an axis of a buffer."""
    return word(load_i64(buffer + _DIMS), axis)


# Functions of XLA take one struct of arguments, which begins with its size, and return an error or
# 0.

_CTX = _frame("ctx")


def _size_and_offsets(struct: str, *members: str) -> tuple[int, ...]:
    return header().size(struct), *(header().offset(struct, member) for member in members)


_CREATE, _DESTROY = _api("XLA_FFI_Error_Create"), _api("XLA_FFI_Error_Destroy")
_SCHEDULE, _NUM_THREADS = (
    _api("XLA_FFI_ThreadPool_Schedule"),
    _api("XLA_FFI_ThreadPool_NumThreads"),
)
_CREATE_SIZE, _MESSAGE, _CODE = _size_and_offsets("XLA_FFI_Error_Create_Args", "message", "errc")
_DESTROY_SIZE, _ERROR = _size_and_offsets("XLA_FFI_Error_Destroy_Args", "error")
_SCHEDULE_SIZE, _SCHEDULE_CTX, _TASK, _TASK_DATA = _size_and_offsets(
    "XLA_FFI_ThreadPool_Schedule_Args", "ctx", "task", "data"
)
_COUNT_SIZE, _COUNT_CTX, _COUNT = _size_and_offsets(
    "XLA_FFI_ThreadPool_NumThreads_Args", "ctx", "num_threads"
)


@native
def _begin(arguments, size):
    """Write the first members of a struct of arguments: its size, and no extension."""
    store_i64(arguments, size)
    store_i64(arguments + 8, 0)


@native
def _call_xla(frame, function, arguments):
    """Call a function of XLA. Return whether it succeeded."""
    api = load_i64(frame + _API)
    error = call(load_i64(api + function), (arguments,))
    if error == 0:
        return True
    destroyed = stack(_DESTROY_SIZE)
    _begin(destroyed, _DESTROY_SIZE)
    store_i64(destroyed + _ERROR, error)
    call(load_i64(api + _DESTROY), (destroyed,))
    return False


@native
def create_error(frame, code, message):
    """Return an error with a constant message, which a handler returns to XLA."""
    arguments = stack(_CREATE_SIZE)
    _begin(arguments, _CREATE_SIZE)
    store_i64(arguments + _MESSAGE, _c_string(message))
    store_i32(arguments + _CODE, code)
    return call(load_i64(load_i64(frame + _API) + _CREATE), (arguments,))


@native
def pool_threads(frame):
    """Return the number of threads of XLA's pool, or 0 if there is no pool."""
    arguments, count = stack(_COUNT_SIZE), stack(8)
    _begin(arguments, _COUNT_SIZE)
    store_i64(arguments + _COUNT_CTX, load_i64(frame + _CTX))
    store_i64(arguments + _COUNT, count)
    return load_i64(count) if _call_xla(frame, _NUM_THREADS, arguments) else 0


@native
def schedule(frame, task, argument):
    """Let a thread of XLA's pool call the C function `task(argument)`. Return whether it will."""
    arguments = stack(_SCHEDULE_SIZE)
    _begin(arguments, _SCHEDULE_SIZE)
    store_i64(arguments + _SCHEDULE_CTX, load_i64(frame + _CTX))
    store_i64(arguments + _TASK, task)
    store_i64(arguments + _TASK_DATA, argument)
    return _call_xla(frame, _SCHEDULE, arguments)
