"""The array types of Quax's documentation, with the names, fields and arguments of Quax.

Some of them compute with an array type of Veneer. Each module is imported when it is first used.

    lora                    `LoraArray`, `loraify`: a weight and a low-rank update
    named                   `NamedArray`, `Axis`, `trace`: an array whose axes have names
    prng                    `PRNG`, `ThreeFry`, `uniform`, `normal`, `split`: random keys
    sparse                  `BCOO`: a sparse array by coordinates
    structured_matrices     `TridiagonalMatrix`
    unitful                 `Unitful`, `Dimension`, `kilograms`, `meters`, `seconds`
    zero                    `Zero`: zeros that are known when a program is traced
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
