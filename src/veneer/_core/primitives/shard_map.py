"""The rule of `shard_map`, whose body gets blocks of implicit values as implicit values.

JAX's own `shard_map` runs the body on blocks of the leaves. Inside, the values of these blocks are
rebuilt, and the rules are in force.
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
    operands, specs = list(values), list(in_specs)
    for i, (value, spec) in enumerate(zip(values, in_specs, strict=True)):
        if isinstance(value, Value):
            block = block_specs(value, spec, mesh.shape)
            if block is None:
                why = why_not_split(value, spec, mesh.shape)
                (operands[i],) = make_dense(_shard_map_p, [value], why)
            else:
                operands[i], specs[i] = map_leaves(reshard, value, block), block
                keep_sources([value], [operands[i]])
    leaves = jax.tree.leaves(operands)
    leaf_specs, treedef = jax.tree.flatten(specs)
    if len(leaves) != len(values):
        debug_info = debug_info.with_unknown_names()
    out: Any = None  # what the body returns: JAX's own tree of the results
    out_treedef: Any = None  # our tree of the leaves of the results

    def on_leaves(*leaves: Any) -> Any:
        out_specs: Sequence[Any] = ()

        def body(*args: Any) -> list[Any]:
            nonlocal out, out_specs
            out, out_specs = f(*args).unpack_aux()
            return list(out)

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
        # JAX's messages show the user's own tree. In a derivative, it also contains other data.
        if out.tree.num_leaves == len(results):
            results = jax.tree.unflatten(out.tree, results)
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
    return out.update(jax.tree.unflatten(out_treedef, list(leaves_out)))


def checked_joined_specs(block: Value, spec: P, sizes: Sizes, check_vma: bool) -> Any:
    """Return `joined_specs`, or None if a leaf may differ along an axis that its spec omits.

    JAX takes such a leaf from any one block. If JAX does not check which arrays vary, a leaf may
    differ along all axes in the spec of the dense array.
    """
    joined = joined_specs(block, spec, sizes)
    if joined is None:
        return None
    names_in = lambda spec: {name for entry in spec.partitions for name in axes_of(entry)}
    for leaf, leaf_spec in zip(jax.tree.leaves(block), jax.tree.leaves(joined), strict=True):
        differs = varying_axes(leaf) & names_in(spec) if check_vma else names_in(spec)
        if not differs <= names_in(leaf_spec):
            return None
    return joined


def reshard_leaf(leaf: Any, spec: P, mesh: Any, manual: frozenset[str]) -> Any:
    """Return a leaf with the sharding that its spec requires on explicit mesh axes.

    The dense array has this sharding by its type. A leaf may be sharded along other or fewer axes.
    `manual` are the mesh axes of the `shard_map`.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name in types if types[name] == AxisType.Explicit}
    if not explicit & manual:
        return leaf
    aval = jax.typeof(leaf)
    present = entries_of(aval.sharding.spec, aval.ndim)
    entries = [
        tuple(name for name in axes_of(required) if name in explicit)
        + tuple(name for name in axes_of(own) if name not in manual)
        for required, own in zip(entries_of(spec, aval.ndim), present, strict=True)
    ]
    required = P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
    if present == required.partitions:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(mesh.abstract_mesh, required))


@register(_pvary_p, precedence=-1)
def _pvary(value: Value, *, axes: tuple[str, ...]) -> Any:
    # The leaves of one value may vary along different axes.
    def vary(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
        return _pvary_p.bind(leaf, axes=missing) if missing else leaf

    return jax.tree.map(vary, value)
