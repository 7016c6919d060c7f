"""The array types of Quax's documentation, by Quax's names, fields and arguments.

Each computes with one of our own types, where we have one. Each module is imported when it is first
used.

    lora                    `LoraArray`, `loraify`: a weight and a low-rank update
    named                   `NamedArray`, `Axis`, `trace`: an array whose axes have names
    prng                    `PRNG`, `ThreeFry`, `uniform`, `normal`, `split`: random keys
    sparse                  `BCOO`: a sparse array by coordinates
    structured_matrices     `TridiagonalMatrix`
    unitful                 `Unitful`, `Dimension`, `kilograms`, `meters`, `seconds`
    zero                    `Zero`: zeros that are known when a program is traced

and what they share:

    delegation              rules that run the rules of a Veneer type
"""

import importlib
from typing import Any

__all__ = ["lora", "named", "prng", "sparse", "structured_matrices", "unitful", "zero"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
