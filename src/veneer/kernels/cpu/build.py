"""Register CPU kernels as FFI targets, which XLA calls.

Numba compiles a kernel when it is first used on a machine. Later processes load its object file
with LLVM alone, in a fraction of the time that importing Numba takes.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable

import jax

from ...native.cache import COMPILING, Cache
from ...native.ffi_header import header, header_text
from . import targets

CACHE = Cache("kernels", "veneer.kernels", header_text)

_registered: set[str] = set()


@functools.cache
def available() -> str | None:
    """Return why this process cannot use CPU kernels, or None if it can.

    >>> from veneer.kernels.cpu import build
    >>> build.available() is None
    True
    """
    if sys.maxsize < 2**32 or sys.byteorder != "little":
        return "kernels need a 64-bit little-endian CPU"
    if importlib.util.find_spec("numba") is None:
        return "kernels need Numba: pip install 'numba>=0.61'"
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "NUMBA_DISABLE_JIT is set"
    try:
        header()
    except (OSError, ValueError) as reason:
        return f"kernels do not support the FFI of JAX {jax.__version__}: {reason}"
    return None


@functools.cache
def has_bf16() -> bool:
    """Return whether kernels and this CPU multiply bf16."""
    if available() is not None:
        return False
    try:
        from ...native.simd import HAS_BF16
    except (ImportError, ValueError):  # building a kernel warns of it
        return False
    return HAS_BF16


def target(name: str) -> str:
    """Register a kernel as a target of `jax.ffi.ffi_call` on CPU. Return its name.

    Threads may call this at the same time.

    **Arguments:**

    - `name`: one of `targets.names()`, such as "veneer_rows_lookup4_few".

    **Raises:** `KeyError` for any other name. `ValueError` if VENEER_KERNELS_ISA names instructions
    that this CPU does not have. `ImportError` if Numba cannot be imported.

    >>> from veneer.kernels.cpu import build
    >>> build.target("veneer_rows_int8_few")
    'veneer_rows_int8_few'
    """
    return registered(name, lambda: targets.object_code(name))


def registered(name: str, compile: Callable[[], bytes]) -> str:
    """Register the C function `name` of an object file as a target of `jax.ffi.ffi_call` on CPU.

    **Arguments:**

    - `compile`: returns the bytes of the object file. It is called if the cache does not have them.

    **Returns:** `name`.
    """
    with COMPILING:
        if name not in _registered:
            from ...native import machine_code  # which imports LLVM

            _load_handlers()
            (address,) = machine_code.load(CACHE.cached(name, compile), name)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
            _registered.add(name)
    return name


def register_handlers(executable: bytes | None = None) -> list[str]:
    """Register the CPU kernels that a compiled program calls, before the program is loaded.

    A process registers a kernel with XLA when it first traces a program that needs the kernel. A
    process that loads a program from `jax.experimental.serialize_executable` has traced nothing.
    Without this call, it fails with "No FFI handler registered for veneer_...".

    **Arguments:**

    - `executable`: the bytes that `serialize` returned. The kernels that it calls are registered,
        and compiled if the cache of this machine does not have them. By default, all kernels that
        the cache has are registered.

    **Returns:** the names of the registered kernels.

    **Raises:**

    - `RuntimeError` if the executable calls kernels and this process cannot use them, for example
      without Numba.
    - `ValueError` if the executable was compiled by another version of veneer and calls a kernel
      that this version does not have.

    >>> from veneer import kernels
    >>> kernels.register_handlers(b"...veneer_rows_int8_few...")
    ['veneer_rows_int8_few']
    """
    names = targets.names() if executable is None else targets.names_in(executable)
    if (reason := available()) is not None:
        if not names or executable is None:
            return []
        raise RuntimeError(f"the executable calls {', '.join(names)}, which cannot run: {reason}")
    if executable is None:
        names = [name for name in names if CACHE.holds(name)]
    return [target(name) for name in names]


@functools.cache
def _load_handlers() -> None:
    from ...native import machine_code

    code = CACHE.cached(targets.SHARED, lambda: targets.object_code(targets.SHARED))
    addresses = machine_code.load(code, *targets.HANDLERS)
    for name, address in zip(targets.HANDLERS, addresses, strict=True):
        machine_code.register_symbol(name, address)
