"""`implicit`, the transformation that users call, with filters, policies and captured arrays.

JAX treats an array that a function captures as a constant, but it does not know implicit arrays. So
`open_closure` converts a function that captures implicit arrays to a `Closure`, a pytree with the
captured objects as children, and `close` rebuilds the function from the children. Captured objects
are:

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
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.tree_util import treedef_is_leaf

from ..policy import (
    ALLOW,
    OnMaterialise,
    Policy,
    current_policy,
    nested_policy,
    policy_of,
    set_variable,
)
from ..sources import leaf_sources, tag_sources, with_source
from ..trace import Program, run
from ..value import OpaqueNode, Value, has_all_leaves, is_opaque_leaf, source_of

P = ParamSpec("P")
R = TypeVar("R")
FilterSpec = Any  # bool | Callable[[Value], bool] | a pytree of them


def _missing() -> None:
    """The default of `fn`. With this default, `implicit` returns a decorator."""


@overload
def implicit(
    fn: Callable[P, R],
    filter_spec: FilterSpec = True,
    *,
    on_materialise: OnMaterialise = "allow",
) -> Callable[P, R]: ...


@overload
def implicit(
    *, filter_spec: FilterSpec = True, on_materialise: OnMaterialise = "allow"
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def implicit(
    fn: Callable = _missing,
    filter_spec: FilterSpec = True,
    *,
    on_materialise: OnMaterialise = "allow",
) -> Callable:
    """Transform a function so that it takes implicit arrays and runs the rules of their types.

    This is a JAX transformation like `jax.vmap`, and composes with the others.
    `jax.grad(implicit(f))` differentiates with respect to the leaves of an implicit array, such
    as LoRA's `a` and `b`. `implicit(jax.grad(f))` differentiates with respect to the dense array
    and returns dense gradients. A primitive that no rule fits runs on materialized operands.

    **Arguments:**

    - `fn`: a function of pytrees, or a callable pytree such as a module. Implicit arrays that it
      captures are treated like arguments. Without `fn`, `implicit` returns a decorator.
    - `filter_spec`: which implicit arrays use their rules: a bool, a function from an implicit
      array to a bool, or a pytree of these that is a prefix of `(fn, args, kwargs)`. `fn` gets the
      other implicit arrays unchanged, and can pass them to a nested call of `implicit`.
    - `on_materialise`: what happens if an operand is materialized. A nested call of `implicit`
      with `"allow"`, the default, uses the setting of the outer call.

      | value | effect |
      |---|---|
      | `"allow"` | nothing |
      | `"warn"` | a `vn.MaterialiseWarning` is emitted |
      | `"error"` | a `vn.MaterialiseError` is raised |
      | `"warn_weights"`, `"error_weights"` | the same, only for weights (see `vn.Event`) |
      | a callable | it is called with the `vn.Event` |

    **Returns:** a function of the same arguments, which may return implicit arrays. If `fn` is a
    pytree, the result is a callable pytree with the same leaves.

    **Raises:** `TypeError` if `fn` is not callable or `filter_spec` holds arrays. `ValueError` if
    `on_materialise` is not in the table, or if `filter_spec` does not match `(fn, args, kwargs)`.

    >>> import jax, jax.numpy as jnp, veneer as vn
    >>> w = vn.quant.quantize(jnp.eye(2), "nf4")
    >>> vn.implicit(lambda x, w: x @ w)(jnp.ones((1, 2)), w).tolist()
    [[1.0, 1.0]]
    >>> vn.implicit(jnp.sin, on_materialise="error")(w)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    veneer.MaterialiseError: sin(QArray:f32[2,2]) at ...
    """
    policy = policy_of(on_materialise)
    if fn is _missing:
        return partial(implicit, filter_spec=filter_spec, on_materialise=on_materialise)
    if filter_spec is not True or not callable(fn):
        _check_arguments(fn, filter_spec)
    if not treedef_is_leaf(jax.tree.structure(fn)):
        return Implicit(fn, filter_spec, policy)

    has_captures = may_capture(fn)

    @wraps(fn, updated=())
    def implicit_fn(*args: Any, **kwargs: Any) -> Any:
        return _run(open_closure(fn) if has_captures else fn, filter_spec, policy, args, kwargs)

    return implicit_fn


@jax.tree_util.register_dataclass
@dataclass(eq=False, repr=False)
class Implicit:
    """The result of `implicit` for a callable pytree `fn`, such as a module: a callable pytree."""

    fn: Any
    filter_spec: FilterSpec = field(metadata={"static": True})
    policy: Policy = field(metadata={"static": True})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.fn, self.filter_spec, self.policy, args, kwargs)

    def __repr__(self) -> str:
        return f"implicit({self.fn!r})"


def _run(fn: Any, filter_spec: FilterSpec, policy: Policy, args: Any, kwargs: Any) -> Any:
    """Call `fn` with the rules of the implicit arrays that `filter_spec` selects."""
    program = fn, args, kwargs
    select = None if filter_spec is True else partial(_select_leaves, filter_spec)
    with nested_policy(policy):
        if current_policy() is ALLOW or filter_spec is False:  # no report needs names of weights
            out = run(_call_closure, program, select)
        else:
            out = _run_with_paths(program, select)
    reject_assignments(fn)
    return out


def _call_closure(program: Program) -> Any:
    """Call a program, the triple `(fn, args, kwargs)`. `fn` may be a `Closure`."""
    fn, args, kwargs = program
    return close(fn)(*args, **kwargs)


def _select_leaves(filter_spec: FilterSpec, program: Program) -> list[bool]:
    """Return, for each leaf of a program `(fn, args, kwargs)`, whether `filter_spec` selects it."""

    def select(spec: Any, subtree: Any) -> Any:
        choose = spec if callable(spec) else lambda _: bool(spec)
        is_selected = lambda x: isinstance(x, Value) and has_all_leaves(x) and bool(choose(x))
        return jax.tree.map(is_selected, subtree, is_leaf=is_opaque_leaf)

    is_spec = lambda x: isinstance(x, bool) or callable(x)
    try:
        return jax.tree.leaves(jax.tree.map(select, filter_spec, program, is_leaf=is_spec))
    except ValueError as error:
        raise ValueError(
            "filter_spec must be a bool, a predicate, or a pytree of them that is a prefix of "
            f"(fn, args, kwargs): {error}"
        ) from None


_has_paths: ContextVar[bool] = ContextVar("has_paths", default=False)


def _run_with_paths(program: Program, select: Any) -> Any:
    """Run a program, and let reports name each implicit array by its path, such as `layer.kernel`.

    `program` is the triple `(fn, args, kwargs)`, and `select` is the argument of `trace.run`. In a
    nested call of `implicit`, keep the paths that the outer call has set.
    """
    if _has_paths.get():
        return run(_call_closure, tag_sources(program), select)
    fn, args, _ = program
    names = _argument_names(fn.function if isinstance(fn, Closure) else fn, len(args))

    def name_weight(path: Any, x: Any) -> Any:
        if not isinstance(x, Value):
            return x
        copy = jax.tree.map(lambda leaf: leaf, x)  # do not change the caller's object
        return with_source(copy, (_path_string(*path, names=names),))

    named = jax.tree.map_with_path(name_weight, program, is_leaf=is_opaque_leaf)
    leaves = jax.tree.leaves(named, is_leaf=is_opaque_leaf)
    pairs = [(x, source_of(x)) for x in leaves]
    with set_variable(_has_paths, True), leaf_sources(pairs):
        return run(_call_closure, named, select)


def _path_string(element: Any, *keys: Any, names: Sequence[str]) -> str:
    """Return the path of a leaf of `(fn, args, kwargs)` as text, such as `params.layer.kernel`.

    `element` and `keys` are JAX's keys of the path: `element` selects `fn`, `args` or `kwargs`, and
    `keys` are the keys below. `names` are the names of the positional arguments.
    """
    name = ""  # the name of the argument; empty for a leaf in `fn`
    if element.idx == 1:  # args
        name, keys = names[keys[0].idx], keys[1:]
    elif element.idx == 2:  # kwargs
        name, keys = keys[0].key, keys[1:]
    path = jax.tree_util.keystr(keys, simple=True, separator=".")
    return ".".join(filter(None, (name, path)))


def _argument_names(fn: Any, count: int) -> list[str]:
    """Return the names of `count` positional arguments of a function: `x`, `args.0`, ..."""
    names: list[str] = []
    with suppress(TypeError, ValueError):  # a function without a signature
        for name, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"{name}.{i}" for i in range(count - len(names))]
    return names + [f"args.{i}" for i in range(len(names), count)]


def _check_arguments(fn: Any, filter_spec: FilterSpec) -> None:
    """Raise `TypeError` if `fn` is not callable or `filter_spec` holds arrays other than bools."""
    if not callable(fn):
        shown = type(fn).__name__
        leaves = jax.tree.leaves(fn, is_leaf=is_opaque_leaf)
        is_container = bool(leaves) and leaves[0] is not fn
        if is_container:
            kinds = {"Array" if isinstance(x, jax.Array) else type(x).__name__ for x in leaves}
            shown += f" (leaves: {', '.join(sorted(kinds))})"
        raise TypeError(
            f"vn.implicit takes a function, not an object of type {shown}. Call "
            "vn.implicit(model)(params, x), where model is the function. To get dense arrays, call "
            "vn.materialise(params)."
        )
    if isinstance(filter_spec, bool) or callable(filter_spec):
        return
    if any(hasattr(x, "dtype") and x.dtype != "bool" for x in jax.tree.leaves(filter_spec)):
        raise TypeError(
            "filter_spec holds arrays, but it must be a bool, a predicate, or a pytree of them. "
            "Pass arguments of the function to the result: vn.implicit(f)(params, x)."
        )


# Captured arrays.


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
    """The global variables of a module, with new values for some of them.

    The other variables are read from the module at each access.
    """

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
