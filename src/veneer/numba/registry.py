"""The registries: what each primitive is in a compiled program, and what it is in NumPy."""

import difflib
from collections.abc import Callable
from typing import Any


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
    """A table of rules by the names of primitives, as jaxprs print them."""

    def __init__(self, name: str, example: str, way_out: str = ""):
        self._name, self._example, self._way_out = name, example, way_out
        self._rules: dict[str, Callable[..., Any]] = {}

    def register(self, *primitives: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Makes a function the rule of primitives; a later one takes the place of an earlier."""

        def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
            self._rules.update(dict.fromkeys(primitives, rule))
            return rule

        return decorate

    def __contains__(self, primitive: str) -> bool:
        return primitive in self._rules

    def __getitem__(self, primitive: str) -> Callable[..., Any]:
        return self._rules[primitive]

    def __iter__(self) -> Any:
        return iter(sorted(self._rules))

    def missing(self, primitive: str, place: str) -> NotImplementedError:
        """The error for a primitive that has no rule."""
        close = difflib.get_close_matches(primitive, self._rules, n=2)
        hint = f" (there are rules for {' and '.join(close)})" if close else ""
        return NotImplementedError(
            f"vn.numba has no rule for the primitive {primitive!r}{hint}, from {place}. Register "
            f"one with @vn.numba.{self._name}.register({primitive!r}): {self._example}"
            f"{self._way_out}"
        )


#: How a primitive is compiled: a function of a `Builder` and the operands, with the equation's
#: parameters as keywords, that returns the result, or a list of them where there may be several.
funcify = Registry(
    "funcify",
    "a function of a builder, the operands and the parameters.",
    " Or have JAX run it, in tens of microseconds, with vn.numba.compile(..., fallback='jax').",
)

#: What a primitive computes: a function of NumPy arrays, with the parameters as keywords. It is
#: what compiled programs are tested against.
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
