"""Implicit arrays that a function captures, turned into children of a pytree.

JAX treats a captured array as a constant, but it does not know implicit arrays. So `open_closure`
converts a function that captures implicit arrays to a `Closure`, a pytree with the captured objects
as children, and `close` rebuilds the function from the children. Captured objects are:

- the variables of enclosing scopes, which may be functions and containers;
- the global variables of the module that are implicit arrays. A function or a container among the
  globals is not searched, because a module is too large to search in each call;
- defaults, the arguments of `functools.partial`, and the object of a bound method.

A function that captures no implicit array is left unchanged. A variable that a function assigns is
left unchanged, too. Containers are copied, like containers in arguments. Wrapped functions
(`jax.jit`, `jax.custom_vjp`) are not opened. If one captures an implicit array, `operands.py`
handles the array.
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
    """A function as a pytree whose children are the objects that the function captures."""

    captured: list[Any]
    close: Callable[[list[Any]], Callable]  # returns the function with other captured objects
    names: tuple[str, ...]  # the names of the captured objects, for paths in messages
    function: Callable  # the original function

    def tree_flatten_with_keys(self) -> tuple[list[Any], Any]:
        keys = map(jax.tree_util.DictKey, self.names)
        children = list(zip(keys, self.captured, strict=True))
        return children, (self.close, self.names, self.function)

    @classmethod
    def tree_unflatten(cls, settings: Any, children: Iterable[Any]) -> "Closure":
        return cls(list(children), *settings)


def may_capture(function: Any) -> bool:
    """Return whether a function can capture an object. If not, it needs no `open_closure`."""
    return type(function) is not FunctionType or bool(
        function.__closure__
        or function.__defaults__
        or function.__kwdefaults__
        or any(code.co_names for code in _codes(function.__code__))
    )


def open_closure(function: Any, opening: tuple[Any, ...] = ()) -> Any:
    """Return a `Closure` if a function captures an implicit array, else the function itself.

    `opening` are the enclosing functions that are being opened, to stop at a recursive function.
    """
    opener = _OPENERS.get(type(function))
    if opener is None or function in opening:
        return function
    return opener(function, (*opening, function))


def close(function: Any) -> Any:
    """Return the function that a `Closure` represents. Return anything else unchanged."""
    if type(function) is not Closure:
        return function
    return function.close(jax.tree.map(close, function.captured, is_leaf=_is_closure_or_opaque))


def reject_assignments(closure: Any) -> None:
    """Raise `TypeError` if a call of a closure assigned a variable that holds implicit arrays.

    The call ran a copy of the function, so the new content of the variable would be lost.
    """
    if type(closure) is not Closure:
        return
    for part in jax.tree.leaves(closure.captured, is_leaf=_is_closure_or_opaque):
        reject_assignments(part)
    rebuild: Any = closure.close  # has `cell_contents` if it is a `_Rebuild`
    for cell, content in getattr(rebuild, "cell_contents", ()):
        is_assigned = not _is_filled(cell) or cell.cell_contents is not content
        if is_assigned:
            raise TypeError(
                f"{rebuild.function.__qualname__} captures an implicit array in a variable "
                "that it assigns. vn.implicit would lose the new value. Pass the array as an "
                "argument, and return the new value."
            )


def _is_closure_or_opaque(x: Any) -> bool:
    return type(x) is Closure or isinstance(x, OpaqueNode)


def _holds_values(tree: Any) -> bool:
    """Return whether an implicit array is among the leaves of a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=is_opaque_leaf)
    return any(isinstance(x, Value) for x in leaves)


def _open_function(function: FunctionType, opening: tuple[Any, ...]) -> Any:
    """Return a `Closure` of a Python function, or the function if it captures no implicit array."""
    cells, variables = function.__closure__ or (), function.__globals__
    global_names = _captured_globals(function.__code__, variables)
    if not (cells or global_names or function.__defaults__ or function.__kwdefaults__):
        return function
    assigned = _assigned_cells(function, set())
    contents = {  # by the index of the cell
        i: open_closure(cell.cell_contents, opening)
        for i, cell in enumerate(cells)
        if _is_filled(cell) and id(cell) not in assigned
    }
    # Cells without implicit arrays keep the same objects: a function may append to a list.
    opened_cells = {i: content for i, content in contents.items() if _holds_values(content)}
    globals_and_defaults = [variables[name] for name in global_names]
    globals_and_defaults += [function.__defaults__, function.__kwdefaults__]
    opened_others = [open_closure(x, opening) for x in globals_and_defaults]
    captured = [*opened_cells.values(), *opened_others]
    if not _holds_values(captured):
        return function
    cell_names = [function.__code__.co_freevars[i] for i in opened_cells]
    names = (*cell_names, *global_names, "defaults", "keyword defaults")
    return Closure(captured, _Rebuild(function, list(opened_cells), global_names), names, function)


