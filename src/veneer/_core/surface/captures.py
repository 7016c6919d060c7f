"""What a function closes over, as a pytree: so that a captured implicit array is as an argument.

JAX takes a captured array as a constant, but of a captured implicit array it knows nothing. So a
function is opened here: what it captures becomes the children of a `Closure`, and `close` makes
a function of them, as the original but for that. Captured are the variables of enclosing scopes,
with the functions and containers among them; those variables of its module that are implicit arrays
(and no functions or containers that hold one: a module is too large to search in each call);
defaults, the arguments of `functools.partial`, and the object of a bound method. A function that
captures no implicit array, and no part of one, is left as it is; variables that functions assign
stay what they are, and containers are copied as those of arguments are. Wrapped ones (`jax.jit`,
`jax.custom_vjp`) are not opened: what they capture is an operand where they come to it
(`operands`).
"""

import dis
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import jax

from ..value import Kept, Value, is_kept


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Closure:
    """An opened function: what it captures, as children, and the function that puts it back."""

    captured: list[Any]
    close: Callable[[list[Any]], Callable]
    names: tuple[str, ...]  # of what is captured
    function: Callable  # as it was

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.captured, (self.close, self.names, self.function)

    def tree_flatten_with_keys(self) -> tuple[list[Any], Any]:
        keys = map(jax.tree_util.DictKey, self.names)
        return list(zip(keys, self.captured, strict=True)), self.tree_flatten()[1]

    @classmethod
    def tree_unflatten(cls, settings: Any, children: Iterable[Any]) -> "Closure":
        return cls(list(children), *settings)


def may_capture(function: Any) -> bool:
    """Whether a function could ever capture anything, and need be opened when it is called."""
    return type(function) is not FunctionType or bool(
        function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
        or any(code.co_names for code in _codes(function.__code__))
    )


def open_closure(function: Any, within: tuple[Any, ...] = ()) -> Any:
    """The function, or a `Closure` of it if it captures an implicit array."""
    opener = _OPENERS.get(type(function))
    if opener is None or function in within:  # a function that calls itself captures itself
        return function
    return opener(function, (*within, function))


def close(function: Any) -> Any:
    """The inverse of `open_closure`."""
    return function.close(_close_all(function.captured)) if type(function) is Closure else function


def refuse_assignments(closure: Any) -> None:
    """Refuses that a function assigned variables which were opened: it would be lost."""
    if type(closure) is not Closure:
        return
    for part in jax.tree.leaves(closure.captured, is_leaf=_is_part):
        refuse_assignments(part)
    remake: Any = closure.close
    for cell, content in getattr(remake, "cells", ()):
        if not _is_filled(cell) or cell.cell_contents is not content:
            raise TypeError(
                f"{remake.function.__qualname__} captures an implicit array in a variable "
                "that it assigns. vn.implicit would lose the new value. Pass the array as an "
                "argument, and return the new value."
            )


def _is_part(x: Any) -> bool:
    return type(x) is Closure or isinstance(x, Kept)


def _close_all(tree: Any) -> Any:
    return jax.tree.map(close, tree, is_leaf=_is_part)


def _open_all(items: Iterable[Any], within: tuple[Any, ...]) -> list[Any] | None:
    """The items with functions opened; None if there is no implicit array in them."""
    opened = [open_closure(item, within) for item in items]
    return opened if _holds_values(opened) else None


def _holds_values(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=is_kept)
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
    # Others stay the objects that they are: what a function appends to a list must be in that list.
    opened = {i: content for i, content in contents.items() if _holds_values(content)}
    rest = [*(variables[n] for n in names), function.__defaults__, function.__kwdefaults__]
    captured = [*opened.values(), *(open_closure(item, within) for item in rest)]
    if not _holds_values(captured):
        return function
    free = function.__code__.co_freevars
    named = (*(free[i] for i in opened), *names, "defaults", "keyword defaults")
    return Closure(captured, _Remake(function, list(opened), names), named, function)


def _written_cells(function: Any, seen: set[int]) -> set[int]:
    """The variables of enclosing scopes that a function assigns, or those that it captures do.

    They must stay the same variables, so they are not opened.
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
    """Some variables in place of a module's own, and for the rest the module's, as they are now."""

    def __init__(self, module: dict[str, Any], replaced: Iterable[tuple[str, Any]]):
        super().__init__(module)  # for code that does not ask __getitem__: imports, class bodies
        self._module, self._replaced = module, dict(replaced)
        self.update(self._replaced)

    def __getitem__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else self._module[name]


class _Remake:
    """Makes a function again, with other contents of its cells, module variables and defaults."""

    def __init__(self, function: FunctionType, opened: list[int], names: list[str]):
        self.function, self.opened, self.names = function, opened, names
        self.cells: list[tuple[CellType, Any]] = []  # the old and the new, with what they held

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
    """A code object, and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _codes(constant)


def _captured_names(code: CodeType, variables: dict[str, Any]) -> list[str]:
    """The module variables that code reads and that are implicit arrays.

    Empty if it assigns any module variable: that would be lost in an overlay of them.
    """
    codes = list(_codes(code))
    if not any(isinstance(variables.get(name), Value) for c in codes for name in c.co_names):
        return []  # as a rule, and without taking the code apart
    instructions = [i for c in codes for i in dis.get_instructions(c)]
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in instructions):
        return []
    read = dict.fromkeys(i.argval for i in instructions if i.opname == "LOAD_GLOBAL")
    return [name for name in read if isinstance(variables.get(name), Value)]
