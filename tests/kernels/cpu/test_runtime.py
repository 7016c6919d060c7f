"""The handler of kernels reads operands, runs parts on threads, and reports errors to XLA."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.cpu import plain_kernel as plain

#: Enough multiplications to run on several threads.
LARGE = {"m": 8, "r": 512, "c": 256}
SMALL = {"m": 1, "tr": 64, "tc": 100}
PARTS = {"batch": 3, "c": 33, "tc": 1}


@pytest.mark.parametrize("sizes", [SMALL, PARTS, LARGE, LARGE | {"batch": 4}], ids=str)
def test_kernel_gets_the_operands_of_its_call(sizes):
    plain.check(**sizes)


@pytest.mark.parametrize("place", [0, 1, 2, 5, -1])  # outside: the first or the last
def test_kernel_reads_the_selected_place_of_a_stack(place):
    x, codes, scale = plain.operands(batch=6, c=33, tr=64, tc=1)
    at = slice(2 * min(max(place, 0), 2), None)
    part = lambda array: array[at][:2]
    want = plain.expected(x[:2], part(codes), part(scale))
    of_both = plain.product(x[:2], codes, scale, places=(place, place))
    np.testing.assert_allclose(of_both, want, rtol=1e-5, atol=1e-3)
    of_codes = plain.product(x[:2], codes, part(scale), places=(place, 0))
    np.testing.assert_allclose(of_codes, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("empty", ["batch", "m", "r", "c"])
def test_any_size_can_be_zero(empty):
    x, codes, scale = plain.operands(**{"batch": 1, "m": 2, "r": 4, "c": 4, empty: 0}, tr=1, tc=1)
    result = plain.product(x, codes, scale)
    np.testing.assert_array_equal(result, np.zeros((x.shape[0], x.shape[1], codes.shape[2])))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, codes, scale: (x[:, :, 1:], codes, scale),
        lambda x, codes, scale: (x[0], codes, scale),
        lambda x, codes, scale: (x.astype(np.int32), codes, scale),
        lambda x, codes, scale: (x, codes, np.zeros((1, 3, 25), np.float32)),
        lambda x, codes, scale: (x, codes, scale, np.zeros(4, np.float32)),
        lambda x, codes, scale: (x, codes, scale, None, ([0], 0)),
        lambda x, codes, scale: (x.repeat(2, 0), codes.repeat(3, 0), scale),
    ],
)
def test_operands_of_other_shapes_raise(change):
    operands = change(*plain.operands())
    if operands[0].ndim == 2:
        shape = jax.ShapeDtypeStruct((3, 100), jnp.float32)
        call = jax.ffi.ffi_call(plain.target(), shape)
        x, codes, scale = operands
        with pytest.raises(jax.errors.JaxRuntimeError, match="operands do not fit together"):
            call(x, codes, np.int32(0), scale, np.int32(0), jnp.zeros(16)).block_until_ready()
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="operands do not fit together"):
        plain.product(*operands).block_until_ready()


@pytest.mark.parametrize("when", [1, 2], ids=["before any part", "in a part"])
def test_a_failed_allocation_raises(when):
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory for the buffers of a kernel"):
        plain.product(*plain.operands(), jnp.zeros(16).at[-1].set(when)).block_until_ready()


def test_parts_wait_for_the_first_parts():
    x, codes, scale = plain.operands(**LARGE)
    table = jnp.zeros(16).at[-2].set(3000)
    want = plain.product(x, codes, scale)
    for _ in range(10):
        np.testing.assert_array_equal(plain.product(x, codes, scale, table), want)


def test_threads_can_call_a_kernel_at_the_same_time():
    x, codes, scale = plain.operands(**LARGE)
    want = plain.product(x, codes, scale)

    def call(_):
        return all(np.array_equal(plain.product(x, codes, scale), want) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(8)))


def test_a_program_can_call_a_kernel_many_times():
    x, codes, scale = plain.operands(**LARGE)
    shape = jax.ShapeDtypeStruct((1, 8, 256), jnp.float32)
    call, first = jax.ffi.ffi_call(plain.target(), shape), np.int32(0)

    @jax.jit
    def program(x):
        return sum(call(x + i, codes, first, scale, first, jnp.zeros(16)) for i in range(16))

    want = sum(plain.expected(x + np.float32(i), codes, scale) for i in range(16))
    np.testing.assert_allclose(program(x), want, rtol=1e-4, atol=1e-1)


def run(code: str, **environment: str) -> str:
    """Run code in a new Python process, and return its output."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "from kernels.cpu import plain_kernel as plain\n" + code,
    ]
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("flags", ["", "--xla_cpu_multi_thread_eigen=false"])
def test_kernels_run_on_a_single_cpu(flags):
    plain.target()  # Compile it, so that the other process loads it.
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    run(f"{pin}plain.check(batch=4, m=8, r=512, c=256)", XLA_FLAGS=flags)


def test_a_process_can_fork_after_using_kernels():
    plain.target()
    run(
        """
import os, threading, time, numpy as np
from veneer.native.cache import COMPILING
plain.check(m=8, r=512, c=256)
locked = threading.Event()
def hold():
    with COMPILING:
        locked.set(); time.sleep(0.5)
threading.Thread(target=hold, daemon=True).start()
locked.wait()
child = os.fork()
if child == 0:
    assert np.ones(3) @ np.ones(3) == 3
    plain.target.cache_clear(); plain.target()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
plain.check(m=8, r=512, c=256)
"""
    )
