"""Calls of compiled functions: threads, the conversion of arguments, and memory."""

import sys
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.numba import compiler
from veneer.numba.codegen.graph import trace

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def steps(x):
    """Return a JAX function with a loop of `n` steps that carries work memory."""
    carry, rows = jax.lax.scan(lambda c, _: (jnp.sin(c[::-1] + x), c), x, length=2000)
    return carry, rows[-1]


@pytest.fixture(scope="module")
def long():
    return vn.numba.compile(steps, X[0])


def is_long(f, *args):
    return compiler.source_of(trace(f, args)[0]).is_long


def test_long_calls_are_distinguished_from_short_calls():
    large, small = (jax.ShapeDtypeStruct((n, n), np.float32) for n in (512, 8))
    assert is_long(lambda x: x + 1, large)
    assert is_long(steps, X[0])
    assert not is_long(lambda x: jnp.tanh(x @ x), small)
    assert not is_long(lambda x: jax.lax.scan(lambda c, r: (c + r, None), x[0], x), small)


def test_threads_can_call_one_function_at_once(long):
    inputs = [X[0] + n for n in range(4)]
    expected = [long(x) for x in inputs]
    wrong = []

    def work(n):
        for _ in range(50):
            for found, wanted in zip(long(inputs[n]), expected[n], strict=True):
                if not np.array_equal(found, wanted):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.fixture
def threads_that_keep_the_lock():
    """Keep Python from switching threads, unless a thread releases the GIL itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def test_other_threads_run_during_a_long_call(long, threads_that_keep_the_lock):
    go, ran = threading.Event(), []

    def run():
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    go.set()
    for _ in range(20_000):  # a few suffice once the system wakes the thread
        if ran:
            break
        long(X[0])
    assert ran
    thread.join()


def test_arguments_are_converted_or_rejected():
    double = vn.numba.compile(lambda n: n * 2, np.int32(1))
    assert (double(3), double(True)) == (6, 2)
    for other in (1.5, 1j, np.float32(1), np.ones(1, np.int32)):
        with pytest.raises(TypeError, match="Argument 0 is"):
            double(other)
    for wide in (2**31, -(2**31) - 1, 2**70):
        with pytest.raises(OverflowError, match=f"Argument 0 is {wide}, .* int32"):
            double(wide)
    added = vn.numba.compile(lambda x: x + 1, np.ones((2, 3), np.float32))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for same in (x, x.astype(">f4"), np.asfortranarray(x)):
        np.testing.assert_array_equal(added(same), x + 1)
    with pytest.raises(TypeError, match=r"Argument 0 is a masked array.*x\.filled"):
        added(np.ma.array(x, mask=x > 2))


PAIRS = {"i4": "i8", "u4": "u8", "f4": "f8", "c8": "c16"}


@pytest.mark.parametrize(("narrow", "wide"), PAIRS.items(), ids=PAIRS)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 5000)], ids=str)
def test_64_bit_arguments_are_converted_as_under_jit(narrow, wide, shape):
    f = vn.numba.compile(lambda x: x, jax.ShapeDtypeStruct(shape, narrow))
    low = 0 if narrow == "u4" else -(2**31)
    x = np.asarray(np.random.default_rng(0).integers(low, 2**31, size=shape)).astype(wide)
    expected = jax.jit(lambda x: x)(x)
    assert expected.dtype == narrow
    for same in (x, x[()], x.astype(x.dtype.newbyteorder(">")), x.copy("F")):
        np.testing.assert_array_equal(f(same), expected)
        assert f(same).dtype == narrow


@pytest.mark.parametrize("wide", [2**31, -(2**31) - 1, 2**40, -(2**63)])
def test_a_64_bit_integer_that_does_not_fit_raises(wide):
    f = vn.numba.compile(lambda x: x, np.zeros(3, np.int32))
    with pytest.raises(OverflowError, match=rf"Argument 0 is int64\[3\], .* cannot hold {wide}"):
        f(np.array([1, wide, 2]))
    scalar = vn.numba.compile(lambda x: x, np.uint32(0))
    with pytest.raises(OverflowError, match="cannot hold 4294967296"):
        scalar(np.uint64(2**32))


def test_a_call_with_64_bit_arguments_runs_no_python():
    """Native code converts the arguments, which takes far less time than Python."""
    f = vn.numba.compile(lambda n, x: n * x, np.zeros((2, 3), np.int32), np.float32(1))
    entered = []
    sys.setprofile(lambda frame, event, of: entered.append(event) if event == "call" else None)
    try:
        result = f(np.arange(6).reshape(2, 3), np.float64(0.5))
    finally:
        sys.setprofile(None)
    np.testing.assert_array_equal(result, np.arange(6).reshape(2, 3) * 0.5)
    assert entered == []


def test_a_program_traced_under_x64_rejects_64_bit_arguments():
    with jax.enable_x64(True):
        f = vn.numba.compile(lambda x: x, np.zeros(3, np.float32))
    for x64 in (True, False):
        with jax.enable_x64(x64), pytest.raises(TypeError, match="Argument 0 is float64"):
            f(np.zeros(3))


@pytest.mark.parametrize("kind", ["result", "work"])
def test_a_call_without_enough_memory_releases_its_results(kind):
    """The program needs more bytes than a process has addresses."""
    size, many = 2**16, 2**48

    def f(x):
        first, huge = jnp.full(size, x), jnp.full(many, x)
        return (first, huge) if kind == "result" else (first, lax.cumsum(huge)[many // 2])

    compiled = vn.numba.compile(f, np.float32(0))
    tracemalloc.start()
    try:
        with pytest.raises(MemoryError):
            compiled(1.0)
        assert not [trace for trace in tracemalloc.take_snapshot().traces if trace.size == 4 * size]
    finally:
        tracemalloc.stop()
