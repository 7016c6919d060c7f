"""Which CPU a thread runs on, where Linux leaves one idle.

Linux wakes a thread on the CPU of the one that asks for it, or on that where it ran last, if it
finds no other idle. On a virtual machine it may not: a CPU that halts looks like one that its host
took away. Then two threads take turns on one CPU for milliseconds, beside one that has nothing to
do, until the scheduler looks again. So one of them has to go, for as long as there is work.
"""

import sys
from typing import Any

from numba import types
from numba.core.typing import signature

from .functions import native
from .memory import load_i8, load_i64, stack, store_i8, store_i64

#: Bytes of a set of CPUs, a bit each, as in the C library.
CPU_SET = 128

_IS_LINUX = sys.platform == "linux"
_MONOTONIC = 1


def _of_c(name: str, *arguments: Any) -> Any:
    return types.ExternalFunction(name, signature(types.int32, *arguments))


_cpu = _of_c("sched_getcpu")
_read_cpus, _set_cpus = (
    _of_c(name, types.int32, types.int64, types.int64)
    for name in ("sched_getaffinity", "sched_setaffinity")
)
_read_clock = _of_c("clock_gettime", types.int32, types.int64)


@native
def this_cpu():
    """The number of the CPU that this thread runs on."""
    return _cpu() if _IS_LINUX else 0


@native
def nanoseconds():
    """How long ago some moment was, the same for all threads."""
    time = stack(16)
    store_i64(time, 0)
    store_i64(time + 8, 0)
    if _IS_LINUX:
        _read_clock(_MONOTONIC, time)
    return load_i64(time) * 1_000_000_000 + load_i64(time + 8)


@native
def leave(cpu, cpus):
    """Moves this thread to another CPU, if it is on this one and may be elsewhere.

    Returns whether it has moved. Then `cpus`, of CPU_SET bytes, has where it might be before, for
    `come_back`.
    """
    if not _IS_LINUX or _cpu() != cpu or _read_cpus(0, CPU_SET, cpus) != 0:
        return False
    others = stack(CPU_SET)
    for i in range(0, CPU_SET, 8):
        store_i64(others + i, load_i64(cpus + i))
    store_i8(others + cpu // 8, load_i8(others + cpu // 8) & ~(1 << cpu % 8))
    return _set_cpus(0, CPU_SET, others) == 0  # which fails if there is no other


@native
def come_back(cpus):
    """Lets this thread be where it might be before it left."""
    if _IS_LINUX:
        _set_cpus(0, CPU_SET, cpus)
