"""Read the annotations of a rule as the classes of operands that the rule accepts."""

import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from .tree import annotated_types
from .value import Value


class Dense:
    """The class of all operands that are not implicit values."""


# The classes that one annotation accepts: `Dense`, subclasses of `Value`, or `object` for any
# operand. An operand must be an instance of one of these classes.
Alternatives = frozenset[type]

_DENSE_TYPES = (*typing.get_args(ArrayLike), np.generic, bool, int, float, complex)


def names_around(function: Callable) -> dict[str, Any]:
    """Return the global and local variables that the annotations of `function` can name."""
    # The locals come from the innermost running function of the same module.
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not function.__globals__:
        frame = frame.f_back
    return {**function.__globals__, **(frame.f_locals if frame else {})}


def operand_types(function: Callable) -> tuple[tuple[Alternatives, ...], Alternatives | None]:
    """Return the classes that a rule accepts for each positional operand, and for its `*args`.

    The second result is None if the rule has no `*args`. Keyword parameters are not operands.
    """
    operands: list[Alternatives] = []
    variadic: Alternatives | None = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            continue
        annotation = parameter.annotation
        if isinstance(annotation, str):  # from __future__ import annotations
            annotation = eval(annotation, names_around(function))
        alternatives = _alternatives(annotation, function, parameter.name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            variadic = alternatives
        else:
            operands.append(alternatives)
    return tuple(operands), variadic


def check_annotations(function: Callable) -> None:
    """Raise `TypeError` if no operand of a rule is annotated with an implicit type or `Any`.

    Without this check, a rule whose annotations were forgotten would run for every implicit type.
    """
    operands, variadic = operand_types(function)
    accepted = operands if variadic is None else (*operands, variadic)
    if any(issubclass(c, Value) for classes in accepted for c in classes):
        return
    if all(classes == {Dense} for classes in accepted):
        raise TypeError(
            f"{function.__qualname__} takes only dense operands. A rule runs only if an operand "
            "is implicit. Annotate that operand with its type, a subclass of vn.ImplicitArray."
        )
    # The rule accepts any type: an operand is annotated with `Any`, or has no annotation.
    keyword_kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in keyword_kinds and parameter.annotation is parameter.empty:
            raise TypeError(
                f"{function.__qualname__}: operand {parameter.name!r} has no annotation, so the "
                "rule would run for every implicit type. Annotate it with a subclass of "
                "vn.ImplicitArray, with vn.ArrayLike for a dense operand, or with Any."
            )


def _alternatives(annotation: Any, function: Callable, operand: str) -> Alternatives:
    """Return the classes that the annotation of an operand of the rule `function` accepts."""
    accepted: set[type] = set()
    for cls in annotated_types(annotation):
        if cls in (inspect.Parameter.empty, Any, object):
            accepted.add(object)
        elif isinstance(cls, type) and issubclass(cls, Value):
            accepted.add(cls)
        elif isinstance(cls, type) and issubclass(cls, _DENSE_TYPES):
            accepted.add(Dense)
        else:
            raise TypeError(
                f"{function.__qualname__}: operand {operand!r} is annotated {annotation!r}, which "
                "is neither dense (vn.ArrayLike, jax.Array) nor a subclass of vn.ImplicitArray, "
                "nor a union of those."
            )
    return frozenset(accepted)
