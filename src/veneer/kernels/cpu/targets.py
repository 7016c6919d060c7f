"""The FFI targets of CPU kernels, and the object file of each.

The object file of a kernel has its functions, and an entry that XLA calls. The entry calls the
handler that all kernels share (`handlers.py`), so each kernel is compiled separately. Numba is
imported only when a kernel is compiled.
"""

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

from ..common.kinds import ACTIVATIONS, BITS, QUANTIZED_BITS
from ..common.table import TABLE, KernelRow

#: The object file with the functions that all kernels share, and the names of these functions.
SHARED, HANDLERS = "veneer_shared", ("veneer_handle_product", "veneer_handle_quantize")
_PRODUCT, _QUANTIZE = HANDLERS

_CALL = re.compile(rb"veneer_(?:(?:integer_|bf16_)?(?:rows|columns)|quanti[sz]e)_\w+")


@functools.cache
def _products() -> dict[str, tuple[KernelRow, str]]:
    """Return the kernel and the kind of codes of each target that multiplies, by name."""
    rows = [row for row in TABLE if row.platform == "cpu"]
    return {row.target(kind): (row, kind) for row in rows for kind in row.kinds}


def quantize_target(kind: str) -> str:
    """Return the name of the target that quantizes to a format in `QUANTIZED_BITS`, as "nf4"."""
    return f"veneer_quantize_{kind}"


def names() -> list[str]:
    """Return the names of the FFI targets of all CPU kernels."""
    return [*_products(), *map(quantize_target, QUANTIZED_BITS)]


def names_in(executable: bytes) -> list[str]:
    """Return the names of the CPU kernels that a serialized executable calls.

    **Raises:** `ValueError` if it calls a kernel that this version of veneer does not have.
    """
    calls = set(_CALL.findall(executable))
    known = {name: name.encode() for name in names()}
    # The bytes that follow a name may look like a part of it.
    for call in calls:
        if not any(call.startswith(name) for name in known.values()):
            raise ValueError(
                f"the executable calls the kernel {call.decode()!r}, which this version of veneer "
                "does not have: compile the program again with this version"
            )
    return [name for name, text in known.items() if any(call.startswith(text) for call in calls)]


def object_code(name: str) -> bytes:
    """Return the object file of a target such as `veneer_rows_lookup4_few`, or of `SHARED`.

    **Raises:** `KeyError` if there is no such target.
    """
    if name == SHARED:
        return _shared_code()
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

            functions = dict(zip(("count", "work"), quantize.kernel(kind), strict=True))
            return _code(functions, name, _QUANTIZE, [bits])
    raise KeyError(f"no kernel is named {name}")


def product_code(
    functions: Any, name: str, bits: int, *, contracts_rows: bool, dtype: str
) -> bytes:
    """Return the object file of a kernel that multiplies.

    `functions` are the `JobFunctions` of the kernel, `name` is the name of its target, and `bits`
    are the bits per code.
    """
    constants = [bits, int(contracts_rows), ACTIVATIONS.index(dtype)]
    return _code(functions._asdict(), name, _PRODUCT, constants)


def _code(functions: dict[str, Any], name: str, handler: str, constants: Sequence[int]) -> bytes:
    """Return an object file with the functions of a kernel and the entry `name`, which XLA calls.

    The entry calls the function `handler` of the object file `SHARED`, with the constants and the
    addresses of the functions.
    """
    from ...native.functions import ObjectFile

    file = ObjectFile()
    for part, function in functions.items():
        file.export(f"{name}_{part}", function)
    file.export_call(name, handler, [*constants, *(f"{name}_{part}" for part in functions)])
    return file.code()


def _shared_code() -> bytes:
    from ...native.functions import ObjectFile
    from . import handlers

    file = ObjectFile()
    file.export(_PRODUCT, handlers.handle_product)
    file.export(_QUANTIZE, handlers.handle_quantize)
    return file.code()
