"""Limit the memory of each worker, and the number of workers."""

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

import jax

#: Bytes of memory that a run plans for each worker.
PER_WORKER = 1_500_000_000
#: A worker releases its compiled programs when its resident memory exceeds this, in bytes.
LIMIT = 600_000_000
#: Bytes that a worker may add before it releases its programs again.
STEP = 80_000_000


def resident_bytes():
    """Return the resident bytes of this process, or 0 if the system does not report them."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def peak_bytes():
    """Return the largest resident size of this process so far, or 0 if it is not known."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return 0


def available_bytes():
    """Return the bytes that new processes may use, or None if the system does not report them."""
    limits = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(available.split()[1]) * 1024)
    container = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # memory.max is "max" without a limit
        limit = int((container / "memory.max").read_text())
        limits.append(limit - int((container / "memory.current").read_text()))
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def number_of_cpus():
    """Return how many CPUs this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def number_of_workers():
    """Return how many workers a run starts: one per CPU, as far as the memory allows."""
    available = available_bytes()
    n_fitting = number_of_cpus() if available is None else available // PER_WORKER
    return max(1, min(number_of_cpus(), n_fitting))


class ProgramReleaser:
    """A check that frees the compiled programs of JAX when this process has grown too large."""

    def __init__(self):
        self.limit = LIMIT

    def check(self):
        if resident_bytes() > self.limit:
            release_programs()
            self.limit = max(LIMIT, resident_bytes() + STEP)


def release_programs():
    """Free the programs that JAX compiled, and return their memory to the system."""
    jax.clear_caches()
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
