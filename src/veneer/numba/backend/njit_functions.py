"""Functions that users compile with Numba, as functions of addresses that a program can call."""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, typeof, types
from numba.np.numpy_support import from_dtype

from .intrinsics import intrinsic

Layout = tuple[tuple[int, ...], np.dtype]


@intrinsic
def pointer_to(typing_context, address):
    """Return the pointer of an address."""

    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@intrinsic
def read_only(typing_context, array):
    """Return an array whose entries Numba refuses to assign to."""

    def emit(context, builder, signature, args):
        context.nrt.incref(builder, signature.args[0], args[0])
        return args[0]

    return array.copy(readonly=True)(array), emit


class NativeFunction:
    """A Numba function, compiled for operands and results of known shapes and dtypes.

    `address` is that of a C function of an array of words: a flag, which it sets to 1 on success,
    and the addresses of operands and results. `writes_operands` says that the operands must be
    copies.

    **Arguments:**

    - `primitive`, `rule`: named in errors.
    - `function`: a Numba function, or a Python function that Numba can compile.
    - `params`: passed to the function by keyword, as constants.
    - `operands`, `results`: their shapes and dtypes.

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
        function = _as_numba_function(function)
        python = getattr(function, "py_func", None) or function
        self.name = getattr(python, "__name__", type(function).__name__)
        self._where = f"the Numba function {self.name!r} ({_place(python)})"
        if function is not rule:
            self._where += f", by the rule of {primitive!r} ({_place(rule)}),"
        else:
            self._where += f", the rule of {primitive!r},"
        accepted = self._accepted(python, params)
        self._call = njit(_caller(function, len(operands), accepted))
        self.writes_operands, returned = self._returned()
        self._check(returned)
        self._native = self._compiled(returned)
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
            raise ValueError(
                f"{self._where} gave arrays of shape {', '.join(map(_text_of_shape, shapes))} for "
                f"{_listed(self._operands)}, but JAX has {_listed(self._results)}."
            )
        return results

    def _accepted(self, python: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters to pass. Only a parameter that is None may be left out."""
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

    def _returned(self) -> tuple[bool, Any]:
        """Compile the function. Return whether it writes to its operands, and its result types."""
        for writes in (False, True):
            arguments = tuple(_type_of(layout, not writes) for layout in self._operands)
            try:
                self._call.compile(arguments)
            except Exception as error:  # Numba raises many kinds
                if not writes:
                    continue
                raise TypeError(
                    f"{self._where} cannot be compiled by Numba for "
                    f"{_listed(self._operands)}: {error}"
                ) from error
            compiled: Any = self._call.overloads[arguments]
            return writes, compiled.signature.return_type
        raise AssertionError

    def _check(self, returned: Any) -> None:
        kinds = _kinds(returned)
        fit = len(kinds) == len(self._results) and all(map(_fits, kinds, self._results))
        if not fit:
            raise TypeError(
                f"{self._where} gives {', '.join(map(str, kinds)) or 'nothing'} for "
                f"{_listed(self._operands)}, but JAX has {_listed(self._results)}."
            )

    def _compiled(self, returned: Any) -> Any:
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
        for n, kind in enumerate(_kinds(returned)):
            lines.append(f"        r{n} = result{f'[{n}]' if is_tuple else ''}")
            if isinstance(kind, types.Array):
                shape = self._results[n][0]
                lines += [f"        if r{n}.shape != {shape}:", "            return"]
        for n, kind in enumerate(_kinds(returned)):
            shape = self._results[n][0]
            value = f"r{n}[()]" if isinstance(kind, types.Array) and not shape else f"r{n}"
            lines += [
                f"        y{n} = {memory[n_operands + n]}",
                f"        y{n}[{'...' if shape else '0'}] = {value}",
            ]
        lines += ["        words[0] = 1", "    except Exception:", "        words[0] = 0"]
        exec("\n".join(lines), names)
        return cfunc(types.void(types.voidptr))(names["native"])


def _as_numba_function(function: Any) -> Any:
    """Return a function that compiled code can call. A Python function is compiled by Numba."""
    return njit(inspect.unwrap(function)) if isinstance(function, FunctionType) else function


@functools.cache
def always_failing() -> Any:
    """Return a C function, as `NativeFunction` has one, that only fails."""

    def native(place):
        return

    return cfunc(types.void(types.voidptr))(inspect.unwrap(native))


def _caller(function: Any, n_operands: int, params: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of the operands that passes the parameters as constants."""
    names = {"function": function}
    arguments = operands = [f"x{n}" for n in range(n_operands)]
    for n, (name, value) in enumerate(params.items()):
        names[f"param{n}"] = value
        arguments = [*arguments, f"{name}=param{n}"]
    header = f"def call({', '.join(operands)}):"
    exec(f"{header}\n    return function({', '.join(arguments)})", names)
    return names["call"]


def _type_of(layout: Layout, read_only: bool) -> Any:
    shape, dtype = layout
    number = from_dtype(dtype)
    return types.Array(number, len(shape), "C", readonly=read_only) if shape else number


def _kinds(returned: Any) -> list[Any]:
    """Return the types of the results of a function, one by one."""
    if returned == types.none:
        return []
    is_tuple = isinstance(returned, types.BaseTuple)
    return list(returned.types) if is_tuple else [returned]


def _fits(kind: Any, layout: Layout) -> bool:
    shape, dtype = layout
    number = from_dtype(dtype)
    if isinstance(kind, types.Array):
        return kind.ndim == len(shape) and kind.dtype == number
    return not shape and types.unliteral(kind) == number


def _listed(layouts: Sequence[Layout]) -> str:
    return f"({', '.join(f'{dtype}{[*shape]}' for shape, dtype in layouts)})"


def _text_of_shape(shape: tuple[int, ...]) -> str:
    return str([*shape])


def _place(function: Any) -> str:
    """Return the file and line of a function."""
    code = getattr(getattr(function, "py_func", function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
