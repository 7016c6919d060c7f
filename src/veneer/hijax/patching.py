"""Changing what is another package's, and restoring it exactly."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from .._jax.tracing import InvalidInputException, set_operand_conversion

_ABSENT = object()


class Patches:
    """Attributes and items, mostly of JAX's, to be set and restored."""

    def __init__(self) -> None:
        self._setters: list[Callable[[], Callable[[], None]]] = []
        self._undos: list[Callable[[], None]] = []

    def attribute(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """An attribute in the place of another, from which it is made; None if there is none."""
        self._setters.append(partial(_set_attribute, owner, name, make))

    def attribute_if_imported(
        self, module: str, owner: str | None, name: str, make: Callable[[Any], Any]
    ) -> None:
        """An attribute of a class, or of a module, that nobody need have imported."""
        self._setters.append(partial(_set_if_imported, module, owner, name, make))

    def boundary(self, function: Any, make: Callable[[Any], Any]) -> None:
        """What one of JAX's public functions calls, under whatever name someone has imported it."""
        cell = function.__closure__[function.__code__.co_freevars.index("fun")]
        self.attribute(cell, "cell_contents", make)

    def item(self, owner: dict, key: Any, value: Any) -> None:
        """An item that a dict does not have."""
        self._setters.append(partial(_set_item, owner, key, value))

    def canonical(self, cls: type, operand: Callable[[Any], Any]) -> None:
        """What primitives are given for the values of a class."""
        self._setters.append(partial(_set_operand, cls, operand))

    def apply(self) -> None:
        """Sets all of them."""
        for set_one in self._setters:
            self._undos.append(set_one())

    def undo(self) -> None:
        """Restores all of them."""
        while self._undos:
            self._undos.pop()()


def _set_attribute(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    before = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, make(None if before is _ABSENT else before))
    if before is _ABSENT:
        return partial(delattr, owner, name)
    return partial(setattr, owner, name, before)


def _set_if_imported(
    module: str, owner: str | None, name: str, make: Callable[[Any], Any]
) -> Callable[[], None]:
    if module not in sys.modules:
        return lambda: None
    of = sys.modules[module]
    return _set_attribute(of if owner is None else getattr(of, owner), name, make)


def _set_item(owner: dict, key: Any, value: Any) -> Callable[[], None]:
    owner[key] = value
    return partial(owner.pop, key)


def _set_operand(cls: type, operand: Callable[[Any], Any]) -> Callable[[], None]:
    before = set_operand_conversion(cls, operand) or _refuse

    def undo() -> None:
        set_operand_conversion(cls, before)

    return undo


def _refuse(x: Any) -> Any:
    """As JAX does what is of a type that it does not know."""
    raise InvalidInputException(f"Argument '{x}' of type {type(x)} is not a valid JAX type.")
