"""Kernels and programs are compiled for the CPU that the settings of Numba name."""

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

ARRAYS = """
import numpy as np
x, c = np.full(1, 1 + 2**-12, np.float32), np.full(1, -1, np.float32)
"""

KERNEL = """
import ctypes
from veneer.native.functions import native
from veneer.native.machine_code import load
from veneer.native.memory import load_f32
from veneer.native.functions import ObjectFile
from veneer.native.simd.floats import add_outer, splat, store

@native
def multiply_add(x, c, y):
    store(y, add_outer(splat(load_f32(c)), x, 0, splat(load_f32(x))))

file = ObjectFile()
file.export("multiply_add", multiply_add)
(address,) = load(file.code(), "multiply_add")
y = np.zeros(16, np.float32)
call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(address)
call(x.ctypes.data, c.ctypes.data, y.ctypes.data)
"""

PROGRAM = """
import veneer as vn
y = vn.numba.compile(lambda x, c: x * x + c, x, c)(x, c)
"""


@pytest.mark.skipif(
    not llvm.get_host_cpu_features().get("fma"), reason="needs a CPU with fused multiply-add"
)
@pytest.mark.parametrize("code", [KERNEL, PROGRAM], ids=["a kernel", "a program"])
def test_code_is_compiled_for_the_cpu_in_numba_settings(code, tmp_path):
    results = {}
    for settings in ("", "generic"):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= {"JAX_PLATFORMS": "cpu", "VENEER_CACHE": str(tmp_path)}
        if settings:
            environment |= {"NUMBA_CPU_NAME": settings, "NUMBA_CPU_FEATURES": ""}
        run = subprocess.run(
            [sys.executable, "-c", f"{ARRAYS}{code}\nprint(float(y[0]))"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        results[settings] = float(run.stdout)
    # A fused multiply-add rounds once. Without it, the product and the sum are each rounded.
    assert results == {"": 2**-11 + 2**-24, "generic": 2**-11}
