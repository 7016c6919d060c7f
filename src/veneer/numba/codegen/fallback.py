"""Primitives that have no rule, run by JAX: a call out of compiled code into Python, and back.

The callback takes Python's lock, which ctypes sees to, copies the operands, and writes the results
to memory of the program.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..._jax.frames import user_place
from .arrays import ArrayExpr, Buffer
from .calls import Calls

if TYPE_CHECKING:
    from ..front.graph import Equation
    from .builder import Builder


class Fallbacks(Calls):
    """The calls of a program that may have JAX run primitives without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.primitives: list[str] = []
        self._lines: list[str] = []

    def compile(self, b: "Builder", operands: Sequence[ArrayExpr]) -> list[Buffer]:
        """Write a call of the equation at hand."""
        equation = b.equation
        assert equation is not None
        run = _compiled(equation)
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
        """Says which primitives JAX runs, to who called `compile`."""
        message = (
            f"vn.numba.compile of {name}: JAX runs {'; '.join(self._lines)}, which has no rule. "
            "Each run takes tens of microseconds and the GIL. To compile it, register a rule with "
            "@vn.numba.funcify.register."
        )
        warnings.warn_explicit(message, UserWarning, *user_place())


def _compiled(equation: "Equation") -> Callable[..., Any]:
    """The primitive of an equation as a function of JAX, compiled: it is never traced again."""
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
