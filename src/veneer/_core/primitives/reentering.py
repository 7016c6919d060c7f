"""Functions that JAX runs later, in a trace of its own, and that still know our values."""

from collections.abc import Callable
from typing import Any

from ..._jax.tracing import current_trace
from ..nesting import entered
from ..policy import current_policy, policy_in_force
from ..trace import ImplicitTrace
from .scopes import returning


def reentering(trace: ImplicitTrace) -> Callable[..., Callable[..., list[Any]]]:
    """Wraps a flat function of tracers as one of values, which may run later, under any trace.

    It runs with the rules and the policy that are in force now. The values of `trace` that the
    function closes over are known by its tag. `is_derivative` says that it is that of another.
    """
    tag, policy, place_of = trace.tag, current_policy(), returning()

    def run_later(function: Callable, *, is_derivative: bool = False) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            inner = ImplicitTrace(current_trace(), tag)
            with policy_in_force(policy), place_of(is_derivative):
                wrapped = list(map(inner.wrap, args))
                with entered(inner, inner):
                    out = function(*wrapped)
                return list(map(inner.unwrap, out))

        return run

    return run_later
