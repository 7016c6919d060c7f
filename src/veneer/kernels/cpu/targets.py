"""What targets there are, and the object file of each. Numba is imported only as one is compiled.

A kernel's code is its functions and an entry, by which XLA calls it. That calls the handler that
all kernels share (`handlers.py`), so a kernel is compiled by itself.
"""

import re
from collections.abc import Sequence
from typing import Any

from .kinds import ACTIVATIONS, BITS, INTEGERS, QUANTIZED_BITS

#: The object file of what all kernels share, and its functions.
SHARED, HANDLERS = "veneer_shared", ("veneer_handle_product", "veneer_handle_quantise")
_PRODUCT, _QUANTIZE = HANDLERS

_NAME = re.compile(r"veneer_(integer_|bf16_)?(rows|columns)_(\w+)")


def object_code(name: str) -> bytes:
    """Returns the object file of a target, `veneer_rows_lookup4` say, or of what all share.

    **Raises:** `KeyError` where there is no such target.
    """
    if name == SHARED:
        return _shared()
    if name.startswith("veneer_quantise_"):
        return _quantizer(name, name.removeprefix("veneer_quantise_"))
    match = _NAME.fullmatch(name)
    if match is None or match[3] not in (INTEGERS if match[1] == "integer_" else BITS):
        raise KeyError(f"there is no kernel {name}")
    prefix, orientation, kind = match.groups()
    activations = {"integer_": "int8", "bf16_": "bfloat16"}.get(prefix, "float32")
    return code_of(
        _kernel(activations, orientation, kind),
        name,
        bits=BITS[kind],
        contracts_rows=orientation == "rows",
        activations=activations,
    )


def _shared() -> bytes:
    from ...native.object_file import ObjectFile
    from . import handlers

    file = ObjectFile()
    file.export(_PRODUCT, handlers.handle_product)
    file.export(_QUANTIZE, handlers.handle_quantize)
    return file.code()


def _kernel(activations: str, orientation: str, kind: str) -> Any:
    """The four functions of a kernel, whose module is imported only now."""
    if activations == "int8":
        from .integers import kernels

        rows_kernel, columns_kernel = kernels.rows_kernel, kernels.columns_kernel
        return (rows_kernel if orientation == "rows" else columns_kernel)(kind)
    if activations == "bfloat16":
        from .floats import bf16

        return bf16.kernel(orientation, kind)
    from .floats import columns, rows

    return (rows if orientation == "rows" else columns).kernel(kind)


def code_of(kernel: Any, name: str, *, bits: int, contracts_rows: bool, activations: str) -> bytes:
    """Returns the object file of the kernel `(prepare, count, work, finish)`."""
    functions = dict(zip(("prepare", "count", "work", "finish"), kernel, strict=True))
    return _code_of(
        functions, name, _PRODUCT, [bits, int(contracts_rows), ACTIVATIONS.index(activations)]
    )


def _quantizer(name: str, kind: str) -> bytes:
    from . import quantize

    if kind not in QUANTIZED_BITS:
        raise KeyError(f"there is no kernel {name}")
    functions = dict(zip(("count", "work"), quantize.kernel(kind), strict=True))
    return _code_of(functions, name, _QUANTIZE, [QUANTIZED_BITS[kind]])


def _code_of(functions: dict[str, Any], name: str, handler: str, constants: Sequence[int]) -> bytes:
    """The object file of functions, and of an entry that calls a handler with these and them."""
    from ...native.object_file import ObjectFile

    file = ObjectFile()
    for part, function in functions.items():
        file.export(f"{name}_{part}", function)
    file.export_call(name, handler, [*constants, *(f"{name}_{part}" for part in functions)])
    return file.code()
