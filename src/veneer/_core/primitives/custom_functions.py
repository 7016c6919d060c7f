"""Rules of functions with their own transpose, batching rule or solver.

These are linear_call, custom_vmap, custom_linear_solve, and functions that JAX 0.12 defines as
objects that expand to other primitives, such as custom_root. Most rules bind the primitive with
staged programs: programs that are traced again on the leaves of implicit operands, with the rules
in force. `custom_derivatives.py` has the rules of custom_jvp and custom_vjp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import treedef_is_leaf

from ..._jax.derivatives import CustomRoot, RootLinearMap, get_operand_structure
from ..._jax.primitives import close_jaxpr, find_primitive, open_jaxpr, split_list
from ..._jax.tracing import current_trace
from ..policy import current_policy, policy_in_force
from ..rules import structural
from ..trace import ImplicitTracer
from ..transform import redispatch
from ..value import Value, describe, is_value, make_dense
from .custom_derivatives import flatten_values
from .leaves import dense_unless, is_label
from .staging import StagedProgram, stage_to_labels


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
        """Run the user's batching rule on the values with these leaves.

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
    """Solve `A x = b`. The constants of `A` and of the solver may be of any type.

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
    """Run custom_root, or another function that JAX 0.12 defines as a high primitive.

    A high primitive is an object whose method `expand` computes the function by other primitives.
    The functions of custom_root run with our rules. The initial guess and the root are dense.
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
    """Return a function that runs `function` with the rules in force, and returns dense arrays."""
    return lambda *operands: _materialize(redispatch(function, *operands))


def _materialize(tree: Any) -> Any:
    primitive = find_primitive("call_hi_primitive")
    return jax.tree.map(lambda x: make_dense(primitive, [x])[0], tree, is_leaf=is_value)
