"""Jitted functions, such as `jnp.linalg.det`, that have rules like primitives.

The primitives inside `jnp.linalg.det` do not tell that they compute a determinant. So a call of it
is recognized by the name of the jit and by its jaxpr, which must be equal to the jaxpr that JAX
traces for operands of these types, or for `jax.vmap` of the function. The derivative of the
function is another program, which is not recognized.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax


class JittedFunction:
    """A jitted function, or a partial of one with static keywords, with the API of a primitive."""

    multiple_results = True

    def __init__(self, function: Any):
        partial = isinstance(function, functools.partial)
        self._jitted: Any = function.func if partial else function
        self._keywords = function.keywords if partial else {}
        self.name: str = self._jitted.__name__

    def jaxpr(self, avals: Sequence[Any], vmaps: int = 0) -> Any:
        """Trace the function, under `vmaps` calls of `jax.vmap`, for operands of these types."""
        operands = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=a.sharding)
            for a in avals
        ]
        function = lambda *xs: self._jitted(*xs, **self._keywords)
        for _ in range(vmaps):
            function = jax.vmap(function)
        equations = jax.make_jaxpr(function)(*operands).jaxpr.eqns
        return equations[-1].params["jaxpr"] if equations else None

    def abstract_eval(self, *avals: Any) -> tuple[Any, Any]:
        """Return the types of the results and no effects, like `Primitive.abstract_eval`."""
        return list(self.jaxpr(avals).out_avals), set()


_functions: dict[Any, JittedFunction] = {}
_by_name: dict[str, list[JittedFunction]] = {}


def is_jitted(function: Any) -> bool:
    """Return whether a function, or the function in a partial, was made by `jax.jit`."""
    bare = function.func if isinstance(function, functools.partial) else function
    return callable(bare) and hasattr(bare, "trace") and hasattr(bare, "lower")


def jitted_function(function: Any) -> JittedFunction:
    """Return the `JittedFunction` of a function, the same object in each call."""
    partial = isinstance(function, functools.partial)
    key = (function.func, tuple(sorted(function.keywords.items()))) if partial else function
    if key not in _functions:
        target = _functions[key] = JittedFunction(function)
        _by_name.setdefault(target.name, []).append(target)
    return _functions[key]


def functions_named(name: str) -> Sequence[JittedFunction]:
    """Return the functions of this name for which `jitted_function` was called."""
    return _by_name.get(name, ())
