"""`custom_jvp` and `custom_vjp` functions that meet implicit values.

Such a function is rebuilt, with JAX's public decorators, as a function of the leaves. Its
derivative with respect to an implicit operand is the one its author wrote, taken at the dense
array that the operand stands for, composed with the derivative of `materialise`. So its outputs
are dense, for so are the tangents and cotangents that an author's rule speaks of.

Labels need none of that: the tangent or cotangent of a label is a label, with the same metadata, so
they go in and come out as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..._jax.derivatives import call_bwd, reset_stores, transform_flat_function
from ..._jax.primitives import Primitive, find_primitive
from ..rules import structural
from ..sources import restore_sources
from ..tree import split_list
from ..value import Value, describe, make_dense, materialise_one, source_of
from .labels import dense_unless, is_label
from .reentering import reentering
from .scopes import OF_TANGENTS, answers_noted, asked

_custom_jvp_p, _custom_vjp_p = map(find_primitive, ("custom_jvp_call", "custom_vjp_call"))


@structural("custom_jvp_call")
def _custom_jvp_call(
    *values: Any, trace: Any, fun: Any, jvp: Any, symbolic_zeros: bool
) -> Sequence[Any]:
    """A `custom_jvp` function at `values`, in the trace below `trace`."""
    primitive = _custom_jvp_p
    run_later = reentering(trace)
    run_jvp = _run_jvp(run_later, fun)
    if not any(isinstance(v, Value) for v in values):  # it may close over implicit ones
        outputs = _Outputs(primitive)
        jvp = transform_flat_function(jvp, lambda f: outputs.flat(run_jvp(f), tangents=True))
        fun = transform_flat_function(fun, lambda f: outputs.flat(run_later(f)))
        out = trace.parent.process_custom_jvp_call(
            primitive, fun, jvp, values, symbolic_zeros=symbolic_zeros
        )
        return outputs.rebuild(out)
    leaves, treedef = jax.tree.flatten(list(values))
    sources = list(map(source_of, values))
    together = lambda leaves: restore_sources(sources, jax.tree.unflatten(treedef, leaves))

    @jax.custom_jvp
    def call(*leaves: Any) -> list[Any]:
        out = run_later(fun.call_wrapped)(*together(leaves))
        return dense_unless(is_label, primitive, out)

    def call_jvp(leaves: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        primals = together(leaves)
        moves = [
            tangent_of_leaves(primal, tangent, symbolic_zeros)
            for primal, tangent in zip(primals, _by_value(treedef, tangents), strict=True)
        ]
        reset_stores(jvp)
        both = run_jvp(jvp.call_wrapped)(*primals, *moves)
        out = dense_unless(is_label, primitive, both[: len(both) // 2])
        moved = [
            _tangent_of_output(primitive, primal, tangent)
            for primal, tangent in zip(out, both[len(out) :], strict=True)
        ]
        return out, moved

    call.defjvp(call_jvp, symbolic_zeros=True)
    return call(*leaves)


def _run_jvp(run_later: Callable, fun: Any) -> Callable[[Callable], Callable]:
    """What runs a derivative rule later, from a function of primals and tangents to the outputs.

    Where a product of tangents differs from one of activations, or somebody asks for places, the
    rule is run for the tangents alone, and the outputs are those of the function itself.
    """
    is_asked = asked() is not None

    def run_jvp(jvp: Callable) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            with answers_noted() as differs, OF_TANGENTS(True):
                both = run_later(jvp, is_derivative=True)(*args)
            if not (is_asked or differs):
                return both
            reset_stores(fun)
            out = run_later(fun.call_wrapped)(*args[: len(args) // 2])
            reset_stores(fun)  # JAX reads those of one of the two functions
            return [*out, *both[len(out) :]]

        return run

    return run_jvp


@structural("custom_vjp_call")
def _custom_vjp_call(
    *values: Any,
    trace: Any,
    fun: Any,
    fwd: Any,
    bwd: Any,
    out_trees: Callable,
    symbolic_zeros: bool,
) -> Sequence[Any]:
    """A `custom_vjp` function at `values`, in the trace below `trace`."""
    primitive = _custom_vjp_p
    run_later = reentering(trace)
    if not any(isinstance(v, Value) for v in values):  # it may close over implicit ones
        outputs = _Outputs(primitive)
        fun = transform_flat_function(fun, lambda f: outputs.flat(run_later(f)))
        fwd = transform_flat_function(fwd, lambda f: outputs.flat(run_later(f)))
        out = trace.parent.process_custom_vjp_call(
            primitive, fun, fwd, bwd, values, out_trees=out_trees, symbolic_zeros=symbolic_zeros
        )
        return outputs.rebuild(out)
    leaves, treedef = jax.tree.flatten(list(values))
    sources = list(map(source_of, values))
    together = lambda leaves: restore_sources(sources, jax.tree.unflatten(treedef, leaves))

    @jax.custom_vjp
    def call(*leaves: Any) -> list[Any]:
        out = run_later(fun.call_wrapped)(*together(leaves))
        return dense_unless(is_label, primitive, out)

    def call_fwd(*primals: Any) -> tuple[list[Any], Any]:
        values = together([p.value for p in primals])
        perturbed = _by_value(treedef, [p.perturbed for p in primals])
        flagged = [x for value, p in zip(values, perturbed, strict=True) for x in (value, any(p))]
        reset_stores(fwd)
        results = run_later(fwd.call_wrapped)(*flagged)
        _, residual_tree, forwarded = out_trees()
        count = residual_tree.num_leaves - sum(f is not None for f in forwarded)
        computed, out = split_list(results, count)
        rest = iter(computed)
        residuals = [next(rest) if f is None else values[f] for f in forwarded]
        operands = [v if isinstance(v, Value) else None for v in values]
        return dense_unless(is_label, primitive, out), (residuals, operands)

    def call_bwd_rule(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        residuals, operands = saved
        cotangents = [_settle(ct, symbolic_zeros) for ct in cotangents]
        run: Callable = lambda *args: call_bwd(bwd, *split_list(args, len(residuals)))
        found = run_later(run, is_derivative=True)(*residuals, *cotangents)
        return tuple(
            leaf_ct
            for operand, ct in zip(operands, found, strict=True)
            for leaf_ct in leaf_cotangents(primitive, operand, ct)
        )

    call.defvjp(call_fwd, call_bwd_rule, symbolic_zeros=True)
    return call(*leaves)


class _Outputs:
    """The outputs of a function that takes arrays and gives labels, as arrays for JAX."""

    def __init__(self, primitive: Primitive):
        self.primitive = primitive
        self.trees: list[Any] = []

    def flat(self, run: Callable, tangents: bool = False) -> Callable:
        """`run` giving arrays; of outputs followed by their tangents, the former are noted."""

        def on_arrays(*args: Any) -> list[Any]:
            out = dense_unless(is_label, self.primitive, run(*args))
            self.trees = [jax.tree.structure(v) for v in out]
            if tangents:
                del self.trees[len(out) // 2 :]
            return [jax.tree.leaves(v)[0] if isinstance(v, Value) else v for v in out]

        return on_arrays

    def rebuild(self, arrays: Sequence[Any]) -> list[Any]:
        """The outputs; residuals, if any, come before and are not among the arrays."""
        trees = self.trees[len(self.trees) - len(arrays) :]
        return [jax.tree.unflatten(t, [x]) for t, x in zip(trees, arrays, strict=True)]


def _by_value(treedef: Any, leaves: Sequence[Any]) -> list[list[Any]]:
    return list(split_list(leaves, *(child.num_leaves for child in treedef.children())))[:-1]


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is known to be zero: told so, or that of an integer."""
    return isinstance(tangent, SymbolicZero) or jax.dtypes.float0 == tangent.dtype


