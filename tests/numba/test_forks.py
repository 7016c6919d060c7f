"""Forks: a child has one thread of its parent, so locks of other threads stay locked."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")

#: A parent with threads of XLA that has compiled `double`. `fork` waits for its child.
PARENT = """
    import faulthandler, os, sys, threading, time, warnings
    import jax, jax.numpy as jnp, numpy as np
    import veneer as vn

    warnings.filterwarnings("ignore", message=".*fork")
    jax.jit(lambda x: x @ x)(np.ones((300, 300), np.float32)).block_until_ready()
    ones = np.ones(3, np.float32)
    double = vn.numba.compile(lambda x: x * 2, ones)

    def compiled(number):
        return vn.numba.compile(lambda x: jnp.sin(x) + number, ones)

    def fork(child):
        pid = os.fork()
        if not pid:
            faulthandler.dump_traceback_later(40, exit=True)
            try:
                child()
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
"""

CALLS = """
    fork(lambda: np.testing.assert_array_equal(double(ones), [2, 2, 2]))
    fork(lambda: np.testing.assert_array_equal(double(np.ones(3)), [2, 2, 2]))
"""

COMPILES = """
    def child():
        for number in (1, 2):  # the second is compiled, the first is in the cache
            np.testing.assert_allclose(compiled(number)(ones), np.sin(ones) + number, 1e-6)

    compiled(1)
    fork(child)
"""

MEANWHILE = """
    done = threading.Event()

    def work():
        number = 1000
        while not done.is_set():
            compiled(number := number + 1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for n in range(4):
        time.sleep(0.1 * n)
        fork(lambda: compiled(n)(ones))
    done.set()
    thread.join()
"""


@pytest.mark.parametrize(
    "program", [CALLS, COMPILES, MEANWHILE], ids=["calls", "compiles", "while another compiles"]
)
def test_a_forked_child_does_not_hang(program, tmp_path):
    environment = {**os.environ, "VENEER_CACHE": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT) + textwrap.dedent(program)],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
