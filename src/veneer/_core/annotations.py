"""The annotations of a rule, converted to the classes of the operands that it accepts."""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike

from .value import Value


class Dense:
    """The class of all operands that are not implicit values."""


# The classes that an annotation accepts: `Dense`, subclasses of Value, or `object` for anything.
Alternatives = frozenset[type]

_DENSE_TYPES = (*typing.get_args(ArrayLike), np.generic, bool, int, float, complex)


def names_around(function: Callable) -> dict[str, Any]:
    """Return the variables that annotations of a function can name: global and local ones."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not function.__globals__:
        frame = frame.f_back
    return {**function.__globals__, **(frame.f_locals if frame else {})}


def operand_types(function: Callable) -> tuple[tuple[Alternatives, ...], Alternatives | None]:
    """Return the accepted classes of each operand of a rule, and of its `*args`."""
    operands: list[Alternatives] = []
    more: Alternatives | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            continue  # parameters of the primitive
        annotation = parameter.annotation
        if isinstance(annotation, str):  # from __future__ import annotations
            annotation = eval(annotation, names_around(function))
        alternatives = frozenset(_alternatives(annotation, function, parameter.name))
        if parameter.kind is parameter.VAR_POSITIONAL:
            more = alternatives
        else:
            operands.append(alternatives)
    return tuple(operands), more


def check_annotations(function: Callable) -> None:
    """Reject a rule that names no implicit type, unless `Any` says that it serves all of them.

    Without this check, a rule whose annotations were forgotten would run for every implicit type.
    """
    operands, more = operand_types(function)
    accepted = (*operands, *([] if more is None else [more]))
    if any(issubclass(c, Value) for classes in accepted for c in classes):
        return
    if all(classes == {Dense} for classes in accepted):
        raise TypeError(
            f"{function.__qualname__} takes only dense operands. A rule runs only if an operand "
            "is implicit. Annotate that operand with its type, a subclass of vn.ImplicitArray."
        )
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in keywords and parameter.annotation is parameter.empty:
            raise TypeError(
                f"{function.__qualname__}: operand {parameter.name!r} has no annotation, so the "
                "rule would run for every implicit type. Annotate it with a subclass of "
                "vn.ImplicitArray, with vn.ArrayLike for a dense operand, or with Any."
            )


def _alternatives(annotation: Any, function: Callable, name: str) -> Iterable[type]:
    if annotation in (inspect.Parameter.empty, Any, object):
        return (object,)
    annotation = getattr(annotation, "__value__", annotation)  # a `type` statement's alias
    if isinstance(annotation, TypeVar):
        return _alternatives(annotation.__bound__ or object, function, name)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = (_alternatives(a, function, name) for a in typing.get_args(annotation))
        return [alternative for part in parts for alternative in part]
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0], function, name)
    if hasattr(annotation, "array_type"):  # jaxtyping: Float[Array, "m n"]
        return _alternatives(annotation.array_type, function, name)
    if isinstance(origin or annotation, type):
        cls = origin or annotation
        if issubclass(cls, Value):
            return (cls,)
        if cls in _DENSE_TYPES or issubclass(cls, jax.Array | np.ndarray | np.generic):
            return (Dense,)
    raise TypeError(
        f"{function.__qualname__}: operand {name!r} is annotated {annotation!r}, which is neither "
        "dense (vn.ArrayLike, jax.Array) nor a subclass of vn.ImplicitArray, nor a union of those."
    )
