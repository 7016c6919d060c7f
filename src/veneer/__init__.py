"""Arrays for JAX that look dense to every program and store something cheaper.

    _jax                all uses of private functions of JAX
    _core               implicit arrays, rules, and `implicit`
    _report             the reports that `explain` returns
    native              machine code for the CPU: compiled once and cached on disk
    kernels             products and quantization of packed codes
    types               array types: low rank, sparse, structured, labeled
    quant               quantized arrays: formats, products, calibration, training
    hijax               high types: implicit arrays as operands of plain JAX functions
    numba               JAX functions compiled to native functions
    files               `save` and `load`, and checkpoints of other libraries
    models              language models: load, chat, compare
    interop             drop-in modules with the names of other libraries
    lora                LoRA adapters, by rules on paths
    tree                trees in which an implicit array is one leaf
    distributed         collectives that send dense arrays quantized
    placement           `device_put` and shardings of dense arrays
    training            which weights are trained: `freeze`, `unfreeze` and `trainable`
    testing             checks of array types, for tests
    parameter_table     `summary`: a table of formats and sizes
    plan                `veneer plan`: how to shard a model over devices
    doctor              `veneer doctor`: which kernels run on this machine
    cli, demo           the command line, and a demonstration on a real model

docs/architecture.md lists the imports that each module may have, and the functions that three
example calls run through.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax.typing import ArrayLike

from . import _core as _core
from ._core.errors import OutsideImplicitError
from ._core.leaf_axes import LeafAxis
from ._core.policy import Event, MaterialiseError, MaterialiseWarning
from ._core.rules import AmbiguousLookupError, register
from ._core.surface.array import ImplicitArray
from ._core.surface.implicit import implicit
from ._core.tree import static
from ._core.value import Value, materialise
from ._report import Report, explain

if TYPE_CHECKING:
    from . import distributed, hijax, lora, models, numba, quant, testing, tree, types
    from ._core.surface.straight_through import ste
    from .files.load_save import load, save
    from .hijax.jit import jit
    from .parameter_table import summary
    from .placement import device_put, fully_sharded, logical_shardings
    from .training import freeze, trainable, unfreeze

__version__ = "0.1.0"

__all__ = [
    "AmbiguousLookupError",
    "ArrayLike",
    "Event",
    "ImplicitArray",
    "LeafAxis",
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
    "models",
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


# The modules of the names that are imported on first use, so that `import veneer` is quick. Apart
# from the names of modules, no name is the name of a module here: importing the module would
# replace the name.
_LAZY = {
    "device_put": "placement",
    "distributed": "distributed",
    "freeze": "training",
    "fully_sharded": "placement",
    "hijax": "hijax",
    "jit": "hijax.jit",
    "load": "files.load_save",
    "logical_shardings": "placement",
    "lora": "lora",
    "models": "models",
    "numba": "numba",
    "quant": "quant",
    "save": "files.load_save",
    "ste": "_core.surface.straight_through",
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
    """Return the end of the error for a missing attribute `name` of `vn`: a hint, or "".

    There is a hint if a public module has an attribute with this name, and for "materialize", which
    is spelled `materialise` in `vn`.
    """
    if name == "materialize":
        return "; did you mean vn.materialise?"
    if not name.startswith("_"):  # tools ask for private names, and importing modules takes time
        for module in ("quant", "types", "lora", "tree", "hijax"):
            if name in import_module(f"{__name__}.{module}").__all__:
                return f"; did you mean vn.{module}.{name}?"
    return ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


for _error in (AmbiguousLookupError, MaterialiseError, MaterialiseWarning, OutsideImplicitError):
    _error.__module__ = "veneer"  # as tracebacks show it
