"""The registries of rules for primitives, and the evaluation of graphs with the NumPy rules."""

import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import Primitive

from .graph import Graph, Variable, graph_of

_F = TypeVar("_F", bound=Callable[..., Any])


class Unsupported(NotImplementedError):
    """The error of a rule for a parameter or an operand that it does not support.

    `Builder` catches it and raises an error that also names the primitive and the user's line.

    **Arguments:**

    - `parameter`: the name of the parameter, or a property of an operand, such as "dtype".
    - `reason`: a sentence that explains the limitation.
    """

    def __init__(self, parameter: str, reason: str):
        super().__init__(f"{parameter}: {reason}")


class Registry:
    """A registry of rules for JAX primitives, keyed by the name that a jaxpr shows.

    `name in registry`, `registry[name]` and `iter(registry)` work as for a dict.

    | registry | a rule |
    |---|---|
    | `vn.numba.funcify` | returns a function that computes the primitive and that Numba compiles |
    | `vn.numba.perform` | computes the primitive with NumPy, as a reference for tests |

    Add rules with the method `register`.

    >>> import numpy as np, veneer as vn
    >>> "tanh" in vn.numba.funcify
    True
    >>> vn.numba.perform["tanh"](np.zeros(2, np.float32), accuracy=None)
    array([0., 0.], dtype=float32)
    """

    def __init__(self, name: str, example: str, way_out: str = ""):
        self._name, self._example, self._way_out = name, example, way_out
        self._rules: dict[str, Callable[..., Any]] = {}

    def register(
        self, *primitives: str | Primitive | Iterable[str | Primitive]
    ) -> Callable[[_F], _F]:
        """Register a rule for primitives. It replaces an earlier rule for the same primitive.

        A rule of `funcify` takes a builder, the operands by position, which have a `shape` and a
        `dtype`, and the parameters of the equation by keyword. It returns a function that Numba
        compiles: an `@numba.njit` function, or a Python function that Numba can compile. The
        function takes the operands and returns the result, or a tuple of the results. Its arrays
        of rank 0 are numbers. A rule may also be an `@numba.njit` function itself, of the operands,
        and of the parameters of the equation by keyword.

        A rule of `perform` takes NumPy arrays and the parameters, and returns arrays.

        **Arguments:**

        - `primitives`: JAX primitives, their names as jaxprs print them, or sequences of both.

        **Returns:** a decorator that returns the rule.

        **Raises:** `TypeError` for something that is not a primitive or a name. `vn.numba.compile`
        raises `TypeError` if Numba cannot compile the function of a rule, or if its results have
        the wrong number, dtypes or ranks.

        >>> import jax.numpy as jnp, numba, numpy as np, veneer as vn
        >>> from jax.extend.core import Primitive
        >>> power = Primitive("power")
        >>> _ = power.def_abstract_eval(lambda x, *, n: x)
        >>> @vn.numba.funcify.register(power)
        ... def power_rule(b, x, *, n):
        ...     @numba.njit
        ...     def power(x):
        ...         return x**n
        ...     return power
        >>> f = vn.numba.compile(lambda x: power.bind(x, n=3), np.ones(2, np.float32))
        >>> f(np.array([1, 2], np.float32))
        array([1., 8.], dtype=float32)
        """
        names = [name for target in primitives for name in _names(target)]

        def decorate(rule: _F) -> _F:
            self._rules.update(dict.fromkeys(names, rule))
            return rule

        return decorate

    def __contains__(self, primitive: str) -> bool:
        return primitive in self._rules

    def __getitem__(self, primitive: str) -> Callable[..., Any]:
        return self._rules[primitive]

    def __iter__(self) -> Any:
        return iter(sorted(self._rules))

    def missing_rule_error(self, primitive: str, place: str) -> NotImplementedError:
        """Return the error for a primitive without a rule.

        `place` is the line of the user's code with the primitive.
        """
        close = difflib.get_close_matches(primitive, self._rules, n=2)
        hint = f" (there are rules for {' and '.join(close)})" if close else ""
        return NotImplementedError(
            f"vn.numba has no rule for the primitive {primitive!r}{hint}, from {place}. Register "
            f"one with @vn.numba.{self._name}.register({primitive!r}): {self._example}"
            f"{self._way_out}"
        )


def _names(target: str | Primitive | Iterable[str | Primitive]) -> list[str]:
    if isinstance(target, str):
        return [target]
    if isinstance(target, Primitive):
        return [target.name]
    if isinstance(target, Iterable):
        return [name for item in target for name in _names(item)]
    raise TypeError(
        f"register takes a JAX primitive, its name, or a sequence of them, not {target!r}."
    )


def is_numba_function(x: Any) -> bool:
    """Return whether an object is a Numba dispatcher or ufunc."""
    if "numba" not in sys.modules:
        return False
    from numba.core.dispatcher import Dispatcher
    from numba.np.ufunc.dufunc import DUFunc

    return isinstance(x, Dispatcher | DUFunc)


#: The rules that compile primitives. A rule takes a `Builder`, the operands, and the parameters by
#: keyword, and returns an `@numba.njit` function. Our own rules return array expressions instead.
funcify = Registry(
    "funcify",
    "a function of a builder, the operands and the parameters, that returns an @numba.njit "
    "function of the operands.",
    " Or have JAX run it, in tens of microseconds, with vn.numba.compile(..., fallback='jax').",
)

#: The rules that compute primitives with NumPy. A rule takes NumPy arrays, and the parameters by
#: keyword. Compiled programs are tested against them.
perform = Registry("perform", "a function of NumPy arrays and the parameters.")

#: Primitives without results that print or call back for debugging.
DEBUG_PRIMITIVES = {"debug_callback", "debug_print"}

#: Primitives whose rules return lazy arrays, which a later loop computes entry by entry.
FUSED: set[str] = set()


def fused(*primitives: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a rule of `funcify` for primitives that fuse with others.

    The result of the rule is a lazy array, which other kernels compute as part of their loops.
    """
    FUSED.update(primitives)
    return funcify.register(*primitives)


def evaluate_jaxpr(jaxpr: Any, *operands: Any) -> list[Any]:
    """Evaluate a jaxpr on NumPy arrays with the rules of `perform`. Return the results."""
    return evaluate(graph_of(jaxpr), operands)


def evaluate(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a graph on NumPy arrays with the rules of `perform`. Return the results."""
    values: dict[Variable, Any] = dict(zip(graph.inputs, operands, strict=True))

    def value_of(variable: Variable) -> Any:
        if variable not in values:
            values[variable] = np.asarray(variable.value, variable.aval.dtype)
        return values[variable]

    for equation in graph.equations:
        if equation.primitive in DEBUG_PRIMITIVES:
            continue
        if equation.has_empty_results:
            values |= {v: np.empty(v.aval.shape, v.aval.dtype) for v in equation.outputs}
            continue
        if equation.primitive not in perform:
            raise perform.missing_rule_error(equation.primitive, equation.line)
        inputs = [value_of(v) for v in equation.inputs]
        with np.errstate(all="ignore"):
            results = perform[equation.primitive](*inputs, **equation.params)
        results = results if isinstance(results, list | tuple) else [results]
        for variable, result in zip(equation.outputs, results, strict=True):
            array, aval = np.asarray(result), variable.aval
            if (array.shape, array.dtype) != (aval.shape, aval.dtype):
                raise TypeError(
                    f"The rule of vn.numba.perform for {equation.primitive!r} returns "
                    f"{array.dtype}{[*array.shape]}, but JAX has {aval}."
                )
            values[variable] = array
    return [value_of(v) for v in graph.outputs]
