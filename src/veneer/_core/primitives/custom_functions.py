"""Rules of functions that define their own derivative, transpose, batching rule or solver.

A `custom_jvp` or `custom_vjp` function is rebuilt as a function of leaves, with JAX's public
decorators. Its derivative with respect to an implicit operand is its own derivative rule at the
dense array, composed with the derivative of `materialise`. Derivative rules take and return dense
tangents and cotangents, so implicit outputs are materialized. Only labels (types whose only leaf is
the dense array) are not: the tangent or cotangent of a label is a label with the same metadata.

For the other primitives (`linear_call`, `custom_vmap_call`, `custom_linear_solve`), the functions
in their parameters are staged: traced again as programs on leaves, in which implicit operands use
their rules.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import treedef_is_leaf

from ..._jax.derivatives import (
    CustomRoot,
    RootLinearMap,
    call_bwd,
    get_operand_structure,
    reset_stores,
    transform_flat_function,
)
from ..._jax.primitives import Primitive, close_jaxpr, find_primitive, open_jaxpr, split_list
from ..._jax.tracing import current_trace
from ..policy import current_policy, policy_in_force
from ..rules import structural
from ..sources import restore_sources
from ..trace import ImplicitTracer, redispatch
from ..value import Value, describe, is_value, make_dense, materialise_one, source_of
from .leaves import dense_unless, is_label
from .scopes import IN_DERIVATIVE_RULE, record_tangent_queries, scope_query
from .staging import StagedProgram, capture_context, stage_to_labels

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
    """Run the derivative rule `jvp` of a `custom_jvp` function `fun` on dense and implicit arrays.

    `args` are the primals and then their tangents. Return the primal outputs and then their
    tangents. The primal outputs are computed by `fun` instead of `jvp` in two cases: if one of our
    rules did not quantize or record an operand because it may be a tangent, or if
    `has_scope_query` is True, because a caller of `query_scopes` needs the place of each primitive.
    `run_later` is the result of `capture_context`.
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
    """Flatten arrays, dense or implicit, to one list of leaves.

    **Returns:** the leaves; a function that rebuilds the arrays from a list of leaves; a function
    that splits such a list into one list per array. The functions do not capture the leaves, whose
    tracers must not outlive their trace.
    """
    leaves, treedef = jax.tree.flatten(list(values))
    counts = [len(jax.tree.leaves(value)) for value in values]
    sources = list(map(source_of, values))
    unflatten = lambda leaves: restore_sources(sources, jax.tree.unflatten(treedef, leaves))
    group_by_value = lambda leaves: split_list(leaves, counts)[:-1]  # the rest is empty
    return leaves, unflatten, group_by_value


class _OutputsAsArrays:
    """A converter between the outputs of a function, which may be labels, and dense arrays.

    A label is an implicit array whose only leaf is the dense array. `wrap` converts the outputs of
    a function to arrays, and `rebuild` converts the arrays back to labels.
    """

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
        """Convert arrays back to labels where the function given to `wrap` returned labels."""
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
    """Convert a tangent or cotangent for the derivative rule of a `custom_jvp` or `custom_vjp`.

    If the rule was defined without `symbolic_zeros=True`, replace a symbolic zero by an array.
    """
    if isinstance(tangent, Value):  # a label, whose leaf may be a symbolic zero
        (leaf,) = jax.tree.leaves(tangent, is_leaf=lambda x: isinstance(x, SymbolicZero))
        if isinstance(leaf, SymbolicZero) and symbolic_zeros:
            return leaf
        return jax.tree.unflatten(jax.tree.structure(tangent), [instantiate(leaf)])
    return tangent if symbolic_zeros else instantiate(tangent)


def dense_function_of(value: Value, selected: Sequence[bool]) -> tuple[Callable, list[Any]]:
    """Return a function from the selected leaves of an implicit array to its dense array.

    `selected` has a bool per leaf. The other leaves are constants of the function.

    **Returns:** a pair: the function, and the list of the selected leaves.
    """
    leaves, treedef = jax.tree.flatten(value)

    def dense(*args: Any) -> Any:
        rest = iter(args)
        filled = [next(rest) if s else x for s, x in zip(selected, leaves, strict=True)]
        return materialise_one(jax.tree.unflatten(treedef, filled))

    return dense, [x for s, x in zip(selected, leaves, strict=True) if s]


