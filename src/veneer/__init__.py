"""Arrays that look dense to every JAX program and are something cheaper inside.

    _jax                the seam to private JAX
    _install            the command that installs an extra, for errors
    _core               implicit values, rules, and the transform that runs them
    _report             what ran where: `explain`
    native              machine code of a CPU: compiled once, kept on disk, called by XLA and NumPy
    kernels             products and quantising on stored codes
    types               array types: low rank, sparse, structured, labelled
    quant               quantised arrays: formats, products, calibration, training
    hijax               high types: implicit arrays as operands of plain JAX functions
    numba               JAX functions as native ones
    interop             files, and other libraries
    lora                updates of low rank, by rules on paths
    tree                trees in which an implicit array is one leaf
    straight_through    `ste`: the value of a function, with the derivative of the identity
    distributed         collectives that send dense arrays quantised
    placement           where arrays are: `device_put`, by shardings that speak of dense arrays
    training            which arrays are trained: `freeze`, `trainable`
    testing             checks for the tests of those who write array types
    parameter_table     what the arrays of a tree are and cost: `summary`
    plan                how to divide a model over devices, by its config: `veneer plan`
    doctor              what products run by on this machine: `veneer doctor`
    cli, demo           the command line, and its demonstration on a real model
    cli_help            examples, table of formats and JSON keys of the command line's help

What each may import, and three journeys through them: docs/architecture.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax.typing import ArrayLike

from . import _core as _core
from ._core.rules import AmbiguousLookupError, register
from ._core.surface.array import ImplicitArray
from ._core.surface.event import Event, MaterialiseError, MaterialiseWarning
from ._core.surface.mistakes import OutsideImplicitError
from ._core.transform import implicit
from ._core.tree import static
from ._core.value import Value, materialise
from ._report.explain import explain
from ._report.report import Report

if TYPE_CHECKING:
    from . import distributed, hijax, lora, numba, quant, testing, tree, types
    from .hijax.jit import jit
    from .interop.safetensors import load, save
    from .parameter_table import summary
    from .placement import device_put, fully_sharded, logical_shardings
    from .straight_through import ste
    from .training import freeze, trainable, unfreeze

__version__ = "0.1.0"

__all__ = [
    "AmbiguousLookupError",
    "ArrayLike",
    "Event",
    "ImplicitArray",
    "MaterialiseError",
    "MaterialiseWarning",
    "OutsideImplicitError",
    "Report",
    "Value",
    "device_put",
    "distributed",
    "explain",
    "freeze",
    "fully_sharded",
    "hijax",
    "implicit",
    "jit",
    "load",
    "logical_shardings",
    "lora",
    "materialise",
    "numba",
    "quant",
    "register",
    "save",
    "static",
    "ste",
    "summary",
    "testing",
    "trainable",
    "tree",
    "types",
    "unfreeze",
]


# Where the names are that are imported when they are first asked for, so that a program need not
# wait for what it does not use. A module is named after none but itself: the import of another
# would put the module in the place of the name.
_LAZY = {
    "device_put": "placement",
    "distributed": "distributed",
    "freeze": "training",
    "fully_sharded": "placement",
    "hijax": "hijax",
    "jit": "hijax.jit",
    "load": "interop.safetensors",
    "logical_shardings": "placement",
    "lora": "lora",
    "numba": "numba",
    "quant": "quant",
    "save": "interop.safetensors",
    "ste": "straight_through",
    "summary": "parameter_table",
    "testing": "testing",
    "trainable": "training",
    "tree": "tree",
    "types": "types",
    "unfreeze": "training",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_suggest(name)}")
    module = import_module(f"{__name__}.{_LAZY[name]}")
    return module if name == _LAZY[name] else getattr(module, name)


def _suggest(name: str) -> str:
    """Return a hint if a module of this package has a public name."""
    if not name.startswith("_"):  # tools ask for private names, and importing modules takes time
        for module in ("quant", "types", "lora", "tree"):
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if getattr(found, "__module__", "").startswith(f"{__name__}."):
                return f"; did you mean vn.{module}.{name}?"
    return ""


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


for _public in (AmbiguousLookupError, Event, MaterialiseError, MaterialiseWarning, Report):
    _public.__module__ = "veneer"