def instantiate(tangent: Any) -> Any:
    """A zero that is told as an array of zeros; any other tangent as it is."""
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    shape, dtype = aval.shape, aval.dtype
    return np.zeros(shape, dtype) if dtype == jax.dtypes.float0 else jnp.zeros(shape, dtype)


def _settle(tangent: Any, symbolic_zeros: bool) -> Any:
    """A tangent or cotangent as the author's rule takes it: zeros are arrays unless it asked."""
    if isinstance(tangent, Value):
        (leaf,) = jax.tree.leaves(tangent, is_leaf=lambda x: isinstance(x, SymbolicZero))
        if isinstance(leaf, SymbolicZero) and symbolic_zeros:
            return leaf
        return jax.tree.unflatten(jax.tree.structure(tangent), [instantiate(leaf)])
    return tangent if symbolic_zeros else instantiate(tangent)


def materialise_along(value: Value, moving: Sequence[bool]) -> tuple[Callable, list[Any]]:
    """The dense array as a function of some of the leaves, and those leaves."""
    leaves, treedef = jax.tree.flatten(value)

    def dense(*moved: Any) -> Any:
        rest = iter(moved)
        filled = [next(rest) if m else x for m, x in zip(moving, leaves, strict=True)]
        return materialise_one(jax.tree.unflatten(treedef, filled))

    return dense, [x for m, x in zip(moving, leaves, strict=True) if m]


