"""Calls from a compiled program to functions at addresses: callbacks, and what Numba compiled.

The program reads an address from a constant. So the function is no part of the object code that
the cache has on disk, and a function that changed is never served from there.
"""

import ctypes
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..maths.scalar import instruction
from .arrays import Buffer
from .program import Statement

if TYPE_CHECKING:
    from .builder import Builder

PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@instruction
def call_address(function, *pointers):
    """Call the function whose address `function` holds, with pointers. Return 1 on success."""
    places = [p.entries.ctypes.data + p.start * p.entries.itemsize for p in pointers]
    words = (ctypes.c_int64 * (1 + len(places)))(0, *places)
    PROTOTYPE(int(function[0]))(ctypes.addressof(words))
    return words[0]


class Calls:
    """The calls out of a program. An error in one ends the program, and is raised after it.

    `names` lists the called functions, for error messages.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._thread = threading.local()

    def write(
        self, b: "Builder", functions: Sequence[Buffer], buffers: Sequence[Buffer], name: str
    ) -> None:
        """Write a call that ends the program if every function fails. Each is tried in order."""
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
        """Return a constant of the program that holds an address."""
        return b.program.constant(np.array([address], np.int64))

    def callback(
        self,
        b: "Builder",
        run: Callable[..., Any],
        n_operands: int,
        buffers: Sequence[Buffer],
    ) -> Buffer:
        """Return a constant with the address of a callback that runs a Python function.

        **Arguments:**

        - `run`: a function of arrays that returns a list of arrays.
        - `n_operands`: the number of buffers that `run` takes. It returns the other ones.
        """
        callback = PROTOTYPE(self._function(run, n_operands, buffers))
        b.program.kept.append(callback)
        constant = self.address(b, ctypes.cast(callback, ctypes.c_void_p).value or 0)
        b.program.callbacks.append(len(b.program.constants) - 1)
        return constant

    def _function(
        self, run: Callable[..., Any], n_operands: int, buffers: Sequence[Buffer]
    ) -> Callable[[int], None]:
        layouts = [(buffer.shape, buffer.dtype) for buffer in buffers]

        def write_results(place: int) -> None:
            words = (ctypes.c_int64 * (1 + len(layouts))).from_address(place)
            views = [_view(p, *x) for p, x in zip(words[1:], layouts, strict=True)]
            # Copies: the function may keep its operands for longer than their memory exists.
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
        """Add a last result to a program with calls: whether it ran to its end."""
        if self.names:
            finished = b.buffer((), np.int64)
            b.program.statements.insert(0, Statement((finished, "[0] = np.int64(0)")))
            b.line(finished, "[0] = np.int64(1)")
            b.program.output(finished)
            b.program.calls = tuple(self.names)

    def checked(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a program without its last result, raising what calls raised."""
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


def _view(place: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of a program as an array."""
    nbytes = max(1, int(np.prod(shape)) * dtype.itemsize)
    memory: Any = (ctypes.c_char * nbytes).from_address(place)
    return np.ndarray(shape, dtype, memory)
