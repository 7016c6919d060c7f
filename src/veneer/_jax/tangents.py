"""Scopes around the tangents that JAX computes, so that a staged program shows which they are.

JAX's own rules compute a primal value and its tangent by the same primitive, on the same line. In
the program that results nothing tells them apart.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import jax
from jax._src.interpreters import ad

from .custom_functions import reset_stores, transform_flat_function
from .primitives import Primitive

#: The name of the scope.
TANGENT_SCOPE = "veneer_tangent"

_lock = threading.Lock()
_uses = 0  # blocks of `tangents_in_scope` that are open, in any thread
_undos: list[Callable[[], None]] = []


def _replace_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # the child has no thread that could unlock the other one
    os.register_at_fork(after_in_child=_replace_lock)


@contextmanager
def tangents_in_scope(primitives: Sequence[Primitive], is_on: Callable[[], bool]) -> Iterator[None]:
    """Compute the tangents of some primitives and of `custom_jvp` functions in a named scope.

    JAX has no hook for it. While a block is open, its derivative rules of these primitives are
    replaced by rules that call them.

    **Arguments:**

    - `primitives`: the same for all open blocks.
    - `is_on`: returns whether a program that is differentiated now is meant. JAX must trace
      functions anew where the result changes.
    """
    global _uses
    with _lock:
        if _uses == 0:
            _replace_rules(primitives, is_on)
        _uses += 1
    try:
        yield
    finally:
        with _lock:
            _uses -= 1
            while _uses == 0 and _undos:
                _undos.pop()()


def _replace_rules(primitives: Sequence[Primitive], is_on: Callable[[], bool]) -> None:
    rules = ad.primitive_jvps
    for primitive in primitives:
        rule = rules[primitive]
        rules[primitive] = _with_tangent_in_scope(primitive, rule, is_on)
        _undos.append(partial(rules.__setitem__, primitive, rule))
    name = "process_custom_jvp_call"
    for trace in (ad.JVPTrace, ad.LinearizeTrace):
        process = getattr(trace, name)
        setattr(trace, name, _with_rule_in_scope(process, is_on))
        _undos.append(partial(setattr, trace, name, process))


def _with_tangent_in_scope(primitive: Primitive, rule: Callable, is_on: Callable) -> Callable:
    @wraps(rule)
    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        if not is_on():
            return rule(primals, tangents, **params)
        with jax.named_scope(TANGENT_SCOPE):
            _, tangent = rule(primals, tangents, **params)
        return primitive.bind(*primals, **params), tangent

    return jvp


def _with_rule_in_scope(process: Callable, is_on: Callable) -> Callable:
    @wraps(process)
    def process_custom_jvp_call(
        self: Any, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        def run_rule(rule: Callable, *args: Any) -> list[Any]:
            with jax.named_scope(TANGENT_SCOPE):
                both = rule(*args)
            reset_stores(fun)
            out = fun.call_wrapped(*args[: len(args) // 2])
            reset_stores(fun)  # JAX reads those of the rule
            return [*out, *both[len(out) :]]

        if is_on():
            jvp = transform_flat_function(jvp, lambda rule: partial(run_rule, rule))
        return process(self, primitive, fun, jvp, tracers, **params)

    return process_custom_jvp_call
