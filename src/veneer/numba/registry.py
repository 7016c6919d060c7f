"""The registries: what each primitive is in a compiled program, and what it is in NumPy."""

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jax.extend.core import Primitive

_F = TypeVar("_F", bound=Callable[..., Any])


class Unsupported(NotImplementedError):
    """What a rule raises over a parameter or an operand that it does not know.

    Whoever compiles adds the primitive and the line of the program that it comes from.

    **Arguments:**

    - `parameter`: its name, or what it is about an operand.
    - `reason`: what is not supported, and the way out, if there is one.
    """

    def __init__(self, parameter: str, reason: str):
        super().__init__(f"{parameter}: {reason}")
        self.parameter, self.reason = parameter, reason


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

    def missing(self, primitive: str, place: str) -> NotImplementedError:
        """Return the error for a primitive without a rule."""
        close = difflib.get_close_matches(primitive, self._rules, n=2)
        hint = f" (there are rules for {' and '.join(close)})" if close else ""
        return NotImplementedError(
            f"vn.numba has no rule for the primitive {primitive!r}{hint}, from {place}. Register "
            f"one with @vn.numba.{self._name}.register({primitive!r}): {self._example}"
            f"{self._way_out}"
        )


def _names(target: str | Primitive | Iterable[str | Primitive]) -> list[str]:
    """Return the names of a primitive, or of a sequence of them."""
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
    """Return whether an object is a function that Numba has compiled, or will."""
    if "numba" not in sys.modules:
        return False
    from numba.core.dispatcher import Dispatcher
    from numba.np.ufunc.dufunc import DUFunc

    return isinstance(x, Dispatcher | DUFunc)


#: The rules that compile primitives. A rule takes a `Builder`, the operands, and the parameters by
#: keyword, and returns an `@numba.njit` function. Our own rules return lazy results, for which the
#: builder writes the source.
funcify = Registry(
    "funcify",
    "a function of a builder, the operands and the parameters, that returns an @numba.njit "
    "function of the operands.",
    " Or have JAX run it, in tens of microseconds, with vn.numba.compile(..., fallback='jax').",
)

#: The rules that compute primitives with NumPy. A rule takes NumPy arrays, and the parameters by
#: keyword. Compiled programs are tested against them.
perform = Registry("perform", "a function of NumPy arrays and the parameters.")

#: Primitives that show what a program computes, and give no results.
SHOWN = {"debug_callback", "debug_print"}

#: Primitives whose results are read where they are used: each entry of the result is computed of
#: few entries of the operands.
FUSED: set[str] = set()


def fused(*primitives: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a rule with `funcify` that returns a lazy value."""
    FUSED.update(primitives)
    return funcify.register(*primitives)
