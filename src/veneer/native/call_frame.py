"""A call from XLA to an FFI handler, read and answered in Numba.

XLA calls a handler as `XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)`: the frame has the buffers
of the arguments and results, and a table of functions of XLA's, which are called by address. Where
the members of these C structs are, the header says that JAX ships (`ffi_header.py`).
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
    """The address of a constant text."""

    def emit(context, builder, signature, args):
        constant = context.insert_const_string(builder.module, text.literal_value)
        return builder.ptrtoint(constant, I64)

    return types.int64(text), emit


# XLA asks a handler once which version it is written for, by an extension of an empty frame.

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
    """Returns whether XLA asked for the handler's metadata alone, which it then has."""
    extension = load_i64(frame + _EXTENSION)
    if extension == 0 or load_i32(extension + _TYPE) != _IS_METADATA:
        return False
    metadata = load_i64(extension + _METADATA)
    store_i32(metadata + _MAJOR, MAJOR_VERSION)
    store_i32(metadata + _MINOR, _MINOR_VERSION)
    store_i32(metadata + _TRAITS, 0)
    return True


# Buffers. Arguments and results are addresses in an array of pointers.

_ARGUMENTS, _ARGUMENT_COUNT = _frame("args.args"), _frame("args.size")
_RESULTS, _RESULT_COUNT = _frame("rets.rets"), _frame("rets.size")
_DTYPE, _DATA, _RANK, _DIMS = map(_buffer, ("dtype", "data", "rank", "dims"))


@native
def argument_count(frame):
    """Returns how many arguments a call has."""
    return load_i64(frame + _ARGUMENT_COUNT)


@native
def result_count(frame):
    """Returns how many results a call has."""
    return load_i64(frame + _RESULT_COUNT)


@native
def has_buffers(frame, arguments, results):
    """Returns whether a call has so many arguments and results."""
    return argument_count(frame) == arguments and result_count(frame) == results


@native
def argument_buffer(frame, index):
    """Returns the address of an argument's buffer."""
    return word(load_i64(frame + _ARGUMENTS), index)


@native
def result_buffer(frame, index):
    """Returns the address of a result's buffer."""
    return word(load_i64(frame + _RESULTS), index)


@native
def data(buffer):
    """Returns the address of a buffer's first entry."""
    return load_i64(buffer + _DATA)


@native
def dtype(buffer):
    """Returns what a buffer's entries are: `F32`, `F16`, `S8` and so on, or another number."""
    return load_i32(buffer + _DTYPE)


@native
def rank(buffer):
    """Returns how many axes a buffer has."""
    return load_i64(buffer + _RANK)


@native
def dim(buffer, axis):
    """Returns the size of an axis."""
    return word(load_i64(buffer + _DIMS), axis)


# XLA's functions take one struct of arguments, which begins with its own size, and return an error
# or 0.

_CTX = _frame("ctx")


def _arguments(struct: str, *members: str) -> tuple[int, ...]:
    """The size of a struct of arguments, and where its members are."""
    return header().size(struct), *(header().offset(struct, member) for member in members)


_CREATE, _DESTROY = _api("XLA_FFI_Error_Create"), _api("XLA_FFI_Error_Destroy")
_SCHEDULE, _NUM_THREADS = (
    _api("XLA_FFI_ThreadPool_Schedule"),
    _api("XLA_FFI_ThreadPool_NumThreads"),
)
_CREATE_SIZE, _MESSAGE, _CODE = _arguments("XLA_FFI_Error_Create_Args", "message", "errc")
_DESTROY_SIZE, _ERROR = _arguments("XLA_FFI_Error_Destroy_Args", "error")
_SCHEDULE_SIZE, _SCHEDULE_CTX, _TASK, _TASK_DATA = _arguments(
    "XLA_FFI_ThreadPool_Schedule_Args", "ctx", "task", "data"
)
_COUNT_SIZE, _COUNT_CTX, _COUNT = _arguments(
    "XLA_FFI_ThreadPool_NumThreads_Args", "ctx", "num_threads"
)


@native
def _begin(arguments, size):
    """Writes what every struct of arguments begins with: its size, and no extension."""
    store_i64(arguments, size)
    store_i64(arguments + 8, 0)


@native
def _ask(frame, function, arguments):
    """Calls a function of XLA's, and returns whether there was no error."""
    api = load_i64(frame + _API)
    error = call(load_i64(api + function), (arguments,))
    if error == 0:
        return True
    destroyed = stack(_DESTROY_SIZE)
    _begin(destroyed, _DESTROY_SIZE)
    store_i64(destroyed + _ERROR, error)
    call(load_i64(api + _DESTROY), (destroyed,))  # it is ours
    return False


@native
def create_error(frame, code, message):
    """Returns an error for XLA to raise, of a constant message."""
    arguments = stack(_CREATE_SIZE)
    _begin(arguments, _CREATE_SIZE)
    store_i64(arguments + _MESSAGE, _c_string(message))
    store_i32(arguments + _CODE, code)
    return call(load_i64(load_i64(frame + _API) + _CREATE), (arguments,))


@native
def pool_threads(frame):
    """Returns how many threads XLA computes with; 0 where there is no pool of them."""
    arguments, count = stack(_COUNT_SIZE), stack(8)
    _begin(arguments, _COUNT_SIZE)
    store_i64(arguments + _COUNT_CTX, load_i64(frame + _CTX))
    store_i64(arguments + _COUNT, count)
    return load_i64(count) if _ask(frame, _NUM_THREADS, arguments) else 0


@native
def schedule(frame, task, argument):
    """Has a thread of XLA's call a C function by and by, and returns whether it will."""
    arguments = stack(_SCHEDULE_SIZE)
    _begin(arguments, _SCHEDULE_SIZE)
    store_i64(arguments + _SCHEDULE_CTX, load_i64(frame + _CTX))
    store_i64(arguments + _TASK, task)
    store_i64(arguments + _TASK_DATA, argument)
    return _ask(frame, _SCHEDULE, arguments)
