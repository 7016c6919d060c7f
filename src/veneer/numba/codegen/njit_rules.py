"""Rules that return an ordinary Numba function: the call of one from a compiled program.

The program calls a wrapper of the function at an address. If the wrapper fails, a callback runs the
function again from Python, on the same operands, and so gets its exception.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..registry import Unsupported
from . import storage
from .arrays import ArrayExpr

if TYPE_CHECKING:
    from .builder import Builder


def call_function(
    b: "Builder", rule: Callable[..., Any], function: Any, operands: Sequence[ArrayExpr]
) -> list[ArrayExpr]:
    """Write a call of the Numba function of a rule, for the equation at hand."""
    from ..backend.njit_functions import NativeFunction  # which imports Numba

    equation = b.equation
    assert equation is not None
    if b.in_kernel:
        raise Unsupported(
            "jaxpr", f"the rule of {b.primitive!r} is a Numba function, which no kernel can call."
        )
    key = _key(b, rule, function, operands)
    native = b.native_functions.get(key)
    if native is None:
        native = b.native_functions[key] = NativeFunction(
            equation.primitive,
            rule,
            function,
            equation.params if function is rule else {},
            [(x.shape, _computed(x.dtype)) for x in operands],
            [(aval.shape, _computed(aval.dtype)) for aval in b.outs],
        )
        b.program.kept.append(native)
    arrays = [b.force(b.converted(x, _computed(x.dtype))) for x in operands]
    if native.writes_operands:
        arrays = [b.copy(x) if x.ndim else x for x in arrays]
    results = [b.buffer(aval.shape, _computed(aval.dtype)) for aval in b.outs]
    buffers = [*arrays, *results]
    address = b.calls.address(b, native.address)
    callback = b.calls.callback(b, native.run, len(arrays), buffers)
    name = f"{equation.primitive} is the Numba function {native.name}"
    b.calls.write(b, [address, callback], buffers, name)
    return [b.converted(x, aval.dtype) for x, aval in zip(results, b.outs, strict=True)]


def _computed(dtype: Any) -> np.dtype:
    """The dtype of the arrays that the function takes: Numba has none of half precision."""
    return np.dtype(dtype) if np.dtype(dtype).kind == "b" else storage.computed_dtype(dtype)


def _key(b: "Builder", rule: Any, function: Any, operands: Sequence[ArrayExpr]) -> Any:
    """Equal for calls that can share a wrapper."""
    assert b.equation is not None
    layouts = tuple((x.shape, np.dtype(x.dtype)) for x in (*operands, *b.outs))
    params = tuple(sorted(b.equation.params.items())) if function is rule else ()
    key = function, layouts, params, repr(params)  # 1 == True, but their texts differ
    try:
        hash(key)
    except TypeError:
        return object()
    return key
