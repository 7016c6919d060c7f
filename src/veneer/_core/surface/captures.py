"""Implicit arrays that a function captures, turned into children of a pytree.

JAX treats a captured array as a constant, but it does not know implicit arrays. So `open_closure`
converts a function that captures implicit arrays to a `Closure`, a pytree with the captured objects
as children, and `close` rebuilds the function from the children. Captured objects are:

- the variables of enclosing scopes, with the functions and containers among them;
- the variables of the module that are implicit arrays, but not functions or containers that hold
  implicit arrays: a module is too large to search in each call;
- defaults, the arguments of `functools.partial`, and the object of a bound method.

A function that captures no implicit array is left unchanged, and so are variables that functions
assign. Containers are copied, like those in arguments. Wrapped functions (`jax.jit`,
`jax.custom_vjp`) are not opened: an implicit array that they capture is an operand (`operands.py`).
"""

import dis
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import jax

from ..value import OpaqueNode, Value, is_opaque_leaf


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Closure:
    """A function as a pytree: the captured objects, and a function that puts them back."""

    captured: list[Any]
    close: Callable[[list[Any]], Callable]
    names: tuple[str, ...]  # of the captured objects
    function: Callable  # the original

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.captured, (self.close, self.names, self.function)

    def tree_flatten_with_keys(self) -> tuple[list[Any], Any]:
        keys = map(jax.tree_util.DictKey, self.names)
        return list(zip(keys, self.captured, strict=True)), self.tree_flatten()[1]

    @classmethod
    def tree_unflatten(cls, settings: Any, children: Iterable[Any]) -> "Closure":
        return cls(list(children), *settings)


def may_capture(function: Any) -> bool:
    """Return whether a function can capture anything, so that each call must open it."""
    return type(function) is not FunctionType or bool(
        function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
        or any(code.co_names for code in _codes(function.__code__))
    )


def open_closure(function: Any, within: tuple[Any, ...] = ()) -> Any:
    """Return a `Closure` if a function captures an implicit array, else the function itself."""
    opener = _OPENERS.get(type(function))
    if opener is None or function in within:  # a recursive function captures itself
        return function
    return opener(function, (*within, function))


def close(function: Any) -> Any:
    """Undo `open_closure`."""
    if type(function) is not Closure:
        return function
    return function.close(jax.tree.map(close, function.captured, is_leaf=_is_part))


def reject_assignments(closure: Any) -> None:
    """Reject a call that assigned a variable with implicit arrays, whose new value is lost."""
    if type(closure) is not Closure:
        return
    for part in jax.tree.leaves(closure.captured, is_leaf=_is_part):
        reject_assignments(part)
    remake: Any = closure.close
    for cell, content in getattr(remake, "cells", ()):
        if not _is_filled(cell) or cell.cell_contents is not content:
            raise TypeError(
                f"{remake.function.__qualname__} captures an implicit array in a variable "
                "that it assigns. vn.implicit would lose the new value. Pass the array as an "
                "argument, and return the new value."
            )


def _is_part(x: Any) -> bool:
    return type(x) is Closure or isinstance(x, OpaqueNode)


def _open_all(items: Iterable[Any], within: tuple[Any, ...]) -> list[Any] | None:
    """Open the functions among the items. Return None if the items hold no implicit array."""
    opened = [open_closure(item, within) for item in items]
    return opened if _holds_values(opened) else None


def _holds_values(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_opaque_leaf)
    return any(isinstance(x, Value) for x in leaves)


def _open_function(function: FunctionType, within: tuple[Any, ...]) -> Any:
    names = _captured_names(function.__code__, function.__globals__)
    if names or function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return _open_captures(function, names, within)
    return function


def _open_captures(function: FunctionType, names: list[str], within: tuple[Any, ...]) -> Any:
    cells, variables = function.__closure__ or (), function.__globals__
    written = _written_cells(function, set())
    contents = {
        i: open_closure(cell.cell_contents, within)
        for i, cell in enumerate(cells)
        if _is_filled(cell) and id(cell) not in written
    }
    # Other contents stay the same objects: a function may append to a list.
    opened = {i: content for i, content in contents.items() if _holds_values(content)}
    rest = [*(variables[n] for n in names), function.__defaults__, function.__kwdefaults__]
    captured = [*opened.values(), *(open_closure(item, within) for item in rest)]
    if not _holds_values(captured):
        return function
    free = function.__code__.co_freevars
    named = (*(free[i] for i in opened), *names, "defaults", "keyword defaults")
    return Closure(captured, _Remake(function, list(opened), names), named, function)


