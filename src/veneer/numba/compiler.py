"""`vn.numba.compile`: a JAX function as a native function of NumPy arrays."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten, treedef_is_leaf

from ..native.cache import COMPILING
from ..native.machine_code import load
from . import ops as ops
from .codegen import storage
from .codegen.arrays import ArrayExpr, Buffer
from .codegen.builder import Builder
from .codegen.calls import Calls, Fallbacks
from .codegen.graph import Graph, key_data, trace
from .codegen.program import Source, finish
from .entry import ENTRY, PROGRAM, cached, make_entry, register_symbols


class Compiled:
    """A function that `vn.numba.compile` has compiled.

    It takes the same positional arguments as the original function, and returns NumPy arrays.
    """

    __call__: Callable[..., Any]

    def __init__(self, name: str, source: Source, in_tree: Any, out_tree: Any):
        self._name, self._source = name, source
        self._in_tree, self._out_tree = in_tree, out_tree
        self._address, self._entry, self._raw = 0, None, None
        self._calls = Calls()

    @property
    def source(self) -> str:
        """The generated Python program that Numba compiles, with one function per kernel."""
        return self._source.text

    @property
    def raw(self) -> Any:
        """The program as a Numba dispatcher, which other `numba.njit` functions can call.

        It takes the leaves of the arguments, and returns the result or a tuple of the leaves of
        the results. Scalars are numbers. An integer that does not fit raises `OverflowError`. Numba
        cannot cache functions that call it, because they refer to memory of this process.
        """
        run_by_jax = getattr(self._calls, "primitives", ())
        if run_by_jax:
            raise NotImplementedError(
                f"{self} has no .raw, because it calls JAX for {', '.join(run_by_jax)}. Register "
                "rules for these primitives with @vn.numba.funcify.register."
            )
        with COMPILING:
            if self._raw is None:
                from .codegen.njit_functions import raw_function  # imports Numba

                self._raw = raw_function(self._source, self._address, self._entry)
            return self._raw

    def __copy__(self) -> "Compiled":
        return self

    def __deepcopy__(self, memo: Any) -> "Compiled":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self} cannot be pickled, because it has memory addresses of this process. Call "
            "vn.numba.compile in the process that calls it; the native code is cached on disk."
        )

    def __repr__(self) -> str:
        args = ", ".join(
            f"{memory.dtype}{[*shape]}"
            for memory, shape in zip(self._source.inputs, self._source.input_shapes, strict=True)
        )
        return f"<vn.numba.compile of {self._name}({args})>"


def compile(
    f: Callable[..., Any], *example_args: Any, fallback: Literal["jax"] | None = None
) -> Any:
    """Compile a JAX function to native code. A call has an overhead of about a microsecond.

    **Arguments:**

    - `f`: a function of pytrees of arrays that JAX can trace. Its arguments and captured variables
      may be implicit arrays, as under `vn.implicit`.
    - `example_args`: arguments of `f`, which may contain `jax.ShapeDtypeStruct`s. The arguments of
      all calls must have the same structure, shapes and dtypes. Random keys may be typed keys or
      their data, `uint32[..., 2]`. Keys among the results are returned as data.
    - `fallback`: `"jax"` lets JAX run primitives without a rule, which takes tens of microseconds
      each. A warning names these primitives and their lines, and the compiled function has no
      attribute `raw`. With the default None, `compile` raises an error instead.

    **Returns:** a function of the same positional arguments that returns NumPy arrays in the
    structure of the results of `f`. Its attribute `source` is the generated program. Its attribute
    `raw` is a function that other `numba.njit` code can call. C-contiguous NumPy arguments are not
    copied, and no argument is modified. If `jax_enable_x64` is not set, 64-bit arguments are
    converted to 32 bits, as under `jax.jit`.

    **Raises:**

    - `NotImplementedError` if `vn.numba` does not support a primitive, one of its parameters or a
      dtype, or if a shape is not static.
    - `ValueError` if `fallback` is neither None nor `"jax"`.
    - The error that JAX raises if a shape depends on values, as in `jnp.nonzero(x)`.
    - A call raises `TypeError` if the structure, a shape or a dtype of the arguments differs from
      `example_args`, and `OverflowError` if an integer does not fit its dtype.

    >>> import jax.numpy as jnp, numpy as np, veneer as vn
    >>> f = vn.numba.compile(lambda x: jnp.tanh(x).sum(), np.ones(3, np.float32))
    >>> f(np.zeros(3, np.float32))
    array(0., dtype=float32)
    """
    if fallback not in (None, "jax"):
        raise ValueError(f"fallback must be None or 'jax', not {fallback!r}.")
    calls = Calls() if fallback is None else Fallbacks()
    with COMPILING:  # also while tracing, because JAX takes locks for it
        graph, in_tree, out_tree = trace(f, example_args)
        name = getattr(f, "__name__", type(f).__name__)
        compiled = Compiled(name, source_of(graph, calls), in_tree, out_tree)
        compiled._calls = calls
        if isinstance(calls, Fallbacks) and calls.primitives:
            calls.warn(name)
        return _make_callable(compiled)


def source_of(graph: Graph, calls: Calls | None = None) -> Source:
    """Generate the program of a graph.

    If `calls` is a `Fallbacks`, JAX runs the primitives that have no rule.
    """
    b = Builder(calls)
    for variable in (*graph.inputs, *graph.outputs):
        if not storage.is_supported(variable.aval.dtype):
            raise NotImplementedError(
                f"vn.numba has no arrays of dtype {variable.aval.dtype}. The function has one as "
                "an argument or a result."
            )
    inputs = [b.program.input(v.aval.shape, v.aval.dtype) for v in graph.inputs]
    for value in b.run(graph, inputs):
        b.program.output(_result(b, value))
    b.calls.end(b)
    return finish(b.program)


def _result(b: Builder, value: ArrayExpr) -> Buffer:
    """Return `value` in a block of work memory that has no other array. Copy it if necessary.

    The block becomes a result of the program.
    """
    buffer = b.force(value)
    memory = buffer.memory
    if memory.kind == "work" and memory.alias is None and buffer.size == memory.size:
        return buffer
    return b.copy(value)


def _make_callable(compiled: Compiled) -> Any:
    source = compiled._source
    register_symbols(source.names.values())

    def make() -> bytes:
        from .machine import object_code  # imports Numba

        return object_code(source)

    code = cached(source.key, make)
    address, compiled._address = load(code, ENTRY, PROGRAM)
    entry = make_entry(
        address,
        compiled._address,
        compiled._name,
        source,
        lambda *args, **named: slow(*args, **named),
    )

    def slow(*args: Any, **named: Any) -> Any:
        if named:
            raise TypeError(
                f"{compiled} was called with the keyword {', '.join(map(repr, named))}. Pass all "
                "arguments by position, as to vn.numba.compile."
            )
        if len(args) != len(source.inputs):
            count = len(source.inputs)
            raise TypeError(f"{compiled} takes {count} array{'s' * (count != 1)}, not {len(args)}.")
        return entry(*(_convert_argument(x, n, compiled) for n, x in enumerate(args)))

    compiled._entry = entry
    call = _tree_function(compiled._calls.with_errors(entry), compiled._in_tree, compiled._out_tree)
    # Python finds `__call__` faster on a class than through an instance.
    compiled.__class__ = type("Compiled", (Compiled,), {"__call__": staticmethod(call)})
    return compiled


def _convert_argument(x: Any, number: int, compiled: Compiled) -> np.ndarray:
    """Return the argument `x` of a compiled function as the array that its program takes.

    `number` is the position of the argument. Raise `TypeError` if its shape or dtype differs, and
    `OverflowError` if an integer does not fit.
    """
    source = compiled._source
    shape, dtype = source.input_shapes[number], source.inputs[number].dtype
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"Argument {number} is a masked array, but {compiled} does not support masks. Fill the "
            "masked entries with x.filled(value)."
        )
    if type(x) is int and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= x <= limits.max:
            raise OverflowError(
                f"Argument {number} is {x}, which {dtype} of {compiled} cannot hold."
            )
    array = np.asarray(key_data(x))
    if type(x) in _KINDS:
        fits = _KINDS[type(x)] <= _KIND_OF.get(dtype.kind, 0)
    else:
        wide = source.wide_dtype(dtype) or dtype
        fits = array.dtype.newbyteorder("=") in (dtype, wide)
    if array.shape != shape or not fits:
        raise TypeError(
            f"Argument {number} is {array.dtype}{[*array.shape]}, but {compiled} takes "
            f"{dtype}{[*shape]}. Compile it again for other shapes or dtypes."
        )
    exact = np.empty(shape, dtype)
    if array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned:
        viewed = array.view(dtype)
        if viewed.dtype is dtype and type(viewed) is np.ndarray:
            return viewed
    exact[...] = array
    if dtype.kind in "iu" and not np.array_equal(exact, array):
        raise OverflowError(
            f"Argument {number} is {array.dtype}{[*shape]}, but {compiled} takes {dtype}, which "
            f"cannot hold {array[exact != array].flat[0]}."
        )
    return exact


# Ranks of Python types and dtype kinds. A number fits a dtype of the same or a higher rank. "V" is
# the kind of bfloat16.
_KINDS = {bool: 1, int: 2, float: 3, complex: 4}
_KIND_OF = {"b": 1, "i": 2, "u": 2, "f": 3, "V": 3, "c": 4}


# Functions of pytrees. For tuples, lists and dicts, their code is generated for one tree structure,
# because `jax.tree` takes longer than many compiled programs.


def _tree_function(entry: Callable[..., Any], in_tree: Any, out_tree: Any) -> Callable[..., Any]:
    """Return a function of pytrees that calls `entry`, the function of a program, with all leaves.

    It raises `TypeError` if the arguments have another structure than `in_tree`. `entry` returns
    one leaf, or a tuple of leaves. The function returns them as a pytree of the structure
    `out_tree`.
    """
    arguments = in_tree.children()
    if all(map(_is_leaf, arguments)) and _is_leaf(out_tree):
        return entry

    def call_any(*args: Any) -> Any:
        leaves, tree = tree_flatten(args)
        if tree != in_tree:
            raise TypeError(f"The arguments must have the structure {in_tree}, not {tree}.")
        results = entry(*leaves)
        return tree_unflatten(out_tree, results if type(results) is tuple else (results,))

    source = _tree_function_source(arguments, out_tree)
    if source is None:
        return call_any
    names = {"entry": entry, "call_any": call_any}
    exec(source, names)
    return names["call"]


def _tree_function_source(arguments: list[Any], out_tree: Any) -> str | None:
    """Return the source of a function of pytrees, or None if it cannot be generated.

    The function checks the structure of its arguments, and calls `entry` with the leaves. It can be
    generated if all nodes of the trees are tuples, lists and dicts.
    """
    names = [f"x{n}" for n in range(len(arguments))]
    reader = _Reader()
    leaves = [
        leaf
        for name, tree in zip(names, arguments, strict=True)
        for leaf in reader.read(name, tree)
    ]
    results = [f"y{n}" for n in range(out_tree.num_leaves)]
    built = _tree_expression(out_tree, iter(results))
    if built is None or reader.failed:
        return None
    called = f"entry({', '.join(f'leaf{n}' for n in range(len(leaves)))})"
    # Leaves are read within `try`, because a dict may have other keys.
    read = [f"            leaf{n} = {place}" for n, place in enumerate(leaves)]
    left = f"{', '.join(results)} = " if results else ""
    return "\n".join([
        f"def call({', '.join(names)}):",
        "    try:",
        f"        fits = {' and '.join(reader.checks) or 'True'}",
        "        if fits:",
        *(read or ["            pass"]),
        "    except KeyError:",
        "        fits = False",
        "    if not fits:",
        f"        return call_any({', '.join(names)})",
        f"    {left}{called}",
        f"    return {built}",
    ])  # fmt: skip


class _Reader:
    """A generator of code that checks the structure of pytrees and reads their leaves.

    `checks` are the conditions to check. `failed` is set if a tree has a node that is not a tuple,
    list or dict.
    """

    def __init__(self) -> None:
        self.checks: list[str] = []
        self.failed = False
        self._n_nodes = 0

    def read(self, place: str, tree: Any) -> Iterator[str]:
        """Yield an expression for each leaf of a pytree, given its structure `tree`.

        `place` is the expression of the pytree itself, such as "x0[1]".
        """
        if _is_leaf(tree):
            yield place
            return
        kind, keys = _kind_of(tree)
        if kind in (None, type(None)):
            self.checks.append(f"({place}) is None")
            return
        if kind not in (tuple, list, dict) or (kind is dict and not _has_literal_keys(keys)):
            self.failed = True
            return
        name, self._n_nodes = f"node{self._n_nodes}", self._n_nodes + 1
        children = tree.children()
        self.checks.append(f"type({name} := {place}) is {kind.__name__}")
        self.checks.append(f"len({name}) == {len(children)}")
        for n, child in enumerate(children):
            yield from self.read(f"{name}[{keys[n]!r}]" if kind is dict else f"{name}[{n}]", child)


def _kind_of(tree: Any) -> tuple[Any, Any]:
    """Return the class of the root node of a tree structure, and its keys if it is a dict."""
    return tree.node_data() or (None, None)


def _is_leaf(tree: Any) -> bool:
    return bool(treedef_is_leaf(tree)) and tree.num_leaves == 1  # None has no leaves


def _has_literal_keys(keys: Any) -> bool:
    """Return whether the keys of a dict can be written in generated code by their `repr`."""
    return all(type(key) in (str, int, bool) for key in keys)


def _tree_expression(tree: Any, leaves: Iterator[str]) -> str | None:
    """Return an expression that builds a pytree of a structure from expressions for its leaves.

    Return None if a node is not a tuple, list or dict.
    """
    if _is_leaf(tree):
        return next(leaves)
    kind, keys = _kind_of(tree)
    if kind in (None, type(None)):
        return "None"
    children = [_tree_expression(child, leaves) for child in tree.children()]
    if None in children:
        return None
    if kind is dict and _has_literal_keys(keys):
        pairs = zip(keys, children, strict=True)
        return f"{{{', '.join(f'{key!r}: {child}' for key, child in pairs)}}}"
    if kind is tuple:
        return f"({''.join(f'{child}, ' for child in children)})"
    return f"[{', '.join(map(str, children))}]" if kind is list else None
