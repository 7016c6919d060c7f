"""What targets there are, and the object file of each. Numba is imported only as one is compiled.

A kernel's code is its functions and an entry, by which XLA calls it. That calls the handler that
all kernels share (`handlers.py`), so a kernel is compiled by itself.
"""

import importlib
import re
from collections.abc import Sequence
from typing import Any

from ..common.kinds import ACTIVATIONS, BITS, INTEGER_PLANES, INTEGERS, QUANTIZED_BITS
from ..common.limits import VARIANTS

#: The object file of what all kernels share, and its functions.
SHARED, HANDLERS = "veneer_shared", ("veneer_handle_product", "veneer_handle_quantise")
_PRODUCT, _QUANTIZE = HANDLERS

_FAMILY = re.compile(r"veneer_(integer_|bf16_|)(rows|columns)_(\w+)")
_CALL = re.compile(rb"veneer_(?:(?:integer_|bf16_)?(?:rows|columns)|quantise)_\w+")
_ACTIVATIONS = {"integer_": "int8", "bf16_": "bfloat16", "": "float32"}


def names() -> list[str]:
    """Return the names of all targets."""
    families = [
        (prefix, contracting, _ACTIVATIONS[prefix])
        for prefix in _ACTIVATIONS
        for contracting in ("rows", "columns")
    ]
    products = [
        f"veneer_{prefix}{contracting}_{kind}_{variant}"
        for prefix, contracting, activations in families
        for kind in BITS
        for variant in VARIANTS[activations, contracting]
        if _is_there(activations, contracting, kind, variant)
    ]
    return products + [f"veneer_quantise_{kind}" for kind in QUANTIZED_BITS]


def names_in(executable: bytes) -> list[str]:
    """Return the targets that a serialized executable calls.

    **Raises:** `ValueError` if it calls a target of another version.
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


def _is_there(activations: str, contracting: str, kind: str, variant: str) -> bool:
    """Whether there is a variant of a kernel."""
    if variant not in VARIANTS.get((activations, contracting), ()):
        return False
    if activations != "int8":
        return kind in BITS
    return kind in INTEGERS or (
        kind in INTEGER_PLANES and (contracting, variant) == ("columns", "few")
    )


def object_code(name: str) -> bytes:
    """Returns the object file of a target, `veneer_rows_lookup4_few` say, or of what all share.

    **Raises:** `KeyError` where there is no such target.
    """
    if name == SHARED:
        return _shared()
    if name.startswith("veneer_quantise_"):
        return _quantizer(name, name.removeprefix("veneer_quantise_"))
    family, _, variant = name.rpartition("_")
    activations, contracting, kind = _parts(family)
    if not _is_there(activations, contracting, kind, variant):
        raise KeyError(f"no kernel is named {name}")
    return code_of(
        _kernel(activations, contracting, kind, variant),
        name,
        bits=BITS[kind],
        contracts_rows=contracting == "rows",
        activations=activations,
    )


def _parts(family: str) -> tuple[str, str, str]:
    """What a kernel's name says: its activations, what it contracts and its kind of codes."""
    match = _FAMILY.fullmatch(family)
    return (_ACTIVATIONS[match[1]], match[2], match[3]) if match else ("", "", "")


def _shared() -> bytes:
    from ...native.object_file import ObjectFile
    from . import handlers

    file = ObjectFile()
    file.export(_PRODUCT, handlers.handle_product)
    file.export(_QUANTIZE, handlers.handle_quantize)
    return file.code()


def _kernel(activations: str, contracting: str, kind: str, variant: str) -> Any:
    """The four functions of a kernel, whose module is imported only now."""
    package = "integers" if activations == "int8" else "floats"
    name = (
        contracting if package == "integers" and variant == "many" else f"{contracting}_{variant}"
    )
    module = importlib.import_module(f"{__package__}.{package}.{name}")
    if activations == "bfloat16":
        return module.build(kind, activations)
    return module.build(kind)


def code_of(kernel: Any, name: str, *, bits: int, contracts_rows: bool, activations: str) -> bytes:
    """Returns the object file of the kernel `(prepare, count, work, finish)`."""
    functions = dict(zip(("prepare", "count", "work", "finish"), kernel, strict=True))
    return _code_of(
        functions, name, _PRODUCT, [bits, int(contracts_rows), ACTIVATIONS.index(activations)]
    )


def _quantizer(name: str, kind: str) -> bytes:
    from . import quantize

    if kind not in QUANTIZED_BITS:
        raise KeyError(
            f"no CPU kernel quantizes to {kind}; there are kernels for {', '.join(QUANTIZED_BITS)}"
        )
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
