"""Rules of `custom_jvp` and `custom_vjp` functions.

Such a function is rebuilt as a function of leaves, with JAX's public decorators. Its derivative
with respect to an implicit operand is the user's rule at the dense array, composed with the
derivative of `materialise`. The rules of users take and return dense tangents and cotangents, so
implicit outputs are materialized. Only labels (types whose only leaf is the dense array) are not:
the tangent or cotangent of a label is a label with the same metadata.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..._jax.derivatives import call_bwd, reset_stores, transform_flat_function
from ..._jax.primitives import Primitive, find_primitive, split_list
from ..rules import structural
from ..sources import restore_sources
from ..value import Value, describe, make_dense, materialise_one, source_of
from .leaves import dense_unless, is_label
from .scopes import IN_DERIVATIVE_RULE, record_tangent_queries, scope_query
from .staging import capture_context

_custom_jvp_p, _custom_vjp_p = map(find_primitive, ("custom_jvp_call", "custom_vjp_call"))


@structural("custom_jvp_call")
def _custom_jvp_call(
    *values: Any, trace: Any, fun: Any, jvp: Any, symbolic_zeros: bool
) -> Sequence[Any]:
    run_later = capture_context(trace)
    run_jvp = partial(_run_jvp, run_later, fun, scope_query() is not None)
    if not any(isinstance(v, Value) for v in values):
        # The functions may still capture implicit values. So run them with our rules.
        outputs = _OutputsAsArrays(_custom_jvp_p)
        jvp = transform_flat_function(jvp, lambda f: outputs.wrap(partial(run_jvp, f), is_jvp=True))
        fun = transform_flat_function(fun, lambda f: outputs.wrap(run_later(f)))
        out = trace.parent.process_custom_jvp_call(
            _custom_jvp_p, fun, jvp, values, symbolic_zeros=symbolic_zeros
        )
        return outputs.rebuild(out)
    leaves, unflatten, group_by_value = flatten_values(values)

    @jax.custom_jvp
    def call(*leaves: Any) -> list[Any]:
        out = run_later(fun.call_wrapped)(*unflatten(leaves))
        return dense_unless(is_label, _custom_jvp_p, out)

    def call_jvp(leaves: Any, leaf_tangents: Any) -> tuple[list[Any], list[Any]]:
        primals = unflatten(leaves)
        pairs = zip(primals, group_by_value(leaf_tangents), strict=True)
        tangents = [combine_tangents(primal, ts, symbolic_zeros) for primal, ts in pairs]
        reset_stores(jvp)
        results = run_jvp(jvp.call_wrapped, *primals, *tangents)
        # The first half of the results are primal outputs. The other half are their tangents.
        out = dense_unless(is_label, _custom_jvp_p, results[: len(results) // 2])
        return out, list(map(_tangent_of_output, out, results[len(out) :]))

    call.defjvp(call_jvp, symbolic_zeros=True)
    return call(*leaves)


def _run_jvp(
    run_later: Callable, fun: Any, has_scope_query: bool, jvp: Callable, *args: Any
) -> list[Any]:
    """Run the derivative rule `jvp` of a `custom_jvp` function `fun`, with our rules in force.

    The rule takes primals and tangents, and returns primal outputs and their tangents. The primal
    outputs are computed by `fun` instead in two cases: if one of our rules did not quantize or
    record operands that `may_be_tangents`, or if `query_scopes` asks for the place of primitives.
    """
    with record_tangent_queries() as tangent_queries, IN_DERIVATIVE_RULE(True):
        results = run_later(jvp, is_derivative=True)(*args)
    if not (has_scope_query or tangent_queries):
        return results
    primals = args[: len(args) // 2]
    reset_stores(fun)
    out = run_later(fun.call_wrapped)(*primals)
    reset_stores(fun)  # JAX reads the stores of only one of the functions
    return [*out, *results[len(out) :]]


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
    run_later = capture_context(trace)
    if not any(isinstance(v, Value) for v in values):
        # The functions may still capture implicit values. So run them with our rules.
        outputs = _OutputsAsArrays(_custom_vjp_p)
        fun = transform_flat_function(fun, lambda f: outputs.wrap(run_later(f)))
        fwd = transform_flat_function(fwd, lambda f: outputs.wrap(run_later(f)))
        out = trace.parent.process_custom_vjp_call(
            _custom_vjp_p, fun, fwd, bwd, values, out_trees=out_trees, symbolic_zeros=symbolic_zeros
        )
        return outputs.rebuild(out)
    leaves, unflatten, group_by_value = flatten_values(values)

    @jax.custom_vjp
    def call(*leaves: Any) -> list[Any]:
        out = run_later(fun.call_wrapped)(*unflatten(leaves))
        return dense_unless(is_label, _custom_vjp_p, out)

    def call_fwd(*primals: Any) -> tuple[list[Any], Any]:
        values = unflatten([p.value for p in primals])
        is_perturbed = map(any, group_by_value([p.perturbed for p in primals]))
        reset_stores(fwd)
        pairs = zip(values, is_perturbed, strict=True)
        # `fwd` takes each operand, followed by whether the operand is perturbed.
        results = run_later(fwd.call_wrapped)(*(x for pair in pairs for x in pair))
        # `fwd` omits a residual that is an operand. `forwarded` has the index of the operand, or
        # None for a residual that `fwd` returns, before the outputs.
        _, residual_tree, forwarded = out_trees()
        returned_count = residual_tree.num_leaves - sum(index is not None for index in forwarded)
        returned, out = split_list(results, [returned_count])
        remaining = iter(returned)
        residuals = [next(remaining) if index is None else values[index] for index in forwarded]
        operands = [v if isinstance(v, Value) else None for v in values]
        return dense_unless(is_label, _custom_vjp_p, out), (residuals, operands)

    def call_bwd_rule(saved: Any, cotangents: list[Any]) -> tuple[Any, ...]:
        residuals, operands = saved
        cotangents = [_fill_zeros(ct, symbolic_zeros) for ct in cotangents]
        run: Callable = lambda *args: call_bwd(bwd, *split_list(args, [len(residuals)]))
        results = run_later(run, is_derivative=True)(*residuals, *cotangents)
        pairs = zip(operands, results, strict=True)
        return tuple(
            leaf_ct for x, ct in pairs for leaf_ct in leaf_cotangents(_custom_vjp_p, x, ct)
        )

    call.defvjp(call_fwd, call_bwd_rule, symbolic_zeros=True)
    return call(*leaves)


def flatten_values(values: Sequence[Any]) -> tuple[list[Any], Callable, Callable]:
    """Flatten values to one list of leaves.

    **Returns:** the leaves; a function that rebuilds the values from a list of leaves; a function
    that splits such a list into one list per value. The functions do not capture the leaves, whose
    tracers must not outlive their trace.
    """
    leaves, treedef = jax.tree.flatten(list(values))
    counts = [len(jax.tree.leaves(value)) for value in values]
    sources = list(map(source_of, values))
    unflatten = lambda leaves: restore_sources(sources, jax.tree.unflatten(treedef, leaves))
    group_by_value = lambda leaves: split_list(leaves, counts)[:-1]  # the rest is empty
    return leaves, unflatten, group_by_value


class _OutputsAsArrays:
    """A converter of outputs that are labels (types with one leaf, the dense array) to arrays."""

    def __init__(self, primitive: Primitive):
        self.primitive = primitive
        self.trees: list[Any] = []

    def wrap(self, run: Callable, is_jvp: bool = False) -> Callable:
        """Return a function that calls `run`, and returns its outputs as arrays.

        Outputs that are not labels are materialized. The structures of the outputs are stored, so
        that labels can be rebuilt. With `is_jvp`, the second half of the outputs are tangents.
        """

        def run_to_arrays(*args: Any) -> list[Any]:
            outputs = dense_unless(is_label, self.primitive, run(*args))
            primal_count = len(outputs) // 2 if is_jvp else len(outputs)
            self.trees = [jax.tree.structure(output) for output in outputs[:primal_count]]
            # A label has one leaf, which is the dense array.
            return [jax.tree.leaves(x)[0] if isinstance(x, Value) else x for x in outputs]

        return run_to_arrays

    def rebuild(self, arrays: Sequence[Any]) -> list[Any]:
        """Convert arrays back to labels where the wrapped function returned labels."""
        # A `fwd` returns residuals before the outputs, so the last trees belong to the outputs.
        trees = self.trees[len(self.trees) - len(arrays) :]
        return [jax.tree.unflatten(t, [x]) for t, x in zip(trees, arrays, strict=True)]


def instantiate(tangent: Any) -> Any:
    """Return an array of zeros for a symbolic zero, and any other tangent unchanged."""
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    shape, dtype = aval.shape, aval.dtype
    return np.zeros(shape, dtype) if dtype == jax.dtypes.float0 else jnp.zeros(shape, dtype)


def _fill_zeros(tangent: Any, symbolic_zeros: bool) -> Any:
    """Convert a tangent or cotangent for the derivative rule of the user.

    If the user did not set `symbolic_zeros`, replace a symbolic zero by an array of zeros.
    """
    if isinstance(tangent, Value):  # a label, whose leaf may be a symbolic zero
        (leaf,) = jax.tree.leaves(tangent, is_leaf=lambda x: isinstance(x, SymbolicZero))
        if isinstance(leaf, SymbolicZero) and symbolic_zeros:
            return leaf
        return jax.tree.unflatten(jax.tree.structure(tangent), [instantiate(leaf)])
    return tangent if symbolic_zeros else instantiate(tangent)


def dense_function_of(value: Value, selected: Sequence[bool]) -> tuple[Callable, list[Any]]:
    """Return a function from some leaves of a value to its dense array, and the list of the leaves.

    `selected` has a bool per leaf. The function takes the selected leaves. The others are constant.
    """
    leaves, treedef = jax.tree.flatten(value)

    def dense(*args: Any) -> Any:
        rest = iter(args)
        filled = [next(rest) if s else x for s, x in zip(selected, leaves, strict=True)]
        return materialise_one(jax.tree.unflatten(treedef, filled))

    return dense, [x for s, x in zip(selected, leaves, strict=True) if s]


def combine_tangents(value: Any, tangents: Sequence[Any], symbolic_zeros: bool) -> Any:
    """Return the tangent of an operand for the derivative rule of the user.

    `tangents` has the tangent of each leaf of the operand `value`. `symbolic_zeros` is the option
    of the same name that the user set for the rule.
    """
    if is_label(value) and jnp.issubdtype(value.aval().dtype, jnp.inexact):
        return _fill_zeros(jax.tree.unflatten(jax.tree.structure(value), tangents), symbolic_zeros)
    is_zero = lambda t: isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0
    nonzero = [not is_zero(t) for t in tangents]
    if not isinstance(value, Value):
        (tangent,) = tangents
    elif not any(nonzero):
        tangent = SymbolicZero(value.aval().to_tangent_aval())
    else:
        dense, primals = dense_function_of(value, nonzero)
        _, tangent = jax.jvp(dense, primals, [t for t in tangents if not is_zero(t)])
    return _fill_zeros(tangent, symbolic_zeros)


def _tangent_of_output(primal: Any, tangent: Any) -> Any:
    """Return the tangent of an output: a label with the same metadata if the output is a label."""
    if not isinstance(primal, Value):
        return make_dense(_custom_jvp_p, [tangent])[0]
    structure: Any = jax.tree.structure(primal)
    if is_label(tangent):
        if structure != jax.tree.structure(tangent):
            raise TypeError(
                f"The rule of a custom_jvp function returns the tangent {tangent!r} for the output "
                f"{primal!r}. Both must have the same metadata."
            )
        return tangent
    return jax.tree.unflatten(structure, make_dense(_custom_jvp_p, [tangent]))


def leaf_cotangents(primitive: Primitive, operand: Value | None, cotangent: Any) -> list[Any]:
    """Return the cotangent of each leaf of an operand, given the cotangent of the dense array.

    `operand` is None for a dense operand. `cotangent` is None for a zero. The cotangent of a leaf
    with an integer dtype is None.
    """
    if is_label(cotangent):  # JAX takes an array here, so drop the metadata, such as a unit
        (cotangent,) = jax.tree.leaves(cotangent)
    else:
        (cotangent,) = make_dense(primitive, [cotangent])
    if operand is None or is_label(operand):
        return [cotangent]
    leaves = jax.tree.leaves(operand)
    if cotangent is None:
        return [None] * len(leaves)
    is_inexact = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    dense, primals = dense_function_of(operand, is_inexact)
    _, pull_back = jax.vjp(dense, *primals)
    cts = iter(pull_back(cast_cotangent(operand, cotangent)))
    return [next(cts) if inexact else None for inexact in is_inexact]


def cast_cotangent(operand: Value, cotangent: Any) -> Any:
    """Convert a dense cotangent to the dtype of the operand. Raise if the shapes differ."""
    aval = operand.aval()
    if jnp.shape(cotangent) != aval.shape:
        actual, expected = describe([cotangent, operand])
        raise TypeError(
            f"The backward rule of a custom_vjp returns {actual} for the argument {expected}. A "
            "cotangent must have the same shape as its argument."
        )
    return jnp.asarray(cotangent, aval.dtype)
