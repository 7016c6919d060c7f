"""Rules for the primitives that contain other programs: jit, scan, while, cond, checkpoint.

Each is bound again, with the jaxpr it contains staged anew for implicit operands: the rules run
inside it, on the leaves. None of these materialises because it is higher-order; shard_map,
custom_linear_solve, callbacks and sharding constraints have no rule yet, and do.

A value that goes round a loop or out of a branch must be of one type. Where an implicit one meets a
dense one, it is made dense, visibly; a loop's carry is found so by going to a fixed point. Where
its metadata changes, that is an error, unless the type says that metadata is not meaning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax.tree_util import treedef_is_leaf

from .explain import ALLOW, ERROR, current_policy
from .jax_internals import (
    UNSPECIFIED,
    close_jaxpr,
    find_primitive,
    jaxpr_as_fun,
    open_jaxpr,
    primitives,
    scan_counts,
)
from .rules import add_rule, forget_with_rules
from .transform import implicit
from .tree import split_list
from .value import Value, describe, make_dense


def _structural(name: str) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        add_rule(function, [find_primitive(name)], structural=True)
        return function

    return add


# Staging.

Typed = tuple[Any, Sequence[Any]]  # a value's structure and its abstract leaves


@dataclass(frozen=True)
class Staged:
    """A jaxpr of leaves that does what another did on implicit values."""

    jaxpr: Any  # closed
    out_trees: tuple[Any, ...]  # the structure of each output
    out_avals: tuple[tuple[Any, ...], ...]  # the abstract leaves of each output

    def output(self, i: int) -> tuple[Any, tuple[Any, ...]]:
        """What must agree for two outputs to be of one type."""
        return self.out_trees[i], self.out_avals[i]

    def unflatten(self, leaves: Sequence[Any]) -> list[Any]:
        """The outputs, from all of their leaves."""
        pieces = split_list(leaves, *(tree.num_leaves for tree in self.out_trees))
        return [
            jax.tree.unflatten(tree, piece)
            for tree, piece in zip(self.out_trees, pieces, strict=False)
        ]

    def __call__(self, *values: Any) -> list[Any]:
        return self.unflatten(jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(values)))


_staged: WeakKeyDictionary[Any, dict[Any, Staged]] = WeakKeyDictionary()
forget_with_rules(_staged.clear)


def _typed(value: Any) -> Typed:
    """A value's structure and its abstract leaves. Leaves may be abstract already."""
    leaves, treedef = jax.tree.flatten(value)
    return treedef, tuple(map(jax.typeof, leaves))


def stage(
    primitive: str, jaxpr: Any, values: Sequence[Any], dense: frozenset[int] = frozenset()
) -> Staged:
    """`jaxpr` staged for the types of `values`; the outputs numbered in `dense` are made dense."""
    treedef, avals = _typed(list(values))
    policy = current_policy()
    key = treedef, avals, dense, policy
    # Other policies tell of events, and must hear of them each time.
    known = _staged.setdefault(jaxpr, {}) if policy in (ALLOW, ERROR) else {}
    if key not in known:
        closed = close_jaxpr(jaxpr)
        known[key] = _stage(find_primitive(primitive), closed, treedef, avals, dense)
    return known[key]


def _stage(
    primitive: Any, jaxpr: Any, treedef: Any, avals: Sequence[Any], dense: frozenset[int]
) -> Staged:
    out_trees: list[Any] = []

    def on_leaves(*leaves: Any) -> list[Any]:
        outputs = implicit(jaxpr_as_fun(jaxpr))(*jax.tree.unflatten(treedef, leaves))
        outputs = [
            make_dense(primitive, [out])[0] if i in dense else out for i, out in enumerate(outputs)
        ]
        flat = [jax.tree.flatten(out) for out in outputs]
        out_trees.extend(tree for _, tree in flat)
        return [leaf for leaves, _ in flat for leaf in leaves]

    staged = jax.make_jaxpr(on_leaves)(*avals)
    counts: list[int] = [tree.num_leaves for tree in out_trees]
    out_avals = [tuple(piece) for piece in split_list(staged.out_avals, *counts)][:-1]
    return Staged(staged, tuple(out_trees), tuple(out_avals))


