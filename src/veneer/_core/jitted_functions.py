"""Jitted functions, such as `jnp.linalg.det`, that have rules like primitives.

The primitives inside `jnp.linalg.det` do not show that they compute a determinant. So Veneer
compares each `jit` equation with the functions that have rules. It recognizes a function by its
name and by its jaxpr for operands of these types, traced directly or under `jax.vmap`. The
derivative of a function has another jaxpr and is not recognized.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

_functions: "dict[Any, JittedFunction]" = {}  # by the function and its keywords


class JittedFunction:
    """A jitted function with static keywords, as an object with the attributes of a primitive."""

    multiple_results = True

    def __init__(self, jitted: Any, keywords: dict[str, Any]):
        self._jitted, self._keywords = jitted, keywords
        self.name: str = jitted.__name__

    def jaxpr(self, avals: Sequence[Any], vmaps: int = 0) -> Any:
        """Return the jaxpr of the function for operands of the types `avals`.

        `vmaps` is the number of nested calls of `jax.vmap` around the function. Return None if
        tracing the call of the function gives no equations.
        """
        operands = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=a.sharding)
            for a in avals
        ]
        function = lambda *xs: self._jitted(*xs, **self._keywords)
        for _ in range(vmaps):
            function = jax.vmap(function)
        equations = jax.make_jaxpr(function)(*operands).jaxpr.eqns
        # The last equation is the `jit`. JAX may convert operands in the equations before.
        return equations[-1].params["jaxpr"] if equations else None

    def abstract_eval(self, *avals: Any) -> tuple[Any, Any]:
        """Return the types of the results and no effects, like `Primitive.abstract_eval`."""
        return list(self.jaxpr(avals).out_avals), set()


def jitted_function(function: Any) -> JittedFunction | None:
    """Return the `JittedFunction` for a result of `jax.jit`, or a `functools.partial` of one.

    Return the same object in each call, and None for anything else.
    """
    keywords: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        function, keywords = function.func, function.keywords
    if not (callable(function) and hasattr(function, "trace") and hasattr(function, "lower")):
        return None
    key = function, tuple(sorted(keywords.items()))
    return _functions.setdefault(key, JittedFunction(function, keywords))


def functions_named(name: str) -> Sequence[JittedFunction]:
    """Return the functions of this name for which `jitted_function` was called."""
    return [function for function in _functions.values() if function.name == name]
