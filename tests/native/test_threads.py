"""After a job, a thread waits for a short time to be given the next job."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from veneer.native import machine_code, xla_calls
from veneer.native.functions import ObjectFile, native

JOB = 1 << 20  # an address that is never read


@pytest.fixture(scope="module")
def functions():
    file = ObjectFile()
    slots, wait, give = xla_calls._slots, xla_calls._wait_for_job, xla_calls._give_to_waiting_thread
    file.export("test_slots", native(lambda unused: slots()))
    file.export("test_wait", native(lambda unused: wait()))
    file.export("test_give", native(lambda memory: int(give(memory))))
    addresses = machine_code.load(file.code(), "test_slots", "test_wait", "test_give")
    one = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    return tuple(map(one, addresses))


@pytest.fixture
def slots(functions):
    """Yield a view of all slots, and empty them after the test."""
    words = (ctypes.c_int64 * (xla_calls._SLOTS_SIZE // 8)).from_address(functions[0](0))
    each = np.frombuffer(words, np.int64)[:: xla_calls._SLOT_SIZE // 8]
    assert not each.any()
    yield each
    each[:] = xla_calls._EMPTY


def test_a_thread_without_a_job_leaves_its_slot(functions, slots):
    _, wait, give = functions
    for _ in range(2 * len(slots)):
        assert wait(0) == 0
    assert not slots.any()
    assert not give(JOB)


def test_each_job_goes_to_one_waiting_thread(functions, slots):
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
    assert not slots.any()


def test_no_thread_waits_if_all_slots_are_taken(functions, slots):
    _, wait, give = functions
    slots[:] = JOB  # other threads have jobs that they have not started
    assert wait(0) == 0
    assert not give(JOB + 8)
    assert (slots == JOB).all()
    slots[-1] = xla_calls._WAITING
    assert give(JOB + 8)
    assert slots[-1] == JOB + 8