def tangent_of_leaves(value: Any, tangents: Sequence[Any], symbolic_zeros: bool) -> Any:
    """The tangent of an operand, from those of its leaves."""
    if is_label(value) and jnp.issubdtype(value.aval().dtype, jnp.inexact):
        return _settle(jax.tree.unflatten(jax.tree.structure(value), tangents), symbolic_zeros)
    moving = [not is_zero(t) for t in tangents]
    if not isinstance(value, Value):
        (tangent,) = tangents
    elif not any(moving):
        tangent = SymbolicZero(value.aval().to_tangent_aval())
    else:
        dense, primals = materialise_along(value, moving)
        moves = [t for m, t in zip(moving, tangents, strict=True) if m]
        tangent = jax.jvp(dense, primals, moves)[1]
    return _settle(tangent, symbolic_zeros)


def _tangent_of_output(primitive: Primitive, primal: Any, tangent: Any) -> Any:
    if not isinstance(primal, Value):
        return make_dense(primitive, [tangent])[0]
    structure: Any = jax.tree.structure(primal)
    if is_label(tangent):
        if structure != jax.tree.structure(tangent):
            raise TypeError(
                f"The rule of a custom_jvp function returns the tangent {tangent!r} for the output "
                f"{primal!r}. Both must have the same metadata."
            )
        return tangent
    return jax.tree.unflatten(structure, make_dense(primitive, [tangent]))


def leaf_cotangents(primitive: Primitive, operand: Value | None, cotangent: Any) -> list[Any]:
    """The cotangents of an operand's leaves; that of a dense one, if it is None."""
    if is_label(cotangent):  # what its metadata says is of the dual space: the number is meant
        (cotangent,) = jax.tree.leaves(cotangent)
    else:
        (cotangent,) = make_dense(primitive, [cotangent])
    if operand is None or is_label(operand):
        return [cotangent]
    leaves = jax.tree.leaves(operand)
    if cotangent is None:
        return [None] * len(leaves)
    moving = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    dense, primals = materialise_along(operand, moving)
    cts = iter(jax.vjp(dense, *primals)[1](cotangent_of_dense(operand, cotangent)))
    return [next(cts) if m else None for m in moving]


def cotangent_of_dense(operand: Value, cotangent: Any) -> Any:
    """Return a dense cotangent in the dtype of its operand, or reject one of another shape."""
    aval = operand.aval()
    if jnp.shape(cotangent) != aval.shape:
        given, of = describe([cotangent, operand])
        raise TypeError(
            f"The backward rule of a custom_vjp returns {given} for the argument {of}. A cotangent "
            "must have the same shape as its argument."
        )
    return jnp.asarray(cotangent, aval.dtype)
