"""Call JAX's custom derivative and batching rules, and mark tangents with a named scope.

JAX passes the functions of `custom_jvp` and `custom_vjp` to a trace as `WrappedFun`s. A
`WrappedFun` writes trees and other results into stores, which its caller reads after the call.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import jax
from jax._src import custom_batching
from jax._src import linear_util as lu
from jax._src.ad_util import SymbolicZero, Zero
from jax._src.interpreters import ad
from jax._src.lax.control_flow import solves

from .primitives import Primitive


def transform_flat_function(
    function: lu.WrappedFun, transform: Callable[[Callable], Callable]
) -> lu.WrappedFun:
    """Return a `WrappedFun` that calls `transform(f)`, where `f` is the function inside."""

    def transformed(inner: Callable, *args: Any) -> Any:
        return transform(inner)(*args)

    return lu.transformation2(transformed)(function)


def reset_stores(function: lu.WrappedFun) -> None:
    """Empty the stores of a `WrappedFun`, which can be filled only once, to call it again."""
    for store in function.stores:
        if store is not None:
            store.reset()


def call_bwd(bwd: lu.WrappedFun, residuals: Sequence, cotangents: Sequence) -> list[Any]:
    """Call the backward function of a `custom_vjp`. Return cotangents, with None for zeros."""
    out = bwd.call_wrapped(*residuals, *cotangents)
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], list):  # JAX >= 0.12
        out, logs = out
        if logs:
            raise NotImplementedError(
                "custom_vjp functions that log (defvjp_with_logs) cannot take implicit arrays. "
                "Call vn.materialise on the operands first."
            )
    return [None if isinstance(ct, Zero | SymbolicZero) else ct for ct in out]


class _Absent:
    """A placeholder for a class that this version of JAX does not have."""


# Before JAX 0.12, custom_root has no primitive: it is a function with a custom_jvp.
CustomRoot: Any = getattr(solves, "CustomRoot", _Absent)
RootLinearMap: Any = getattr(solves, "_RootLinearMap", _Absent)


def get_operand_structure(tree: Any) -> Any:
    """Return the tree structure that a `custom_vmap` stores for its operands."""
    registry = getattr(custom_batching, "tracing_registry", None)  # JAX >= 0.12 has its own
    return registry.flatten(tree)[1] if registry else jax.tree.structure(tree)


#: The name of the scope around the operations that compute tangents.
TANGENT_SCOPE = "veneer_tangent"

_lock = threading.Lock()
_open_blocks = 0  # the open blocks of `tangents_in_scope`, in all threads
_undos: list[Callable[[], None]] = []


def _replace_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    # A forked process has no copy of the thread that may hold the lock, so nobody would release it.
    os.register_at_fork(after_in_child=_replace_lock)


@contextmanager
def tangents_in_scope(primitives: Sequence[Primitive], is_on: Callable[[], bool]) -> Iterator[None]:
    """Compute the tangents of some primitives and of `custom_jvp` functions in a named scope.

    JAX's derivative rules compute a primal value and its tangent by the same primitives on the same
    source line, so a staged program does not show which operations compute tangents. JAX has no
    hook for this. While a block is open, its derivative rules are wrapped.

    **Arguments:**

    - `primitives`: the primitives, the same in all open blocks.
    - `is_on`: a function that returns whether to mark the tangents that are computed now. If its
      result changes, JAX must trace functions again.
    """
    global _open_blocks
    with _lock:
        if _open_blocks == 0:
            _wrap_derivative_rules(primitives, is_on)
        _open_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            while _open_blocks == 0 and _undos:
                _undos.pop()()


def _wrap_derivative_rules(primitives: Sequence[Primitive], is_on: Callable[[], bool]) -> None:
    rules = ad.primitive_jvps
    for primitive in primitives:
        rule = rules[primitive]
        rules[primitive] = _put_tangent_in_scope(primitive, rule, is_on)
        _undos.append(partial(rules.__setitem__, primitive, rule))
    name = "process_custom_jvp_call"
    for trace in (ad.JVPTrace, ad.LinearizeTrace):
        process = getattr(trace, name)
        setattr(trace, name, _put_custom_rule_in_scope(process, is_on))
        _undos.append(partial(setattr, trace, name, process))


def _put_tangent_in_scope(primitive: Primitive, rule: Callable, is_on: Callable) -> Callable:
    @wraps(rule)
    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        if not is_on():
            return rule(primals, tangents, **params)
        with jax.named_scope(TANGENT_SCOPE):
            _, tangent = rule(primals, tangents, **params)
        return primitive.bind(*primals, **params), tangent

    return jvp


def _put_custom_rule_in_scope(process: Callable, is_on: Callable) -> Callable:
    @wraps(process)
    def process_custom_jvp_call(
        self: Any, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        def run_rule(rule: Callable, *args: Any) -> list[Any]:
            with jax.named_scope(TANGENT_SCOPE):
                both = rule(*args)
            reset_stores(fun)
            out = fun.call_wrapped(*args[: len(args) // 2])
            reset_stores(fun)  # JAX reads the stores of the rule instead
            return [*out, *both[len(out) :]]

        if is_on():
            jvp = transform_flat_function(jvp, lambda rule: partial(run_rule, rule))
        return process(self, primitive, fun, jvp, tracers, **params)

    return process_custom_jvp_call