# Calls.


@_structural("jit")
def _jit(*values: Any, jaxpr: Any, **params: Any) -> list[Any]:
    staged = stage("jit", jaxpr, values)
    in_trees: list[Any] = [jax.tree.structure(v) for v in values]
    out_trees = staged.out_trees
    # A sharding or layout given for the dense array says nothing of its leaves: they keep theirs.
    params["in_shardings"] = _by_leaf(params["in_shardings"], in_trees, UNSPECIFIED)
    params["out_shardings"] = _by_leaf(params["out_shardings"], out_trees, UNSPECIFIED)
    params["in_layouts"] = _by_leaf(params["in_layouts"], in_trees, None)
    params["out_layouts"] = _by_leaf(params["out_layouts"], out_trees, None)
    params["donated_invars"] = _repeat(params["donated_invars"], in_trees)
    leaves = jax.tree.leaves(values)
    return staged.unflatten(primitives.jit_p.bind(*leaves, jaxpr=staged.jaxpr, **params))


def _repeat(choices: Sequence[Any], trees: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(c for c, tree in zip(choices, trees, strict=True) for _ in range(tree.num_leaves))


def _by_leaf(choices: Sequence[Any], trees: Sequence[Any], unset: Any) -> tuple[Any, ...]:
    return tuple(
        choice if treedef_is_leaf(tree) else unset
        for choice, tree in zip(choices, trees, strict=True)
        for _ in range(tree.num_leaves)
    )


@_structural("remat")
def _checkpoint(*values: Any, jaxpr: Any, **params: Any) -> list[Any]:
    staged = stage("remat", jaxpr, values)
    opened, constants = open_jaxpr(staged.jaxpr)
    leaves = jax.tree.leaves(values)
    if isinstance(params["prevent_cse"], tuple):  # a choice an operand
        trees = [jax.tree.structure(v) for v in values]
        of_leaves = _repeat(params["prevent_cse"], trees)
        params["prevent_cse"] = (False,) * len(constants) + of_leaves
    return staged.unflatten(primitives.remat_p.bind(*constants, *leaves, jaxpr=opened, **params))


@_structural("closed_call")
def _closed_call(*values: Any, call_jaxpr: Any, **params: Any) -> list[Any]:
    del params
    return stage("closed_call", call_jaxpr, values)(*values)


# Control flow.


@_structural("cond")
def _cond(index: Any, *values: Any, branches: Sequence[Any], **params: Any) -> list[Any]:
    (index,) = make_dense(primitives.cond_p, [index])
    dense: frozenset[int] = frozenset()
    while True:
        staged = [stage("cond", branch, values, dense) for branch in branches]
        first, *others = staged
        differ = {
            i
            for i in range(len(first.out_trees))
            for other in others
            if not _one_type(f"output {i} of cond", first.output(i), other.output(i))
        }
        if not differ:
            branches = tuple(branch.jaxpr for branch in staged)
            leaves = jax.tree.leaves(values)
            out = primitives.cond_p.bind(index, *leaves, branches=branches, **params)
            return first.unflatten(out)
        if differ <= dense:
            raise TypeError(
                f"outputs {sorted(differ)} of cond are dense in every branch and yet of different "
                f"dtypes or shapes; of {describe(values)}, some type's aval() and materialise() "
                "disagree"
            )
        dense |= differ


@_structural("while")
def _while(
    *values: Any,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
    **params: Any,
) -> list[Any]:
    del params
    cond_consts, body_consts, carry = split_list(values, cond_nconsts, body_nconsts)
    body, carry = _fixed_point("while", body_jaxpr, body_consts, carry, [])
    cond = stage("while", cond_jaxpr, [*cond_consts, *carry], frozenset({0}))
    if cond.out_avals[0][0].shape:  # a predicate for each element of a batch, as vmap makes it
        leaves = [jax.tree.leaves(part) for part in (cond_consts, body_consts, carry)]
        out = primitives.while_p.bind(
            *(leaf for part in leaves for leaf in part),
            cond_nconsts=len(leaves[0]),
            cond_jaxpr=cond.jaxpr,
            body_nconsts=len(leaves[1]),
            body_jaxpr=body.jaxpr,
        )
        return body.unflatten(out)
    return jax.lax.while_loop(
        lambda carry: cond(*cond_consts, *carry)[0],
        lambda carry: body(*body_consts, *carry),
        carry,
    )


@_structural("scan")
def _scan(
    *values: Any, jaxpr: Any, reverse: bool, length: int, unroll: int, **params: Any
) -> list[Any]:
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = split_list(values, num_consts, num_carry)
    xs = [x if _sliced(x, length) else make_dense(primitives.scan_p, [x])[0] for x in xs]
    slices = [_abstract(x, lambda shape: shape[1:]) for x in xs]
    body, carry = _fixed_point("scan", jaxpr, consts, carry, slices, stack=True)

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body(*consts, *carry, *xs)
        return out[:num_carry], out[num_carry:]

    carry, ys = jax.lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=unroll)
    return [*carry, *ys]


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
    carry = list(carry)
    dense: frozenset[int] = frozenset()
    while True:
        staged = stage(primitive, jaxpr, [*consts, *carry, *xs], dense)
        change = {
            i
            for i, value in enumerate(carry)
            if not _one_type(f"carry {i} of {primitive}", _typed(value), staged.output(i))
        }
        for i in change:
            (carry[i],) = make_dense(find_primitive(primitive), [carry[i]])
        change |= {
            i
            for i in range(len(carry), len(staged.out_trees))
            if stack and not _stacks(*staged.output(i))
        }
        if change <= dense:
            return staged, carry
        dense |= change


