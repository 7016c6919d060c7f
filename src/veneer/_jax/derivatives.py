"""Call JAX's custom derivative and batching rules, and mark tangents with a named scope.

JAX passes the functions of `custom_jvp` and `custom_vjp` to a trace as `WrappedFun`s. Besides its
return value, a `WrappedFun` writes results such as tree structures into stores. Its caller reads
the stores after the call.
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
    """Return a copy of a `WrappedFun` that calls `transform(f)` instead of its function `f`."""
    call_transformed = lambda inner, *args: transform(inner)(*args)
    return lu.transformation2(call_transformed)(function)


def reset_stores(function: lu.WrappedFun) -> None:
    """Empty the stores of a `WrappedFun`, so that it can be called again."""
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


def get_operand_structure(operands: Any) -> Any:
    """Return the tree structure of `operands`, in the form of the parameter `in_tree`.

    `in_tree` is a parameter of the primitive that `jax.custom_batching.custom_vmap` binds.
    """
    registry = getattr(custom_batching, "tracing_registry", None)  # JAX >= 0.12
    return registry.flatten(operands)[1] if registry else jax.tree.structure(operands)


#: The name of the scope around the operations that compute tangents.
TANGENT_SCOPE = "veneer_tangent"

_lock = threading.Lock()
_open_blocks = 0  # the number of open blocks of `tangents_in_scope`, in all threads
_undo_functions: list[Callable[[], None]] = []  # restore the rules of JAX that are wrapped

if hasattr(os, "register_at_fork"):
    # A forked process has no copy of the thread that may hold the lock, so nobody would release it.
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


@contextmanager
def tangents_in_scope(primitives: Sequence[Primitive], is_on: Callable[[], bool]) -> Iterator[None]:
    """Put the operations that compute tangents into the named scope `TANGENT_SCOPE`.

    JAX's derivative rules compute a primal value and its tangent by the same primitives on the same
    source line, so a jaxpr does not show which operations compute tangents. JAX has no hook for
    this. So the first `with` block wraps JAX's derivative rules, and the last to end restores them.

    **Arguments:**

    - `primitives`: the primitives whose derivative rules are wrapped, the same in all blocks. The
      rules of `custom_jvp` functions are always wrapped.
    - `is_on`: a function that returns whether to mark the tangents that are computed now. JAX must
      not reuse a jaxpr that was traced when `is_on` returned another result.
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
            while _open_blocks == 0 and _undo_functions:
                _undo_functions.pop()()


def _wrap_derivative_rules(primitives: Sequence[Primitive], is_on: Callable[[], bool]) -> None:
    rules = ad.primitive_jvps
    for primitive in primitives:
        rule = rules[primitive]
        rules[primitive] = _put_tangent_in_scope(primitive, rule, is_on)
        _undo_functions.append(partial(rules.__setitem__, primitive, rule))
    method = "process_custom_jvp_call"
    for trace_class in (ad.JVPTrace, ad.LinearizeTrace):
        process = getattr(trace_class, method)
        setattr(trace_class, method, _put_custom_rule_in_scope(process, is_on))
        _undo_functions.append(partial(setattr, trace_class, method, process))


def _put_tangent_in_scope(primitive: Primitive, rule: Callable, is_on: Callable) -> Callable:
    """Wrap the derivative rule of a primitive, to compute tangents in the scope `TANGENT_SCOPE`.

    The primal result is computed outside the scope. Nothing changes while `is_on()` is False.
    """

    @wraps(rule)
    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        if not is_on():
            return rule(primals, tangents, **params)
        with jax.named_scope(TANGENT_SCOPE):
            _, tangent = rule(primals, tangents, **params)
        # The primal of the rule is in the scope too. So drop it and compute it again outside.
        return primitive.bind(*primals, **params), tangent

    return jvp


def _put_custom_rule_in_scope(process: Callable, is_on: Callable) -> Callable:
    """Wrap `process`, the method by which a trace runs `custom_jvp` functions.

    The derivative rule of such a function runs in the scope `TANGENT_SCOPE`, for the tangents. The
    function itself runs outside of the scope, for the primal results. Nothing changes while
    `is_on()` is False.
    """

    @wraps(process)
    def process_custom_jvp_call(
        self: Any, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
    ) -> Any:
        def run_rule(rule: Callable, *args: Any) -> list[Any]:
            primals = args[: len(args) // 2]  # the tangents follow
            with jax.named_scope(TANGENT_SCOPE):
                results = rule(*args)  # primal outputs, then tangents
            # Compute the primal outputs again, outside the scope. JAX reads the stores of the rule,
            # so the stores of `fun` must be empty before and after.
            reset_stores(fun)
            primal_outputs = fun.call_wrapped(*primals)
            reset_stores(fun)
            return [*primal_outputs, *results[len(primal_outputs) :]]

        if is_on():
            jvp = transform_flat_function(jvp, lambda rule: partial(run_rule, rule))
        return process(self, primitive, fun, jvp, tracers, **params)

    return process_custom_jvp_call
