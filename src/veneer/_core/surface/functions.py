"""Jitted functions of JAX's as something that has rules, as primitives have.

`jnp.linalg.det` is a jit of some program, and by its primitives no rule could tell that this is a
determinant. So a jit is recognised by its name and its program: its jaxpr must be the one to which
JAX traces the function for operands of these types, or `jax.vmap` of it. Differentiated it is
another program, which is not recognised.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax


class JittedFunction:
    """A jitted function, or a partial of one with static keywords, in the place of a primitive."""

    multiple_results = True

    def __init__(self, function: Any):
        partial = isinstance(function, functools.partial)
        self._jitted: Any = function.func if partial else function
        self._keywords = function.keywords if partial else {}
        self.name: str = self._jitted.__name__

    def jaxpr(self, avals: Sequence[Any], vmaps: int = 0) -> Any:
        """What JAX traces it to for operands of these types, if so many axes are mapped."""
        like = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=a.sharding)
            for a in avals
        ]
        function = lambda *xs: self._jitted(*xs, **self._keywords)
        for _ in range(vmaps):
            function = jax.vmap(function)
        equations = jax.make_jaxpr(function)(*like).jaxpr.eqns
        return equations[-1].params["jaxpr"] if equations else None

    def abstract_eval(self, *avals: Any) -> tuple[Any, Any]:
        """The types of the results, as a primitive of several results gives them."""
        return list(self.jaxpr(avals).out_avals), set()


_functions: dict[Any, JittedFunction] = {}
_by_name: dict[str, list[JittedFunction]] = {}


def is_jitted(function: Any) -> bool:
    """Whether a function, or the one that a partial is of, is the result of `jax.jit`."""
    bare = function.func if isinstance(function, functools.partial) else function
    return callable(bare) and hasattr(bare, "trace") and hasattr(bare, "lower")


def jitted_function(function: Any) -> JittedFunction:
    """The one `JittedFunction` of a function; from then on it is known by its name."""
    partial = isinstance(function, functools.partial)
    key = (function.func, tuple(sorted(function.keywords.items()))) if partial else function
    if key not in _functions:
        made = _functions[key] = JittedFunction(function)
        _by_name.setdefault(made.name, []).append(made)
    return _functions[key]


def functions_named(name: str) -> Sequence[JittedFunction]:
    """Those that have rules, of this name."""
    return _by_name.get(name, ())