def _one_type(what: str, one: Typed, other: Typed) -> bool:
    """Whether two ends of a loop, or two branches, agree; refused where metadata would be lost."""
    (tree, avals), (other_tree, other_avals) = one, other
    if tree == other_tree:
        return all(
            (a.shape, a.dtype) == (b.shape, b.dtype)
            for a, b in zip(avals, other_avals, strict=True)
        )
    value, other_value = _example(*one), _example(*other)
    if type(value) is type(other_value) and value.metadata_is_meaning:
        raise TypeError(
            f"{what} is {value} on one side and {other_value} on the other: their metadata "
            "differs, and would be lost. Have both sides give the same type, or materialise the "
            "value (vn.materialise) before."
        )
    return False


def _example(tree: Any, avals: Sequence[Any]) -> Any:
    """A value of a type, with abstract leaves."""
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])


def _abstract(value: Any, reshape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    """The value with abstract leaves of other shapes."""
    leaves, treedef = jax.tree.flatten(value)
    avals = [jax.typeof(x) for x in leaves]
    return jax.tree.unflatten(
        treedef, [jax.ShapeDtypeStruct(reshape(a.shape), a.dtype) for a in avals]
    )


def _sliced(value: Any, length: int) -> bool:
    """Whether slices of the leaves, along the first axis, stand for slices of the value."""
    if not isinstance(value, Value):
        return True
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(value)]
    return all(shape[:1] == (length,) for shape in shapes) and _has_batch_axis(
        value, lambda shape: shape[1:], value.aval().shape[1:]
    )


def _stacks(tree: Any, avals: Sequence[Any]) -> bool:
    """Whether leaves stacked along a new first axis stand for stacked values."""
    value = _example(tree, avals)
    return not isinstance(value, Value) or _has_batch_axis(
        value, lambda shape: shape, value.aval().shape
    )


def _has_batch_axis(
    value: Value, inner: Callable[[tuple[int, ...]], tuple[int, ...]], shape: tuple[int, ...]
) -> bool:
    """Whether a first axis, put before the `inner` shapes of the leaves, is one of the value alone.

    Seen on an axis of a size that no other has, lest it should fit by chance.
    """
    sizes = [size for leaf in jax.tree.leaves(value) for size in jnp.shape(leaf)]
    unlike = 1 + max(sizes, default=0)
    one, many = _abstract(value, inner), _abstract(value, lambda s: (unlike, *inner(s)))
    try:
        return one.aval().shape == shape and many.aval().shape == (unlike, *shape)
    except Exception:  # whatever a type's own code raises on leaves that make no sense to it
        return False
