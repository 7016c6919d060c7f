"""Build CPU kernels and register them as FFI targets, which XLA calls.

Numba compiles a kernel when it is first used on a machine, and the cache stores its object file.
Later processes load the file with LLVM alone, in a fraction of the time that importing Numba takes.

The object file of a kernel has its functions, and an entry that XLA calls. The entry calls the
handler that all kernels share (`handlers.py`), so each kernel is compiled separately.
"""

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ...native.cache import COMPILING, Cache
from ...native.ffi_header import header, header_text
from ..common.problem import ACTIVATIONS, BITS
from ..common.table import QUANTIZED_BITS, TABLE, KernelRow

CACHE = Cache("veneer.kernels", header_text)

#: The object file with the functions that all kernels share, and the names of these functions.
_SHARED, _HANDLERS = "veneer_shared", ("veneer_handle_product", "veneer_handle_quantize")
_PRODUCT, _QUANTIZE = _HANDLERS

_CALL = re.compile(rb"veneer_(?:(?:integer_|bf16_)?(?:rows|columns)|quanti[sz]e)_\w+")

_registered: set[str] = set()


@functools.cache
def unavailable_reason() -> str | None:
    """Return why this process cannot use CPU kernels, or None if it can.

    >>> from veneer.kernels.cpu import build
    >>> build.unavailable_reason() is None
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
    """Return whether this CPU has instructions that multiply bf16, and kernels can use them."""
    if unavailable_reason() is not None:
        return False
    try:
        from ...native.simd import HAS_BF16
    except (ImportError, ValueError):  # building a kernel warns of it
        return False
    return HAS_BF16


# The names of targets.


@functools.cache
def _products() -> dict[str, tuple[KernelRow, str]]:
    """Map the name of each FFI target that multiplies to a table row and a kind of codes."""
    rows = [row for row in TABLE if row.platform == "cpu"]
    return {row.target(kind): (row, kind) for row in rows for kind in row.kinds}


def quantize_target(kind: str) -> str:
    """Return the name of the FFI target that quantizes to a format.

    `kind` is the format, a key of `QUANTIZED_BITS` such as "nf4".
    """
    return f"veneer_quantize_{kind}"


def target_names() -> list[str]:
    """Return the names of the FFI targets of all CPU kernels."""
    return [*_products(), *map(quantize_target, QUANTIZED_BITS)]


def called_targets(executable: bytes) -> list[str]:
    """Return the names of the CPU kernels that a serialized executable calls.

    **Raises:** `ValueError` if it calls a kernel that this version of veneer does not have.
    """
    calls = set(_CALL.findall(executable))
    known = {name: name.encode() for name in target_names()}
    # The bytes that follow a name may look like a part of it.
    for call in calls:
        if not any(call.startswith(name) for name in known.values()):
            raise ValueError(
                f"the executable calls the kernel {call.decode()!r}, which this version of veneer "
                "does not have: compile the program again with this version"
            )
    return [name for name, text in known.items() if any(call.startswith(text) for call in calls)]


# Object files.


def object_code(name: str) -> bytes:
    """Compile the kernel of an FFI target, and return the bytes of its object file.

    `name` is one of `target_names()`, such as "veneer_rows_lookup4_few".

    **Raises:** `KeyError` if there is no such target.
    """
    if name in _products():
        kernel, kind = _products()[name]
        module = importlib.import_module(f"..{kernel.module}", __package__)
        build = getattr(module, kernel.function)
        return product_code(
            *(build(kind), name, BITS[kind]),
            contracts_rows=kernel.contracting == "rows",
            dtype=kernel.dtype,
        )
    for kind, bits in QUANTIZED_BITS.items():
        if name == quantize_target(kind):
            from . import quantize

            functions = dict(zip(("count", "work"), quantize.build(kind), strict=True))
            return _entry_code(functions, name, _QUANTIZE, [bits])
    raise KeyError(f"no kernel is named {name}")


def product_code(
    functions: Any, name: str, bits: int, *, contracts_rows: bool, dtype: str
) -> bytes:
    """Compile a kernel that multiplies, and return the bytes of its object file.

    **Arguments:**

    - `functions`: the `JobFunctions` of the kernel.
    - `name`: the name of its FFI target.
    - `bits`: the bits per code.
    - `contracts_rows`: whether it contracts the rows of the stored matrix, not the columns.
    - `dtype`: the dtype of activations, one of `ACTIVATIONS`.
    """
    constants = [bits, int(contracts_rows), ACTIVATIONS.index(dtype)]
    return _entry_code(functions._asdict(), name, _PRODUCT, constants)


def _entry_code(
    functions: dict[str, Any], name: str, handler: str, constants: Sequence[int]
) -> bytes:
    """Return an object file with the functions of a kernel and its entry, which XLA calls.

    **Arguments:**

    - `functions`: the native functions of the kernel, by their names in `JobFunctions`.
    - `name`: the name of the entry.
    - `handler`: the C function that the entry calls, with the constants and the addresses of the
      functions. It is in the object file of `handlers_code`.
    """
    from ...native.functions import ObjectFile

    file = ObjectFile()
    for part, function in functions.items():
        file.export(f"{name}_{part}", function)
    file.export_call(name, handler, [*constants, *(f"{name}_{part}" for part in functions)])
    return file.code()


def handlers_code() -> bytes:
    """Compile the handlers that all kernels share, and return the bytes of their object file."""
    from ...native.functions import ObjectFile
    from . import handlers

    file = ObjectFile()
    file.export(_PRODUCT, handlers.handle_product)
    file.export(_QUANTIZE, handlers.handle_quantize)
    return file.code()


# Registration.


def register_target(name: str) -> str:
    """Register a kernel as a target of `jax.ffi.ffi_call` on CPU. Return its name.

    Threads may call this at the same time.

    **Arguments:**

    - `name`: one of `target_names()`, such as "veneer_rows_lookup4_few".

    **Raises:** `KeyError` for any other name. `ValueError` if VENEER_KERNELS_ISA names instructions
    that this CPU does not have. `ImportError` if Numba cannot be imported.

    >>> from veneer.kernels.cpu import build
    >>> build.register_target("veneer_rows_int8_few")
    'veneer_rows_int8_few'
    """
    return register_function(name, lambda: object_code(name))


def register_function(name: str, compile: Callable[[], bytes]) -> str:
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


@functools.cache
def _load_handlers() -> None:
    from ...native import machine_code

    addresses = machine_code.load(CACHE.cached(_SHARED, handlers_code), *_HANDLERS)
    for name, address in zip(_HANDLERS, addresses, strict=True):
        machine_code.register_symbol(name, address)


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
    names = target_names() if executable is None else called_targets(executable)
    if (reason := unavailable_reason()) is not None:
        if not names or executable is None:
            return []
        raise RuntimeError(f"the executable calls {', '.join(names)}, which cannot run: {reason}")
    if executable is None:
        names = [name for name in names if CACHE.holds(name)]
    return [register_target(name) for name in names]
