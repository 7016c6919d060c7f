"""Threads that have helped wait a while for the next job."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from veneer.native import machine_code, threads
from veneer.native.functions import native
from veneer.native.object_file import ObjectFile

PLACES = threads._PLACES // threads._LINE
JOB = 1 << 20  # an address, of which nothing is read


@pytest.fixture(scope="module")
def functions():
    file = ObjectFile()
    wait, give = threads._wait_for_job, threads._call_waiting
    file.export("test_wait", native(lambda unused: wait()))
    file.export("test_give", native(lambda memory: int(give(memory))))
    addresses = machine_code.load(file.code(), "test_wait", "test_give")
    one = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return tuple(map(one, addresses))


def test_a_thread_that_nobody_calls_stops_to_wait(functions):
    wait, give = functions
    begin = time.perf_counter()
    for _ in range(2 * PLACES):  # each leaves its place
        assert wait(0) == 0
    assert time.perf_counter() - begin < 1
    assert not give(JOB)


def test_each_job_is_given_to_one_thread_that_waits(functions):
    wait, give = functions
    jobs = [JOB + 8 * i for i in range(200)]

    def wait_long():
        limit = time.perf_counter() + 20
        while time.perf_counter() < limit:
            if (job := wait(0)) != 0:
                return job
        return None

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(wait_long) for _ in jobs]
        for job in jobs:
            while not give(job):
                pass
        taken = [each.result() for each in waiting]
    assert sorted(taken) == jobs


def test_there_is_no_place_for_more_threads(functions):
    wait, give = functions
    with ThreadPoolExecutor(4 * PLACES) as pool:
        found = [pool.submit(wait, 0) for _ in range(20 * PLACES)]
        assert not any(each.result() for each in found)
    assert not give(JOB)
