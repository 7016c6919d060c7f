"""A forked child process never hangs, as long as it calls no XLA.

XLA can hang in forked processes, also in programs that do not import Veneer.
"""

import os
import subprocess
import sys

import pytest
from support.optional import needs

# Another thread holds each lock of Veneer while the process forks. A lock that the child does not
# replace stays locked there. The alarm ends a child that hangs.
CHILD = """
import importlib, os, pkgutil, signal, sys, threading, traceback
import jax, jax.numpy as jnp, numpy as np
import veneer as vn

for module in pkgutil.walk_packages(vn.__path__, "veneer."):
    if "pytensor" not in module.name and "__main__" not in module.name:
        importlib.import_module(module.name)

LOCKS = (type(threading.Lock()), type(threading.RLock()))

def locks():
    for name, module in sorted(sys.modules.items()):
        if name.startswith("veneer"):
            for key, value in vars(module).items():
                if isinstance(value, LOCKS):
                    yield f"{name}.{key}", value

from veneer.files.folder import TensorFolder
from veneer.kernels.cpu import build
from veneer.native.cache import COMPILING

folder = sys.argv[1]
w = vn.quant.quantize(jnp.ones((4, 8)), "int4")
vn.save(folder + "/w", {"w": np.ones(3), "q": w})
assert jax.jit(lambda x: x + 1)(1) == 2  # XLA has its threads

held = threading.Event()

def hold():
    for _, lock in locks():
        if lock is not COMPILING:  # a fork waits until this lock is free
            lock.acquire()
    held.set()
    threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    try:
        signal.alarm(60)
        for name, lock in locks():
            assert lock.acquire(blocking=False), name
            lock.release()
        vn.hijax.install()
        with vn.hijax.enabled():
            assert vn.hijax.is_enabled()
        vn.hijax.uninstall()
        build.CACHE.cached("nothing", lambda: b"code")
        build.unavailable_reason()
        assert vn.quant.get_format("nf4").bits == 4
        assert repr(w) and w.shape == (4, 8)
        with TensorFolder(folder + "/w", verify=True) as source:
            assert source.read("w").sum() == 3
        print("alive", len(list(locks())), flush=True)
        os._exit(7)
    finally:
        traceback.print_exc()
        os._exit(1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 7, status
"""


@needs("demo")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_child_that_calls_no_xla_never_hangs(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "VENEER_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 3
