"""Rules of branches and loops: cond, while, scan.

The branches and bodies are staged: traced again as programs on the leaves of implicit operands,
with the rules in force. The primitive is then bound with the leaves and the staged programs.

All branches must return the same types, and a loop must return its carry with the type that it
takes. If an implicit value is on one side and a dense array on the other, the value is
materialized, and this is reported. The programs are staged again until the types agree. If metadata
would change, an error is raised, unless the type sets `metadata_is_meaning = False`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.tree_util import treedef_is_leaf

from ..._jax.primitives import bind_scan, find_primitive, scan_counts, split_list
from ..._jax.tracing import slice_type
from ..event import join_sources
from ..policy import emit_events
from ..rules import structural
from ..sources import keep_sources
from ..value import Value, describe, is_value, make_dense
from .leaves import (
    can_become_label,
    can_stack_leaves,
    dense_unless,
    has_batch_axes,
    has_no_dense_form,
    is_label,
)
from .staging import (
    DENSE,
    StagedProgram,
    ValueType,
    abstract_value,
    lift_references,
    stage_to_labels,
    stage_without_events,
    value_type,
)


@structural("cond")
def _cond(index: Any, *values: Any, branches: Sequence[Any], **params: Any) -> list[Any]:
    (index,) = make_dense(find_primitive("cond"), [index])
    forms: dict[int, Any] = {}  # by index of an output: `DENSE`, or the structure of a label
    while True:
        staged = [stage_without_events("cond", b, values, forms) for b in branches]
        first, *others = staged
        changes = {}
        for i in range(len(first.out_trees)):
            for other in others:
                types = first.output_type(i), other.output_type(i)
                form = common_form(f"output {i} of cond", *types, forms.get(i))
                if form is not None:
                    changes[i] = form
        if not changes:
            break
        forms |= changes
    for branch in staged:
        emit_events(branch.events)
    refs, jaxprs = lift_references(*(branch.jaxpr for branch in staged))
    operands = [index, *refs, *jax.tree.leaves(values)]
    out = find_primitive("cond").bind(*operands, branches=tuple(jaxprs), **params)
    # The sources (weight paths) of an output are its sources in all branches.
    sources = map(join_sources, zip(*(branch.out_sources for branch in staged), strict=True))
    return replace(first, out_sources=tuple(sources)).unflatten(out)


@structural("while")
def _while(
    *values: Any,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
    **params: Any,
) -> list[Any]:
    cond_consts, body_consts, carry = split_list(values, [cond_nconsts, body_nconsts])
    body, carry = _stage_body("while", body_jaxpr, body_consts, carry, [])
    cond = stage_to_labels("while", cond_jaxpr, [*cond_consts, *carry])
    refs, (body_program,) = lift_references(body.jaxpr)
    cond_leaves, body_leaves = jax.tree.leaves(cond_consts), [*refs, *jax.tree.leaves(body_consts)]
    out = find_primitive("while").bind(
        *cond_leaves,
        *body_leaves,
        *jax.tree.leaves(carry),
        cond_nconsts=len(cond_leaves),
        cond_jaxpr=cond.jaxpr,
        body_nconsts=len(body_leaves),
        body_jaxpr=body_program,
        **params,
    )
    return body.unflatten(out)


@structural("scan")
def _scan(*values: Any, jaxpr: Any, length: int, **params: Any) -> list[Any]:
    consts, carry, xs = split_list(values, list(scan_counts(params)))
    can_slice = lambda x: not isinstance(x, Value) or has_batch_axes(x, 1)
    xs = dense_unless(can_slice, find_primitive("scan"), xs)
    slices = keep_sources(xs, [jax.tree.map(slice_type, x) for x in xs])
    body, carry = _stage_body("scan", jaxpr, consts, carry, slices, stacks=True)
    refs, (program,) = lift_references(body.jaxpr)
    leaves = [jax.tree.leaves(part) for part in ([refs, consts], carry, xs)]
    return body.unflatten(bind_scan(*leaves, jaxpr=program, length=length, params=params))


def _stage_body(
    primitive: str,
    jaxpr: Any,
    consts: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    stacks: bool = False,
) -> tuple[StagedProgram, list[Any]]:
    """Trace the body of a loop on leaves, so that the carry has the same types before and after.

    **Arguments:**

    - `consts`, `carry`, `xs`: the operands of the body. `carry` is for the first iteration.
    - `stacks`: whether the outputs after the carry are stacked, as in a scan. Outputs whose leaves
      cannot be stacked are then materialized.

    **Returns:** the staged body, and the carry for the first iteration, converted to the types of
    the body.
    """
    initial = carry
    carry = [jax.tree.map(_strip_weak_type, v) if isinstance(v, Value) else v for v in initial]
    keep_sources(initial, carry)
    forms: dict[int, Any] = {}  # by index of an output: `DENSE`, or the structure of a label
    while True:
        body = stage_without_events(primitive, jaxpr, [*consts, *carry, *xs], forms)
        changes: dict[int, Any] = {}
        for i, value in enumerate(carry):
            where, types = f"carry {i} of {primitive}", (value_type(value), body.output_type(i))
            form = common_form(where, *types, forms.get(i))
            if form is not None and form is not DENSE and not isinstance(value, Value):
                # The body returns a label, so convert the dense `value` to it, or materialize both.
                carry[i] = jax.tree.unflatten(form, [value])
                if not can_become_label(value, carry[i]):
                    form = common_form(where, *types, form)
            if form is DENSE:
                (carry[i],) = make_dense(find_primitive(primitive), [value])
            if form is not None:
                changes[i] = form
        for i, output in enumerate(body.abstract_outputs()):
            if stacks and i >= len(carry) and is_value(output) and not can_stack_leaves(output):
                changes[i] = DENSE
        if not changes:
            emit_events(body.events)
            return body, carry
        forms |= changes


def _strip_weak_type(leaf: Any) -> Any:
    """Return a leaf without weak type. A carry would lose its weak type in the first iteration."""
    aval = jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)  # types of vn.hijax have no such attribute
    return jax.lax.convert_element_type(leaf, aval.dtype) if weak else leaf


def common_form(where: str, one: ValueType, other: ValueType, tried: Any = None) -> Any:
    """Return the form that two values must be converted to, so that they have the same type.

    A form is `DENSE`, or the tree structure of a label (a type whose only leaf is the dense array).
    The values are the same output of two branches, or a carry before and after the body of a loop.
    If one value is dense and the other is a label, try the label first. Otherwise use `DENSE`.

    **Arguments:**

    - `where`: the name of the values for errors.
    - `one`, `other`: the types of the values.
    - `tried`: the form to which the values were converted without success, or None.

    **Returns:** the form, or None if the types are the same.

    **Raises:** `TypeError` if metadata would be lost or a type cannot be materialized.
    """
    (tree, avals), (other_tree, other_avals) = one, other
    if tree == other_tree and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(avals, other_avals, strict=True)
    ):
        return None
    values = abstract_value(*one), abstract_value(*other)
    show = lambda v: repr(v) if isinstance(v, Value) else f"dense {describe([v])[0]}"
    sides = f"{where} is {show(values[0])} on one side and {show(values[1])} on the other"
    if tried is DENSE:
        raise TypeError(f"{sides}, also after materialization. Change the program so they agree.")
    labels = [t for t, v in zip((tree, other_tree), values, strict=True) if is_label(v)]
    if _metadata_differs(tree, other_tree) or (tree != other_tree and len(labels) == 2):
        why = "the carry changed structure: " if where.startswith("carry") else ""  # as in Quax
        raise TypeError(
            f"{sides}: {why}their metadata differs, and would be lost. Return the same type on "
            "both sides, or call vn.materialise there to drop the metadata."
        )
    if treedef_is_leaf(tree) != treedef_is_leaf(other_tree) and labels and tried is None:
        return labels[0]
    for v in filter(has_no_dense_form, values):
        raise TypeError(
            f"{sides}, and {type(v).__name__} refuses to be dense. Return the same type on "
            "both sides."
        )
    return DENSE


def _metadata_differs(one: Any, other: Any) -> bool:
    """Return whether two tree structures differ in metadata that changes the meaning of a value."""
    data, other_data = one.node_data(), other.node_data()
    if data is None or other_data is None:
        return False
    (cls, metadata), (other_cls, other_metadata) = data, other_data
    if cls is not other_cls:
        return False
    if issubclass(cls, Value) and cls.metadata_is_meaning and metadata != other_metadata:
        return True
    return any(map(_metadata_differs, one.children(), other.children()))
