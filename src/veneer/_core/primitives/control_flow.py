"""Rules for loops and branches: cond, while, scan.

Each is bound again, with the jaxprs it contains staged anew for implicit operands. A value that
goes round a loop or out of a branch must be of one type. Where an implicit one meets a dense one,
it is made dense, visibly; a loop's carry is found so by going to a fixed point. Where its metadata
would change, that is an error, unless the type says that metadata is not meaning.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.tree_util import treedef_is_leaf

from ..._jax.primitives import bind_scan, find_primitive, scan_counts
from ..._jax.tracing import slice_type
from ..event import join_sources
from ..policy import emit_events
from ..rules import structural
from ..sources import keep_sources
from ..tree import split_list
from ..value import Value, describe, is_value, make_dense
from .batch_axes import has_batch_axes, takes_batch_axis
from .labels import dense_unless, is_label, may_be_labelled, refuses_to_be_dense
from .staging import (
    DENSE,
    Staged,
    Typed,
    example,
    find_staged,
    references,
    stage_to_labels,
    taking,
    typed,
)


@structural("cond")
def _cond(index: Any, *values: Any, branches: Sequence[Any], **params: Any) -> list[Any]:
    (index,) = make_dense(find_primitive("cond"), [index])
    forms: dict[int, Any] = {}
    while True:
        staged = [find_staged("cond", branch, values, forms) for branch in branches]
        first, *others = staged
        change = {}
        for i in range(len(first.out_trees)):
            for other in others:
                what, tried = f"output {i} of cond", forms.get(i)
                form = meeting(what, first.output(i), other.output(i), tried)
                if form is not None:
                    change[i] = form
        if not change:
            break
        forms |= change
    for branch in staged:
        emit_events(branch.events)
    sources = map(join_sources, zip(*(branch.out_sources for branch in staged), strict=True))
    first = replace(first, out_sources=tuple(sources))
    refs = references(*(branch.jaxpr for branch in staged))
    branches = tuple(taking(branch.jaxpr, refs) for branch in staged)
    leaves = [*refs, *jax.tree.leaves(values)]
    return first.unflatten(find_primitive("cond").bind(index, *leaves, branches=branches, **params))


@structural("while")
def _while(
    *values: Any,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
    **params: Any,
) -> list[Any]:
    cond_consts, body_consts, carry = split_list(values, cond_nconsts, body_nconsts)
    body, carry = _fixed_point("while", body_jaxpr, body_consts, carry, [])
    cond = stage_to_labels("while", cond_jaxpr, [*cond_consts, *carry])
    leaves = [jax.tree.leaves(part) for part in (cond_consts, body_consts, carry)]
    refs = references(body.jaxpr)
    leaves[1] = [*refs, *leaves[1]]
    out = find_primitive("while").bind(
        *(leaf for part in leaves for leaf in part),
        cond_nconsts=len(leaves[0]),
        cond_jaxpr=cond.jaxpr,
        body_nconsts=len(leaves[1]),
        body_jaxpr=taking(body.jaxpr, refs),
        **params,
    )
    return body.unflatten(out)


@structural("scan")
def _scan(*values: Any, jaxpr: Any, length: int, **params: Any) -> list[Any]:
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = split_list(values, num_consts, num_carry)
    xs = dense_unless(lambda x: _may_be_sliced(x, length), find_primitive("scan"), xs)
    slices = keep_sources(xs, [_slice_of(x) for x in xs])
    body, carry = _fixed_point("scan", jaxpr, consts, carry, slices, stack=True)
    refs = references(body.jaxpr)
    leaves = [jax.tree.leaves(part) for part in ([refs, consts], carry, xs)]
    jaxpr = taking(body.jaxpr, refs)
    return body.unflatten(bind_scan(*leaves, jaxpr=jaxpr, length=length, params=params))


def _fixed_point(
    primitive: str,
    jaxpr: Any,
    consts: Sequence[Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    stack: bool = False,
) -> tuple[Staged, list[Any]]:
    """The body staged so that each carried value leaves it as the type that it enters with.

    With `stack`, an output after the carry that cannot be stacked is made dense.
    """
    begun = carry
    carry = [jax.tree.map(_strong, v) if isinstance(v, Value) else v for v in begun]
    keep_sources(begun, carry)
    forms: dict[int, Any] = {}
    while True:
        staged = find_staged(primitive, jaxpr, [*consts, *carry, *xs], forms)
        change: dict[int, Any] = {}
        for i, value in enumerate(carry):
            what, enters, leaves = f"carry {i} of {primitive}", typed(value), staged.output(i)
            form = meeting(what, enters, leaves, forms.get(i))
            if form is not None and form is not DENSE and not isinstance(value, Value):
                carry[i] = jax.tree.unflatten(form, [value])
                if not may_be_labelled(value, carry[i]):
                    form = meeting(what, enters, leaves, form)
            if form is DENSE:
                (carry[i],) = make_dense(find_primitive(primitive), [value])
            if form is not None:
                change[i] = form
        for i, output in enumerate(staged.examples()):
            if stack and i >= len(carry) and is_value(output) and not takes_batch_axis(output):
                change[i] = DENSE
        if not change:
            emit_events(staged.events)
            return staged, carry
        forms |= change


def _strong(leaf: Any) -> Any:
    """A leaf of no weak type, which a loop's carry would lose on its first turn."""
    aval = jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)  # a leaf of hijax has a type of its own
    return jax.lax.convert_element_type(leaf, aval.dtype) if weak else leaf


