"""The rule of `shard_map`: the body gets each block of an implicit value as an implicit value.

A block is the shard of an array on one device. JAX's `shard_map` is bound with the leaves. Its body
rebuilds a value from the blocks of the leaves, and runs with the rules in force.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._jax.primitives import find_primitive
from ..._jax.sharding import flat_tree
from ..._jax.tracing import varying_axes
from ..policy import current_policy, policy_in_force
from ..rules import register, structural
from ..sources import keep_sources
from ..value import Value, make_dense
from .sharding import (
    Sizes,
    axes_of,
    block_specs,
    entries_of,
    joined_specs,
    map_leaves,
    why_not_split,
)
from .staging import capture_context

_shard_map_p, _pvary_p = map(find_primitive, ("shard_map", "pvary"))


@structural("shard_map")
def _shard_map(
    *values: Any,
    trace: Any,
    f: Any,
    mesh: Any,
    in_specs: Sequence[Any],
    check_vma: bool,
    debug_info: Any,
    **params: Any,
) -> Any:
    run_later, policy = capture_context(trace), current_policy()
    manual = params["newly_manual_axes"]
    reshard = lambda leaf, spec: reshard_leaf(leaf, spec, mesh, manual)
    # Find the spec of each leaf. Materialize values that cannot be split. `specs` becomes a list
    # of dense specs and of values, shaped as blocks, with a spec in place of each leaf.
    operands, specs = list(values), list(in_specs)
    for i, (value, spec) in enumerate(zip(values, in_specs, strict=True)):
        if isinstance(value, Value):
            value_specs = block_specs(value, spec, mesh.shape)
            if value_specs is None:
                why = why_not_split(value, spec, mesh.shape)
                (operands[i],) = make_dense(_shard_map_p, [value], why)
            else:
                operands[i], specs[i] = map_leaves(reshard, value, value_specs), value_specs
                keep_sources([value], [operands[i]])
    leaves = jax.tree.leaves(operands)
    leaf_specs, treedef = jax.tree.flatten(specs)
    if len(leaves) != len(values):
        debug_info = debug_info.with_unknown_names()
    user_results: Any = None  # the FlatTree that the body of the user returns
    out_treedef: Any = None  # the tree structure of the results, joined from blocks

    def on_leaves(*leaves: Any) -> Any:
        out_specs: Sequence[Any] = ()

        def body(*args: Any) -> list[Any]:
            nonlocal user_results, out_specs
            user_results, out_specs = f(*args).unpack_aux()
            return list(user_results)

        blocks = keep_sources(operands, jax.tree.unflatten(treedef, leaves))
        results = run_later(body)(*blocks)
        specs = list(out_specs)
        with policy_in_force(policy):
            for i, (result, spec) in enumerate(zip(results, out_specs, strict=True)):
                if isinstance(result, Value):
                    specs[i] = checked_joined_specs(result, spec, mesh.shape, check_vma)
                    if specs[i] is None:
                        specs[i], (results[i],) = spec, make_dense(_shard_map_p, [result])
        nonlocal out_treedef
        leaf_out_specs, out_treedef = jax.tree.flatten(specs)
        # JAX's messages show the tree of the user's results. In a derivative, this tree also
        # contains other data.
        if user_results.tree.num_leaves == len(results):
            results = jax.tree.unflatten(user_results.tree, results)
        return flat_tree(results).with_aux(tuple(leaf_out_specs))

    leaves_out = trace.parent.process_shard_map(
        _shard_map_p,
        on_leaves,
        leaves,
        mesh=mesh,
        in_specs=tuple(leaf_specs),
        check_vma=check_vma,
        debug_info=debug_info,
        **params,
    )
    return user_results.update(jax.tree.unflatten(out_treedef, list(leaves_out)))


def checked_joined_specs(block: Value, spec: P, sizes: Sizes, check_vma: bool) -> Any:
    """Return the specs that join the blocks of all devices, or None if they cannot be joined.

    If the spec of a leaf omits a mesh axis, JAX takes the leaf from an arbitrary device along this
    axis. Unlike `joined_specs`, return None if these devices may have different leaves.
    """
    joined = joined_specs(block, spec, sizes)
    if joined is None:
        return None
    names_in = lambda spec: {name for entry in spec.partitions for name in axes_of(entry)}
    for leaf, leaf_spec in zip(jax.tree.leaves(block), jax.tree.leaves(joined), strict=True):
        # Without `check_vma`, JAX does not know along which axes a leaf varies.
        may_vary = varying_axes(leaf) & names_in(spec) if check_vma else names_in(spec)
        if not may_vary <= names_in(leaf_spec):
            return None
    return joined


def reshard_leaf(leaf: Any, spec: P, mesh: Any, manual: frozenset[str]) -> Any:
    """Reshard a leaf along explicit mesh axes by `spec`, before it becomes a `shard_map` operand.

    On explicit axes, JAX rejects an operand of `shard_map` with another sharding. The dense array
    has the required sharding, but a leaf may be sharded along other or fewer axes. `manual` has the
    mesh axes that become manual in the `shard_map`.
    """
    axis_types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, axis_type in axis_types if axis_type == AxisType.Explicit}
    if not explicit & manual:
        return leaf
    aval = jax.typeof(leaf)
    old_entries = entries_of(aval.sharding.spec, aval.ndim)
    # Take the manual axes from the required spec, and keep the sharding along other axes.
    names_by_axis = [
        tuple(name for name in axes_of(required) if name in explicit)
        + tuple(name for name in axes_of(old) if name not in manual)
        for required, old in zip(entries_of(spec, aval.ndim), old_entries, strict=True)
    ]
    new_spec = P(*(names[0] if len(names) == 1 else names or None for names in names_by_axis))
    if old_entries == new_spec.partitions:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(mesh.abstract_mesh, new_spec))


@register(_pvary_p, precedence=-1)
def _pvary(value: Value, *, axes: tuple[str, ...]) -> Any:
    # The leaves of one value may vary along different axes.
    def vary(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return _pvary_p.bind(leaf, axes=missing) if missing else leaf

    return jax.tree.map(vary, value)
