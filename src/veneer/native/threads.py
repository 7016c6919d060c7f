"""The parts of a job, taken by the thread that XLA calls and by threads of XLA's own pool.

A job is some words of 64 bits that all threads read. Whoever makes it knows what they say.

All threads take the next part from one counter until none is left, so it does not matter when a
thread comes, or whether it does: the caller alone finishes what nobody helps with, and waits only
for parts that another thread has begun. So nothing here can hang on a pool that is small, busy or
gone (as after `fork`). What comes too late finds no part left, in memory that whoever leaves last
frees.

A thread that comes to the CPU of the caller goes to another (`idle_cpus.py`); and if none comes,
the caller does, for the one that it called may wait for that CPU.

Of some jobs the first parts make what all others read. Parts are taken in order, so whoever takes
one of the others waits only for parts that are begun.
"""

import sys
from typing import Any

from numba import types
from numba.core.typing import signature

from .call_frame import schedule
from .functions import c_function, call, native
from .idle_cpus import CPU_SET, come_back, leave, nanoseconds, this_cpu
from .memory import (
    fetch_add,
    free,
    load_shared,
    malloc,
    pause,
    replace_shared,
    set_word,
    shared,
    stack,
    word,
)

# Words before the job in its memory. Two cache lines apart: who waits for the last part does not
# slow down who takes one. Of the threads that are called, _CALLED counts down those that leave.
_NEXT, _WORK, _COUNT, _FIRST, _REFERENCES, _CPU, _CALLED, _DONE, _JOB = 0, 1, 2, 3, 4, 5, 6, 16, 24

#: For so many nanoseconds the caller waits for another thread, while it takes parts.
_PATIENCE = 40_000

#: Bytes of all places where threads wait, and of each: a line of a cache. And for how many
#: nanoseconds they do.
_PLACES, _LINE, _WAIT = 1024, 64, 50_000
#: What is at a place, where it is no job.
_NOBODY, _WAITING = 0, 1

_sched_yield: Any = types.ExternalFunction("sched_yield", signature(types.int32))


@native
def new_job(words):
    """Returns the address of a new job of so many words, all 0, or 0 where there is no memory."""
    memory = malloc(8 * (_JOB + words))
    if memory == 0:
        return 0
    for i in range(_JOB + words):
        set_word(memory, i, 0)
    set_word(memory, _REFERENCES, 1)
    return memory + 8 * _JOB


@native
def release(job):
    """Gives up a job, which is freed when all who have it have given it up."""
    memory = job - 8 * _JOB
    if fetch_add(memory + 8 * _REFERENCES, -1) == 1:
        free(memory)


if sys.platform == "win32":

    @native
    def _let_others_run():
        pass

else:

    @native
    def _let_others_run():
        _sched_yield()


@native
def _wait(memory, count):
    """Waits until so many parts are done, which other threads have begun."""
    looks = 0
    while load_shared(memory + 8 * _DONE) < count:
        pause()
        looks += 1
        if looks > 100:  # a part takes long, or its thread is not running
            _let_others_run()


@native
def _next_part(memory):
    """A part that nobody has taken, or one that is not there; after the first ones, if it must."""
    part, first = fetch_add(memory + 8 * _NEXT, 1), word(memory, _FIRST)
    if part < word(memory, _COUNT) and part >= first > 0:
        _wait(memory, first)
    return part


@native
def _do(memory, part):
    call(word(memory, _WORK), (memory + 8 * _JOB, part))
    fetch_add(memory + 8 * _DONE, 1)


@native
def _help(memory):
    """What a thread of the pool does, until there is nothing to do for a while."""
    while memory != 0:
        _help_with(memory)
        memory = _wait_for_job()
    return 0


@native
def _help_with(memory):
    cpus, has_left, count = stack(CPU_SET), False, word(memory, _COUNT)
    may_leave = fetch_add(memory + 8 * _CALLED, -1) > 0
    if may_leave and fetch_add(memory + 8 * _NEXT, 0) < count:
        has_left = leave(word(memory, _CPU), cpus)
    part = _next_part(memory)
    while part < count:
        _do(memory, part)
        part = _next_part(memory)
    if has_left:
        come_back(cpus)
    release(memory + 8 * _JOB)


# Threads that have helped wait a while for the next job, each at a place of its own: to wake one
# takes as long as a small product.


@native
def _places():
    return shared("threads", _PLACES)


@native
def _wait_for_job():
    """The next job to help with; or 0, if there is none for a while or no place to wait at."""
    place, last = _places(), _places() + _PLACES
    while place < last and not replace_shared(place, _NOBODY, _WAITING):
        place += _LINE
    if place == last:
        return 0
    limit, looks = nanoseconds() + _WAIT, 0
    while load_shared(place) == _WAITING:
        pause()
        looks += 1
        if looks % 256 == 0:
            _let_others_run()
            if nanoseconds() > limit and replace_shared(place, _WAITING, _NOBODY):
                return 0
    memory = load_shared(place)
    replace_shared(place, memory, _NOBODY)
    return memory


@native
def _call_waiting(memory):
    """Gives a job to a thread that waits for one, if there is one."""
    place = _places()
    for i in range(0, _PLACES, _LINE):
        at = place + i
        if load_shared(at) == _WAITING and replace_shared(at, _WAITING, memory):
            return True
    return False


@native
def run(frame, job, work, count, first, threads):
    """Calls the C function `work(job, part)` for so many parts, which all are done then.

    The first parts are done before the others begin; and so many threads are enough for all.
    """
    memory, called = job - 8 * _JOB, min(threads, count) - 1
    set_word(memory, _WORK, work)
    set_word(memory, _COUNT, count)
    set_word(memory, _FIRST, first)
    set_word(memory, _CPU, this_cpu())
    set_word(memory, _CALLED, called)
    for _ in range(called):
        fetch_add(memory + 8 * _REFERENCES, 1)
        if _call_waiting(memory):
            continue
        if not schedule(frame, c_function(_help, "veneer_help"), memory):
            fetch_add(memory + 8 * _REFERENCES, -1)
            break
    cpus, has_left, begun = stack(CPU_SET), False, nanoseconds()
    is_alone = called > 0
    part = _next_part(memory)
    while part < count:
        _do(memory, part)
        is_alone = is_alone and fetch_add(memory + 8 * _CALLED, 0) == called
        if is_alone and nanoseconds() - begun > _PATIENCE:
            is_alone = False
            fetch_add(memory + 8 * _CALLED, -1)
            has_left = leave(word(memory, _CPU), cpus)
        part = _next_part(memory)
    if has_left:
        come_back(cpus)
    _wait(memory, count)
