"""Rules for closed calls, and those whose program is for a transformation, a backend or a memory.

Where that program speaks of the dense operands alone (composite, whose name promises a backend
their number; remat_opt), the call is replaced by the program that it stands for.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import treedef_is_leaf

from ..._jax.derivatives import get_operand_structure
from ..._jax.primitives import close_jaxpr, contained_jaxpr, find_primitive, open_jaxpr
from ..policy import current_policy, policy_in_force
from ..rules import structural
from ..sources import restore_sources
from ..trace import ImplicitTracer
from ..transform import redispatch
from ..tree import split_list
from ..value import describe, make_dense, source_of
from .labels import dense_unless, is_label
from .staging import stage, stage_to_labels


def _inline(name: str) -> None:
    @structural(name)
    def _(*values: Any, **params: Any) -> list[Any]:
        return stage(name, contained_jaxpr(params), values)(*values)


for _primitive in ("closed_call", "composite", "eval_jaxpr"):  # in JAX >= 0.12, two of them are one
    _inline(_primitive)


@structural("remat_opt")
def _remat_opt(*values: Any, fwd_jaxpr: Any, **params: Any) -> list[Any]:
    del params
    return stage("remat_opt", fwd_jaxpr, values)(*values)


@structural("linear_call")
def _linear_call(
    *values: Any, callee: Any, transpose_thunk: Any, num_callee_consts: int, num_res: int
) -> list[Any]:
    """Linear in the last operands, which are labels or made dense; residuals may be of any type."""
    primitive = find_primitive("linear_call")
    consts, residuals, linear = split_list(values, num_callee_consts, num_res)
    linear = dense_unless(is_label, primitive, linear)
    staged = stage_to_labels("linear_call", callee, [*consts, *residuals, *linear])
    program, captured = open_jaxpr(staged.jaxpr)
    callee_leaves = [*captured, *jax.tree.leaves(consts)]
    residual_leaves = jax.tree.leaves(residuals)

    def transpose() -> tuple[Any, list[Any]]:
        jaxpr, closed_over = transpose_thunk()
        for x in closed_over:
            if isinstance(x, ImplicitTracer):
                raise NotImplementedError(
                    f"linear_call: the transpose captures {x.value}. Pass it as a residual."
                )
        cotangents = staged.examples()
        transposed = stage_to_labels("linear_call", jaxpr, [*closed_over, *residuals, *cotangents])
        opened, captured = open_jaxpr(transposed.jaxpr)
        return close_jaxpr(opened), [*captured, *closed_over]

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
    """The batching rule is run on values, too; what it gives must be of the types of the call's."""
    del out_tree
    primitive = find_primitive("custom_vmap_call")
    staged = stage_to_labels("custom_vmap_call", call, values)
    leaves, treedef = jax.tree.flatten(list(values))
    counts = [len(jax.tree.leaves(x)) for x in values]
    sources = list(map(source_of, values))
    policy = current_policy()

    def rule_of_leaves(
        axis_size: int, in_batched: Sequence[bool], *leaves: Any
    ) -> tuple[list[Any], list[bool]]:
        batched = [any(part) for part in list(split_list(in_batched, *counts))[:-1]]
        of_leaves = [b for b, count in zip(batched, counts, strict=True) for _ in range(count)]
        leaves = tuple(
            jnp.broadcast_to(x, (axis_size, *jnp.shape(x))) if now and not before else x
            for x, now, before in zip(leaves, of_leaves, in_batched, strict=True)
        )
        out_batched: list[bool] = []

        def run(*values: Any) -> list[Any]:
            operands, flags = (
                jax.tree.unflatten(in_tree, values),
                jax.tree.unflatten(in_tree, batched),
            )
            out, are_batched = rule(axis_size, list(flags), *operands)
            out_batched.extend(jax.tree.leaves(are_batched))
            return jax.tree.leaves(out)

        with policy_in_force(policy):
            out = redispatch(run, *restore_sources(sources, jax.tree.unflatten(treedef, leaves)))
            out = [
                x if not treedef_is_leaf(tree) else make_dense(primitive, [x])[0]
                for x, tree in zip(out, staged.out_trees, strict=True)
            ]
        for i, (x, tree) in enumerate(zip(out, staged.out_trees, strict=True)):
            if jax.tree.structure(x) != tree:
                # Without the batch axis, so that the shapes can be compared.
                example = jax.tree.map(lambda leaf: leaf[0], x) if out_batched[i] else x
                found, wanted = describe([example, staged.examples()[i]])
                raise TypeError(
                    f"Output {i} of a custom_vmap function is {wanted} for one example, but its "
                    f"batching rule returns {found} for each example. Both must have the same "
                    "type and metadata."
                )
        return jax.tree.leaves(out), out_batched

    out = primitive.bind(
        *leaves,
        call=staged.jaxpr,
        rule=rule_of_leaves,
        in_tree=get_operand_structure(tuple(leaves)),
        out_tree=jax.tree.structure([0] * len(staged.out_trees)),
    )
    return staged.unflatten(out)
