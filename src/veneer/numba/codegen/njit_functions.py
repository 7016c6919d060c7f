"""Numba functions: calls from a program to the user's functions, and the reverse, `.raw`.

A rule may return an `@numba.njit` function. The program calls a C wrapper of the function at an
address. If the wrapper fails, a callback runs the function again from Python, on the same operands,
so that its exception is raised. `raw_function` makes a program callable from other Numba code.

This module imports Numba, so import it only when a program needs it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, typeof, types
from numba.core.errors import TypingError
from numba.np.numpy_support import from_dtype

from ...native.functions import call
from ..maths.intrinsics import intrinsic, llvm_type
from . import storage
from .arrays import ArrayExpr
from .program import Source
from .registry import Unsupported

if TYPE_CHECKING:
    from .builder import Builder


def call_function(
    b: "Builder", rule: Callable[..., Any], function: Any, operands: Sequence[ArrayExpr]
) -> list[ArrayExpr]:
    """Write a call of a Numba function, which computes the primitive of the current equation.

    **Arguments:**

    - `rule`: the rule that is registered for the primitive.
    - `function`: the Numba function: `rule` itself, or the function that `rule` returned.
    """
    equation = b.equation
    assert equation is not None
    if b.in_kernel:
        raise Unsupported(
            "jaxpr", f"the rule of {b.primitive!r} is a Numba function, which no kernel can call."
        )
    layouts = tuple((x.shape, np.dtype(x.dtype)) for x in (*operands, *b.outs))
    params = tuple(sorted(equation.params.items())) if function is rule else ()
    key: Any = function, layouts, params, repr(params)  # repr, because 1 == True
    try:
        native = b.native_functions.get(key)
    except TypeError:  # a parameter is not hashable
        key, native = object(), None
    if native is None:
        native = b.native_functions[key] = NativeFunction(
            equation.primitive,
            rule,
            function,
            equation.params if function is rule else {},
            [(x.shape, _function_dtype(x.dtype)) for x in operands],
            [(aval.shape, _function_dtype(aval.dtype)) for aval in b.outs],
        )
        b.program.objects.append(native)
    arrays = [b.force(b.convert(x, _function_dtype(x.dtype))) for x in operands]
    if native.writes_operands:
        arrays = [b.copy(x) if x.ndim else x for x in arrays]
    results = [b.buffer(aval.shape, _function_dtype(aval.dtype)) for aval in b.outs]
    buffers = [*arrays, *results]
    address = b.calls.address(b, native.address)
    callback = b.calls.callback(b, native.run, len(arrays), buffers)
    name = f"{equation.primitive} is the Numba function {native.name}"
    b.calls.write(b, [address, callback], buffers, name)
    return [b.convert(x, aval.dtype) for x, aval in zip(results, b.outs, strict=True)]


def _function_dtype(dtype: Any) -> np.dtype:
    """Return the dtype in which a Numba function takes or returns arrays of `dtype`.

    It differs only for float16 and bfloat16, which Numba does not have. They are converted to
    float32.
    """
    return np.dtype(dtype) if np.dtype(dtype).kind == "b" else storage.computed_dtype(dtype)


Layout = tuple[tuple[int, ...], np.dtype]


@intrinsic
def pointer_to(typing_context, address):
    """Return an integer address as a pointer."""

    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic
def read_only(typing_context, array):
    """Return `array` with a type that makes Numba reject assignments to its entries."""

    def emit(context, builder, signature, args):
        context.nrt.incref(builder, signature.args[0], args[0])
        return args[0]

    return array.copy(readonly=True)(array), emit


class NativeFunction:
    """The Numba function of a rule, compiled for operands and results of known shapes and dtypes.

    `address` is the address of a C function. It takes one argument, the address of an array of
    64-bit words: a flag that the function sets to 1 on success, and the addresses of operands and
    results. `writes_operands` says whether the function assigns to operands, which must then be
    copies.

    **Arguments:**

    - `primitive`, `rule`: the primitive and its rule, which errors name.
    - `function`: a Numba function, or a Python function that Numba can compile.
    - `params`: passed to the function by keyword, as constants.
    - `operands`, `results`: the shape and dtype of each.

    **Raises:** `TypeError` if Numba cannot compile the function for the operands, or if it returns
    other types than the results have.
    """

    def __init__(
        self,
        primitive: str,
        rule: Callable[..., Any],
        function: Any,
        params: dict[str, Any],
        operands: Sequence[Layout],
        results: Sequence[Layout],
    ):
        self._operands, self._results = operands, results
        if isinstance(function, FunctionType):
            function = njit(inspect.unwrap(function))
        python = getattr(function, "py_func", None) or function
        self.name = getattr(python, "__name__", type(function).__name__)
        self._where = f"the Numba function {self.name!r} ({_location(python)})"
        if function is not rule:
            self._where += f", by the rule of {primitive!r} ({_location(rule)}),"
        else:
            self._where += f", the rule of {primitive!r},"
        accepted = self._accepted_params(python, params)
        self._call = njit(_with_constant_params(function, len(operands), accepted))
        self.writes_operands, returned = self._compile_for_operands()
        self._check(returned)
        self._native = self._make_c_function(returned)
        self.address: int = self._native.address

    def run(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Call the function from Python, and check the shapes of its results."""
        for array in arrays:
            array.flags.writeable = self.writes_operands
        returned = self._call(*(x if x.ndim else x[()] for x in arrays))
        single = not isinstance(returned, tuple)
        results = [np.asarray(x) for x in ((returned,) if single else returned)]
        shapes = [x.shape for x in results]
        wanted = [shape for shape, _ in self._results]
        if shapes != wanted:
            actual = ", ".join(str([*shape]) for shape in shapes)
            raise ValueError(
                f"{self._where} gave arrays of shape {actual} for "
                f"{_format_layouts(self._operands)}, but JAX has {_format_layouts(self._results)}."
            )
        return results

    def _accepted_params(self, python: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of the equation that the function accepts as keywords.

        Raise `TypeError` if it does not accept a parameter whose value is not None.
        """
        if not isinstance(python, FunctionType):
            return {name: value for name, value in params.items() if value is not None}
        known = inspect.signature(python).parameters
        unknown = [name for name, x in params.items() if name not in known and x is not None]
        if unknown:
            raise TypeError(
                f"{self._where} takes no {', '.join(map(repr, unknown))}, but the equation has "
                f"{', '.join(f'{name}={params[name]!r}' for name in unknown)}. Add the parameter "
                "to the function, or register a rule that takes the parameters and returns the "
                "function."
            )
        accepted = {name: value for name, value in params.items() if name in known}
        for name, value in accepted.items():
            try:
                typeof(value)
            except ValueError:
                raise TypeError(
                    f"{self._where} takes {name!r}, but Numba has no type for {name}={value!r}. "
                    "Register a rule that takes this parameter and returns the function."
                ) from None
        return accepted

    def _compile_for_operands(self) -> tuple[bool, Any]:
        """Compile the function. Return whether it writes to its operands, and its result type."""
        for writes in (False, True):
            arguments = tuple(
                types.Array(from_dtype(dtype), len(shape), "C", readonly=not writes)
                if shape
                else from_dtype(dtype)
                for shape, dtype in self._operands
            )
            try:
                self._call.compile(arguments)
            except Exception as error:  # Numba raises many kinds
                if not writes:
                    continue
                raise TypeError(
                    f"{self._where} cannot be compiled by Numba for "
                    f"{_format_layouts(self._operands)}: {error}"
                ) from error
            compiled: Any = self._call.overloads[arguments]
            return writes, compiled.signature.return_type
        raise AssertionError

    def _check(self, returned: Any) -> None:
        kinds = _result_types(returned)
        if len(kinds) != len(self._results) or not all(map(_matches, kinds, self._results)):
            raise TypeError(
                f"{self._where} gives {', '.join(map(str, kinds)) or 'nothing'} for "
                f"{_format_layouts(self._operands)}, but JAX has {_format_layouts(self._results)}."
            )

    def _make_c_function(self, returned: Any) -> Any:
        n_operands = len(self._operands)
        names: dict[str, Any] = {"call": self._call, "carray": carray, "np": np}
        names |= {"pointer_to": pointer_to, "read_only": read_only}
        layouts = [*self._operands, *self._results]
        memory = []
        for n, (shape, dtype) in enumerate(layouts):
            names[f"dtype{n}"] = np.bool_ if dtype.kind == "b" else dtype
            memory.append(f"carray(pointer_to(words[{1 + n}]), {shape or (1,)}, dtype{n})")
        operands = []
        for (shape, _), text in zip(self._operands, memory, strict=False):
            array = text if self.writes_operands else f"read_only({text})"
            operands.append(array if shape else f"{text}[0]")
        lines = [
            "def native(place):",
            f"    words = carray(place, ({1 + len(layouts)},), np.int64)",
            "    try:",
            f"        result = call({', '.join(operands)})",
        ]
        is_tuple = isinstance(returned, types.BaseTuple)
        for n, kind in enumerate(_result_types(returned)):
            lines.append(f"        r{n} = result{f'[{n}]' if is_tuple else ''}")
            if isinstance(kind, types.Array):
                shape = self._results[n][0]
                lines += [f"        if r{n}.shape != {shape}:", "            return"]
        for n, kind in enumerate(_result_types(returned)):
            shape = self._results[n][0]
            value = f"r{n}[()]" if isinstance(kind, types.Array) and not shape else f"r{n}"
            lines += [
                f"        y{n} = {memory[n_operands + n]}",
                f"        y{n}[{'...' if shape else '0'}] = {value}",
            ]
        lines += ["        words[0] = 1", "    except Exception:", "        words[0] = 0"]
        exec("\n".join(lines), names)
        return cfunc(types.void(types.voidptr))(names["native"])


@functools.cache
def _failing_function() -> Any:
    """Return a compiled C function that only returns, without reporting success.

    It replaces callbacks to Python in code that runs without the GIL.
    """

    def native(place):
        return

    return cfunc(types.void(types.voidptr))(inspect.unwrap(native))


def _with_constant_params(
    function: Any, n_operands: int, params: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function of `n_operands` operands that calls `function` with `params` as keywords.

    Numba compiles the parameters as constants.
    """
    names = {"function": function}
    arguments = operands = [f"x{n}" for n in range(n_operands)]
    for n, (name, value) in enumerate(params.items()):
        names[f"param{n}"] = value
        arguments = [*arguments, f"{name}=param{n}"]
    header = f"def call({', '.join(operands)}):"
    exec(f"{header}\n    return function({', '.join(arguments)})", names)
    return names["call"]


def _result_types(returned: Any) -> list[Any]:
    """Return the Numba types of the results of a function as a list, given its return type."""
    if returned == types.none:
        return []
    is_tuple = isinstance(returned, types.BaseTuple)
    return list(returned.types) if is_tuple else [returned]


def _matches(kind: Any, layout: Layout) -> bool:
    shape, dtype = layout
    number = from_dtype(dtype)
    if isinstance(kind, types.Array):
        return kind.ndim == len(shape) and kind.dtype == number
    return not shape and types.unliteral(kind) == number


def _format_layouts(layouts: Sequence[Layout]) -> str:
    return f"({', '.join(f'{dtype}{[*shape]}' for shape, dtype in layouts)})"


def _location(function: Any) -> str:
    """Return the file and line of a function."""
    code = getattr(getattr(function, "py_func", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


_referenced: list[Any] = []  # objects to which compiled code refers by their addresses


@intrinsic
def address_of(typing_context, x, like):
    """Return the address of the entries of an array, or of a copy of a number on the stack.

    `like` is an array with the required dtype and rank.
    """
    if isinstance(x, types.Array):
        if x.dtype != like.dtype or x.layout != "C" or x.ndim != like.ndim:
            wanted = f"C-contiguous arrays of {like.dtype} with {like.ndim} axes"
            raise TypingError(f"an argument is {x}, for {wanted}")
        return types.int64(x, like), _address_of_entries
    ranks = [
        next((n for n, kind in enumerate(_NUMBERS) if isinstance(type, kind)), len(_NUMBERS))
        for type in (x, like.dtype)
    ]
    if ranks[0] > ranks[1]:  # the conversion would round, or drop the imaginary part
        raise TypingError(f"an argument is {x}, for a number of {like.dtype}")
    return types.int64(x, like), _address_of_number


#: The kinds of numbers. Each contains those before it.
_NUMBERS = (types.Boolean, types.Integer, types.Float, types.Complex)


def _address_of_entries(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return builder.ptrtoint(array.data, ir.IntType(64))


def _address_of_number(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    number, array = signature.args
    value = context.cast(builder, args[0], number, array.dtype)
    stored = context.get_value_as_data(builder, array.dtype, value)
    with builder.goto_entry_block():
        slot = builder.alloca(stored.type)
    builder.store(stored, slot)
    return builder.ptrtoint(slot, ir.IntType(64))


@intrinsic
def fits(typing_context, x, like):
    """Return whether the integer `x` fits the dtype of the array `like`.

    Other numbers always fit.
    """

    def emit(context, builder, signature, args):
        number, kind = signature.args[0], signature.args[1].dtype
        if not (isinstance(number, types.Integer) and isinstance(kind, types.Integer)):
            return ir.IntType(1)(1)
        extend = lambda x, type: (builder.sext if type.signed else builder.zext)(x, ir.IntType(128))
        extended = extend(args[0], number)
        truncated = builder.trunc(extended, llvm_type(kind))
        return builder.icmp_signed("==", extended, extend(truncated, kind))

    return types.boolean(x, like), emit


def raw_function(source: Source, address: int, entry: Any) -> Any:
    """Return a program as a Numba dispatcher, which takes and returns the leaves of the pytrees.

    **Arguments:**

    - `source`: the program.
    - `address`: the address of its `veneer_program`.
    - `entry`: its function for Python, whose `__self__` is the table that `veneer_program` takes.
    """
    halves = {x.dtype.name for x in (*source.inputs, *source.outputs)} & {"float16", "bfloat16"}
    if halves:
        raise NotImplementedError(
            f"A program with {' and '.join(sorted(halves))} arguments or results has no .raw: "
            "Numba has no such arrays. Convert them to float32 in the compiled function."
        )
    _referenced.append(entry)
    table = _table_without_callbacks(source, entry.__self__)
    _referenced.append(table)
    names: dict[str, Any] = {"np": np, "call": call, "address_of": address_of, "fits": fits}
    names |= {"ADDRESS": address, "TABLE": table.ctypes.data}
    for n, memory in enumerate(source.inputs):
        names[f"like{n}"] = np.zeros([0] * len(source.input_shapes[n]), memory.dtype)
    for n, memory in enumerate(source.outputs):
        names[f"dtype{n}"] = memory.dtype
    exec(_source_of_raw(source), names)
    return njit(inspect.unwrap(names["raw"]), nogil=True)


def _table_without_callbacks(source: Source, table: np.ndarray) -> np.ndarray:
    """Return a copy of `table`, in which callbacks to Python are replaced by a function that fails.

    `table` has the addresses that the program uses. The addresses of constants are at its end. Code
    that runs in threads of Numba must not wait for the GIL.
    """
    if not source.callbacks:
        return table
    table = table.copy()
    address = np.array([_failing_function().address], np.int64)
    _referenced.append(address)
    table[[n - len(source.constants) for n in source.callbacks]] = address.ctypes.data
    return table


def _source_of_raw(source: Source) -> str:
    inputs = [f"x{n}" for n in range(len(source.inputs))]
    outputs = [f"y{n}" for n in range(len(source.outputs))]
    lines = [f"def raw({', '.join(inputs)}):"]
    for n, (name, shape) in enumerate(zip(inputs, source.input_shapes, strict=True)):
        dtype = source.inputs[n].dtype
        if shape:
            lines += [
                f"    if {name}.shape != {shape}:",
                f"        raise ValueError('argument {n} is not of the shape {[*shape]}')",
            ]
        elif dtype.kind in "iu":
            lines += [
                f"    if not fits({name}, like{n}):",
                f"        raise OverflowError('argument {n} does not fit into {dtype}')",
            ]
    for n, shape in enumerate(source.output_shapes):
        lines.append(f"    y{n} = np.empty({shape or (1,)}, dtype{n})")
    addresses = [f"address_of({name}, like{n})" for n, name in enumerate(inputs)]
    addresses += [f"address_of({name}, {name})" for name in outputs]
    lines += [
        f"    if call(ADDRESS, ({', '.join(['TABLE', *addresses])},)):",
        "        raise MemoryError('there is too little memory')",
    ]
    if source.calls:
        message = (
            "a function of vn.numba.funcify raised an error, or gave an array of another shape: "
            f"{', '.join(dict.fromkeys(source.calls))}. Call the compiled function from Python to "
            "see the error."
        )
        lines += [f"    if not {outputs.pop()}[0]:", f"        raise RuntimeError({message!r})"]
    results = [
        name if shape else f"{name}[0]"
        for name, shape in zip(outputs, source.output_shapes, strict=False)
    ]
    lines.append(f"    return {', '.join(results) or '()'}")
    return "\n".join(lines)
