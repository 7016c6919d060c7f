"""Arrays that look dense to every JAX program and are something cheaper inside."""

from typing import TYPE_CHECKING, Any

from jax.typing import ArrayLike

from . import _core as _core
from . import quant
from ._core.array import ImplicitArray
from ._core.explain import explain
from ._core.policy import Event, MaterialiseError, MaterialiseWarning
from ._core.report import Report
from ._core.rules import AmbiguousLookupError, register
from ._core.transform import implicit
from ._core.tree import static
from ._core.value import Value, materialise

if TYPE_CHECKING:
    from .interop.safetensors import load, save

__version__ = "0.1.0"

__all__ = [
    "AmbiguousLookupError",
    "ArrayLike",
    "Event",
    "ImplicitArray",
    "MaterialiseError",
    "MaterialiseWarning",
    "Report",
    "Value",
    "explain",
    "implicit",
    "load",
    "materialise",
    "quant",
    "register",
    "save",
    "static",
]


def __getattr__(name: str) -> Any:
    # Programs that read and write no files need not wait for what does.
    if name in ("load", "save"):
        from .interop import safetensors

        return getattr(safetensors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _public in (AmbiguousLookupError, Event, MaterialiseError, MaterialiseWarning, Report):
    _public.__module__ = "veneer"
