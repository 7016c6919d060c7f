"""Elementwise functions of matrices that store each entry which is not a structural zero, once."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from jax import lax

from ..._core.rules import register
from ..._core.transform import redispatch
from ..._jax.primitives import find_primitive
from ..zero_preserving import LINEAR, NONLINEAR
from .matrix import Matrix

_M = TypeVar("_M", bound=type[Matrix])


def stores_entries(kind: _M) -> _M:
    """Says of a type that its leaves `linear_in` are entries, so that functions act on these.

    They keep the structure if they give 0 for 0.
    """
    for name in (*LINEAR, *NONLINEAR):
        _register(kind, name)

    @register("integer_pow")
    def _(x: kind, *, y: int) -> Any:  # type: ignore[valid-type]
        return _of_entries(x, lambda w: lax.integer_pow(w, y)) if y > 0 else NotImplemented

    return kind


def _register(kind: type[Matrix], name: str) -> None:
    primitive = find_primitive(name)

    @register(primitive)
    def _(x: kind, **params: Any) -> Any:  # type: ignore[valid-type]
        return _of_entries(x, lambda w: primitive.bind(w, **params))


def _of_entries(x: Any, function: Callable) -> Any:
    return x.rescaled(partial(redispatch, function))
