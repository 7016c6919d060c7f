"""Serve a call from XLA in Numba functions: its buffers, its errors, and work on XLA's threads.

XLA calls an FFI handler as `XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame)`. The frame has the
buffers of the arguments and results, and a table of functions of XLA. The offsets of the members
come from the header that JAX ships (`ffi_header.py`).

A handler divides its work into the parts of a job, and `run` computes them on the calling thread
and on threads of XLA's own pool. A job is an array of 64-bit words that all threads read. Its
creator defines their meaning.
"""

import functools
import sys
from typing import Any

from numba import types
from numba.core.typing import signature

from .ffi_header import MAJOR_VERSION, header
from .functions import c_function, call, native
from .memory import (
    I64,
    fetch_add,
    free,
    intrinsic,
    load_i32,
    load_i64,
    load_shared,
    malloc,
    pause,
    replace_shared,
    set_word,
    shared,
    stack,
    store_i32,
    store_i64,
    word,
)

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
    """Write the handler's metadata if the call with this call frame only asks for it.

    Return whether it does.
    """
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
    """Return the number of arguments of a call from XLA, given the address of its call frame."""
    return load_i64(frame + _ARGUMENT_COUNT)


@native
def result_count(frame):
    """Return the number of results of a call from XLA, given the address of its call frame."""
    return load_i64(frame + _RESULT_COUNT)


@native
def has_buffers(frame, arguments, results):
    """Return whether a call from XLA has these numbers of arguments and results.

    `frame` is the address of its call frame.
    """
    return argument_count(frame) == arguments and result_count(frame) == results


@native
def argument_buffer(frame, index):
    """Return the address of the XLA_FFI_Buffer of argument `index` of a call.

    `frame` is the address of the call frame.
    """
    return word(load_i64(frame + _ARGUMENTS), index)


@native
def result_buffer(frame, index):
    """Return the address of the XLA_FFI_Buffer of result `index` of a call.

    `frame` is the address of the call frame.
    """
    return word(load_i64(frame + _RESULTS), index)


@native
def data(buffer):
    """Return the address of the first entry of the array in an XLA_FFI_Buffer."""
    return load_i64(buffer + _DATA)


@native
def dtype(buffer):
    """Return XLA's number of the dtype of a buffer: `F32`, `F16`, `S8` and so on of this module.

    For other dtypes, it is another number.
    """
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
    """Write the first members of the struct of arguments of a function of XLA.

    They are the size of the struct, and no extension. `arguments` is the address of the struct.
    """
    store_i64(arguments, size)
    store_i64(arguments + 8, 0)


@native
def _call_xla(frame, function, arguments):
    """Call a function of XLA. Return whether it succeeded. Errors are destroyed.

    `frame` is the address of a call frame, `function` the offset of the function in XLA's table of
    functions, and `arguments` the address of its struct of arguments.
    """
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
    """Create an XLA_FFI_Error, which a handler returns to XLA, and return its address.

    `code` is an error code such as INVALID_ARGUMENT, and `message` is a constant string.
    """
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
    """Let a thread of XLA's pool call a C function. Return whether XLA accepted the call.

    `task` is the address of the function, and `argument` is its argument.
    """
    arguments = stack(_SCHEDULE_SIZE)
    _begin(arguments, _SCHEDULE_SIZE)
    store_i64(arguments + _SCHEDULE_CTX, load_i64(frame + _CTX))
    store_i64(arguments + _TASK, task)
    store_i64(arguments + _TASK_DATA, argument)
    return _call_xla(frame, _SCHEDULE, arguments)


# Jobs. All threads take the next part from one counter until none is left. So the result does not
# depend on which threads help, or on whether any do: the caller runs every part that nobody takes,
# and waits only for parts that another thread has begun. A pool that is small, busy or gone (as
# after `fork`) cannot block it. A thread that comes too late finds no part left. The last thread
# frees the memory.
#
# The first parts of a job may compute what all others read. Parts are taken in order, so a thread
# that takes one of the others waits only for parts that are begun.

# The words in front of the job in its memory. _DONE has a cache line that no other word shares, so
# that a thread that polls it does not slow down threads that take parts.
_NEXT, _WORK, _PARTS, _FIRST, _REFERENCES, _DONE, _JOB = 0, 1, 2, 3, 4, 16, 24

#: Threads that wait for a job have a slot each, a cache line. A slot holds one of these two values,
#: or the address of a job for the thread that waits there.
_SLOTS_SIZE, _SLOT_SIZE = 1024, 64
_EMPTY, _WAITING = 0, 1
#: Nanoseconds that a thread waits in its slot. Windows has no `clock_gettime`, so nobody waits.
_WAIT = 0 if sys.platform == "win32" else 50_000

_CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1
_read_clock: Any = types.ExternalFunction(
    "clock_gettime", signature(types.int32, types.int32, types.int64)
)
_sched_yield: Any = types.ExternalFunction("sched_yield", signature(types.int32))


@native
def new_job(words):
    """Allocate a job: an array of `words` 64-bit words, initially 0, that threads read.

    Return its address, or 0 if there is too little memory.
    """
    memory = malloc(8 * (_JOB + words))
    if memory == 0:
        return 0
    for i in range(_JOB + words):
        set_word(memory, i, 0)
    set_word(memory, _REFERENCES, 1)
    return memory + 8 * _JOB


@native
def release(job):
    """Drop one reference to a job, and free the job with the last one."""
    memory = job - 8 * _JOB
    if fetch_add(memory + 8 * _REFERENCES, -1) == 1:
        free(memory)


@native
def run(frame, job, work, count, first, threads):
    """Call the C function `work(job, part)` for `count` parts on at most `threads` threads.

    All parts are done when this returns. The first `first` parts are done before others begin.
    """
    memory = job - 8 * _JOB  # the words in front of the job
    set_word(memory, _WORK, work)
    set_word(memory, _PARTS, count)
    set_word(memory, _FIRST, first)
    for _ in range(min(threads, count) - 1):
        fetch_add(memory + 8 * _REFERENCES, 1)  # for one helper, which releases it in `_help`
        if _give_to_waiting_thread(memory):
            continue
        if not schedule(frame, c_function(_help, "veneer_help"), memory):
            # XLA's pool takes no helper. This thread does the remaining parts.
            fetch_add(memory + 8 * _REFERENCES, -1)
            break
    _do_parts(memory)
    _wait_until_done(memory, count)


@native
def _help(memory):
    """Run parts of a job, and then of each job that is given to this thread within `_WAIT`.

    `memory` is the address of the words in front of the job. XLA's pool calls this.
    """
    while memory != 0:
        _do_parts(memory)
        release(memory + 8 * _JOB)
        memory = _wait_for_job()
    return 0


@native
def _do_parts(memory):
    """Take and run parts of a job until none is left.

    `memory` is the address of the words in front of the job.
    """
    count, first = word(memory, _PARTS), word(memory, _FIRST)
    part = fetch_add(memory + 8 * _NEXT, 1)
    while part < count:
        if part >= first > 0:
            _wait_until_done(memory, first)
        call(word(memory, _WORK), (memory + 8 * _JOB, part))
        fetch_add(memory + 8 * _DONE, 1)
        part = fetch_add(memory + 8 * _NEXT, 1)


@native
def _wait_until_done(memory, count):
    polls = 0
    while load_shared(memory + 8 * _DONE) < count:
        pause()
        polls += 1
        if polls > 100:  # a part takes long, or its thread is not running
            _yield_cpu()


# A thread that has helped waits a while for the next job, because to wake a thread takes as long as
# a small product.


@native
def _slots():
    return shared("threads", _SLOTS_SIZE)


@native
def _wait_for_job():
    """Wait for a job to help with. Return the address of the words in front of it.

    Return 0 after `_WAIT` nanoseconds, or if all slots of waiting threads are taken.
    """
    slot, end = _slots(), _slots() + _SLOTS_SIZE
    while slot < end and not replace_shared(slot, _EMPTY, _WAITING):
        slot += _SLOT_SIZE
    if slot == end:
        return 0
    limit, polls = _monotonic_ns() + _WAIT, 0
    while load_shared(slot) == _WAITING:
        pause()
        polls += 1
        if polls % 256 == 0:
            _yield_cpu()
            if _monotonic_ns() >= limit and replace_shared(slot, _WAITING, _EMPTY):
                return 0
    memory = load_shared(slot)
    replace_shared(slot, memory, _EMPTY)
    return memory


@native
def _give_to_waiting_thread(memory):
    """Give a job to a thread that waits in a slot. Return whether there was such a thread.

    `memory` is the address of the words in front of the job.
    """
    for i in range(0, _SLOTS_SIZE, _SLOT_SIZE):
        slot = _slots() + i
        if load_shared(slot) == _WAITING and replace_shared(slot, _WAITING, memory):
            return True
    return False


if sys.platform == "win32":

    @native
    def _yield_cpu():
        pass

    @native
    def _monotonic_ns():
        return 0

else:

    @native
    def _yield_cpu():
        _sched_yield()

    @native
    def _monotonic_ns():
        """Return `CLOCK_MONOTONIC`, the same for all threads, in nanoseconds."""
        time = stack(16)
        _read_clock(_CLOCK_MONOTONIC, time)
        return load_i64(time) * 1_000_000_000 + load_i64(time + 8)