def meeting(what: str, one: Typed, other: Typed, tried: Any = None) -> Any:
    """The form that two ends of a loop, or two branches, must take to agree; None if they do.

    A dense array may be taken for a label, if it is a zero; else both are made dense. Refused where
    metadata would be lost, or a type refuses.
    """
    (tree, avals), (other_tree, other_avals) = one, other
    if tree == other_tree and all(
        (a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(avals, other_avals, strict=True)
    ):
        return None
    value, other_value = example(*one), example(*other)
    sides = f"{what} is {_show(value)} on one side and {_show(other_value)} on the other"
    if tried is DENSE:
        raise TypeError(f"{sides}, also after materialization. Change the program so they agree.")
    labels = [t for t, v in ((tree, value), (other_tree, other_value)) if is_label(v)]
    if _metadata_differs(tree, other_tree) or (tree != other_tree and len(labels) == 2):
        why = "the carry changed structure: " if what.startswith("carry") else ""  # as in Quax
        raise TypeError(
            f"{sides}: {why}their metadata differs, and would be lost. Return the same type on "
            "both sides, or call vn.materialise there to drop the metadata."
        )
    if treedef_is_leaf(tree) != treedef_is_leaf(other_tree) and labels and tried is None:
        return labels[0]
    for v in (value, other_value):
        if refuses_to_be_dense(v):
            raise TypeError(
                f"{sides}, and {type(v).__name__} refuses to be dense. Return the same type on "
                "both sides."
            )
    return DENSE


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, Value) else f"dense {describe([value])[0]}"


def _metadata_differs(one: Any, other: Any) -> bool:
    """Whether values of one class, in these tree structures, differ in metadata that is meaning."""
    data, other_data = one.node_data(), other.node_data()
    if data is None or other_data is None or data[0] is not other_data[0]:
        return False
    cls = data[0]
    if issubclass(cls, Value) and cls.metadata_is_meaning and data[1] != other_data[1]:
        return True
    return any(map(_metadata_differs, one.children(), other.children()))


def _may_be_sliced(value: Any, length: int) -> bool:
    """Whether slices of the leaves, along the first axis, stand for slices of the value."""
    return not isinstance(value, Value) or (
        value.aval().shape[:1] == (length,) and has_batch_axes(value, 1)
    )


def _slice_of(value: Any) -> Any:
    """What one turn of a scan takes of a value, with abstract leaves."""
    return jax.tree.map(slice_type, value)