def _written_cells(function: Any, seen: set[int]) -> set[int]:
    """Return the ids of the cells that a function, or a function that it captures, assigns.

    They must stay the same cells, so they are not opened.
    """
    if type(function) is not FunctionType or id(function) in seen:
        return set()
    seen.add(id(function))
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    stored = _stored_names(function.__code__) if cells else ()
    written = {id(cell) for name, cell in zip(names, cells, strict=True) if name in stored}
    for cell in cells:
        if _is_filled(cell):
            written |= _written_cells(cell.cell_contents, seen)
    return written


@lru_cache(maxsize=4096)
def _stored_names(code: CodeType) -> frozenset[str]:
    instructions = [i for c in _codes(code) for i in dis.get_instructions(c)]
    return frozenset(i.argval for i in instructions if i.opname in ("STORE_DEREF", "DELETE_DEREF"))


class _Overlay(dict[str, Any]):
    """The variables of a module, some of them replaced. Others have their current values."""

    def __init__(self, module: dict[str, Any], replaced: Iterable[tuple[str, Any]]):
        super().__init__(module)  # imports and class bodies do not call __getitem__
        self._module, self._replaced = module, dict(replaced)
        self.update(self._replaced)

    def __getitem__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else self._module[name]


class _Remake:
    """A copy of a function, with new contents of its cells, module variables and defaults."""

    def __init__(self, function: FunctionType, opened: list[int], names: list[str]):
        self.function, self.opened, self.names = function, opened, names
        self.cells: list[tuple[CellType, Any]] = []  # old and new cells, with their contents

    def __call__(self, captured: list[Any]) -> Callable:
        old = self.function
        *contents, defaults, keyword_defaults = captured
        rest = iter(contents)
        cells = list(old.__closure__ or ())
        for i in self.opened:
            content = next(rest)
            self.cells.append((cells[i], cells[i].cell_contents))
            cells[i] = CellType(content)
            self.cells.append((cells[i], content))
        variables = old.__globals__
        if self.names:
            variables = _Overlay(variables, zip(self.names, rest, strict=True))
        new = FunctionType(old.__code__, variables, old.__name__, defaults, tuple(cells) or None)
        new.__kwdefaults__ = keyword_defaults
        new.__dict__.update(old.__dict__)
        new.__qualname__, new.__module__ = old.__qualname__, old.__module__
        return new


def _open_method(method: MethodType, within: tuple[Any, ...]) -> Any:
    captured = _open_all([method.__self__, method.__func__], within)
    if captured is None:
        return method
    return Closure(captured, lambda c: MethodType(c[1], c[0]), ("self", "method"), method)


def _open_partial(function: partial, within: tuple[Any, ...]) -> Any:
    captured = _open_all([function.func, function.args, function.keywords], within)
    if captured is None:
        return function
    remake = lambda c: partial(c[0], *c[1], **c[2])
    return Closure(captured, remake, ("function", "args", "keywords"), function)


_OPENERS: dict[type, Callable[[Any, tuple[Any, ...]], Any]] = {
    FunctionType: _open_function,
    MethodType: _open_method,
    partial: _open_partial,
}


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and the code objects of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _codes(constant)


def _captured_names(code: CodeType, variables: dict[str, Any]) -> list[str]:
    """Return the module variables that a function reads and that are implicit arrays.

    Return none if it assigns a module variable, because an `_Overlay` would lose the new value.
    """
    codes = list(_codes(code))
    if not any(isinstance(variables.get(name), Value) for c in codes for name in c.co_names):
        return []  # the usual case, without disassembling the code
    instructions = [i for c in codes for i in dis.get_instructions(c)]
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in instructions):
        return []
    read = dict.fromkeys(i.argval for i in instructions if i.opname == "LOAD_GLOBAL")
    return [name for name in read if isinstance(variables.get(name), Value)]
