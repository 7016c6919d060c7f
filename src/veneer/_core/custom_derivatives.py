"""`custom_jvp` and `custom_vjp` functions that meet implicit values.

Such a function is rebuilt, with JAX's public decorators, as a function of the leaves. Its
derivative with respect to an implicit operand is the one its author wrote, taken at the dense
array that the operand stands for, composed with the derivative of `materialise`. Its outputs are
dense, for so are the tangents and cotangents that an author's rule speaks of.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .explain import current_policy, policy_in_force
from .jax_internals import (
    Primitive,
    call_bwd,
    current_trace,
    reset_stores,
    set_current_trace,
    transform_flat_function,
)
from .tree import split_list
from .value import Value, make_dense, materialise_one


def custom_jvp_call(
    trace: Any,
    primitive: Primitive,
    fun: Any,
    jvp: Any,
    values: Sequence[Any],
    symbolic_zeros: bool,
) -> Sequence[Any]:
    """A `custom_jvp` function at `values`, in the trace below `trace`."""
    again = _later(trace, primitive)
    if not any(isinstance(v, Value) for v in values):  # it may close over implicit ones
        fun, jvp = (transform_flat_function(f, again) for f in (fun, jvp))
        return trace.parent.process_custom_jvp_call(
            primitive, fun, jvp, values, symbolic_zeros=symbolic_zeros
        )
    leaves, treedef = jax.tree.flatten(list(values))

    @jax.custom_jvp
    def call(*leaves: Any) -> list[Any]:
        return again(fun.call_wrapped)(*jax.tree.unflatten(treedef, leaves))

    def call_jvp(leaves: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        primals = jax.tree.unflatten(treedef, leaves)
        dense_tangents = [
            _dense_tangent(primal, tangent)
            for primal, tangent in zip(primals, _by_value(treedef, tangents), strict=True)
        ]
        if not symbolic_zeros:
            dense_tangents = [_instantiate(t) for t in dense_tangents]
        reset_stores(jvp)
        out = again(jvp.call_wrapped)(*primals, *dense_tangents)
        return out[: len(out) // 2], out[len(out) // 2 :]

    call.defjvp(call_jvp, symbolic_zeros=True)
    return call(*leaves)


def custom_vjp_call(
    trace: Any,
    primitive: Primitive,
    fun: Any,
    fwd: Any,
    bwd: Any,
    values: Sequence[Any],
    out_trees: Callable,
    symbolic_zeros: bool,
) -> Sequence[Any]:
    """A `custom_vjp` function at `values`, in the trace below `trace`."""
    again = _later(trace, primitive)
    if not any(isinstance(v, Value) for v in values):  # it may close over implicit ones
        fun, fwd = (transform_flat_function(f, again) for f in (fun, fwd))
        return trace.parent.process_custom_vjp_call(
            primitive, fun, fwd, bwd, values, out_trees=out_trees, symbolic_zeros=symbolic_zeros
        )
    leaves, treedef = jax.tree.flatten(list(values))

    @jax.custom_vjp
    def call(*leaves: Any) -> list[Any]:
        return again(fun.call_wrapped)(*jax.tree.unflatten(treedef, leaves))

    def call_fwd(*primals: Any) -> tuple[list[Any], Any]:
        values = jax.tree.unflatten(treedef, [p.value for p in primals])
        perturbed = _by_value(treedef, [p.perturbed for p in primals])
        flagged = [x for value, p in zip(values, perturbed, strict=True) for x in (value, any(p))]
        reset_stores(fwd)
        results = again(fwd.call_wrapped, keep=True)(*flagged)
        _, residual_tree, forwarded = out_trees()
        count = residual_tree.num_leaves - sum(f is not None for f in forwarded)
        computed, out = split_list(results, count)
        rest = iter(computed)
        residuals = [next(rest) if f is None else values[f] for f in forwarded]
        operands = [v if isinstance(v, Value) else None for v in values]
        return make_dense(primitive, out), (residuals, operands)

    def call_bwd_rule(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        residuals, operands = saved
        if not symbolic_zeros:
            cotangents = [_instantiate(ct) for ct in cotangents]
        run: Callable = lambda *args: call_bwd(bwd, *split_list(args, len(residuals)))
        dense_cts = again(run)(*residuals, *cotangents)
        return tuple(
            leaf_ct
            for operand, ct in zip(operands, dense_cts, strict=True)
            for leaf_ct in ([ct] if operand is None else _leaf_cotangents(operand, ct))
        )

    call.defvjp(call_fwd, call_bwd_rule, symbolic_zeros=True)
    return call(*leaves)


def _later(trace: Any, primitive: Primitive) -> Callable:
    """Runs a flat function under whatever trace is current then, still knowing our values."""
    kind, tag, policy = type(trace), trace.tag, current_policy()

    def again(function: Callable, keep: bool = False) -> Callable:
        def run(*args: Any) -> list[Any]:
            inner = kind(current_trace(), tag)
            with policy_in_force(policy):
                wrapped = list(map(inner.wrap, args))
                with set_current_trace(inner):
                    out = function(*wrapped)
                values = list(map(inner.unwrap, out))
                return values if keep else make_dense(primitive, values)

        return run

    return again


def _by_value(treedef: Any, leaves: Sequence[Any]) -> list[list[Any]]:
    return list(split_list(leaves, *(child.num_leaves for child in treedef.children())))[:-1]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or jax.dtypes.float0 == tangent.dtype


def _instantiate(tangent: Any) -> Any:
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    shape, dtype = aval.shape, aval.dtype
    return np.zeros(shape, dtype) if dtype == jax.dtypes.float0 else jnp.zeros(shape, dtype)


def _materialise_along(value: Value, moving: Sequence[bool]) -> tuple[Callable, list[Any]]:
    """The dense array as a function of some of the leaves, and those leaves."""
    leaves, treedef = jax.tree.flatten(value)

    def dense(*moved: Any) -> Any:
        rest = iter(moved)
        filled = [next(rest) if m else x for m, x in zip(moving, leaves, strict=True)]
        return materialise_one(jax.tree.unflatten(treedef, filled))

    return dense, [x for m, x in zip(moving, leaves, strict=True) if m]


def _dense_tangent(value: Any, tangents: Sequence[Any]) -> Any:
    if not isinstance(value, Value):
        (tangent,) = tangents
        return tangent
    moving = [not _is_zero(t) for t in tangents]
    if not any(moving):
        return SymbolicZero(value.aval().to_tangent_aval())
    dense, primals = _materialise_along(value, moving)
    return jax.jvp(dense, primals, [t for m, t in zip(moving, tangents, strict=True) if m])[1]


def _leaf_cotangents(value: Value, cotangent: Any) -> list[Any]:
    leaves = jax.tree.leaves(value)
    if cotangent is None:
        return [None] * len(leaves)
    moving = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    dense, primals = _materialise_along(value, moving)
    cts = iter(jax.vjp(dense, *primals)[1](cotangent))
    return [next(cts) if m else None for m in moving]
