"""Calls from a compiled program to functions at addresses, and primitives that JAX runs this way.

The program reads an address from a constant, so the object code in the disk cache does not contain
the function, and a function that was changed is never served from the cache. A function can be
Python code: ctypes takes the GIL, and the callback copies operands and writes results.
"""

import ctypes
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..._jax.frames import user_place
from ..maths.instructions import instruction
from .arrays import ArrayExpr, Buffer
from .program import Statement

if TYPE_CHECKING:
    from .builder import Builder
    from .graph import Equation

PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@instruction
def call_address(function, *pointers):
    """Call the C function at the address `function[0]` with the addresses of `pointers`.

    Return 1 if it succeeds, or 0.
    """
    places = [p.entries.ctypes.data + p.start * p.entries.itemsize for p in pointers]
    words = (ctypes.c_int64 * (1 + len(places)))(0, *places)
    PROTOTYPE(int(function[0]))(ctypes.addressof(words))
    return words[0]


class Calls:
    """The calls that a compiled program makes to functions at addresses, outside of the program.

    If a call fails, the program ends early, and the error is raised in Python. `names` lists the
    called functions, for error messages.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._thread = threading.local()

    def write(
        self, b: "Builder", functions: Sequence[Buffer], buffers: Sequence[Buffer], name: str
    ) -> None:
        """Write code that calls functions at addresses in the order given, until one succeeds.

        If all of them fail, the program ends early. Each function gets `buffers`: the operands and
        then the results. `name` describes the call in error messages.
        """
        pieces: list[str | Buffer] = []
        for function in functions:
            pieces += [f"{' and not ' if pieces else 'if not '}{b.function(call_address)}("]
            pieces.append(function)
            for buffer in buffers:
                pieces += [", ", buffer]
            pieces.append(")")
        b.line(*pieces, f": return  # {name}")
        self.names.append(name)

    def address(self, b: "Builder", address: int) -> Buffer:
        """Return a constant array of the program that contains a memory address."""
        return b.program.constant(np.array([address], np.int64))

    def callback(
        self,
        b: "Builder",
        run: Callable[..., Any],
        n_operands: int,
        buffers: Sequence[Buffer],
    ) -> Buffer:
        """Return a constant array with the address of a C function that calls a Python function.

        **Arguments:**

        - `run`: the Python function. It takes NumPy arrays and returns a list of arrays.
        - `n_operands`: the number of arrays that `run` takes.
        - `buffers`: the operands and then the results, which the C function gets.
        """
        callback = PROTOTYPE(self._c_callback(run, n_operands, buffers))
        b.program.objects.append(callback)
        constant = self.address(b, ctypes.cast(callback, ctypes.c_void_p).value or 0)
        b.program.callbacks.append(len(b.program.constants) - 1)
        return constant

    def _c_callback(
        self, run: Callable[..., Any], n_operands: int, buffers: Sequence[Buffer]
    ) -> Callable[[int], None]:
        layouts = [(buffer.shape, buffer.dtype) for buffer in buffers]

        def write_results(place: int) -> None:
            words = (ctypes.c_int64 * (1 + len(layouts))).from_address(place)
            views = []
            for address, (shape, dtype) in zip(words[1:], layouts, strict=True):
                nbytes = max(1, int(np.prod(shape)) * dtype.itemsize)
                memory: Any = (ctypes.c_char * nbytes).from_address(address)
                views.append(np.ndarray(shape, dtype, memory))
            # Copy, because the function may keep its operands after the program frees them.
            results = run(*(view.copy() for view in views[:n_operands]))
            for view, result in zip(views[n_operands:], results, strict=True):
                view[...] = np.asarray(result)
            words[0] = 1

        def function(place: int) -> None:
            try:
                write_results(place)
            except BaseException as error:  # it cannot propagate through compiled code
                traceback.clear_frames(error.__traceback__)  # they have views of freed memory
                self._thread.error = error

        return function

    def end(self, b: "Builder") -> None:
        """Add a last result to a program that makes calls: 1 if the program ends well, or 0."""
        if self.names:
            finished = b.buffer((), np.int64)
            b.program.statements.insert(0, Statement((finished, "[0] = np.int64(0)")))
            b.line(finished, "[0] = np.int64(1)")
            b.program.output(finished)
            b.program.calls = tuple(self.names)

    def with_errors(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function of a program that makes calls, to raise the error of a failed call.

        `entry` is the function. The wrapper drops its last result, which says whether the program
        ran to its end.
        """
        if not self.names:
            return entry

        def call(*args: Any) -> Any:
            self._thread.error = None
            results = entry(*args)
            *results, finished = results if isinstance(results, tuple | list) else (results,)
            if not finished:
                error, self._thread.error = self._thread.error, None
                raise error or RuntimeError(
                    f"the program ended early, in one of its calls: {', '.join(self.names)}"
                )
            return results[0] if len(results) == 1 else tuple(results)

        return call


class Fallbacks(Calls):
    """The calls of a program in which JAX runs the primitives without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.primitives: list[str] = []
        self._lines: list[str] = []

    def compile(self, b: "Builder", operands: Sequence[ArrayExpr]) -> list[Buffer]:
        """Write a call of JAX, which runs the current equation. Return its results."""
        equation = b.equation
        assert equation is not None
        run = _compiled_by_jax(equation)
        results = [b.buffer(aval.shape, aval.dtype) for aval in b.outs]
        buffers = [*map(b.force, operands), *results]
        x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]

        def run_as_traced(*arrays: np.ndarray) -> list[np.ndarray]:
            with jax.enable_x64(x64):
                return [np.asarray(result) for result in run(*arrays)]

        callback = self.callback(b, run_as_traced, len(operands), buffers)
        self.write(b, [callback], buffers, f"{equation.primitive} is run by JAX")
        self.primitives.append(equation.primitive)
        self._lines.append(f"{equation.primitive!r}, from {equation.line}")
        return results

    def warn(self, name: str) -> None:
        """Warn the caller of `compile` about the primitives that JAX runs.

        `name` is the name of the compiled function.
        """
        message = (
            f"vn.numba.compile of {name}: JAX runs {'; '.join(self._lines)}, which has no rule. "
            "Each run takes tens of microseconds and the GIL. To compile it, register a rule with "
            "@vn.numba.funcify.register."
        )
        warnings.warn_explicit(message, UserWarning, *user_place())


def _compiled_by_jax(equation: "Equation") -> Callable[..., Any]:
    """Compile the primitive of an equation with JAX, so that a call never traces it again."""
    origin = equation.origin
    for v in (*origin.invars, *origin.outvars):
        if not isinstance(v.aval.dtype, np.dtype):
            raise NotImplementedError(
                f"JAX cannot run {equation.primitive!r} from {equation.line} for vn.numba: it has "
                f"arrays of dtype {v.aval.dtype}, which compiled code stores differently."
            )
    primitive = origin.primitive
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in origin.invars]

    def function(*operands: Any) -> Any:
        results = primitive.bind(*operands, **primitive.get_bind_params(origin.params))
        return results if primitive.multiple_results else [results]

    try:
        return jax.jit(function).lower(*structs).compile()
    except Exception as error:
        raise NotImplementedError(
            f"vn.numba has no rule for {equation.primitive!r} from {equation.line}, and JAX cannot "
            f"compile it by itself: {error}"
        ) from error
