"""Arrays that look dense to every JAX program and are something cheaper inside."""

from typing import Any

from jax.typing import ArrayLike

from . import _core as _core
from . import quant
from ._core.explain import Event, MaterialiseError, MaterialiseWarning, Report
from ._core.rules import AmbiguousLookupError, register
from ._core.transform import explain, implicit
from ._core.value import ImplicitArray, Value, materialise, static

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
    if name in ("load", "save"):  # imported when asked for: they need the `interop` extra
        from .interop import safetensors

        return getattr(safetensors, name)
    raise AttributeError(f"module 'veneer' has no attribute {name!r}")


for _public in (AmbiguousLookupError, Event, MaterialiseError, MaterialiseWarning, Report):
    _public.__module__ = "veneer"
