"""`compile`: a JAX function as one of NumPy arrays, which calls nothing of JAX."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ..native.cache import COMPILING
from ..native.machine_code import load
from . import ops as ops
from .backend.cache import cached, register_symbols
from .backend.entry import ENTRY, PROGRAM, make_entry
from .codegen import storage
from .codegen.arrays import ArrayExpr, Buffer
from .codegen.builder import Builder
from .codegen.calls import Calls
from .codegen.fallback import Fallbacks
from .codegen.program import Source, finished
from .front import keys
from .front.graph import Graph, traced
from .front.trees import caller


class Compiled:
    """A compiled function; see `compile`. It is called as the function that it was made of."""

    __call__: Callable[..., Any]

    def __init__(self, name: str, source: Source, in_tree: Any, out_tree: Any):
        self._name, self._source = name, source
        self._in_tree, self._out_tree = in_tree, out_tree
        self._address, self._entry, self._raw = 0, None, None
        self._calls = Calls()

    @property
    def source(self) -> str:
        """The generated Python program, with one function per kernel, which Numba compiles."""
        return self._source.text

    @property
    def raw(self) -> Any:
        """The program as a Numba dispatcher, for other functions under `numba.njit`.

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
                from .backend.raw import raw_function  # which imports Numba

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
    with COMPILING:  # tracing too, for which JAX has locks of its own
        return _compiled(f, example_args, Calls() if fallback is None else Fallbacks())


def _compiled(f: Callable[..., Any], example_args: tuple[Any, ...], calls: Calls) -> Compiled:
    graph, in_tree, out_tree = traced(f, example_args)
    source = source_of(graph, calls)
    name = getattr(f, "__name__", type(f).__name__)
    compiled = Compiled(name, source, in_tree, out_tree)
    compiled._calls = calls
    if isinstance(calls, Fallbacks) and calls.primitives:
        calls.warn(name)
    return _callable(compiled)


def source_of(graph: Graph, calls: Calls | None = None) -> Source:
    """Compile a graph to source. JAX runs primitives without a rule if `calls` are `Fallbacks`."""
    b = Builder(calls)
    for variable in (*graph.inputs, *graph.outputs):
        if not storage.supported(variable.aval.dtype):
            raise NotImplementedError(
                f"vn.numba has no arrays of dtype {variable.aval.dtype}. The function has one as "
                "an argument or a result."
            )
    inputs = [b.program.input(v.aval.shape, v.aval.dtype) for v in graph.inputs]
    for value in b.run(graph, inputs):
        b.program.output(_result(b, value))
    b.calls.end(b)
    return finished(b.program)


def _result(b: Builder, value: ArrayExpr) -> Buffer:
    """A result of a program: all of a piece of work memory, which nothing else is."""
    buffer = b.force(value)
    memory = buffer.memory
    if memory.kind == "work" and memory.alias is None and buffer.size == memory.size:
        return buffer
    return b.copy(value)


def _callable(compiled: Compiled) -> Any:
    source = compiled._source
    register_symbols(source.names.values())
    code = cached(source.key, lambda: _object_code(source))
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
        return entry(*(_as_given(x, n, compiled) for n, x in enumerate(args)))

    compiled._entry = entry
    call = caller(compiled._calls.checked(entry), compiled._in_tree, compiled._out_tree)
    # A method of a class of its own is found faster than one of an instance.
    compiled.__class__ = type("Compiled", (Compiled,), {"__call__": staticmethod(call)})
    return compiled


def _object_code(source: Source) -> bytes:
    from .backend.machine import object_code

    return object_code(source)


def _as_given(x: Any, number: int, compiled: Compiled) -> np.ndarray:
    """An argument as the program takes it."""
    source = compiled._source
    shape, dtype = source.input_shapes[number], source.inputs[number].dtype
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            f"Argument {number} is a masked array, but {compiled} does not support masks. Fill the "
            "masked entries with x.filled(value)."
        )
    if type(x) is int and dtype.kind in "iu" and not _holds(dtype, x):
        raise OverflowError(f"Argument {number} is {x}, which {dtype} of {compiled} cannot hold.")
    array = np.asarray(keys.data(x))
    if type(x) in _KINDS:
        fits = _KINDS[type(x)] <= _KIND_OF.get(dtype.kind, 0)  # 1.5 is no integer
    else:
        wide = source.wide(dtype) or dtype
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


# Kinds of numbers, in the order in which one is also of the next; "V" are those of ml_dtypes.
_KINDS = {bool: 1, int: 2, float: 3, complex: 4}
_KIND_OF = {"b": 1, "i": 2, "u": 2, "f": 3, "V": 3, "c": 4}


def _holds(dtype: np.dtype, number: int) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)
