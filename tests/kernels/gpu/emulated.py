"""Run the CUDA kernel on a CPU. g++ replaces NVRTC, and `emulator.h` replaces the GPU.

As on a GPU, `matmul.separate_product` chooses the block sizes, the macros and the grid.
"""

import ctypes
import hashlib
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from veneer.kernels.gpu import cuda_program, matmul

HERE = Path(__file__).parent
KERNEL = Path(matmul.__file__).parent


@contextmanager
def emulate(monkeypatch, folder):
    """Make `matmul.separate_product` run kernels on this CPU. Write their libraries to `folder`."""

    def compile_library(source, options):
        defined = [option for option in options if option.startswith("-D")]
        name = hashlib.sha256(" ".join(defined).encode()).hexdigest()
        library = Path(folder, f"{name}.so")
        if not library.exists():
            command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", f"-I{KERNEL}"]
            command += [f"-I{HERE}", *defined, str(HERE / "emulated.cc"), "-o", str(library)]
            subprocess.run(command, check=True)
        return str(library)

    cuda_program.ptx.cache_clear()
    monkeypatch.setattr(cuda_program, "compile_ptx", compile_library)
    monkeypatch.setattr(matmul, "compute_capability", lambda: 90)
    monkeypatch.setattr(matmul.jax.ffi, "ffi_call", call_library)
    yield
    cuda_program.ptx.cache_clear()


def call_library(target, out, *, legacy_backend_config, custom_call_api_version):
    """Return a function that runs a kernel on this CPU. It replaces `jax.ffi.ffi_call`."""
    assert (target, custom_call_api_version) == ("__gpu$xla.gpu.ptx", 2)
    blocks, batch = (
        int(re.search(rf"grid_{axis} = (\d+)", legacy_backend_config)[1]) for axis in "xz"
    )
    library = re.search(r'kernel_data = "(.+?)"', legacy_backend_config)[1]

    results_at = re.search(r"output_indices = \[(.+?)\]", legacy_backend_config)[1].split(", ")

    def call(*operands):
        results = [np.full(each.shape, jnp.nan, each.dtype) for each in out]
        arrays = [*map(np.asarray, operands), *results]
        first = len(operands)
        assert results_at == [f"{i} : i32" for i in range(first, first + len(results))]
        addresses = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        ctypes.CDLL(library).emulate(addresses, blocks, batch)
        return [jnp.asarray(result) for result in results]

    return call
