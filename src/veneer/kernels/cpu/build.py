"""Kernels as FFI targets: compiled at first use, kept on disk, and known to XLA by name.

Numba compiles a kernel once a machine. What it made is an object file in the cache (`$VENEER_CACHE`
or `veneer` in the user's cache directory, which nobody else should be able to write: its code is
run); later processes load that with LLVM alone, in a fraction of the time that importing Numba
takes. A cache that cannot be read or written only means that it is compiled again.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jax

from .ffi_header import header, header_text

_lock = threading.RLock()
_registered: set[str] = set()


def _unlock_child() -> None:
    """In the child of a fork, nobody is left to unlock what another thread had locked."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_child)


@functools.cache
def available() -> str | None:
    """Returns why there are no kernels of the CPU in this process, or None if there are.

    >>> from veneer.kernels.cpu import build
    >>> build.available() is None
    True
    """
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        return "kernels are for CPUs of 64 bits whose lowest byte is first"
    if importlib.util.find_spec("numba") is None:
        return "kernels need Numba: pip install 'veneer[numba]'"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "NUMBA_DISABLE_JIT is set"
    try:
        header()
    except (OSError, ValueError) as reason:
        return f"kernels do not know the FFI of JAX {jax.__version__}: {reason}"
    return None


def target(name: str) -> str:
    """Makes a kernel a target of `jax.ffi.ffi_call` on the CPU, and returns its name.

    Threads may call this at the same time.

    **Arguments:**

    - `name`: `veneer_rows_{kind}`, `veneer_columns_{kind}`, `veneer_integer_rows_{kind}` or
      `veneer_integer_columns_{kind}`, where kind is lookup1, lookup2, lookup4, int8, uint8,
      float8_e4m3fn or float8_e5m2.

    **Raises:** `KeyError` for any other name. `ValueError` where VENEER_KERNELS_ISA names what this
    CPU has not. `ImportError` where Numba is broken.

    >>> from veneer.kernels.cpu import build
    >>> build.target("veneer_rows_int8")
    'veneer_rows_int8'
    """
    with _lock:
        if name not in _registered:
            _load_shared_code()
            address = _loaded(name, lambda targets: targets.kernel_code(name))
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
            _registered.add(name)
    return name


@functools.cache
def _load_shared_code() -> None:
    from . import machine_code

    name = "veneer_handle"
    address = _loaded(name, lambda targets: targets.shared_code())
    machine_code.name_address(name, address)


def _loaded(name: str, compile: Callable[[ModuleType], bytes]) -> int:
    """The address of a function: of code from the cache, or compiled now and then put there."""
    from . import machine_code

    file = _cache_directory() / f"{name}-{_fingerprint()}.o"
    try:
        code = _read(file)
    except (OSError, ValueError):
        from . import targets

        code = compile(targets)
        with contextlib.suppress(OSError):
            _write(file, code)
    return machine_code.load(code, name)


def _cache_directory() -> Path:
    own = os.environ.get("VENEER_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return (Path(own) if own else Path(shared) / "veneer") / "kernels"


@functools.cache
def _fingerprint() -> str:
    """Of all that compiled code depends on."""
    digest = hashlib.sha256()
    for part in _dependencies():
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _dependencies() -> Iterator[bytes]:
    from . import machine_code

    for source in sorted(Path(__file__).parent.glob("*.py")):
        yield source.read_bytes()
    yield header_text().encode()
    for package in ("numba", "llvmlite"):
        yield importlib.metadata.version(package).encode()
    yield f"{sys.version} {sys.platform} {platform.machine()}".encode()
    yield machine_code.host().encode()
    for key, value in sorted(os.environ.items()):
        if key == "VENEER_KERNELS_ISA" or key.startswith("NUMBA_"):
            yield f"{key}={value}".encode()


def _read(file: Path) -> bytes:
    """An object file that is whole: LLVM ends the process over one that is not."""
    content = file.read_bytes()
    digest, code = content[:32], content[32:]
    if hashlib.sha256(code).digest() != digest:
        raise ValueError(f"{file} is damaged")
    return code


def _write(file: Path, code: bytes) -> None:
    """Writes an object file after its digest; who reads at the same time sees all of it or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as output:
            output.write(hashlib.sha256(code).digest() + code)
        os.replace(aside, file)
    except OSError:
        os.unlink(aside)
        raise