def combine_tangents(value: Any, tangents: Sequence[Any], symbolic_zeros: bool) -> Any:
    """Return the tangent of an operand, as the derivative rule of a `custom_jvp` takes it.

    `tangents` has the tangent of each leaf of the operand `value`. `symbolic_zeros` is the option
    with which the rule was defined: if False, the rule takes no symbolic zeros.
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
    """Return the tangent of an output: a label for a label, and a dense array for other outputs.

    A label is an implicit array whose only leaf is the dense array, such as an array with a unit.
    Its tangent has the same metadata. Any other implicit tangent is materialized.
    """
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
    with an integer dtype is None. If the cotangent is materialized, the report names `primitive`.
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
    """Convert a dense cotangent to the dtype of the operand.

    Raise `TypeError` if the shapes differ.
    """
    aval = operand.aval()
    if jnp.shape(cotangent) != aval.shape:
        actual, expected = describe([cotangent, operand])
        raise TypeError(
            f"The backward rule of a custom_vjp returns {actual} for the argument {expected}. A "
            "cotangent must have the same shape as its argument."
        )
    return jnp.asarray(cotangent, aval.dtype)


# linear_call, custom_vmap, custom_linear_solve and custom_root.


@structural("linear_call")
def _linear_call(
    *values: Any, callee: Any, transpose_thunk: Any, num_callee_consts: int, num_res: int
) -> list[Any]:
    # The residuals may be of any type. The linear operands must be dense or labels: types whose
    # only leaf is the dense array.
    primitive = find_primitive("linear_call")
    consts, residuals, linear = split_list(values, [num_callee_consts, num_res])
    linear = dense_unless(is_label, primitive, linear)
    staged = stage_to_labels("linear_call", callee, [*consts, *residuals, *linear])
    program, constants = open_jaxpr(staged.jaxpr)
    callee_leaves = [*constants, *jax.tree.leaves(consts)]
    residual_leaves = jax.tree.leaves(residuals)

    def transpose() -> tuple[Any, list[Any]]:
        jaxpr, closed_over = transpose_thunk()  # and the arrays that the transpose captures
        for x in closed_over:
            if isinstance(x, ImplicitTracer):
                raise NotImplementedError(
                    f"linear_call: the transpose captures {x.value}. Pass it as a residual."
                )
        operands = [*closed_over, *residuals, *staged.abstract_outputs()]
        program, constants = open_jaxpr(stage_to_labels("linear_call", jaxpr, operands).jaxpr)
        return close_jaxpr(program), [*constants, *closed_over]

    out = primitive.bind(
        *callee_leaves,
        *residual_leaves,
        *jax.tree.leaves(linear),
        callee=close_jaxpr(program),
        transpose_thunk=transpose,
        num_callee_consts=len(callee_leaves),
        num_res=len(residual_leaves),
    )
    return staged.unflatten(out)


@structural("custom_vmap_call")
def _custom_vmap(*values: Any, call: Any, rule: Any, in_tree: Any, out_tree: Any) -> list[Any]:
    del out_tree
    primitive = find_primitive("custom_vmap_call")
    staged = stage_to_labels("custom_vmap_call", call, values)
    leaves, unflatten, group_by_value = flatten_values(values)
    policy = current_policy()

    def batch_leaves(
        axis_size: int, in_batched: Sequence[bool], *leaves: Any
    ) -> tuple[list[Any], list[bool]]:
        """Run the batching rule of the `custom_vmap` function on operands, given their leaves.

        **Returns:** the leaves of the outputs, and for each output whether it is batched.
        """
        # If one leaf of a value is batched, batch all leaves of the value.
        is_batched = [any(flags) for flags in group_by_value(in_batched)]
        batch = lambda x: jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
        groups = zip(group_by_value(leaves), group_by_value(in_batched), is_batched, strict=True)
        batched_leaves = [
            batch(leaf) if value_is_batched and not leaf_is_batched else leaf
            for value_leaves, flags, value_is_batched in groups
            for leaf, leaf_is_batched in zip(value_leaves, flags, strict=True)
        ]
        out_batched: list[bool] = []

        def run(*values: Any) -> list[Any]:
            operands = jax.tree.unflatten(in_tree, values)
            batched_operands = list(jax.tree.unflatten(in_tree, is_batched))
            out, batched_results = rule(axis_size, batched_operands, *operands)
            out_batched.extend(jax.tree.leaves(batched_results))
            return jax.tree.leaves(out)

        with policy_in_force(policy):
            out = redispatch(run, *unflatten(batched_leaves))
            for i, tree in enumerate(staged.out_trees):
                if treedef_is_leaf(tree):
                    (out[i],) = make_dense(primitive, [out[i]])
        for i, (x, tree) in enumerate(zip(out, staged.out_trees, strict=True)):
            if jax.tree.structure(x) != tree:
                # Compare the shapes without the batch axis.
                example = jax.tree.map(lambda leaf: leaf[0], x) if out_batched[i] else x
                actual, expected = describe([example, staged.abstract_outputs()[i]])
                raise TypeError(
                    f"Output {i} of a custom_vmap function is {expected} for one example, but its "
                    f"batching rule returns {actual} for each example. Both must have the same "
                    "type and metadata."
                )
        return jax.tree.leaves(out), out_batched

    out = primitive.bind(
        *leaves,
        call=staged.jaxpr,
        rule=batch_leaves,
        in_tree=get_operand_structure(tuple(leaves)),
        out_tree=jax.tree.structure([0] * len(staged.out_trees)),
    )
    return staged.unflatten(out)


@structural("custom_linear_solve")
def _custom_linear_solve(*values: Any, const_lengths: Any, jaxprs: Any) -> list[Any]:
    """Solve `A x = b`, a call of `jax.lax.custom_linear_solve`.

    The arrays that the functions of the call capture, such as a matrix `A`, may be implicit.

    `b` is materialized unless it is a label (a type whose only leaf is the dense array). If `b` is
    a label, `x` may be a label with other metadata. For example, a stiffness times a length is a
    force.
    """
    *parts, b = split_list(values, list(const_lengths))
    b = dense_unless(is_label, find_primitive("custom_linear_solve"), b)
    consts = type(jaxprs)(*parts)

    def stage_function(jaxpr: Any, consts: Sequence[Any], vector: Sequence[Any]) -> StagedProgram:
        # A solver may return auxiliary values of any type after the solution.
        return stage_to_labels("custom_linear_solve", jaxpr, [*consts, *vector], len(vector))

    solve = stage_function(jaxprs.solve, consts.solve, b)
    x = solve.abstract_outputs()[: len(b)]
    matvec = stage_function(jaxprs.matvec, consts.matvec, x)
    for operand, product in zip(b, matvec.abstract_outputs()[: len(b)], strict=True):
        tree: Any = jax.tree.structure(operand)
        same_class = isinstance(operand, Value) and type(operand) is type(product)
        if same_class and operand.metadata_is_meaning and tree != jax.tree.structure(product):
            raise TypeError(
                f"custom_linear_solve of b = {operand}: matvec(solve(b)) is {product}, with other "
                "metadata than b. The solver must return metadata that matvec maps to the metadata "
                "of b. Or call vn.materialise to drop the metadata."
            )
    vecmat = transpose_solve = None
    if jaxprs.transpose_solve is not None:  # vecmat maps vectors like b to vectors like x
        vecmat = stage_function(jaxprs.vecmat, consts.vecmat, b)
        transpose_solve = stage_function(jaxprs.transpose_solve, consts.transpose_solve, x)
    staged = type(jaxprs)(matvec, vecmat, solve, transpose_solve)
    leaves = [jax.tree.leaves(part) for part in parts]
    out = find_primitive("custom_linear_solve").bind(
        *jax.tree.leaves((leaves, b)),
        const_lengths=type(const_lengths)(*map(len, leaves)),
        jaxprs=type(jaxprs)(*(None if program is None else program.jaxpr for program in staged)),
    )
    return solve.unflatten(out)


@structural("call_hi_primitive")
def _call_hi_primitive(*values: Any, **params: Any) -> Any:
    """Run `custom_root`, or another function that JAX 0.12 defines as a high primitive.

    A high primitive is an object whose method `expand` computes the function by other primitives.
    In the functions that `custom_root` takes, implicit arrays use their rules. The initial guess
    and the root are dense.
    """
    (high,) = params.values()
    operands = jax.tree.unflatten(high.in_tree, values)
    if isinstance(high, CustomRoot):
        solve_consts, guess, f_consts, tangent_consts = operands
        operands = (solve_consts, _materialize(guess), f_consts, tangent_consts)
        avals = jax.tree.map(jax.typeof, operands)
        f, solve, tangent_solve = map(_return_dense, (high.f, high.solve, high.tangent_solve))
        traced = jax.jit(solve).trace(*avals[:2])
        root = CustomRoot(f, solve, tangent_solve, traced, avals, high.has_aux)
        return jax.tree.leaves(root(*operands))
    if isinstance(high, RootLinearMap):  # the derivative of f at x, applied to v, or its transpose
        f_consts, x, v = operands
        operands = (f_consts, _materialize(x), _materialize(v))
        avals, f = jax.tree.map(jax.typeof, operands), _return_dense(high.f)
        linear_map = RootLinearMap(f, avals, high.out_aval, high.effects, high.transposed)
        return jax.tree.leaves(linear_map(*operands))
    is_inexact = lambda aval: jnp.issubdtype(aval.dtype, jnp.inexact)
    if current_trace().requires_low or not any(map(is_inexact, high.out_avals_flat)):
        # JAX does not differentiate here, so no derivative rule is lost by expanding the primitive.
        return jax.tree.leaves(redispatch(high.expand, *operands), is_leaf=is_value)
    return NotImplemented


def _return_dense(function: Callable) -> Callable:
    """Return a function that runs `function` with the rules of implicit arrays.

    It materializes the results.
    """
    return lambda *operands: _materialize(redispatch(function, *operands))


def _materialize(tree: Any) -> Any:
    primitive = find_primitive("call_hi_primitive")
    return jax.tree.map(lambda x: make_dense(primitive, [x])[0], tree, is_leaf=is_value)
