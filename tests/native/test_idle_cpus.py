"""Threads go to a CPU that has nothing to do, and may be where they might be before."""

import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import veneer as vn
from veneer.native import machine_code
from veneer.native.functions import native
from veneer.native.idle_cpus import CPU_SET, come_back, leave
from veneer.native.object_file import ObjectFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is told")


@pytest.fixture(scope="module")
def functions():
    file = ObjectFile()
    names = "test_leave", "test_come_back"
    file.export(names[0], native(lambda cpu, cpus: int(leave(cpu, cpus))))
    file.export(names[1], native(lambda cpus: come_back(cpus)))
    left, back = machine_code.load(file.code(), *names)
    integer = ctypes.c_int64
    return ctypes.CFUNCTYPE(integer, integer, integer)(left), ctypes.CFUNCTYPE(integer, integer)(
        back
    )


def in_a_thread(function):
    """What a function returns in a thread of its own, which may be bound to CPUs."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other CPU")
def test_a_thread_leaves_a_cpu_and_may_come_back(functions):
    leave, come_back = functions

    def leaving():
        before, cpus = os.sched_getaffinity(0), ctypes.create_string_buffer(CPU_SET)
        moved = []
        for cpu in before:  # it is on one of them
            there = leave(cpu, ctypes.addressof(cpus))
            if there:
                moved.append(before - os.sched_getaffinity(0) == {cpu})
                come_back(ctypes.addressof(cpus))
        return moved, os.sched_getaffinity(0) == before

    moved, is_as_before = in_a_thread(leaving)
    assert moved
    assert all(moved)
    assert is_as_before


def test_a_thread_that_may_be_nowhere_else_stays(functions):
    leave, _ = functions

    def bound():
        (cpu, *_) = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
        cpus = ctypes.create_string_buffer(CPU_SET)
        return leave(cpu, ctypes.addressof(cpus)), os.sched_getaffinity(0) == {cpu}

    assert in_a_thread(bound) == (0, True)


def test_products_leave_all_threads_where_they_may_be():
    x, w = jnp.ones((1, 1024)), vn.quant.quantize(jnp.eye(1024), "int8", channelwise_axes=[1])
    product = jax.jit(vn.implicit(jnp.matmul))
    for _ in range(200):
        product(x, w).block_until_ready()
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    bound = lambda: {frozenset(os.sched_getaffinity(thread)) for thread in threads}
    give_up = time.monotonic() + 10  # who helped comes back once all is done
    while len(bound()) > 1 and time.monotonic() < give_up:
        time.sleep(0.01)
    assert bound() == {frozenset(os.sched_getaffinity(0))}
