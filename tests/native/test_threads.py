"""Threads that have helped wait a while for the next job."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from veneer.native import machine_code, threads
from veneer.native.functions import native
from veneer.native.object_file import ObjectFile

JOB = 1 << 20  # an address, of which nothing is read


@pytest.fixture(scope="module")
def functions():
    file = ObjectFile()
    places, wait, give = threads._slots, threads._wait_for_job, threads._give_to_waiting_thread
    file.export("test_places", native(lambda unused: places()))
    file.export("test_wait", native(lambda unused: wait()))
    file.export("test_give", native(lambda memory: int(give(memory))))
    addresses = machine_code.load(file.code(), "test_places", "test_wait", "test_give")
    one = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return tuple(map(one, addresses))


@pytest.fixture
def places(functions):
    """What is at each place, to read and to write; left empty."""
    words = (ctypes.c_int64 * (threads._SLOTS_SIZE // 8)).from_address(functions[0](0))
    each = np.frombuffer(words, np.int64)[:: threads._SLOT_SIZE // 8]
    assert not each.any()
    yield each
    each[:] = threads._EMPTY


def test_a_thread_that_nobody_calls_leaves_its_place(functions, places):
    _, wait, give = functions
    for _ in range(2 * len(places)):
        assert wait(0) == 0
    assert not places.any()
    assert not give(JOB)


def test_each_job_is_given_to_one_thread_that_waits(functions, places):
    _, wait, give = functions
    jobs = [JOB + 8 * i for i in range(200)]

    def wait_for_one():
        job = 0
        while job == 0:
            job = wait(0)
        return job

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(wait_for_one) for _ in jobs]
        for job in jobs:
            while not give(job):
                pass
        taken = [each.result() for each in waiting]
    assert sorted(taken) == jobs
    assert not places.any()


def test_where_all_places_are_taken_nobody_waits(functions, places):
    _, wait, give = functions
    places[:] = JOB  # others have been given jobs, and have not come to them yet
    assert wait(0) == 0
    assert not give(JOB + 8)
    assert (places == JOB).all()
    places[-1] = threads._WAITING
    assert give(JOB + 8)
    assert places[-1] == JOB + 8
