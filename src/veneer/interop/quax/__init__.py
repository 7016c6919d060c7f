"""The public names of Quax 0.4.6, implemented by Veneer: `import veneer.interop.quax as quax`.

Types, rules and functions written for Quax (https://github.com/nstarman/quax) run after this change
of the import. Other packages that import Quax (`quaxed`, `unxt`) run with Veneer too if
`replace_quax` is called before they are imported:

    import veneer.interop.quax as quax

    quax.replace_quax()
    import unxt

docs/quax.md lists the differences.

    core            `Value`, `ArrayValue`, `quaxify`, `register` and `AmbiguousLookupError`
    examples        the array types of Quax's documentation
    experimental    `HiValue` and `register_rules` of Quax's main branch
"""

import importlib
import sys

from . import examples, experimental
from .core import AmbiguousLookupError, ArrayValue, Value, quaxify, register
from .examples import lora, zero

__all__ = [
    "AmbiguousLookupError",
    "ArrayValue",
    "Value",
    "examples",
    "experimental",
    "lora",
    "quaxify",
    "register",
    "replace_quax",
    "zero",
]
__version__ = "0.4.6"  # of Quax


def replace_quax() -> None:
    """Make `import quax` import this package, for packages that are written for Quax.

    Call it before anything imports Quax. It applies to the whole process.

    **Raises:** `RuntimeError` if Quax itself is already imported.
    """
    present = sys.modules.get("quax")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            f"{present.__name__} is already imported, so types made with it are Quax's: call "
            "veneer.interop.quax.replace_quax() before the first `import quax`"
        )
    for name in examples.__all__:
        importlib.import_module(f"{examples.__name__}.{name}")
    importlib.import_module(f"{experimental.__name__}.hijax")
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(f"{__name__}."):
            sys.modules["quax" + name.removeprefix(__name__)] = module
