"""Compile CUDA C++ to PTX with NVRTC, which `jax[cuda12]` and `jax[cuda13]` install."""

import ctypes
import ctypes.util
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

#: The PTX version that the kernel needs. NVRTC writes a newer one, which older drivers reject.
PTX_VERSION = "8.1"


class CompileError(RuntimeError):
    """An error because NVRTC is missing or rejects a program."""


def compile_ptx(source: str, options: Sequence[str]) -> str:
    """Return the PTX of a CUDA C++ program.

    **Raises:** `CompileError` with NVRTC's log.
    """
    library = load()
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"veneer.cu", 0, None, None
        ),
    )
    try:
        encoded = [option.encode() for option in options]
        result = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        if result:
            raise CompileError(_text(library, program, "ProgramLog"))
        ptx = _text(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return with_version(ptx)


def with_version(ptx: str) -> str:
    """Return PTX whose version line is replaced by `PTX_VERSION`, so that older drivers accept it.

    **Raises:** `CompileError` if the text has no version.
    """
    ptx, count = re.subn(r"^\.version .*$", f".version {PTX_VERSION}", ptx, count=1, flags=re.M)
    if count != 1:
        raise CompileError("NVRTC returned PTX without a version")
    return ptx


@functools.cache
def load() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's Python packages, or else from the system.

    **Raises:** `CompileError` if neither has it.
    """
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompileError("NVRTC is missing: install jax with its CUDA packages, jax[cuda13]")


def _candidates() -> Iterator[str]:
    """Return the paths and names to load NVRTC by, in the order of preference."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for place in ("cu*/lib", "cuda_nvrtc/lib"):
            yield from sorted(
                map(str, Path(folder).glob(f"{place}/libnvrtc.so.*[0-9]")), reverse=True
            )
    if found := ctypes.util.find_library("nvrtc"):
        yield found
    yield from sorted(map(str, Path("/usr/local/cuda/lib64").glob("libnvrtc.so*")), reverse=True)


def _check(library: ctypes.CDLL, result: int) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(result).decode()}")


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, text))
    return text.value.decode()
