"""Run the parts of a job on the thread that XLA calls and on threads of XLA's own pool.

A job is an array of 64-bit words that all threads read. Its creator defines their meaning.

All threads take the next part from one counter until none is left. So the result does not depend
on which threads help, or on whether any do: the caller runs every part that nobody takes, and waits
only for parts that another thread has begun. A pool that is small, busy or gone (as after `fork`)
cannot block it. A thread that comes too late finds no part left. The last thread frees the memory.

The first parts of a job may compute what all others read. Parts are taken in order, so a thread
that takes one of the others waits only for parts that are begun.
"""

import sys
from typing import Any

from numba import types
from numba.core.typing import signature

from .call_frame import schedule
from .functions import c_function, call, native
from .memory import (
    fetch_add,
    free,
    load_i64,
    load_shared,
    malloc,
    pause,
    replace_shared,
    set_word,
    shared,
    stack,
    word,
)

# The words in front of the job in its memory. _DONE has a cache line that no other word shares, so
# that a thread that polls it does not slow down threads that take parts.
_NEXT, _WORK, _COUNT, _FIRST, _REFERENCES, _DONE, _JOB = 0, 1, 2, 3, 4, 16, 24

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
    """Return the address of a new job of `words` zeros, or 0 if there is too little memory."""
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
    set_word(memory, _COUNT, count)
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
    """Take and run parts of the job in `memory` until none is left."""
    count, first = word(memory, _COUNT), word(memory, _FIRST)
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
    """Return the next job to help with, or 0 after `_WAIT` or if all slots are taken."""
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
    """Give a job to a thread that waits in a slot. Return whether there was one."""
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
