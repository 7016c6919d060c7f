"""Primitives that have no rule, run by JAX: a call out of compiled code into Python, and back.

Compiled code knows the address of the function of Python's by a constant of the program, so that
it is no part of what is on disk. The function takes Python's lock, which ctypes sees to, copies
what it is given, and writes results to memory of the program.
"""

import ctypes
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..._jax.source_lines import user_place
from ..maths.scalar import instruction
from .arrays import ArrayExpr, Buffer
from .program import Statement

if TYPE_CHECKING:
    from ..front.graph import Equation
    from .builder import Builder

_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@instruction
def call_jax(callback, *pointers):
    """Calls the function whose address `callback` has, with pointers; 1 if it did its work."""
    places = [p.entries.ctypes.data + p.start * p.entries.itemsize for p in pointers]
    words = (ctypes.c_int64 * (1 + len(places)))(0, *places)
    _PROTOTYPE(int(callback[0]))(ctypes.addressof(words))
    return words[0]


class Fallbacks:
    """The calls of JAX in a program. An error in one ends the program, and is raised after it."""

    def __init__(self) -> None:
        self.primitives: list[str] = []
        self._lines: list[str] = []
        self._callbacks: list[Any] = []  # which compiled code refers to by their addresses
        self._thread = threading.local()

    def compile(self, b: "Builder", operands: Sequence[ArrayExpr]) -> list[Buffer]:
        """Writes a call of the equation at hand."""
        equation = b.equation
        assert equation is not None
        run = _compiled(equation)
        results = [b.buffer(aval.shape, aval.dtype) for aval in b.outs]
        buffers = [*map(b.force, operands), *results]
        callback = _PROTOTYPE(self._function(run, len(operands), buffers))
        address = ctypes.cast(callback, ctypes.c_void_p).value
        known = b.program.constant(np.array([address], np.int64))
        pieces: list[str | Buffer] = [f"if not {b.function(call_jax)}(", known]
        for buffer in buffers:
            pieces += [", ", buffer]
        b.line(*pieces, f"): return  # {equation.primitive} is run by JAX")
        self.primitives.append(equation.primitive)
        self._lines.append(f"{equation.primitive!r}, from {equation.line}")
        self._callbacks.append(callback)
        return results

    def _function(
        self, run: Callable[..., Any], n_operands: int, buffers: Sequence[Buffer]
    ) -> Callable[[int], None]:
        layouts = [(buffer.shape, buffer.dtype) for buffer in buffers]
        x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]

        def write_results(place: int) -> None:
            words = (ctypes.c_int64 * (1 + len(layouts))).from_address(place)
            views = [_view(p, *x) for p, x in zip(words[1:], layouts, strict=True)]
            # Copies: what JAX runs may keep its operands for longer than their memory is there.
            with jax.enable_x64(x64):
                results = run(*(view.copy() for view in views[:n_operands]))
                for view, result in zip(views[n_operands:], results, strict=True):
                    view[...] = np.asarray(result)
            words[0] = 1

        def function(place: int) -> None:
            try:
                write_results(place)
            except BaseException as error:  # it must not pass through compiled code
                traceback.clear_frames(error.__traceback__)  # which have views of that memory
                self._thread.error = error

        return function

    def end(self, b: "Builder") -> None:
        """Makes it the last result of a program that calls JAX whether it came to its end."""
        if self.primitives:
            finished = b.buffer((), np.int64)
            b.program.statements.insert(0, Statement((finished, "[0] = np.int64(0)")))
            b.line(finished, "[0] = np.int64(1)")
            b.program.output(finished)

    def checked(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a program, without its last result, which raises what JAX has raised."""

        def call(*args: Any) -> Any:
            self._thread.error = None
            results = entry(*args)
            *results, finished = results if isinstance(results, tuple) else (results,)
            if not finished:
                error, self._thread.error = self._thread.error, None
                raise error or RuntimeError(
                    f"Python could not be called to run {', '.join(self.primitives)} by JAX"
                )
            return results[0] if len(results) == 1 else tuple(results)

        return call

    def warn(self, name: str) -> None:
        """Says which primitives JAX runs, to who called `compile`."""
        message = (
            f"vn.numba.compile of {name}: JAX runs {'; '.join(self._lines)}, which has no rule. "
            "Each time it takes some tens of microseconds, and Python's lock. To be rid of it, "
            "register a rule with @vn.numba.funcify.register."
        )
        warnings.warn_explicit(message, UserWarning, *user_place())


def _compiled(equation: "Equation") -> Callable[..., Any]:
    """The primitive of an equation as a function of JAX, compiled: it is never traced again."""
    origin = equation.origin
    for v in (*origin.invars, *origin.outvars):
        if not isinstance(v.aval.dtype, np.dtype):
            raise NotImplementedError(
                f"vn.numba cannot have JAX run {equation.primitive!r} from {equation.line}: its "
                f"arrays of {v.aval.dtype} are others in compiled code."
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


def _view(place: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of a program as an array."""
    nbytes = max(1, int(np.prod(shape)) * dtype.itemsize)
    memory: Any = (ctypes.c_char * nbytes).from_address(place)
    return np.ndarray(shape, dtype, memory)