def _assigned_cells(function: Any, seen: set[int]) -> set[int]:
    """Return the ids of the closure cells that a function, or a function in a cell, assigns.

    `seen` are the ids of the functions that were searched already.
    """
    if type(function) is not FunctionType or id(function) in seen:
        return set()
    seen.add(id(function))
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    assigned_names = _assigned_names(function.__code__) if cells else ()
    assigned = {id(cell) for name, cell in zip(names, cells, strict=True) if name in assigned_names}
    for cell in cells:
        if _is_filled(cell):
            assigned |= _assigned_cells(cell.cell_contents, seen)
    return assigned


@lru_cache(maxsize=4096)
def _assigned_names(code: CodeType) -> frozenset[str]:
    """Return the names of the variables of enclosing scopes that a function assigns."""
    instructions = [i for c in _codes(code) for i in dis.get_instructions(c)]
    return frozenset(i.argval for i in instructions if i.opname in ("STORE_DEREF", "DELETE_DEREF"))


class _Overlay(dict[str, Any]):
    """The global variables of a module with new values for some. The others are read live."""

    def __init__(self, module: dict[str, Any], replaced: Iterable[tuple[str, Any]]):
        super().__init__(module)  # imports and class bodies do not call __getitem__
        self._module, self._replaced = module, dict(replaced)
        self.update(self._replaced)

    def __getitem__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else self._module[name]


class _Rebuild:
    """A callable that copies a function with new contents of some cells and global variables."""

    def __init__(self, function: FunctionType, cell_indices: list[int], global_names: list[str]):
        self.function = function
        self.cell_indices, self.global_names = cell_indices, global_names
        self.cell_contents: list[tuple[CellType, Any]] = []  # for `reject_assignments`

    def __call__(self, captured: list[Any]) -> Callable:
        old = self.function
        *contents, defaults, keyword_defaults = captured  # in the order of `_open_function`
        cell_count = len(self.cell_indices)
        cells = list(old.__closure__ or ())
        for i, content in zip(self.cell_indices, contents[:cell_count], strict=True):
            old_cell, cells[i] = cells[i], CellType(content)
            self.cell_contents += [(old_cell, old_cell.cell_contents), (cells[i], content)]
        variables = old.__globals__
        if self.global_names:
            replaced = zip(self.global_names, contents[cell_count:], strict=True)
            variables = _Overlay(variables, replaced)
        new = FunctionType(old.__code__, variables, old.__name__, defaults, tuple(cells) or None)
        new.__kwdefaults__ = keyword_defaults
        new.__dict__.update(old.__dict__)
        new.__qualname__, new.__module__ = old.__qualname__, old.__module__
        return new


def _open_method(method: MethodType, opening: tuple[Any, ...]) -> Any:
    captured = [open_closure(x, opening) for x in (method.__self__, method.__func__)]
    rebuild = lambda captured: MethodType(captured[1], captured[0])  # of function and object
    closure = Closure(captured, rebuild, ("self", "method"), method)
    return closure if _holds_values(captured) else method


def _open_partial(function: partial, opening: tuple[Any, ...]) -> Any:
    parts = (function.func, function.args, function.keywords)
    captured = [open_closure(x, opening) for x in parts]
    rebuild = lambda captured: partial(captured[0], *captured[1], **captured[2])
    closure = Closure(captured, rebuild, ("function", "args", "keywords"), function)
    return closure if _holds_values(captured) else function


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


def _captured_globals(code: CodeType, variables: dict[str, Any]) -> list[str]:
    """Return the names of the global variables that a function reads and that are implicit arrays.

    Return an empty list if the function assigns any global variable, because an `_Overlay` would
    lose the new value.
    """
    codes = list(_codes(code))
    if not any(isinstance(variables.get(name), Value) for c in codes for name in c.co_names):
        return []  # the usual case, without disassembling the code
    instructions = [i for c in codes for i in dis.get_instructions(c)]
    if any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for i in instructions):
        return []
    read_names = dict.fromkeys(i.argval for i in instructions if i.opname == "LOAD_GLOBAL")
    return [name for name in read_names if isinstance(variables.get(name), Value)]
